"""Losses over the drafted slots, without ever holding the logits of all rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def slot_weights(block_size: int, gamma: float | None = None, device: torch.device | None = None) -> Tensor:
    """DFlash's weights ``exp(-(k-1)/gamma)`` of slots k = 1..b-1 (arXiv 2602.06036; gamma 7/5/4 for b =
    16/10/8)."""
    if gamma is None:
        gamma = {16: 7.0, 10: 5.0, 8: 4.0}.get(block_size, block_size / 2)
    return torch.exp(-torch.arange(block_size - 1, dtype=torch.float32, device=device) / gamma)


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Soft cross-entropy against a frozen head and a trained low-rank bias; gradients are made in the
    forward pass.

    The loss is a weighted sum, so d loss / d hidden = w (softmax - target) @ head needs nothing from
    later: each chunk of logits lives only inside the loop. Cost: two matrix products instead of the usual
    three. The same residual w (softmax - target) gives the gradients of the bias' two factors.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        latent: Tensor | None,
        w2: Tensor | None,
        ids: Tensor,
        probs: Tensor,
        weights: Tensor,
        soft: Tensor | None,
        l1: float,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        grad = torch.empty_like(hidden)
        markov = None  # latent, w2 and their gradients
        if latent is not None and w2 is not None:
            markov = latent, w2, torch.empty_like(latent), torch.zeros_like(w2, dtype=torch.float32)
        best = torch.empty(hidden.shape[0], dtype=torch.int64, device=hidden.device)
        loss = torch.zeros((), dtype=torch.float64, device=hidden.device)
        for i in range(0, hidden.shape[0], chunk):
            rows = slice(i, i + chunk)
            logits = torch.mm(hidden[rows], head.t())
            if markov is not None:
                logits.addmm_(markov[0][rows], markov[1].t())
            best[rows] = logits.max(-1).indices
            p = torch.softmax(logits, -1, dtype=torch.float32)
            picked, label = p.gather(1, ids[rows]), probs[rows] * (1 - l1)
            value = -(label * picked.clamp(min=1e-30).log()).sum(-1)
            whole, sparse = label.sum(-1), -label  # d value / d logits = whole * p, and sparse at ids
            if soft is not None:
                # |p - soft| summed: 1 where soft is 0, corrected at ids. Its slope in the logits is
                # p (s - sum p s), where s is -1 where p is below soft and 1 elsewhere.
                below = torch.where(picked < soft[rows], -2.0, 0.0) * picked  # p (s - 1)
                value += l1 * (1 + ((picked - soft[rows]).abs() - picked).sum(-1))
                whole, sparse = whole - l1 * below.sum(-1), sparse + l1 * below
            loss += (weights[rows] * value).sum(dtype=torch.float64)
            p *= (weights[rows] * whole)[:, None]
            p.scatter_add_(1, ids[rows], weights[rows, None] * sparse)
            p = p.to(head.dtype)
            torch.mm(p, head, out=grad[rows])
            if markov is not None:
                torch.mm(p, markov[1], out=markov[2][rows])
                markov[3].add_(torch.mm(p.t(), markov[0][rows]))
        ctx.save_for_backward(grad, *(markov[2:] if markov else (None, None)))
        ctx.mark_non_differentiable(best)
        return loss.float(), best

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, _best: Tensor) -> tuple[Tensor | None, ...]:
        dtype = ctx.saved_tensors[0].dtype
        grad, latent, w2 = (None if g is None else (g * grad_loss).to(dtype) for g in ctx.saved_tensors)
        return grad, None, latent, w2, None, None, None, None, None, None


def soft_cross_entropy(
    hidden: Tensor,
    head: Tensor,
    ids: Tensor,
    probs: Tensor,
    weights: Tensor,
    chunk: int = 1024,
    *,
    latent: Tensor | None = None,
    w2: Tensor | None = None,
    soft: Tensor | None = None,
    l1: float = 0.0,
    total: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Weighted cross-entropy of ``hidden @ head.T`` against sparse target distributions.

    Args:
        hidden: ``[M, H]`` rows.
        head: ``[Vd, H]`` frozen head.
        ids: ``[M, k]`` int64 indices into the head's rows; ``probs [M, k]`` float32 their target
        probabilities
            (k = 1 and probability 1 is plain cross-entropy).
        weights: ``[M]`` float32 weight of each row; the loss is the weighted sum divided by ``total``
            (None: the sum of the weights; with several processes it is that of all of them).
        latent: ``[M, r]`` and w2 ``[Vd, r]``: the Markov bias ``latent @ w2.T`` on the logits, None: no bias.
        soft: ``[M, k]`` float32, a distribution over ``ids`` (zero where an id is not meant).
        l1: share of the loss that is the L1 distance to ``soft`` (DSpark: 0.9); the rest is cross-entropy.

    Returns:
        The loss (scalar) and the argmax of every row ``[M]``.
    """
    weights = weights / (weights.sum() if total is None else total).clamp(min=1e-6)
    loss, best = _ChunkedCrossEntropy.apply(
        hidden, head, latent, w2, ids, probs, weights, soft if l1 > 0 else None, l1, chunk
    )
    return loss, best
