"""How many drafts hold, and which token follows: greedy matching or exact rejection sampling."""

from __future__ import annotations

import torch
from torch import Tensor

from .._library import ops


def accept(
    draft_tokens: Tensor,
    target_logits: Tensor,
    draft_probs: Tensor | None = None,
    uniforms: Tensor | None = None,
    temperature: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Judges K drafts a request by the target's logits of the K+1 rows of its block.

    Temperature 0: draft k holds while it equals the argmax of row k (lowest index on ties); the next token is
    the argmax of the first row behind the held ones.

    Temperature T > 0: with ``p = softmax(logits / T)`` draft x of row k, drawn from q, holds iff ``u_k q(x) <
    p(x)``, in order. At the first rejection the next token is drawn from ``max(p - q, 0)`` (normalised),
    after K held drafts from row K's p, each by inverse CDF with ``u_K``. The tokens that come out follow the
    target's law whatever q is, provided that q is the distribution that the drafts were drawn from. When ``p
    - q`` leaves nothing (they are equal up to rounding) p is used.

    Args:
        draft_tokens: ``[B, K]`` int64; -1 is padding: judging stops there and the next token comes from the
            full p of that row.
        target_logits: ``[B, K + 1, V]`` float32, bfloat16 or float64 (plain, slow), on a GPU float32,
            bfloat16 or float16; NaN-free, processed by top-k or top-p if the target's law is meant so (-inf
            marks an excluded token). May be strided except in its last dimension.
        draft_probs: ``[B, K, V]`` float32, the q of each draft; None with T > 0: drafts were chosen
            deterministically (one-hot q). Ignored at temperature 0.
        uniforms: ``[B, K + 1]`` float32 in [0, 1), independent of the drafts; needed for T > 0.
        temperature: 0 or above.

    Returns:
        ``num_accepted [B]`` int32 in 0..K and ``next_token [B]`` int64.

    Raises:
        RuntimeError: wrong dtype, shape or stride, a token outside the vocabulary, missing uniforms, a
            uniform outside [0, 1]; the message names the argument, its index and value. On a GPU values are
            not looked at, since that would wait for it: a token outside the vocabulary is padding.

    Source: speculative sampling, Leviathan et al. (arXiv 2211.17192), Chen et al. (arXiv 2302.01318).
    Probabilities are float32; sums of the CDF are float64.
    """
    return ops.accept(draft_tokens, target_logits, draft_probs, uniforms, temperature)


@torch.library.register_fake("carryover_ext::accept")
def _fake(
    draft_tokens: Tensor,
    target_logits: Tensor,
    draft_probs: Tensor | None,
    uniforms: Tensor | None,
    temperature: float,
) -> tuple[Tensor, Tensor]:
    batch = draft_tokens.shape[0]
    return draft_tokens.new_empty(batch, dtype=torch.int32), draft_tokens.new_empty(batch)
