"""Inputs of the op tests."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from compare import Guarded
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float64)
DTYPE_IDS = ("f32", "bf16", "f64")


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@dataclass(frozen=True)
class Ragged:
    """A ragged batch: rows and accepted drafts of each request."""

    name: str
    rows: tuple[int, ...]
    accepted: tuple[int, ...]

    @property
    def total(self) -> int:
        return sum(self.rows)

    def row_start(self) -> Tensor:
        return torch.tensor((0, *self.rows), dtype=torch.int32).cumsum(0, dtype=torch.int32)

    def num_accepted(self) -> Tensor:
        return torch.tensor(self.accepted, dtype=torch.int32)


RAGGED = (
    Ragged("none", (), ()),
    Ragged("empty-requests", (0, 0), (-1, -1)),
    Ragged("one-row", (1,), (0,)),
    Ragged("all-accepted", (4, 8), (3, 7)),
    Ragged("all-rejected", (8,), (0,)),
    Ragged("inactive", (5,), (-1,)),
    Ragged("mixed", (16, 3, 0, 8, 1), (5, 0, -1, 7, 0)),
    Ragged("inactive-between", (4, 6, 4), (1, -1, 3)),
    Ragged("block-16", (16, 16, 16, 16), (0, 15, 7, 3)),
    Ragged("prefill-and-verify", (37, 8, 8), (36, 2, 0)),
)


@dataclass(frozen=True)
class Shape:
    """Sizes of the projection: features F, hidden H, layers L, KV heads, head size d, rotary size."""

    features: int
    hidden: int
    layers: int
    heads: int
    dim: int
    rot: int

    def __str__(self) -> str:
        return f"F{self.features}-H{self.hidden}-L{self.layers}-n{self.heads}-d{self.dim}-r{self.rot}"


SHAPES = (
    Shape(48, 40, 2, 1, 32, 32),
    Shape(64, 33, 1, 3, 64, 64),
    Shape(30, 24, 3, 2, 80, 80),
    Shape(96, 64, 2, 2, 96, 48),
    Shape(17, 19, 2, 1, 128, 128),
    Shape(32, 48, 1, 2, 256, 64),
    Shape(24, 16, 2, 2, 40, 10),  # rot/2 = 5: every vector loop has a remainder
    Shape(20, 72, 1, 1, 32, 0),  # no rotation at all
)


@dataclass
class Weights:
    """Weights of one projection, in the order of the ops."""

    fc: Tensor
    norm: Tensor
    kv: Tensor
    k_norm: Tensor
    cos_sin: Tensor
    embedding: Tensor | None

    def args(self, dtype: torch.dtype | None = None) -> tuple[Tensor | None, ...]:
        cast = (lambda t: t) if dtype is None else (lambda t: t.to(dtype))
        embedding = None if self.embedding is None else cast(self.embedding)
        return (cast(self.fc), cast(self.norm), cast(self.kv), cast(self.k_norm), self.cos_sin, embedding)


def rope_table(positions: int, rot: int, theta: float = 10000.0) -> Tensor:
    """cos_sin ``[positions, rot]`` float32."""
    inverse = theta ** (-torch.arange(0, rot, 2, dtype=torch.float64) / max(rot, 1))
    angle = torch.arange(positions, dtype=torch.float64)[:, None] * inverse
    return torch.cat((angle.cos(), angle.sin()), -1).float()


def weights(shape: Shape, dtype: torch.dtype, *, embedding: bool = True, positions: int = 64) -> Weights:
    rows = shape.layers * 2 * shape.heads * shape.dim
    return Weights(
        fc=(torch.randn(shape.hidden, shape.features) / shape.features**0.5).to(dtype),
        norm=(1 + 0.2 * torch.randn(shape.hidden)).to(dtype),
        kv=(torch.randn(rows, shape.hidden) / shape.hidden**0.5).to(dtype),
        k_norm=(1 + 0.2 * torch.randn(shape.layers, shape.dim)).to(dtype),
        cos_sin=rope_table(positions, shape.rot),
        embedding=torch.randn(shape.hidden).to(dtype) if embedding else None,
    )


class CommitCase:
    """Arguments of commit_and_carry; caches and segments are NaN between canaries, lengths hold garbage."""

    def __init__(
        self,
        shape: Shape,
        ragged: Ragged,
        dtype: torch.dtype,
        *,
        pages: int = 7,
        page: int = 16,
        room: int = 15,
        embedding: bool = True,
    ) -> None:
        self.shape, self.ragged, self.dtype = shape, ragged, dtype
        self.pages, self.page, self.room = pages, page, room
        total = ragged.total
        self.features = torch.randn(total, shape.features).to(dtype)
        self.positions = torch.randint(0, 64, (total,), dtype=torch.int32)
        self.slots = torch.randperm(pages * page)[:total]
        self.weights = weights(shape, dtype, embedding=embedding)

    def outputs(self, dtype: torch.dtype | None = None) -> list[Guarded]:
        """k_cache, v_cache, k_segment, v_segment, segment_lens."""
        s, dtype = self.shape, dtype or self.dtype
        cache = (s.layers, self.pages, self.page, s.heads, s.dim)
        segment = (s.layers, len(self.ragged.rows), self.room, s.heads, s.dim)
        out = [Guarded(shape, dtype) for shape in (cache, cache, segment, segment)]
        return [*out, Guarded((len(self.ragged.rows),), torch.int32, fill=99)]

    def run(self, function, dtype: torch.dtype | None = None, **options) -> list[Tensor]:
        """Calls `function`, checks the canaries, returns the five outputs."""
        cast = dtype or self.dtype
        guarded = self.outputs(cast)
        function(
            self.features.to(cast),
            self.positions,
            self.ragged.row_start(),
            self.ragged.num_accepted(),
            self.slots,
            *(g.tensor for g in guarded),
            *self.weights.args(cast),
            **options,
        )
        for g in guarded:
            g.check()
        return [g.tensor for g in guarded]
