"""Distributions: the one place that turns logits into the law that is sampled from, and judges drafts against
it.

The same processing (temperature, top-k, top-p) applies to the drafter's q and to the target's p, in float32
over the target's whole vocabulary, and the q that drew the drafts is the one that judges them. Drafting and
judging use independent uniforms.
"""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral, Real

import torch
from torch import Tensor

from . import ops

LEAST_TEMPERATURE = 1e-30


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. ``temperature`` 0 is greedy; ``top_k`` 0 and ``top_p`` 1 leave the distribution
    whole.

    ``draft_temperature``: temperature of the drafts alone. None: the same. 0: the drafter's best token in
    each slot, judged as a one-hot q. Slots of a block are drawn independently, so at higher temperatures
    sampled drafts do not cohere and are accepted less often. The law of the output does not depend on it.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    draft_temperature: float | None = None

    def __post_init__(self) -> None:
        numbers = [("temperature", self.temperature), ("top_p", self.top_p)]
        if self.draft_temperature is not None:
            numbers.append(("draft_temperature", self.draft_temperature))
        for name, value in numbers:
            if isinstance(value, bool) or not isinstance(value, Real):
                raise ValueError(f"{name}={value!r}: must be a number")
        if isinstance(self.top_k, bool) or not isinstance(self.top_k, Integral):
            raise ValueError(f"top_k={self.top_k!r}: must be a whole number, 0 for off")
        # Below the least one, logits / T overflows float32; at infinity, masked logits become NaN.
        for name, value in (("temperature", self.temperature), ("draft_temperature", self.draft_temperature)):
            if value is not None and value != 0 and not LEAST_TEMPERATURE <= value < float("inf"):
                raise ValueError(
                    f"{name}={value}: must be 0 (greedy), or finite and at least {LEAST_TEMPERATURE}"
                )
        if self.top_k < 0:
            raise ValueError(f"top_k={self.top_k}: must be 0 (off) or positive")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p}: must be in (0, 1]")

    @property
    def drafts(self) -> Sampling:
        """The sampling of the drafter's slots. Greedy output is always drafted greedily."""
        if self.temperature == 0:
            return Sampling(0.0)
        chosen = self.temperature if self.draft_temperature is None else self.draft_temperature
        return Sampling(chosen, self.top_k, self.top_p)


def mask_logits(logits: Tensor, sampling: Sampling) -> Tensor:
    """Logits with everything outside top-k / top-p at -inf; shape and dtype kept. Ties at the k-th value all
    stay.
    """
    if sampling.temperature == 0 or (sampling.top_k == 0 and sampling.top_p >= 1):
        return logits
    if 0 < sampling.top_k < logits.shape[-1]:
        least = logits.topk(sampling.top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < least, float("-inf"))
    if sampling.top_p < 1:
        ordered, index = (logits.float() / sampling.temperature).sort(dim=-1, descending=True)
        probs = ordered.softmax(-1)
        # A token stays when the mass before it is below top_p: the best token always does.
        drop = probs.cumsum(-1) - probs >= sampling.top_p
        logits = logits.masked_fill(torch.zeros_like(drop).scatter(-1, index, drop), float("-inf"))
    return logits


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """``softmax(logits / T)`` in float32 after top-k / top-p, any leading shape. Temperature must be
    positive.
    """
    return torch.softmax(mask_logits(logits, sampling).float() / sampling.temperature, dim=-1)


def uniforms(shape: tuple[int, ...], device: torch.device, generator: torch.Generator | None) -> Tensor:
    """Float32 uniforms in [0, 1)."""
    return torch.rand(shape, dtype=torch.float32, device=device, generator=generator)


def sample(probs: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Draw one index per row of ``probs [..., V]`` (float32) by inverse CDF: int64 ``[...]``. Never an index
    of probability 0.
    """
    cdf = probs.double().cumsum(-1)
    u = uniforms(tuple(probs.shape[:-1]), probs.device, generator).double() * cdf[..., -1]
    index = torch.searchsorted(cdf, u[..., None].contiguous(), right=True)[..., 0]
    last = probs.shape[-1] - 1 - probs.flip(-1).ne(0).to(torch.uint8).argmax(-1)
    return torch.minimum(index, last)


def choose(logits: Tensor, sampling: Sampling, generator: torch.Generator | None = None) -> Tensor:
    """The next token of each row of ``logits [..., V]``: greedy, or drawn. int64 ``[...]``."""
    if sampling.temperature == 0:
        return logits.argmax(-1)
    return sample(probabilities(logits, sampling), generator)


def accept(
    draft_tokens: Tensor,
    target_logits: Tensor,
    draft_probs: Tensor | None,
    sampling: Sampling,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Judge a block: ``draft_tokens [B, K]`` int64 (-1 ends it), ``target_logits [B, K+1, V]``, ``draft_probs
    [B, K, V]`` or None.

    Returns ``num_accepted [B]`` int32 and ``next_token [B]`` int64; see :func:`carryover_ext.ops.accept`.
    """
    if sampling.temperature == 0:
        return ops.accept(draft_tokens, target_logits, None, None, 0.0)
    u = uniforms((draft_tokens.shape[0], draft_tokens.shape[1] + 1), target_logits.device, generator)
    return ops.accept(
        draft_tokens, mask_logits(target_logits, sampling), draft_probs, u, sampling.temperature
    )
