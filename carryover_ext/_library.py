"""Loads the compiled extension and registers its operators as `torch.ops.carryover_ext`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

LEVELS = ("default", "avx2", "avx512", "avx512_bf16")

_PATH = Path(__file__).with_name("_C.abi3.so")


def _load() -> None:
    if not _PATH.exists():
        raise ImportError(
            f"carryover_ext: the compiled extension {_PATH.name} is missing from {_PATH.parent}; "
            "build it with `pip install -e . --no-build-isolation` in the source tree, or install the wheel"
        )
    torch.ops.load_library(str(_PATH))


_load()

ops = torch.ops.carryover_ext

# The projection ops call GEMMs inside, which autocast would cast behind their back: they run below it, in the
# dtype of their arguments. The registrations live as long as these objects.
_below_autocast: list[torch.library.Library] = []


def _run_below_autocast(name: str, key: str) -> None:
    op = getattr(ops, name).default
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return op(*args, **kwargs)

    library = torch.library.Library("carryover_ext", "IMPL", key)
    library.impl(name, call)
    _below_autocast.append(library)


for _key in ("AutocastCPU", "AutocastCUDA"):
    for _name in ("project_kv", "commit_and_carry"):
        _run_below_autocast(_name, _key)


def cpu_capability() -> str:
    """Instruction set that the CPU kernels use: `default`, `avx2`, `avx512` or `avx512_bf16`.

    It is the best one that the machine has, unless the environment variable CARRYOVER_CPU_CAPABILITY names a
    lower one (read once, at the first call of a kernel).
    """
    return LEVELS[ops.cpu_level()]


def available_capabilities() -> tuple[str, ...]:
    """The instruction sets that this machine can run, lowest first."""
    return LEVELS[: ops.max_cpu_level() + 1]


def set_cpu_capability(name: str) -> None:
    """Switches the CPU kernels to `name`, one of :func:`available_capabilities`, for tests and benchmarks."""
    if name not in LEVELS:
        raise ValueError(f"name={name!r} is not one of {', '.join(LEVELS)}")
    ops.set_cpu_level(LEVELS.index(name))


def _crossover_op(name: str) -> Any:
    if not hasattr(ops, name):
        raise RuntimeError(
            f"{name}: this build of carryover_ext has no CUDA kernels; build it with CARRYOVER_CUDA=1"
        )
    return getattr(ops, name)


def project_crossover() -> int:
    """Rows up to which :func:`project_kv` and :func:`commit_and_carry` on a GPU use their own GEMM. Above,
    the library's computes and the same epilogues follow. RuntimeError without CUDA kernels."""
    return int(_crossover_op("project_crossover")())


def set_project_crossover(rows: int) -> None:
    """Moves :func:`project_crossover`, for tests and benchmarks; 0 always takes the library's GEMM."""
    _crossover_op("set_project_crossover")(rows)
