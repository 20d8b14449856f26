"""The V2 runner, its Triton kernels in the interpreter: DFlash and DSpark, one and several KV groups."""

from __future__ import annotations

from collections.abc import Iterator

import engine
import law
import models
import pytest
import scenes
import torch
from conftest import World, random_prompt

from carryover_ext.config import CarryoverConfig

pytestmark = pytest.mark.skipif(not engine.V2, reason="needs VLLM_USE_V2_MODEL_RUNNER=1")
K = models.BLOCK - 1
# Prompt lengths and new tokens; the last request runs into the length limit.
REQUESTS = [(6, 26), (3, 22), (engine.LIMIT - 9, 9)]


@pytest.fixture(scope="module")
def carryover(world: World) -> Iterator:
    drafter = world.drafter("dflash")
    options = {"max_num_seqs": 32, "enable_prefix_caching": True}
    with engine.engine(world.target, drafter / "vllm", tokens=K, **options) as llm:
        yield llm, drafter


def check(world: World, llm, drafter, drafts: int, seed: int, window: int = 0) -> str:
    """Drafts equal to the reference's, output equal to the target's. Returns the speculator's class."""
    prompts = [random_prompt(length, seed + i) for i, (length, _) in enumerate(REQUESTS)]
    lengths = [new for _, new in REQUESTS]
    expected = [world.answer(prompt, length) for prompt, length in zip(prompts, lengths, strict=True)]
    found = engine.proposer(llm)
    assert found.carrying
    with engine.watched(llm, world.referee(drafter, window=window, seed=seed)) as referee:
        out = engine.generate(llm, prompts, [26, 22, 99])
        metrics = engine.metrics(llm)
    assert out == expected
    assert metrics["num_drafts"] > 0 and metrics["num_accepted_tokens"] > 0
    referee.report.check(drafts)
    return type(found).__name__


def run(world: World, drafter, method: str, tokens: int, seed: int, window: int = 0) -> str:
    """:func:`check` in an engine of its own."""
    with engine.engine(world.target, drafter / "vllm", tokens=tokens, method=method) as llm:
        return check(world, llm, drafter, tokens, seed, window)


def test_dflash(world: World, carryover) -> None:
    assert check(world, *carryover, K, 10) == "CarryoverSpeculator"


def test_sampled_output_has_the_targets_law(world: World, carryover, monkeypatch) -> None:
    """As the test of V1 does, with fewer answers: the interpreter needs 0.1 s for each."""
    llm, _ = carryover
    prompt, number = random_prompt(7, 12), 256
    expected = law.of_second_token(world.target, prompt)
    draft, before = int(expected.argmax()), engine.metrics(llm)
    assert law.chi_square(law.second_tokens(llm, prompt, number, draft, 32), expected) > 1e-3
    after = engine.metrics(llm)
    assert after["num_draft_tokens"] - before["num_draft_tokens"] >= number
    assert after["num_accepted_tokens"] - before["num_accepted_tokens"] > number // 20
    judge = engine.runner(llm).rejection_sampler
    monkeypatch.setattr(judge, "synthetic_conditional_rates", torch.ones(K))
    assert law.chi_square(law.second_tokens(llm, prompt, 64, draft, 32), expected) < 1e-6


def test_a_lost_context_is_noticed(world: World, carryover, vllm_log: list[str]) -> None:
    scenes.lost_context(world, *carryover, vllm_log)


def test_dflash2(world: World) -> None:
    """With convolutions that pass their input on and a selector without a say it drafts as DFlash does."""
    drafter = world.drafter("dflash2", dflash2=True, seed=8)
    assert run(world, drafter, "dflash", K, 50) == "CarryoverDFlash2Speculator"


def test_dspark_with_a_reduced_vocabulary(world: World) -> None:
    drafter = world.drafter("markov", markov=True, draft_vocab_size=200)
    assert run(world, drafter, "dspark", K, 20) == "CarryoverDSparkSpeculator"


@pytest.mark.parametrize("markov", [False, True], ids=["dflash", "dspark"])
def test_another_hidden_size(world: World, markov: bool) -> None:
    """Half of the target's, with an embedding and a head of the drafter's own; DSpark's of some tokens."""
    rows = {"draft_vocab_size": 200} if markov else {}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": models.HIDDEN // 2}
    drafter = world.drafter(f"own-size-{markov}", markov=markov, seed=9, **heads, **rows)
    run(world, drafter, "dspark" if markov else "dflash", K, 60)


def test_dspark_anchor_first(world: World) -> None:
    """K query rows give K drafts: the anchor's row drafts as well. The embedding comes after the norm."""
    carry = CarryoverConfig(carry_embed_at="post_norm")
    drafter = world.drafter(
        "anchor-first", markov=True, sample_from_anchor=True, seed=5, carryover_config=carry
    )
    run(world, drafter, "dspark", models.BLOCK, 30)


def test_layers_with_and_without_a_window(world: World) -> None:
    """Two KV cache groups: the embedding is added once, and both groups agree on the slots."""
    mixed = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 48}
    run(world, world.drafter("mixed", seed=6, **mixed), "dflash", K, 40, window=48)
