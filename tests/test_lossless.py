"""What is emitted is the target's own: greedy output token for token, sampled output by distribution."""

from __future__ import annotations

import itertools

import pytest
import torch
from compare import chi_square
from tiny import FAMILIES, Steered, plain, prompts, replay, tiny_drafter, tiny_target
from torch import Tensor

from carryover_ext.acceptance import Sampling, probabilities
from carryover_ext.config import CarryoverConfig
from carryover_ext.drafters import DFlashDrafter, Drafts
from carryover_ext.engine import generate
from carryover_ext.targets import TappedTarget

LENGTHS = {1: (7,), 3: (3, 9, 14)}
PLANS = {
    "own": None,
    "none": lambda i, r: 0,
    "all": lambda i, r: 99,
    "ragged": lambda i, r: (3 * i + 2 * r) % 5,
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("batch", sorted(LENGTHS))
def test_plain_decoding_is_the_stock_model(family: str, batch: int) -> None:
    target, inputs = tiny_target(family), prompts(*LENGTHS[batch])
    out = generate(target, None, inputs, max_new_tokens=12, stop_token_ids=[])
    for prompt, tokens in zip(inputs, out.tokens, strict=True):
        assert tokens == plain(target, prompt, 12)[0]
    assert out.num_drafted == 0 and out.acceptance_length == 1.0


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("batch", sorted(LENGTHS))
@pytest.mark.parametrize("plan", sorted(PLANS))
@pytest.mark.parametrize("carry", [True, False], ids=["on", "off"])
def test_greedy_equals_plain(family: str, batch: int, plan: str, carry: bool) -> None:
    target, inputs = tiny_target(family), prompts(*LENGTHS[batch])
    new = [13, 6, 17][:batch]
    truth = [plain(target, p, n + 8)[0] for p, n in zip(inputs, new, strict=True)]
    drafter = tiny_drafter(target, Steered).start(truth, [p.numel() for p in inputs], PLANS[plan])
    out = generate(target, drafter, inputs, max_new_tokens=new, carry=carry, stop_token_ids=[])
    assert out.tokens == [t[:n] for t, n in zip(truth, new, strict=True)]
    assert out.num_drafted > 0 and drafter.calls > 0
    assert (out.num_carried > 0) == (carry and plan != "all")
    if plan == "all":
        assert out.num_accepted == out.num_drafted


@pytest.mark.parametrize("block", [2, 3, 5])
@pytest.mark.parametrize("page", [None, 1, 4])
def test_greedy_equals_plain_for_every_block_and_page(block: int, page: int | None) -> None:
    target, inputs = tiny_target(), prompts(*LENGTHS[3])
    truth = [plain(target, p, 24)[0] for p in inputs]
    drafter = tiny_drafter(target, Steered).start(truth, [p.numel() for p in inputs], PLANS["ragged"])
    options = {"max_new_tokens": 15, "block_size": block, "page_size": page, "stop_token_ids": []}
    out = generate(target, drafter, inputs, **options)
    assert out.tokens == [t[:15] for t in truth]
    target_tap = TappedTarget(target, drafter.config.target_layer_ids)
    equal, total, _ = replay(drafter, target_tap)
    target_tap.close()
    assert equal == total > 0


# -- sampled output ------------------------------------------------------------------------------------

SMALL = 5


class Liar(DFlashDrafter):
    """Draws from one law and reports another: the negative control."""

    def draft(self, *args, **options) -> Drafts:
        drafts = super().draft(*args, **options)
        assert drafts.probs is not None
        return Drafts(drafts.tokens, torch.full_like(drafts.probs, 1 / drafts.probs.shape[-1]))


@torch.no_grad()
def joint_law(target, prompt: Tensor, count: int, sampling: Sampling) -> Tensor:
    """Exact probability of every continuation of ``count`` tokens, by whole forwards."""
    words = list(itertools.product(range(SMALL), repeat=count))
    ids = torch.cat([prompt.expand(len(words), -1), torch.tensor(words)], 1)
    logits = target(ids).logits[:, prompt.numel() - 1 : -1]
    law = probabilities(logits, sampling).double().gather(-1, torch.tensor(words)[..., None])[..., 0]
    return law.prod(-1)


SAMPLINGS = {
    "t1": {"temperature": 1.0},
    "t0.7": {"temperature": 0.7},
    "t1.6": {"temperature": 1.6},
    "greedy-drafts": {"temperature": 1.0, "draft_temperature": 0.0},
    "cold-drafts": {"temperature": 1.0, "draft_temperature": 0.3},
    "top-k": {"temperature": 1.0, "top_k": 3},
    "top-p": {"temperature": 1.0, "top_p": 0.8},
    "top-k-p": {"temperature": 1.2, "top_k": 4, "top_p": 0.9, "draft_temperature": 0.0},
}


def observed(
    target, drafter, prompt: Tensor, count: int, options: dict, requests: int = 4000
) -> tuple[Tensor, object]:
    out = generate(
        target, drafter, [prompt] * requests, max_new_tokens=count, stop_token_ids=[], seed=3, **options
    )
    words = torch.tensor(out.tokens)
    index = (words * (SMALL ** torch.arange(count - 1, -1, -1))).sum(-1)
    return torch.bincount(index, minlength=SMALL**count), out


@pytest.mark.parametrize("name", sorted(SAMPLINGS))
@pytest.mark.parametrize("kind", ["off", "on", "reduced-head", "plain"])
def test_sampled_output_has_the_target_law(name: str, kind: str) -> None:
    target = tiny_target(vocab=SMALL, layers=2, hidden=16)
    changes = {"target_layer_ids": [0, 1], "head_dim": 8, "block_size": 4}
    if kind == "reduced-head":
        changes["draft_vocab_size"] = 3
    drafter = None if kind == "plain" else tiny_drafter(target, **changes)
    options = dict(SAMPLINGS[name], carry=kind != "off")
    prompt, count = prompts(4, vocab=SMALL)[0], 4
    counts, out = observed(target, drafter, prompt, count, options)
    law = joint_law(
        target,
        prompt,
        count,
        Sampling(*(options.get(k, d) for k, d in (("temperature", 1.0), ("top_k", 0), ("top_p", 1.0)))),
    )
    assert abs(float(law.sum()) - 1) < 1e-4
    assert counts[law == 0].sum() == 0
    assert chi_square(counts, law) > 1e-4
    if drafter is not None:
        assert out.num_accepted > 0 and out.num_accepted < out.num_drafted
        assert (out.num_carried > 0) == (kind != "off")


def test_chi_square_notices_a_wrong_law() -> None:
    target = tiny_target(vocab=SMALL, layers=2, hidden=16)
    drafter = tiny_drafter(target, Liar, target_layer_ids=[0, 1], head_dim=8, block_size=4)
    prompt = prompts(4, vocab=SMALL)[0]
    counts, _ = observed(target, drafter, prompt, 4, {"temperature": 1.0})
    assert chi_square(counts, joint_law(target, prompt, 4, Sampling(1.0))) < 1e-8


def test_reused_noise_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same uniforms for drafting and for judging change the law: the check must see it."""
    from carryover_ext import acceptance

    kept: dict[str, Tensor] = {}
    fresh = acceptance.uniforms

    def reuse(shape, device, generator):
        u = fresh(shape, device, generator)
        if len(shape) == 2 and shape[1] == 3:
            kept["u"] = u
        elif len(shape) == 2 and shape[1] == 4 and "u" in kept:
            u = torch.cat([kept["u"], u[:, -1:]], 1)
        return u

    monkeypatch.setattr(acceptance, "uniforms", reuse)
    target = tiny_target(vocab=SMALL, layers=2, hidden=16)
    drafter = tiny_drafter(target, target_layer_ids=[0, 1], head_dim=8, block_size=4)
    prompt = prompts(4, vocab=SMALL)[0]
    counts, _ = observed(target, drafter, prompt, 5, {"temperature": 1.0})
    assert chi_square(counts, joint_law(target, prompt, 5, Sampling(1.0))) < 1e-6


def test_sampling_is_reproducible() -> None:
    target = tiny_target()
    drafter = tiny_drafter(target)
    options = {"max_new_tokens": 16, "temperature": 1.0, "stop_token_ids": []}
    one, two, other = (generate(target, drafter, prompts(5, 8), seed=s, **options).tokens for s in (1, 1, 2))
    assert one == two != other


@pytest.mark.parametrize("positions", ["verify", "shifted"])
@pytest.mark.parametrize("at", ["pre_norm", "post_norm"])
def test_switches_change_drafts_not_output(positions: str, at: str) -> None:
    target, inputs = tiny_target(), prompts(6, 11)
    carry = CarryoverConfig(True, at, positions)
    drafter = tiny_drafter(target, carryover_config=carry)
    out = generate(target, drafter, inputs, max_new_tokens=14, stop_token_ids=[])
    assert out.tokens == [plain(target, p, 14)[0] for p in inputs]
    assert out.num_carried > 0
