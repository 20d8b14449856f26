"""The CUDA kernels of project_kv and commit_and_carry in the simulator, with the reference's signatures."""

from __future__ import annotations

from typing import Any

import torch
from cases import Shape
from simt import call
from torch import Tensor

OP = "project_kv"
MULTIPROCESSORS = 132

# What the tiles can load: F and H are multiples of 8. No F and no H is a multiple of a tile.
TILE_SHAPES = (
    Shape(72, 40, 2, 2, 64, 64),  # two heads in a tile
    Shape(136, 72, 1, 3, 80, 80),  # 80 of 128 columns used
    Shape(96, 200, 2, 1, 128, 128),
    Shape(64, 136, 2, 2, 96, 48),  # half of the head is rotated
    Shape(40, 48, 1, 2, 256, 64),  # wide tiles
    Shape(200, 24, 1, 2, 192, 192),
    Shape(24, 16, 3, 2, 40, 10),  # three heads in a tile, rot/2 = 5
    Shape(8, 8, 1, 1, 33, 0),  # no rotation, odd head: scalar stores
    Shape(1096, 520, 1, 1, 128, 128),  # both GEMMs are split
)
SPLIT = TILE_SHAPES[-1]


def is_bf16(dtype: torch.dtype) -> bool:
    assert dtype in (torch.bfloat16, torch.float16)
    return dtype == torch.bfloat16


def project_kv(
    features: Tensor,
    positions: Tensor,
    fc_weight: Tensor,
    norm_weight: Tensor,
    kv_weight: Tensor,
    k_norm_weight: Tensor,
    cos_sin: Tensor,
    carry_embedding: Tensor | None = None,
    carried: Tensor | None = None,
    *,
    eps: float = 1e-6,
    carry_embed_at: str = "pre_norm",
    multiprocessors: int = MULTIPROCESSORS,
    library: bool = False,
    out: tuple[Tensor, Tensor] | None = None,
    **how: Any,
) -> tuple[Tensor, Tensor]:
    """Twin of :func:`carryover_ext.ops.project_kv`. `library` takes the path above the crossover,
    `how` goes to :func:`simt.call`."""
    layers, dim = k_norm_weight.shape
    heads = kv_weight.shape[0] // (2 * layers * dim)
    shape = (layers, features.shape[0], heads, dim)
    k, v = out or (torch.full(shape, float("nan"), dtype=features.dtype) for _ in range(2))
    call(
        OP, features, positions, fc_weight, norm_weight, kv_weight, k_norm_weight, cos_sin, carry_embedding,
        carried, k, v, is_bf16(features.dtype), eps, carry_embed_at == "pre_norm", multiprocessors, library,
        **how,
    )  # fmt: skip
    return k, v


def commit_and_carry(
    features: Tensor,
    *args: Tensor | None,
    eps: float = 1e-6,
    carry_embed_at: str = "pre_norm",
    carry: bool = True,
    multiprocessors: int = MULTIPROCESSORS,
    library: bool = False,
    **how: Any,
) -> None:
    """Twin of :func:`carryover_ext.ops.commit_and_carry`; the embedding may be left out."""
    tensors = args if len(args) == 15 else (*args, None)
    call(
        OP, features, *tensors, is_bf16(features.dtype), eps, carry_embed_at == "pre_norm", carry,
        multiprocessors, library, function="commit_and_carry", **how,
    )  # fmt: skip


def plan(
    rows: int, cols: int, depth: int, head: int, multiprocessors: int = MULTIPROCESSORS
) -> dict[str, int]:
    names = ("tile_rows", "tile_cols", "used_cols", "row_blocks", "col_tiles", "splits", "split_depth")
    values = call(OP, rows, cols, depth, head, multiprocessors, function="plan")
    return dict(zip(names, values, strict=True))
