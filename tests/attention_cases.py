"""Calls of segment_attention, for the tests of the CPU op and of the CUDA kernel."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Case:
    """Sizes and switches of one call. Lengths of a request are drawn from 0..context, 0..segment, 0..rows."""

    batch: int = 2
    rows: int = 4
    kv_heads: int = 2
    group: int = 2
    d: int = 32
    context: int = 40
    segment: int | None = 7
    page: int | None = 16
    causal: bool = False
    window: int = 0
    soft_cap: float = 0.0
    sinks: bool = False
    ragged_block: bool = False
    sink_level: float = 0.0  # at the logarithm of the number of keys a sink that is left out shows
    spread: float = 1.0  # of the queries: larger makes the softmax sharper

    def __str__(self) -> str:
        flags = [n for n in ("causal", "sinks", "ragged_block") if getattr(self, n)]
        flags += [f"w{self.window}"] * (self.window > 0) + [f"cap{self.soft_cap:g}"] * (self.soft_cap > 0)
        flags += [f"level{self.sink_level:g}"] * (self.sink_level != 0)
        flags += [f"x{self.spread:g}"] * (self.spread != 1)
        heads = f"n{self.kv_heads}x{self.group}-d{self.d}"
        sizes = f"B{self.batch}-b{self.rows}-{heads}-c{self.context}-s{self.segment}"
        return "-".join([sizes, f"p{self.page}" if self.page else "contiguous", *flags])


@dataclass
class Call:
    """Arguments in float64; everything that no request may read is NaN."""

    positional: list[Tensor | None]
    options: dict

    def args(self, dtype: torch.dtype) -> list[Tensor | None]:
        return [x.to(dtype) if x is not None and x.is_floating_point() else x for x in self.positional]

    def exact(self, dtype: torch.dtype) -> list[Tensor | None]:
        """The values that `args(dtype)` holds, in float64."""
        return [x.double() if x is not None and x.is_floating_point() else x for x in self.args(dtype)]


def build(case: Case) -> Call:
    batch, rows, nkv, d = case.batch, case.rows, case.kv_heads, case.d

    def lengths(limit: int, least: int = 0) -> Tensor:
        n = torch.randint(least, limit + 1, (batch,), dtype=torch.int32)
        if batch:
            n[0] = limit  # the longest is always there
        return n

    def poisoned(shape: tuple[int, ...], lens: Tensor) -> Tensor:
        x = torch.full((batch, shape[0], nkv, d), float("nan"), dtype=torch.float64)
        for i, n in enumerate(lens.tolist()):
            x[i, : max(n, 0)] = torch.randn(max(n, 0), nkv, d, dtype=torch.float64)
        return x

    context = lengths(case.context)
    block = lengths(rows) if case.ragged_block else torch.full((batch,), rows, dtype=torch.int32)
    q = torch.randn(batch, rows, nkv * case.group, d, dtype=torch.float64) * case.spread
    for i, n in enumerate(block.tolist()):
        q[i, n:] = float("nan")
    k_cache, v_cache = (poisoned((case.context + 1,), context) for _ in "kv")
    table = None
    if case.page is not None:
        used = [(n + case.page - 1) // case.page for n in context.tolist()]
        width = max(used, default=0) + 1
        table = torch.full(
            (batch, width), -7, dtype=torch.int32
        )  # entries that are not needed are not looked at
        order = torch.randperm(sum(used) + 2)
        paged = [torch.full((len(order), case.page, nkv, d), float("nan"), dtype=torch.float64) for _ in "kv"]
        taken = 0
        for i, n in enumerate(context.tolist()):
            for j in range(used[i]):
                table[i, j] = order[taken]
                size = min(case.page, n - j * case.page)
                for pages, rows_of in zip(paged, (k_cache, v_cache), strict=True):
                    pages[order[taken], :size] = rows_of[i, j * case.page : j * case.page + size]
                taken += 1
        k_cache, v_cache = paged
    k_segment = v_segment = segment = None
    if case.segment is not None:
        segment = lengths(case.segment)
        k_segment, v_segment = (poisoned((case.segment,), segment) for _ in "kv")
    k_block, v_block = (poisoned((rows,), block) for _ in "kv")
    options = {
        "causal": case.causal,
        "window": case.window,
        "soft_cap": case.soft_cap,
        "sinks": torch.randn(nkv * case.group) + case.sink_level if case.sinks else None,
        "block_lens": block if case.ragged_block else None,
    }
    positional = [q, k_cache, v_cache, context, k_segment, v_segment, segment, k_block, v_block, table]
    return Call(positional, options)


def mixed(count: int) -> list[Case]:
    """A fixed sample of the whole space, made of prime strides so that every pair of choices meets."""
    heads = list(itertools.product((32, 64, 80, 96, 128, 256), range(1, 9)))
    cases = []
    for i in range(count):
        d, group = heads[(i * 7) % len(heads)]
        cases.append(
            Case(
                batch=(1, 2, 3, 5)[i % 4],
                rows=(1, 2, 5, 8, 16)[(i * 3) % 5],
                kv_heads=(1, 2, 3)[(i // 2) % 3],
                group=group,
                d=d,
                context=(0, 1, 15, 33, 64, 127, 128, 129, 300)[(i * 5) % 9],
                segment=(None, 0, 1, 7, 15)[(i * 2) % 5],
                page=(None, 16, 1, 5, 64)[i % 5],
                causal=(i // 3) % 2 == 0,
                window=(0, 0, 1, 20, 150)[(i // 5) % 5],
                soft_cap=(0.0, 0.0, 5.0)[(i // 4) % 3],
                sinks=(i // 7) % 3 == 0,
                ragged_block=(i // 2) % 4 == 0,
                spread=(1.0, 1.0, 4.0)[(i // 11) % 3],
            )
        )
    return cases
