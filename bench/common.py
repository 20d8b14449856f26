"""Timing with interleaved arms, and the ceilings that a time is compared with."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
import torch.nn.functional as F

Call = Callable[[], object]


@dataclass(frozen=True)
class Times:
    """Microseconds of one arm, call by call: on the clock, and of the processor (all threads together)."""

    us: tuple[float, ...]
    cpu: tuple[float, ...]

    def percentile(self, p: float) -> float:
        ordered = sorted(self.us)
        return ordered[min(len(ordered) - 1, round(p / 100 * (len(ordered) - 1)))]

    @property
    def p50(self) -> float:
        return self.percentile(50)


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
            begin, cpu = time.perf_counter(), time.process_time()
            arms[name]()
            end, cpu_end = time.perf_counter(), time.process_time()
            samples[name].append(((end - begin) * 1e6, (cpu_end - cpu) * 1e6))
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
    """Best of several: a triad and a read over 128 MiB arrays, a linear layer of 512 x 2048 x 2048."""
    n = 32 << 20
    a, b, c = (torch.ones(n) for _ in range(3))

    def fastest(f: Call) -> float:
        return interleave({"x": f}, seconds)["x"].percentile(0) / 1e6

    triad = 3 * 4 * n / fastest(lambda: torch.add(b, c, alpha=0.5, out=a))
    read = 4 * n / fastest(lambda: a.sum())
    flops = {}
    for name, dtype in dtypes.items():
        x, w = torch.randn(512, 2048).to(dtype), torch.randn(2048, 2048).to(dtype)
        flops[name] = 2 * 512 * 2048 * 2048 / fastest(lambda x=x, w=w: F.linear(x, w))
    return Ceilings(max(triad, read), flops)
