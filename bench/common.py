"""Timing with interleaved arms, and the ceilings that a time is compared with."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
import torch.nn.functional as F

Call = Callable[[], object]


@dataclass(frozen=True)
class Times:
    """Microseconds of one arm, call by call: on the clock of the device that computes, and of the processor
    (all threads together)."""

    us: tuple[float, ...]
    cpu: tuple[float, ...]

    def percentile(self, p: float) -> float:
        ordered = sorted(self.us)
        return ordered[min(len(ordered) - 1, round(p / 100 * (len(ordered) - 1)))]

    @property
    def p50(self) -> float:
        return self.percentile(50)


def on_gpu() -> bool:
    return torch.get_default_device().type == "cuda"


@functools.cache
def _larger_than_the_cache() -> torch.Tensor:
    return torch.empty(512 << 20, dtype=torch.int8)


def timed(f: Call) -> tuple[float, float]:
    """Microseconds of one call, and of the processor meanwhile. On a GPU the L2 cache is cold, and the
    kernels are queued while it is being flushed: what is timed is the GPU, not the launches."""
    cpu = time.process_time()
    if on_gpu():
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        _larger_than_the_cache().zero_()
        begin.record()
        f()
        end.record()
        end.synchronize()
        us = begin.elapsed_time(end) * 1e3
    else:
        start = time.perf_counter()
        f()
        us = (time.perf_counter() - start) * 1e6
    return us, (time.process_time() - cpu) * 1e6


def interleave(arms: dict[str, Call], seconds: float, least: int = 5, most: int = 200) -> dict[str, Times]:
    """Calls the arms in turn, in rotating order, until `seconds` are spent: a slow moment hits them all."""
    for f in arms.values():
        f()
    names = list(arms)
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in arms}
    start = time.perf_counter()
    for turn in range(most):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            samples[name].append(timed(arms[name]))
        spent = time.perf_counter() - start
        if spent > seconds and (turn + 1 >= least or (turn + 1 >= 3 and spent > 10 * seconds)):
            break
    return {name: Times(*map(tuple, zip(*s, strict=True))) for name, s in samples.items()}


def ratio(a: Times, b: Times) -> float:
    """How many times longer `a` takes than `b`: the median over turns, each of which saw the same machine."""
    return median(x / y for x, y in zip(a.us, b.us, strict=True))


def cpu_ratio(a: Times, b: Times) -> float:
    """The same of processor time: what the machine's other users cannot disturb much."""
    return median(a.cpu) / median(b.cpu)


@dataclass(frozen=True)
class Ceilings:
    """What this machine reached in this run: bytes per second, and operations per second by dtype."""

    bandwidth: float
    flops: dict[str, float]

    def least_us(self, moved: float, operations: float, dtype: str) -> float:
        """The time that neither the memory nor the arithmetic could undercut."""
        return max(moved / self.bandwidth, operations / self.flops[dtype]) * 1e6


def measure_ceilings(dtypes: dict[str, torch.dtype], seconds: float = 1.0) -> Ceilings:
    """Best of several: a triad and a read over 128 MiB arrays (1 GiB on a GPU), a linear layer of
    512 x 2048 x 2048 (all 8192 on a GPU)."""
    n = (256 if on_gpu() else 32) << 20
    rows, wide = (8192, 8192) if on_gpu() else (512, 2048)
    a, b, c = (torch.ones(n) for _ in range(3))

    def fastest(f: Call) -> float:
        return interleave({"x": f}, seconds)["x"].percentile(0) / 1e6

    triad = 3 * 4 * n / fastest(lambda: torch.add(b, c, alpha=0.5, out=a))
    read = 4 * n / fastest(lambda: a.sum())
    flops = {}
    for name, dtype in dtypes.items():
        x, w = torch.randn(rows, wide).to(dtype), torch.randn(wide, wide).to(dtype)
        flops[name] = 2 * rows * wide * wide / fastest(lambda x=x, w=w: F.linear(x, w))
    return Ceilings(max(triad, read), flops)
