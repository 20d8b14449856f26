"""`gather_rejected`: packs the rejected rows of a ragged batch of verified blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from .._library import ops as _ops


def gather_rejected(
    hidden: Tensor, row_start: Tensor, num_accepted: Tensor, max_rejected: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Packs the rows of each request that verification rejected, padded to a static size.

    This is the separate, readable form of the routing inside :func:`commit_and_carry`, for engines that keep
    their own projection. Request i owns rows ``row_start[i] .. row_start[i + 1] - 1``; its first row is the
    anchor, row j the j-th draft. With m = ``num_accepted[i]`` rows 0..m are committed and the rows after m
    are rejected.

    Args:
        hidden: ``[T, F]`` float32, bfloat16 or float64, on a GPU float32, bfloat16 or float16; rows may be
            strided, the last dimension is contiguous.
        row_start: ``[B + 1]`` int32, from 0 to T, not decreasing.
        num_accepted: ``[B]`` int32, accepted drafts of each request; -1 marks an inactive request (nothing
            rejected).
        max_rejected: R, the static number of rows that a request gets in the result; of more rejected rows
            the first R are kept.

    Returns:
        ``rows [B, R, F]`` (zero behind the rejected rows), ``index [B, R]`` int32 (row of `hidden`, -1 is
        padding), ``lens [B]`` int32.

    Differentiable in `hidden`. An empty batch, T = 0 and R = 0 are defined.

    Raises:
        RuntimeError: wrong dtype, shape or device, `row_start` not monotone or not ending at T,
            `num_accepted` outside -1..rows-1. On a GPU values are not read on the host, which would wait for
            it: a request with such a value has no rejected rows.

    Source: arXiv 2609.14717, the rejected rows m+1..b-1 of a verified block.
    """
    return _ops.gather_rejected(hidden, row_start, num_accepted, max_rejected)


@torch.library.register_fake("carryover_ext::gather_rejected")
def _fake(hidden, row_start, num_accepted, max_rejected):
    batch = num_accepted.shape[0]
    return (
        hidden.new_empty(batch, max_rejected, hidden.shape[1]),
        hidden.new_empty(batch, max_rejected, dtype=torch.int32),
        hidden.new_empty(batch, dtype=torch.int32),
    )


def _setup_context(ctx, inputs, output) -> None:
    ctx.save_for_backward(output[1])
    ctx.rows = inputs[0].shape[0]


def _backward(ctx, grad_rows, grad_index, grad_lens):
    (index,) = ctx.saved_tensors
    grad = grad_rows.new_zeros(ctx.rows, grad_rows.shape[2])
    if ctx.rows > 0:
        # Padding adds zeros to row 0.
        kept = torch.where((index >= 0)[..., None], grad_rows, torch.zeros_like(grad_rows))
        grad = grad.index_add(0, index.clamp(min=0).flatten().long(), kept.flatten(0, 1))
    return grad, None, None, None


torch.library.register_autograd("carryover_ext::gather_rejected", _backward, setup_context=_setup_context)
