"""Compiles an op for the simulator to build/simt/<op>_<kind>_<hash of the sources>.so, once for all who ask."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import re
import shutil
import subprocess
import sysconfig
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
CACHE = ROOT / "build" / "simt"

# Kinds of builds and their flags; the runtime is never instrumented, it only hears of the sanitizer.
KINDS = {
    "plain": ([], []),
    "asan": (["-fsanitize=address,undefined", "-fno-sanitize-recover=all"], ["-DSIMT_ASAN"]),
    "tsan": (["-fsanitize=thread"], ["-DSIMT_TSAN"]),
}
FLAGS = ["-std=c++17", "-O2", "-g1", "-fPIC", "-march=native", "-fvisibility=hidden", "-Wno-psabi"]
INCLUDE = re.compile(r'^\s*#include\s+"([^"]+)"', re.M)


def _compiler() -> str | None:
    return shutil.which(os.environ.get("CXX", "g++"))


@functools.cache
def cuda_include() -> Path | None:
    """The folder of cuda_runtime.h and cuda_bf16.h, of a toolkit or of its PyPI packages."""
    nvcc = shutil.which("nvcc")
    roots = [os.environ.get("CUDA_HOME", ""), str(Path(nvcc).resolve().parents[1]) if nvcc else ""]
    folders = [Path(root) / "include" for root in [*roots, "/usr/local/cuda"] if root]
    spec = find_spec("nvidia")
    for place in spec.submodule_search_locations or [] if spec else []:
        folders += sorted(Path(place).glob("cu1*/include"))
    return next(
        (f for f in folders if (f / "cuda_runtime.h").exists() and (f / "cuda_bf16.h").exists()), None
    )


@functools.cache
def cutlass_include() -> Path | None:
    """The folder of cute/tensor.hpp: CUTLASS_HOME/include, or that of the PyPI package nvidia-cutlass."""
    home = os.environ.get("CUTLASS_HOME")
    folders = [Path(home) / "include"] if home else []
    spec = find_spec("cutlass_library")
    for place in spec.submodule_search_locations or [] if spec else []:
        folders.append(Path(place) / "source" / "include")
    return next((f for f in folders if (f / "cute" / "tensor.hpp").exists()), None)


@functools.cache
def unavailable() -> str | None:
    """Why the simulator cannot be built here, or None."""
    if _compiler() is None:
        return "g++ is not installed"
    if find_spec("pybind11") is None:
        return "pybind11 is not installed (requirements-dev.txt)"
    if cuda_include() is None:
        return "no CUDA headers: neither a toolkit (CUDA_HOME) nor its PyPI packages are installed"
    return None


def uses_cutlass(op: str) -> bool:
    return any("#include <cute/" in path.read_text() for path in _sources(op))


def _sources(op: str) -> list[Path]:
    """All files of the project that the op is made of, found by following its includes."""
    kernel = ROOT / "csrc" / "cuda" / f"{op}.cu"
    todo = [HERE / f"bind_{op}.cpp", HERE / "simt_rt.cpp"] + ([kernel] if kernel.exists() else [])
    seen: dict[Path, None] = {}
    while todo:
        path = todo.pop()
        if path in seen:
            continue
        seen[path] = None
        for name in INCLUDE.findall(path.read_text()):
            todo += [folder / name for folder in (ROOT / "csrc", HERE) if (folder / name).exists()][:1]
    return list(seen)


def _run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\n{result.stderr[-6000:]}")


def build(op: str, kind: str = "plain", defines: tuple[str, ...] = ()) -> Path:
    """The module of an op; `defines` are preprocessor symbols of a variant, such as a planted fault."""
    import pybind11

    instrument, runtime = KINDS[kind]
    compiler = str(_compiler())
    digest = hashlib.sha256()
    for path in sorted(_sources(op)):
        digest.update(path.read_bytes())
    for text in (compiler, kind, *FLAGS, *instrument, *runtime, *defines, str(cuda_include())):
        digest.update(text.encode() + b"\0")
    name = f"{op}_{kind}_{digest.hexdigest()[:16]}"
    CACHE.mkdir(parents=True, exist_ok=True)
    library = CACHE / f"{name}.so"
    if library.exists():
        return library
    with open(CACHE / f"{name}.lock", "w") as lock:  # one of several pytest workers compiles
        fcntl.flock(lock, fcntl.LOCK_EX)
        if library.exists():
            return library
        includes = ["-I", str(ROOT / "csrc"), "-I", str(HERE), "-isystem", str(cuda_include()),
                    "-isystem", sysconfig.get_path("include"), "-isystem", pybind11.get_include()]  # fmt: skip
        if cutlass := cutlass_include():
            # CuTe asks for libcu++, which a toolkit keeps one folder down.
            includes += ["-isystem", str(cutlass), "-isystem", f"{cuda_include()}/cccl"]
        common = [compiler, *FLAGS, "-DCARRYOVER_SIMT", *(f"-D{d}" for d in defines), *includes]
        objects = []
        kernel = ROOT / "csrc" / "cuda" / f"{op}.cu"
        parts = [(HERE / f"bind_{op}.cpp", instrument), (HERE / "simt_rt.cpp", runtime)]
        if kernel.exists():
            parts.append((kernel, instrument))
        for source, flags in parts:
            output = CACHE / f"{name}_{source.stem}.{os.getpid()}.o"
            module = [f"-DSIMT_MODULE={op}"] if source.name.startswith("bind_") else []
            _run([*common, *flags, *module, "-x", "c++", "-c", str(source), "-o", str(output)])
            objects.append(output)
        partial = library.with_suffix(f".{os.getpid()}.tmp")
        _run([compiler, "-shared", *instrument, *map(str, objects), "-o", str(partial)])
        partial.rename(library)
        for path in objects:
            path.unlink()
    return library


def sanitizer_library(kind: str) -> str:
    """What must be preloaded so that a module of this kind can be imported by an ordinary Python."""
    name = {"asan": "libasan.so", "tsan": "libtsan.so"}[kind]
    out = subprocess.run([str(_compiler()), f"-print-file-name={name}"], capture_output=True, text=True)
    return out.stdout.strip()
