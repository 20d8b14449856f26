"""Everything that proves the CUDA kernels, in one command: `make gpu-check`.

    python bench/gpu_check.py [--parts tests,bench] [--minutes 10] [--again] [--out runs/gpu_check]

A part that passed is not run again until a source file or the machine changes; --again runs it anyhow. No
part starts after --minutes: the next call goes on from there. The report says what was run, what was left
out, and why. Exit status 0: nothing that was run failed. No part uses the network. The benchmark has rows of
vLLM's and FlashInfer's kernels where these packages are installed.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
STATIC_TESTS = ("tests/test_cuda_static.py", "tests/test_ptx_races.py")
GPU_TESTS, SIMULATOR_TESTS = (
    sorted({str(p.relative_to(ROOT)) for p in (ROOT / "tests").glob(pattern)} - {*STATIC_TESTS})
    for pattern in ("test_cuda_*.py", "test_simt_*.py")
)
BEHAVIOUR = "graph or reruns"  # tests that replay graphs, use two streams and repeat 1,000 times


@dataclass
class Result:
    status: str  # passed, failed, left out
    seconds: float = 0.0
    reason: str = ""  # why it was left out, or the end of what it printed
    key: str = ""


@dataclass(frozen=True)
class Part:
    name: str
    what: str
    missing: Callable[[], str | None]  # why it cannot run here
    command: Callable[[Path], list[str]]  # with the folder for its files
    limit: int  # seconds
    environment: tuple[tuple[str, str], ...] = ()


def nvcc() -> str | None:
    folder = os.environ.get("CUDA_HOME")
    return shutil.which("nvcc") or (shutil.which("nvcc", path=f"{folder}/bin") if folder else None)


def needs_nvcc() -> str | None:
    if nvcc() is None:
        return "nvcc was not found (PATH, CUDA_HOME)"
    if importlib.util.find_spec("cutlass_library") is None and not os.environ.get("CUTLASS_HOME"):
        return "CUTLASS was not found: set CUTLASS_HOME, or pip install --no-deps nvidia-cutlass==4.2.0.0"
    return None


def needs_gpu() -> str | None:
    if torch.version.cuda is None:
        return f"this PyTorch ({torch.__version__}) is built without CUDA"
    if not torch.cuda.is_available():
        return "no GPU"
    return None


def needs_built() -> str | None:
    """A GPU, and kernels in the installed extension (asked of a new process: the build may just have run)."""
    if reason := needs_gpu():
        return reason
    code = (
        "import torch, carryover_ext.ops as _; "
        "print(torch._C._dispatch_has_kernel_for_dispatch_key('carryover_ext::accept', 'CUDA'))"
    )
    asked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    return None if asked.stdout.strip() == "True" else "the installed extension has no CUDA kernels"


def needs_sanitizer() -> str | None:
    if shutil.which("compute-sanitizer") is None:
        return "compute-sanitizer is not on PATH"
    return needs_built()


def pytest(*args: str) -> Callable[[Path], list[str]]:
    return lambda _: [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", *args]


def build(_: Path) -> list[str]:
    return [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "-e",
        ".",
    ]


def architectures() -> str:
    """Of the GPU at hand, else all that a wheel has."""
    if needs_gpu() is None:
        major, minor = torch.cuda.get_device_capability()
        return {"9.0": "90a-real", "10.0": "100a-real"}.get(f"{major}.{minor}", f"{major}{minor}-real")
    return ""


def sanitizer(tool: str) -> Part:
    return Part(
        f"sanitizer-{tool}",
        f"compute-sanitizer {tool} over a sample of the GPU tests",
        needs_sanitizer,
        lambda _: [
            "compute-sanitizer", "--tool", tool, "--error-exitcode", "9", "--target-processes", "all",
            *pytest("-k", "not graph and not reruns", "--sample", "12", *GPU_TESTS)(ROOT),
        ],
        limit=180,
    )  # fmt: skip


def bench(out: Path) -> list[str]:
    files = ["--out", str(out / "ops.json"), "--markdown", str(out / "ops.md")]
    return [sys.executable, "bench/ops.py", "--device", "cuda", "--quick", *files]


def crossover(out: Path) -> list[str]:
    return [sys.executable, "bench/crossover.py", "--out", str(out / "crossover.json")]


BUILD = (("CARRYOVER_CUDA", "1"), ("CARRYOVER_CUDA_ARCHS", architectures()))
PARTS = (
    Part(
        "build", "the extension, for the GPU at hand (all four without one)", needs_nvcc, build, 1500, BUILD
    ),
    Part(
        "static", "registers, spills, instructions, races in the PTX", needs_nvcc, pytest(*STATIC_TESTS), 900
    ),
    Part("simulator", "the kernels' source on the CPU", lambda: None, pytest(*SIMULATOR_TESTS), 1500),
    Part(
        "tests",
        "every op against the float64 reference",
        needs_built,
        pytest("-k", f"not ({BEHAVIOUR})", *GPU_TESTS),
        240,
    ),
    Part(
        "behaviour",
        "100 replays of graphs with changing acceptance, two streams, 1,000 identical reruns",
        needs_built,
        pytest("-k", BEHAVIOUR, *GPU_TESTS),
        120,
    ),
    *(sanitizer(tool) for tool in ("memcheck", "racecheck", "initcheck", "synccheck")),
    Part("crossover", "rows up to which the own GEMM beats the library's", needs_built, crossover, 60),
    Part("bench", "times against eager, torch.compile, SDPA, vLLM, FlashInfer", needs_built, bench, 180),
)


def key_of(part: Part) -> str:
    """Changes with the sources, the machine and the versions."""
    digest = hashlib.sha256()
    for pattern in (
        "csrc/**/*",
        "tests/**/*.py",
        "tests/simt/*",
        "tests/*.cu",
        "carryover_ext/**/*.py",
        "bench/*.py",
        "*.py",
        "*.txt",
    ):
        for path in sorted(ROOT.glob(pattern)):
            if path.is_file() and path.suffix != ".so":
                digest.update(path.read_bytes())
    gpu = torch.cuda.get_device_name() if needs_gpu() is None else "none"
    for text in (part.name, platform.python_version(), torch.__version__, gpu, str(nvcc())):
        digest.update(text.encode() + b"\0")
    return digest.hexdigest()[:16]


def run(part: Part, out: Path) -> Result:
    if reason := part.missing():
        return Result("left out", reason=reason)
    environment = {**os.environ, **{name: value for name, value in part.environment if value}}
    start = time.monotonic()
    log = out / f"{part.name}.log"
    with open(log, "w") as file:
        try:
            code = subprocess.run(
                part.command(out), cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT,
                timeout=part.limit,
            ).returncode  # fmt: skip
            end = "" if code == 0 else f"exit status {code}"
        except subprocess.TimeoutExpired:
            code, end = 1, f"longer than {part.limit} s"
    seconds = time.monotonic() - start
    last = next((line for line in reversed(log.read_text(errors="replace").splitlines()) if line.strip()), "")
    text = "; ".join(x for x in (end, last.strip()[:160]) if x)
    return Result("passed" if code == 0 else "failed", seconds, text, key_of(part))


def table(results: dict[str, Result]) -> str:
    rows = ["| part | what | result | seconds | |", "|---|---|---|---|---|"]
    for part in PARTS:
        if result := results.get(part.name):
            rows.append(
                f"| {part.name} | {part.what} | {result.status} | {result.seconds:.0f} | {result.reason} |"
            )
    return "\n".join(rows)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", help=f"comma-separated subset of {', '.join(p.name for p in PARTS)}")
    parser.add_argument("--minutes", type=float, default=10, help="no part starts after this (default 10)")
    parser.add_argument("--again", action="store_true", help="also run what has passed before")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "runs" / "gpu_check", help="folder of logs and report"
    )
    options = parser.parse_args(arguments)
    chosen = [name.strip() for name in options.parts.split(",")] if options.parts else [p.name for p in PARTS]
    if unknown := set(chosen) - {p.name for p in PARTS}:
        parser.error(f"--parts {', '.join(sorted(unknown))}: not one of {', '.join(p.name for p in PARTS)}")
    options.out.mkdir(parents=True, exist_ok=True)
    report = options.out / "report.json"
    results = (
        {k: Result(**v) for k, v in json.loads(report.read_text())["parts"].items()}
        if report.exists()
        else {}
    )
    results = {p.name: results[p.name] for p in PARTS if p.name in results}

    gpu = torch.cuda.get_device_name() if needs_gpu() is None else f"none ({needs_gpu()})"
    machine = {"gpu": gpu, "torch": torch.__version__, "python": platform.python_version(), "nvcc": nvcc()}
    print(", ".join(f"{name} {value or 'not found'}" for name, value in machine.items()))
    start = time.monotonic()
    for part in PARTS:
        if part.name not in chosen:
            continue
        before = results.get(part.name)
        if before and before.status == "passed" and before.key == key_of(part) and not options.again:
            print(f"{part.name}: passed before ({before.seconds:.0f} s)", flush=True)
            continue
        print(f"{part.name}: {part.what} ...", flush=True)
        late = time.monotonic() - start > 60 * options.minutes
        if late and part.missing() is None:
            result = Result("left out", reason="the time is up; run again to go on")
        else:
            result = run(part, options.out)
        results[part.name] = result
        print(f"{part.name}: {result.status} in {result.seconds:.0f} s. {result.reason}", flush=True)
        text = json.dumps({"machine": machine, "parts": {k: asdict(v) for k, v in results.items()}}, indent=1)
        report.write_text(text + "\n")
    (options.out / "report.md").write_text(table(results) + "\n")

    now = [(p.name, results[p.name]) for p in PARTS if p.name in chosen]
    for status in ("passed", "left out", "failed"):
        names = [name for name, result in now if result.status == status]
        print(f"{status}: {', '.join(names) or 'none'}")
    print(f"report: {report}")
    return int(any(result.status == "failed" for _, result in now))


if __name__ == "__main__":
    sys.exit(main())
