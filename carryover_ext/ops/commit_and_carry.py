"""`commit_and_carry`: every verified row through one projection, each to where it belongs."""

from __future__ import annotations

import torch
from torch import Tensor

from .._library import ops as _ops
from .project_kv import embed_before_norm


def commit_and_carry(
    features: Tensor,
    positions: Tensor,
    row_start: Tensor,
    num_accepted: Tensor,
    slot_mapping: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_segment: Tensor,
    v_segment: Tensor,
    segment_lens: Tensor,
    fc_weight: Tensor,
    norm_weight: Tensor,
    kv_weight: Tensor,
    k_norm_weight: Tensor,
    cos_sin: Tensor,
    carry_embedding: Tensor | None = None,
    *,
    eps: float = 1e-6,
    carry_embed_at: str = "pre_norm",
    carry: bool = True,
) -> None:
    """:func:`project_kv` of all verified rows, with committed rows written to the cache and rejected ones
    carried.

    Request i owns rows ``row_start[i] .. row_start[i + 1] - 1``; with m = ``num_accepted[i]`` its rows 0..m
    are committed: their K and V go to the cache slots that `slot_mapping` names. The rows after m are
    rejected: they get the carry embedding and go, packed, to rows 0, 1, ... of ``segment[:, i]``, whose
    length is replaced (never appended to). The weights are read once; carrying adds no pass over them.

    Args:
        features, positions: ``[T, F]`` and ``[T]`` int32 as in :func:`project_kv`. A row at position -1 is
            padding: written nowhere, not counted.
        row_start: ``[B + 1]`` int32, from 0 to T, not decreasing.
        num_accepted: ``[B]`` int32; -1 marks an inactive request, whose rows are written nowhere and whose
            segment becomes empty. Prefill is ``num_accepted[i] = rows - 1``.
        slot_mapping: ``[T]`` int64: flat cache slot (page index * page size + offset) of each committed row,
            -1 for nowhere; slots of the batch are distinct; those of rejected rows are ignored.
        k_cache, v_cache: ``[L, N, page, nkv, d]``, written in place; strided, contiguous in the last
            dimension.
        k_segment, v_segment: ``[L, B, R, nkv, d]``, written in place; of more than R rejected rows the first
            R are kept. Rows at and behind the new length keep what they held.
        segment_lens: ``[B]`` int32, rewritten for every request; 0 without `carry` or when all drafts were
            accepted.
        fc_weight, norm_weight, kv_weight, k_norm_weight, cos_sin, carry_embedding, eps, carry_embed_at: as in
            :func:`project_kv`. Without an embedding rejected rows are carried as plain context.
        carry: False leaves every segment empty. The committed rows have the same bits either way.

    No gradient: it is the inference path; training uses :func:`project_kv`. Nothing is written when an error
    is raised; but on a GPU `segment_lens` may be, where the library's GEMM finds no memory. A batch without
    live rows only rewrites `segment_lens`.

    On a GPU (bfloat16, float16) nothing waits for the device, so the call can be captured into a graph; the
    workspace comes from PyTorch's allocator. Values are not read on the host: a row whose slot or position is
    out of range is written nowhere and not counted, and so are the rows of a request with a bad `row_start`
    or `num_accepted`; :func:`check_commit_and_carry` reports them, and a build with CARRYOVER_DEBUG=1 traps.
    Above :func:`project_crossover` rows the library's GEMM computes.

    Raises:
        RuntimeError: wrong dtype, shape or device. On the CPU also: slot outside -1..N*page-1 of a committed
            row; position outside -1..P-1 of a written row; `row_start` not monotone or not ending at T;
            `num_accepted` outside -1..rows-1.
        ValueError: unknown `carry_embed_at`.

    Source: arXiv 2609.14717, ``U_l = Phi_l(H_rej + E_carry)`` and the commit of the accepted rows, in one
    pass.
    """
    before = embed_before_norm(carry_embed_at)
    with torch.no_grad():
        _ops.commit_and_carry(
            features, positions, row_start, num_accepted, slot_mapping, k_cache, v_cache, k_segment,
            v_segment, segment_lens, fc_weight, norm_weight, kv_weight, k_norm_weight, cos_sin,
            carry_embedding, eps=eps, carry_pre_norm=before, carry=carry,
        )  # fmt: skip


@torch.library.register_fake("carryover_ext::commit_and_carry")
def _fake(*args, **kwargs) -> None:
    return None


def check_commit_and_carry(
    positions: Tensor,
    row_start: Tensor,
    num_accepted: Tensor,
    slot_mapping: Tensor,
    k_cache: Tensor,
    k_segment: Tensor,
    cos_sin: Tensor,
    *,
    carry: bool = True,
) -> None:
    """Raises what :func:`commit_and_carry` raises on the CPU for the values of these arguments; for
    debugging on a GPU, where it skips bad rows instead. Waits for the device.

    Args:
        positions, row_start, num_accepted, slot_mapping, k_cache, k_segment, cos_sin, carry: as for
            :func:`commit_and_carry`, on any device.

    Raises:
        RuntimeError: the first value that is out of range, by its name and index.
    """
    values = (t.detach().cpu() for t in (positions, row_start, num_accepted, slot_mapping))
    _ops.check_commit_and_carry(
        *values, k_cache.shape[1], k_cache.shape[2], k_segment.shape[2], cos_sin.shape[0], carry
    )  # fmt: skip


@torch.library.register_fake("carryover_ext::check_commit_and_carry")
def _fake_check(*args, **kwargs) -> None:
    return None
