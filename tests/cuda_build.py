"""Compiles a CUDA source for one architecture without a GPU, once for all who ask: build/static."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from simt.build import ROOT, _closure, cutlass_include

CACHE = ROOT / "build" / "static"
FLAGS = ["-std=c++17", "-O3", "--expt-relaxed-constexpr", "-I", str(ROOT / "csrc")]


def tool(name: str) -> str | None:
    """On PATH, in CUDA_HOME, or the copy that Triton brings."""
    folders = [os.path.join(os.environ["CUDA_HOME"], "bin")] if "CUDA_HOME" in os.environ else []
    spec = importlib.util.find_spec("triton")
    for place in (spec.submodule_search_locations or []) if spec else []:
        folders.append(os.path.join(place, "backends", "nvidia", "bin"))
    return shutil.which(name) or shutil.which(name, path=os.pathsep.join(folders))


def unavailable(source: str) -> str | None:
    if tool("nvcc") is None:
        return "nvcc is not installed"
    if source == "project_kv" and cutlass_include() is None:
        return "nvidia-cutlass (CuTe) is not installed"
    return None


@dataclass(frozen=True)
class Kernel:
    """What ptxas says of one instantiation."""

    name: str  # mangled
    registers: int
    stack: int
    spills: int


def short_name(mangled: str) -> str:
    """`markov_step_kernel` of `_ZN9carryover4cuda18markov_step_kernelI...`."""
    for length, rest in re.findall(r"(?=(\d+)([a-z]\w*))", mangled):
        name = rest[: int(length)]
        if name.endswith("_kernel"):
            return name
    raise AssertionError(f"no kernel's name in {mangled}")


def _compile(source: str, arch: str, kind: str, options: list[str]) -> Path:
    """`source`: a name in csrc/cuda, or a path. `kind`: cubin or ptx."""
    path = ROOT / "csrc" / "cuda" / f"{source}.cu" if "/" not in source else Path(source)
    options = [*FLAGS, *options, f"-arch=sm_{arch}"]
    if cutlass := cutlass_include():
        options += ["-isystem", str(cutlass)]
    digest = hashlib.sha256(
        " ".join([*options, str(path) if kind == "ptx" else ""]).encode()
    )  # it names files
    for part in _closure(path):
        digest.update(part.read_bytes())
    result = CACHE / f"{path.stem}_{arch}_{digest.hexdigest()[:16]}.{kind}"
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(result.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not result.exists():
            partial = result.with_suffix(".tmp")
            command = [str(tool("nvcc")), *options, f"-{kind}", str(path), "-o", str(partial)]
            done = subprocess.run(command, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr[-4000:]
            result.with_suffix(".log").write_text(done.stdout + done.stderr)
            partial.rename(result)
    return result


@functools.cache
def compile_source(source: str, arch: str) -> Path:
    """A cubin, with what ptxas said beside it as .log. `source`: a name in csrc/cuda, or a path."""
    return _compile(source, arch, "cubin", ["-Xptxas", "-v"])


@functools.cache
def compile_ptx(source: str, arch: str = "90a", defines: tuple[str, ...] = ()) -> str:
    """PTX with source lines. `source`: a name in csrc/cuda, or a path."""
    return _compile(source, arch, "ptx", ["-lineinfo", *(f"-D{d}" for d in defines)]).read_text()


def kernels(source: str, arch: str) -> list[Kernel]:
    log = compile_source(source, arch).with_suffix(".log").read_text()
    found = []
    for part in log.split("Compiling entry function '")[1:]:
        stack, stores, loads = re.search(
            r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", part
        ).groups()
        registers = re.search(r"Used (\d+) registers", part).group(1)
        found.append(Kernel(part[: part.index("'")], int(registers), int(stack), int(stores) + int(loads)))
    return found


def sass(source: str, arch: str) -> dict[str, str]:
    """The machine code of each kernel, by its mangled name."""
    folder = os.path.dirname(str(tool("nvdisasm")))
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}  # cuobjdump calls nvdisasm
    command = [str(tool("cuobjdump")), "-sass", str(compile_source(source, arch))]
    text = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
    parts = re.split(r"^\s*Function : (\S+)$", text, flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))
