"""The V2 runner, its Triton kernels in the interpreter: DFlash and DSpark, one and several KV groups."""

from __future__ import annotations

import engine
import models
import pytest
from conftest import World, random_prompt

pytestmark = pytest.mark.skipif(not engine.V2, reason="needs VLLM_USE_V2_MODEL_RUNNER=1")
K = models.BLOCK - 1
# Prompt lengths and new tokens; the last request runs into the length limit.
REQUESTS = [(6, 26), (3, 22), (engine.LIMIT - 9, 9)]


def run(world: World, drafter, method: str, tokens: int, seed: int, window: int = 0):
    prompts = [random_prompt(length, seed + i) for i, (length, _) in enumerate(REQUESTS)]
    lengths = [new for _, new in REQUESTS]
    expected = [world.answer(prompt, length) for prompt, length in zip(prompts, lengths, strict=True)]
    with (
        engine.engine(world.target, drafter / "vllm", tokens=tokens, method=method) as llm,
        engine.watched(llm, world.referee(drafter, window=window, seed=seed)) as referee,
    ):
        found = engine.proposer(llm)
        assert found.carrying
        out = engine.generate(llm, prompts, [26, 22, 99])
        metrics = engine.metrics(llm)
    assert out == expected
    assert metrics["num_drafts"] > 0 and metrics["num_accepted_tokens"] > 0
    return type(found).__name__, referee.report


def test_dflash(world: World) -> None:
    name, report = run(world, world.drafter("dflash"), "dflash", K, 10)
    assert name == "CarryoverSpeculator"
    report.check(K)


def test_dspark_with_a_reduced_vocabulary(world: World) -> None:
    drafter = world.drafter("markov", markov=True, draft_vocab_size=200)
    name, report = run(world, drafter, "dspark", K, 20)
    assert name == "CarryoverDSparkSpeculator"
    report.check(K)


def test_dspark_anchor_first(world: World) -> None:
    """K query rows give K drafts: the anchor's row drafts as well."""
    drafter = world.drafter("anchor-first", markov=True, sample_from_anchor=True, seed=5)
    _, report = run(world, drafter, "dspark", models.BLOCK, 30)
    report.check(models.BLOCK)


def test_layers_with_and_without_a_window(world: World) -> None:
    """Two KV cache groups: the embedding is added once, and both groups agree on the slots."""
    mixed = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 48}
    _, report = run(world, world.drafter("mixed", seed=6, **mixed), "dflash", K, 40, window=48)
    report.check(K)
