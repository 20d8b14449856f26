"""Left-to-right sampling of a drafted block with a first-order, low-rank bias on its logits."""

from __future__ import annotations

import torch
from torch import Tensor

from .._library import ops


def markov_sample(
    base_logits: Tensor,
    prev_tokens: Tensor,
    markov_w1: Tensor,
    markov_w2: Tensor,
    d2t: Tensor | None = None,
    uniforms: Tensor | None = None,
    temperature: float = 0.0,
    with_probs: bool = False,
    seeds: Tensor | None = None,
    offsets: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Samples K tokens a request, each given the one before it:
    ``logits_k = base_logits[:, k] + markov_w2 @ markov_w1[x_(k-1)]``, where ``x_(-1)`` is ``prev_tokens``.

    Temperature 0 takes the largest logit (lowest index on ties, NaN never wins). At T > 0 the token is drawn
    from ``q = softmax(logits_k / T)`` by inverse CDF with ``u_k``, in the order of the columns; q is what
    rejection sampling needs to judge the draft. A column of -inf or NaN is never drawn; where no column is
    left, the first one is taken for certain.

    ``u_k`` is given (``uniforms``), or comes from a counter-based generator inside of the op (``seeds``): the
    same seed and offset give the same draw at any place of any batch, on a CPU and on a GPU, and a captured
    CUDA graph draws anew when these tensors have new values. A caller advances ``offsets`` by K a block.

    Args:
        base_logits: ``[B, K, Vd]`` float32, bfloat16 or float64 (plain, slow), on a GPU bfloat16 or float16;
            without +inf. May be strided except in its last dimension.
        prev_tokens: ``[B]`` int64 target ids of the token before each block (the anchor); -1 is padding.
        markov_w1: ``[V, r]`` embedding of the token before, in the dtype of base_logits; on a GPU r is at
            most 2048.
        markov_w2: ``[Vd, r]`` its projection to the logits, in the same dtype.
        d2t: ``[Vd]`` int64, the target id of each column; None: column v is token v.
        uniforms: ``[B, K]`` float32 in [0, 1); T > 0 needs these or seeds, not both.
        temperature: 0 or above.
        with_probs: also return q of all columns; ignored at temperature 0.
        seeds: ``[B]`` int64, any values, one stream each: ``u_k`` is number ``offsets + k`` of it, the upper
            24 bits of the first word of Philox4x32-10 with the seed as key and the number as counter.
        offsets: ``[B]`` int64, any values; None: 0. Given only with seeds.

    Returns:
        ``tokens [B, K]`` int64 target ids (-1 for padding), ``token_probs [B, K]`` float32, q of each token
        (1 at temperature 0, 0 for padding), and ``probs [B, K, Vd]`` float32, q by column (zeros for padding;
        ``[0, K, Vd]`` without with_probs or at temperature 0). An empty batch and K = 0 are defined.

    Raises:
        RuntimeError: wrong dtype, shape or stride, a token without a row in markov_w1, missing uniforms and
            seeds or both of them, a uniform outside [0, 1]; the message names the argument, its index and
            value. On a GPU values are not looked at, since that would wait for it: a token without a row in
            markov_w1 has no bias.

    Source: the vanilla Markov head of DSpark (arXiv 2607.05147); Philox: Salmon et al., SC 2011. The bias is
    added in float32; sums of the CDF over blocks of columns are float64.
    """
    return ops.markov_sample(
        base_logits, prev_tokens, markov_w1, markov_w2, d2t, uniforms, temperature, with_probs, seeds, offsets
    )


@torch.library.register_fake("carryover_ext::markov_sample")
def _fake(
    base_logits: Tensor,
    prev_tokens: Tensor,
    markov_w1: Tensor,
    markov_w2: Tensor,
    d2t: Tensor | None,
    uniforms: Tensor | None,
    temperature: float,
    with_probs: bool,
    seeds: Tensor | None = None,
    offsets: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    batch, steps, vocab = base_logits.shape
    rows = batch if with_probs and temperature > 0 else 0
    return (
        prev_tokens.new_empty(batch, steps),
        prev_tokens.new_empty(batch, steps, dtype=torch.float32),
        prev_tokens.new_empty(rows, steps, vocab, dtype=torch.float32),
    )
