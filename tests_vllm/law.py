"""The law of sampled output: what it must be, what an engine gives, and how likely the difference is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import engine
import torch
from models import VOCAB


def of_second_token(target: Path, prompt: list[int]) -> torch.Tensor:
    """Marginal law of the second token at T=1, float64 ``[V]``: the sum over all first tokens."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    with torch.inference_mode():
        first = model(torch.tensor([prompt])).logits[0, -1].double().softmax(-1)
        rows = torch.tensor([[*prompt, token] for token in range(VOCAB)])
        second = model(rows).logits[:, -1].double().softmax(-1)
    return first @ second


def chi_square(counts: torch.Tensor, law: torch.Tensor) -> float:
    """p-value; cells that expect fewer than five are pooled."""
    expected = law * counts.sum()
    order = expected.argsort(descending=True)
    expected, counts = expected[order], counts.double()[order]
    large = int((expected >= 5).sum())
    expected = torch.cat([expected[:large], expected[large:].sum()[None]])
    counts = torch.cat([counts[:large], counts[large:].sum()[None]])
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(counts) - 1) / 2).double(), statistic / 2))


@contextmanager
def drafting(llm: Any, token: int) -> Iterator[None]:
    """The engine's first draft is ``token`` in every round; a random one would hardly ever be accepted."""
    drafter = engine.proposer(llm)
    propose = drafter.propose

    def proposing(*args: Any, **kwargs: Any) -> torch.Tensor:
        drafts = propose(*args, **kwargs).clone()
        drafts[:, 0] = token
        return drafts

    drafter.propose = proposing
    try:
        yield
    finally:
        del drafter.propose


def second_tokens(llm: Any, prompt: list[int], number: int, draft: int, batch: int = 8) -> torch.Tensor:
    """Counts ``[V]`` of the second tokens of ``number`` answers at T=1, for which ``draft`` was drafted."""
    out = []
    with drafting(llm, draft):
        for start in range(0, number, batch):
            prompts = [prompt] * min(batch, number - start)
            out += engine.generate(llm, prompts, 2, temperature=1.0, seed=None)
    return torch.bincount(torch.tensor([tokens[1] for tokens in out]), minlength=VOCAB)
