"""Thin driver: runs CMake for the extension. All metadata is in pyproject.toml."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent


def _cuda_wanted() -> int:
    """CARRYOVER_CUDA: `auto` (default) takes CUDA when nvcc and a GPU are there, `0` never, `1` insists."""
    value = os.environ.get("CARRYOVER_CUDA", "auto")
    if value not in ("auto", "0", "1"):
        raise SystemExit(f"CARRYOVER_CUDA={value!r} is not one of auto, 0, 1")
    if value == "auto":
        return int(_nvcc() is not None and shutil.which("nvidia-smi") is not None)
    if value == "1" and _nvcc() is None:
        raise SystemExit(
            "CARRYOVER_CUDA=1: nvcc was not found; put it on PATH or set CUDA_HOME to the toolkit, "
            "or set CARRYOVER_CUDA=0 (or auto) to build the CPU kernels only"
        )
    return int(value)


def _nvcc() -> str | None:
    folders = [os.path.join(os.environ["CUDA_HOME"], "bin")] if os.environ.get("CUDA_HOME") else []
    return shutil.which("nvcc", path=os.pathsep.join([*folders, os.environ.get("PATH", "")]))


def _cuda_options() -> list[str]:
    """What CMake must know: the compiler, CUTLASS (its headers), CARRYOVER_CUDA_ARCHS and CARRYOVER_DEBUG."""
    options = [f"-DCMAKE_CUDA_COMPILER={_nvcc()}"]
    home, package = os.environ.get("CUTLASS_HOME"), find_spec("cutlass_library")
    if home:
        options.append(f"-DCUTLASS_INCLUDE={Path(home) / 'include'}")
    elif package is not None and package.submodule_search_locations:
        options.append(f"-DCUTLASS_INCLUDE={Path(package.submodule_search_locations[0])}/source/include")
    archs = os.environ.get("CARRYOVER_CUDA_ARCHS")
    options.append(f"-DCARRYOVER_CUDA_ARCHS={archs}" if archs else "-UCARRYOVER_CUDA_ARCHS")
    return [*options, f"-DCARRYOVER_DEBUG={int(os.environ.get('CARRYOVER_DEBUG', '0') == '1')}"]


def _cmake() -> str:
    spec = find_spec("cmake")  # the PyPI package, preferred: its version is known
    if spec is not None and spec.submodule_search_locations:
        binary = Path(spec.submodule_search_locations[0]) / "data" / "bin" / "cmake"
        if binary.exists():
            return str(binary)
    found = shutil.which("cmake")
    if found is None:
        raise SystemExit("cmake was not found; install it with `pip install cmake ninja` and build again")
    return found


def _build_folder(tools: list[str]) -> Path:
    """build/cmake, kept so that a second build compiles only what changed, unless it is by other tools."""
    folder = ROOT / "build" / "cmake"
    record = folder / "tools.txt"
    text = "\n".join(tools)
    if folder.exists() and not (record.exists() and record.read_text() == text):
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    record.write_text(text)
    return folder


class CMakeBuild(build_ext):
    def build_extension(self, ext: Extension) -> None:
        cuda = _cuda_wanted()
        torch_spec = find_spec("torch")
        if torch_spec is None or not torch_spec.submodule_search_locations:
            raise SystemExit(
                "torch was not found; install torch >= 2.11 first and build with --no-build-isolation"
            )
        out = Path(self.get_ext_fullpath(ext.name)).resolve()
        cmake = _cmake()
        ninja = shutil.which(
            "ninja", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        )
        generator = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"] if ninja else []
        torch_root = torch_spec.submodule_search_locations[0]
        build = _build_folder([cmake, *generator, torch_root])
        subprocess.run(
            [cmake, "-S", str(ROOT), "-B", str(build), *generator, "-DCMAKE_BUILD_TYPE=Release",
             f"-DTORCH_ROOT={torch_root}", f"-DCARRYOVER_CUDA={cuda}", *(_cuda_options() if cuda else [])],
            check=True,
        )  # fmt: skip
        jobs = os.environ.get("MAX_JOBS") or str(os.cpu_count() or 1)
        subprocess.run([cmake, "--build", str(build), "--target", "_C", "-j", jobs], check=True)
        out.parent.mkdir(parents=True, exist_ok=True)
        strip = shutil.which("strip")
        shutil.copy2(build / "_C.abi3.so", out)
        if strip:
            subprocess.run([strip, "--strip-unneeded", str(out)], check=True)


setup(
    ext_modules=[Extension("carryover_ext._C", sources=[], py_limited_api=True)],
    cmdclass={"build_ext": CMakeBuild},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
