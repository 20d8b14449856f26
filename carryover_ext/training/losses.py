"""Losses over the drafted slots, without ever holding the logits of all rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def slot_weights(block_size: int, gamma: float | None = None) -> Tensor:
    """DFlash's weights ``exp(-(k-1)/gamma)`` of slots k = 1..b-1 (arXiv 2602.06036; gamma 7/5/4 for b =
    16/10/8)."""
    if gamma is None:
        gamma = {16: 7.0, 10: 5.0, 8: 4.0}.get(block_size, block_size / 2)
    return torch.exp(-torch.arange(block_size - 1, dtype=torch.float32) / gamma)


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Soft cross-entropy against a frozen head; the gradient of the hidden rows is made in the forward
    pass.

    The loss is a weighted sum, so d loss / d hidden = w (softmax - target) @ head needs nothing from
    later: each chunk of logits lives only inside the loop. Cost: two matrix products instead of the usual
    three.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, ids: Tensor, probs: Tensor, weights: Tensor, chunk: int
    ) -> tuple[Tensor, Tensor]:
        grad = torch.empty_like(hidden)
        best = torch.empty(hidden.shape[0], dtype=torch.int64)
        loss = torch.zeros((), dtype=torch.float64)
        for i in range(0, hidden.shape[0], chunk):
            rows = slice(i, i + chunk)
            logits = torch.mm(hidden[rows], head.t())
            best[rows] = logits.max(-1).indices
            p = torch.softmax(logits, -1, dtype=torch.float32)
            picked = p.gather(1, ids[rows]).clamp_(min=1e-30).log_()
            loss -= (weights[rows, None] * probs[rows] * picked).sum(dtype=torch.float64)
            p *= weights[rows, None] * probs[rows].sum(-1, keepdim=True)
            p.scatter_add_(1, ids[rows], -weights[rows, None] * probs[rows])
            torch.mm(p.to(head.dtype), head, out=grad[rows])
        ctx.save_for_backward(grad)
        ctx.mark_non_differentiable(best)
        return loss.float(), best

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, _best: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = ctx.saved_tensors
        return grad * grad_loss.to(grad.dtype), None, None, None, None, None


def soft_cross_entropy(
    hidden: Tensor, head: Tensor, ids: Tensor, probs: Tensor, weights: Tensor, chunk: int = 1024
) -> tuple[Tensor, Tensor]:
    """Weighted cross-entropy of ``hidden @ head.T`` against sparse target distributions.

    Args:
        hidden: ``[M, H]`` rows.
        head: ``[Vd, H]`` frozen head.
        ids: ``[M, k]`` int64 indices into the head's rows; ``probs [M, k]`` float32 their target
        probabilities
            (k = 1 and probability 1 is plain cross-entropy).
        weights: ``[M]`` float32 weight of each row; the loss is the weighted sum divided by the sum of
        the weights.

    Returns:
        The loss (scalar) and the argmax of every row ``[M]``.
    """
    total = weights.sum().clamp(min=1e-6)
    loss, best = _ChunkedCrossEntropy.apply(hidden, head, ids, probs, weights / total, chunk)
    return loss, best
