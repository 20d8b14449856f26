"""Compiles an op for the simulator, once for all who ask: build/simt/<op>_<kind>_<hash of the sources>.so."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
CACHE = ROOT / "build" / "simt"

# Kinds of builds and their flags; the runtime is never instrumented, it only hears of the sanitizer.
KINDS = {
    "plain": ([], []),
    "asan": (["-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"], ["-DSIMT_ASAN"]),
    "tsan": (["-O1", "-fsanitize=thread"], ["-DSIMT_TSAN"]),
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


def kernel_file(op: str) -> Path:
    """csrc/cuda/<op>.cu; the planted faults are the simulator's own."""
    return next(f for f in (ROOT / "csrc" / "cuda" / f"{op}.cu", HERE / f"{op}.cu") if f.exists())


def _closure(source: Path) -> list[Path]:
    """The file and all files of the project that it includes."""
    todo, seen = [source], set()
    while todo:
        path = todo.pop()
        if path in seen:
            continue
        seen.add(path)
        for name in INCLUDE.findall(path.read_text()):
            todo += [folder / name for folder in (ROOT / "csrc", HERE) if (folder / name).exists()][:1]
    return sorted(seen)


def uses_cutlass(op: str) -> bool:
    return any("#include <cute/" in path.read_text() for path in _closure(kernel_file(op)))


def _run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\n{result.stderr[-6000:]}")


def _once(target: Path, make: Callable[[Path], None]) -> Path:
    """Makes a file that is named by what it is made of; one of several pytest workers does it."""
    if not target.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with open(target.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not target.exists():
                partial = target.with_suffix(f".{os.getpid()}.tmp")
                make(partial)
                partial.rename(target)
    return target


def _object(source: Path, flags: list[str]) -> Path:
    import pybind11

    include = [ROOT / "csrc", HERE]
    system = [cuda_include(), sysconfig.get_path("include"), pybind11.get_include()]
    if cutlass := cutlass_include():
        system += [cutlass, f"{cuda_include()}/cccl"]  # CuTe asks for libcu++, one folder down in a toolkit
    command = [str(_compiler()), *FLAGS, "-DCARRYOVER_SIMT", *flags]
    for option, folders in (("-I", include), ("-isystem", system)):
        for folder in folders:
            command += [option, str(folder)]
    digest = hashlib.sha256("\0".join(command).encode())
    for path in _closure(source):
        digest.update(path.read_bytes())
    target = CACHE / f"{source.stem}_{digest.hexdigest()[:16]}.o"
    return _once(target, lambda out: _run([*command, "-x", "c++", "-c", str(source), "-o", str(out)]))


def build(op: str, kind: str = "plain", defines: tuple[str, ...] = ()) -> Path:
    """The module of an op; `defines` are preprocessor symbols of a variant, such as a planted fault."""
    instrument, runtime = KINDS[kind]
    variant = [f"-D{d}" for d in defines]
    objects = [
        _object(kernel_file(op), [*instrument, *variant]),
        _object(HERE / f"bind_{op}.cpp", [f"-DSIMT_MODULE={op}", *variant]),
        _object(HERE / "simt_rt.cpp", runtime),
    ]
    digest = hashlib.sha256(" ".join(o.name for o in objects).encode())
    target = CACHE / f"{op}_{kind}_{digest.hexdigest()[:16]}.so"
    link = [str(_compiler()), "-shared", *instrument, *map(str, objects)]
    return _once(target, lambda out: _run([*link, "-o", str(out)]))


def sanitizer_library(kind: str) -> str:
    """What must be preloaded so that a module of this kind can be imported by an ordinary Python."""
    name = {"asan": "libasan.so", "tsan": "libtsan.so"}[kind]
    out = subprocess.run([str(_compiler()), f"-print-file-name={name}"], capture_output=True, text=True)
    return out.stdout.strip()
