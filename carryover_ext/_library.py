"""Loads the compiled extension and registers its operators as `torch.ops.carryover_ext`."""

from __future__ import annotations

import functools
from collections.abc import Callable
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

# The registrations of this file live as long as these objects.
_registrations: list[torch.library.Library] = []

# These ops call GEMMs inside, which autocast would cast behind their back: they run below it, in the dtype of
# their arguments.
_AUTOCAST = ("AutocastCPU", "AutocastCUDA")
_BELOW_AUTOCAST = ("project_kv", "commit_and_carry", "segment_attention_backward")


def below_autocast(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, unmoved by the caller's autocast: for a gradient's formula, which the caller of
    ``backward`` runs."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
    keys |= torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return function(*args, **kwargs)

    return call


def _register(name: str, key: str, function: Callable[..., Any], **options: Any) -> None:
    library = torch.library.Library("carryover_ext", "IMPL", key)
    library.impl(name, function, **options)
    _registrations.append(library)


for _key in _AUTOCAST:
    for _name in _BELOW_AUTOCAST:
        _register(_name, _key, below_autocast(getattr(ops, _name).default))


def _count_writes(name: str) -> None:
    """Bumps the versions of the tensors that an op writes, so that autograd refuses a gradient that needs
    what they held before. (The stable ABI has no way to register this in C++; inference tensors have no
    versions, and do not come here.)"""
    op = getattr(ops, name).default
    arguments = op._schema.arguments
    written = [i for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write]

    def call(keys: Any, *args: Any, **kwargs: Any) -> Any:
        with torch._C._AutoDispatchBelowADInplaceOrView():
            result = op.redispatch(keys & torch._C._after_ADInplaceOrView_keyset, *args, **kwargs)
        for i in written:
            torch.autograd.graph.increment_version(args[i])
        return result

    _register(name, "ADInplaceOrView", call, with_keyset=True)


_count_writes("commit_and_carry")


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
