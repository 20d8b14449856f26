"""The V1 runner: every drafted token is the reference drafter's while rejections vary, and the output is the
target's own. One engine serves several checks: starting it costs more than running it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import engine
import law
import models
import pytest
import scenes
import signatures
import torch
from conftest import World, random_prompt
from safetensors.torch import load_file, save_file

from carryover_ext.config import CarryoverConfig
from carryover_ext.export import export_checkpoint
from carryover_ext.integrations.vllm import compat

pytestmark = pytest.mark.skipif(engine.V2, reason="VLLM_USE_V2_MODEL_RUNNER=1: these are the tests of V1")
K = models.BLOCK - 1


def answers(world: World, prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
    return [world.answer(prompt, length) for prompt, length in zip(prompts, lengths, strict=True)]


@pytest.fixture(scope="module")
def carryover(world: World) -> Iterator:
    drafter = world.drafter("dflash")
    with engine.engine(world.target, drafter / "vllm", tokens=K, enable_prefix_caching=True) as llm:
        yield llm, drafter


@pytest.mark.parametrize("batch", [1, 3, 8])
def test_drafts_are_the_references(world: World, carryover, batch: int) -> None:
    llm, drafter = carryover
    found = engine.proposer(llm)
    assert type(found).__name__ == "CarryoverProposer" and found.carrying
    prompts = [random_prompt(1 + 11 * i % 37, 100 * batch + i) for i in range(batch)]
    lengths = [60 - 5 * i for i in range(batch)] if batch > 1 else [120]
    expected = answers(world, prompts, lengths)
    before = engine.metrics(llm)
    with engine.watched(llm, world.referee(drafter, seed=batch)) as referee:
        out = engine.generate(llm, prompts, lengths)
    assert out == expected
    referee.report.check(K)
    after = engine.metrics(llm)
    rounds = after["num_drafts"] - before.get("num_drafts", 0)
    accepted = after["num_accepted_tokens"] - before.get("num_accepted_tokens", 0)
    assert rounds > 0 and 0 < accepted < K * rounds
    verified = referee.report.rounds - referee.report.starts.total()
    assert rounds == pytest.approx(verified, abs=batch)  # vLLM's AL, 1 + accepted / rounds, counts these


def test_a_request_at_the_length_limit_stops_nobody(world: World, carryover) -> None:
    llm, drafter = carryover
    long, short = random_prompt(engine.LIMIT - 14, 1), [random_prompt(9, 2), random_prompt(4, 3)]
    prompts, lengths = [long, *short], [14, 40, 40]
    expected = answers(world, prompts, lengths)
    with engine.watched(llm, world.referee(drafter, seed=5)) as referee:
        out = engine.generate(llm, prompts, [99, 40, 40])  # the first is cut where the positions end
    assert out == expected
    report = referee.report
    assert not report.faults, report.faults[:5]
    assert report.equal + report.ties == report.drafted > 0
    # In every step each running request drafted: a pause would show as rounds without drafts.
    assert set(report.rows) <= {len(long), 9, 4, K + 1, *range(1, K + 1)}
    assert report.rows[1] <= 2, "steps of a single row: drafting had paused"


def test_more_requests_than_slots(world: World, carryover) -> None:
    """Slots and blocks go to their next owner while others run."""
    llm, drafter = carryover
    prompts = [random_prompt(2 + i % 5, 40 + i) for i in range(20)]
    lengths = [5 + 7 * i % 19 for i in range(20)]
    expected = answers(world, prompts, lengths)
    with engine.watched(llm, world.referee(drafter, seed=6)) as referee:
        out = engine.generate(llm, prompts, lengths)
    assert out == expected
    referee.report.check(K)


def test_sampled_output_has_the_targets_law(world: World, carryover, monkeypatch) -> None:
    """At T=1 the second token was drafted and judged; its law is the target's. The draft is the likeliest
    token, so that acceptance and residual both count. The control accepts every draft, which the same test
    must see."""
    from vllm.v1.sample import rejection_sampler

    llm, _ = carryover
    prompt, number = random_prompt(7, 12), 1500
    expected = law.of_second_token(world.target, prompt)
    draft, before = int(expected.argmax()), engine.metrics(llm)
    assert law.chi_square(law.second_tokens(llm, prompt, number, draft), expected) > 1e-3
    after = engine.metrics(llm)
    assert after["num_draft_tokens"] - before["num_draft_tokens"] >= number
    assert after["num_accepted_tokens"] - before["num_accepted_tokens"] > number // 20

    judge = rejection_sampler.rejection_sample

    def accept_all(draft_token_ids, num_draft_tokens, *rest, **options):
        out = judge(draft_token_ids, num_draft_tokens, *rest, **options)
        start = 0
        for i, n in enumerate(num_draft_tokens):
            out[i, :n] = draft_token_ids[start : start + n].to(out.dtype)
            start += n
        return out

    monkeypatch.setattr(rejection_sampler, "rejection_sample", accept_all)
    assert law.chi_square(law.second_tokens(llm, prompt, 200, draft), expected) < 1e-6


def test_a_lost_context_is_noticed(world: World, carryover, vllm_log: list[str]) -> None:
    scenes.lost_context(world, *carryover, vllm_log)


def test_states_from_elsewhere_are_refused(carryover) -> None:
    """Marks are kept by the place of a row; a vLLM that projects copies would be tagged wrongly."""
    model = engine.proposer(carryover[0]).model
    states, rows = torch.zeros(8, models.HIDDEN), torch.ones(8, dtype=torch.bool)
    for once, other in (
        (False, states.clone()),
        (False, states[4:].clone()),
        (True, torch.zeros_like(states)),
    ):
        model.mark_rows(states, rows, once=once)
        with pytest.raises(RuntimeError, match=r"not rows of the proposer's states.*CARRYOVER=off"):
            model.precompute_and_store_context_kv(other, torch.zeros(len(other), dtype=torch.int64))
    assert model._rows(states[2:5]).shape == (3,)
    model.marked = None


def test_the_signatures_of_this_vllm() -> None:
    """Read from the sources and from the functions: both are what the plugin relies on."""
    import vllm

    found = signatures.problems(Path(vllm.__file__).parents[1])
    assert set(found.values()) == {None}
    assert {name: compat.signature_problem(name) for name in found} == found
    assert compat.version_problem(vllm.__version__) is None


def test_off_is_the_drafter_without_the_rows(world: World, monkeypatch, vllm_log: list[str]) -> None:
    monkeypatch.setenv(compat.ENVIRONMENT, "off")
    drafter = world.drafter("dflash")
    prompts, lengths = [random_prompt(5, 21), random_prompt(12, 22), random_prompt(2, 23)], [50, 40, 45]
    expected = answers(world, prompts, lengths)
    with (
        engine.engine(world.target, drafter / "vllm", tokens=K) as llm,
        engine.watched(llm, world.referee(drafter, carry=False)) as referee,
    ):
        assert not engine.proposer(llm).carrying
        out = engine.generate(llm, prompts, lengths)
    assert out == expected
    referee.report.check(K, segment=False)
    assert any("CARRYOVER IS OFF: CARRYOVER=off is set" in line for line in vllm_log)


def test_an_unknown_version_drafts_plainly_and_says_so(world: World, monkeypatch, vllm_log) -> None:
    monkeypatch.setattr(compat, "LAST", (0, 30))
    compat.signatures_fit.cache_clear()
    drafter = world.drafter("dflash")
    prompts, lengths = [random_prompt(5, 31), random_prompt(12, 32), random_prompt(2, 33)], [50, 40, 45]
    expected = answers(world, prompts, lengths)
    try:
        with (
            engine.engine(world.target, drafter / "vllm", tokens=K) as llm,
            engine.watched(llm, world.referee(drafter, carry=False)) as referee,
        ):
            assert type(engine.proposer(llm)).__name__ == "DFlashProposer"
            out = engine.generate(llm, prompts, lengths)
    finally:
        compat.signatures_fit.cache_clear()
    assert out == expected
    referee.report.check(K, segment=False)
    assert any("knows vLLM 0.29 to 0.30, and this is" in line for line in vllm_log)


def test_shifted_positions_embedding_after_the_norm_and_a_reduced_vocabulary(world: World) -> None:
    carry = CarryoverConfig(carry_positions="shifted", carry_embed_at="post_norm")
    drafter = world.drafter("shifted", seed=3, carryover_config=carry, draft_vocab_size=200)
    prompts, lengths = [random_prompt(5, 61), random_prompt(12, 62), random_prompt(2, 63)], [60, 50, 55]
    expected = answers(world, prompts, lengths)
    with (
        engine.engine(world.target, drafter / "vllm", tokens=K) as llm,
        engine.watched(llm, world.referee(drafter)) as referee,
    ):
        out = engine.generate(llm, prompts, lengths)
    assert out == expected
    referee.report.check(K)


@pytest.mark.parametrize("rows", [None, 200])
def test_another_hidden_size(world: World, rows: int | None) -> None:
    """Half of the target's, with an embedding and a head (of all tokens, or of some) of the drafter's own."""
    name = f"own-size-{rows}"
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    drafter = world.drafter(name, seed=9, hidden_size=models.HIDDEN // 2, draft_vocab_size=rows, **heads)
    prompts, lengths = [random_prompt(5, 67), random_prompt(12, 68), random_prompt(2, 69)], [60, 50, 55]
    expected = answers(world, prompts, lengths)
    with (
        engine.engine(world.target, drafter / "vllm", tokens=K) as llm,
        engine.watched(llm, world.referee(drafter)) as referee,
    ):
        found = engine.proposer(llm)
        assert found.carrying and found.model.lm_head.weight.shape[1] == models.HIDDEN // 2
        out = engine.generate(llm, prompts, lengths)
    assert out == expected
    referee.report.check(K)


def test_the_speculators_layout(world: World, tmp_path: Path) -> None:
    """The same drafter, read from the layout of the speculators library: it carries there as well."""
    drafter = world.drafter("reduced", seed=7, draft_vocab_size=200)
    export_checkpoint(drafter / "own", tmp_path / "out", "speculators", target=str(world.target))
    prompts, lengths = [random_prompt(5, 64), random_prompt(12, 65), random_prompt(2, 66)], [60, 50, 55]
    expected = answers(world, prompts, lengths)
    with (
        engine.engine(world.target, tmp_path / "out", tokens=K) as llm,
        engine.watched(llm, world.referee(drafter)) as referee,
    ):
        assert engine.proposer(llm).carrying
        out = engine.generate(llm, prompts, lengths)
    assert out == expected
    referee.report.check(K)


def test_sliding_windows_are_counted_in_positions(world: World) -> None:
    """All layers slide over 48 positions: requests carry while they are shorter and draft right beyond."""
    sliding = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 48}
    drafter = world.drafter("sliding", seed=4, **sliding)
    prompts, lengths = [random_prompt(5, 71), random_prompt(12, 72), random_prompt(2, 73)], [70, 70, 60]
    expected = answers(world, prompts, lengths)
    with (
        engine.engine(world.target, drafter / "vllm", tokens=K) as llm,
        engine.watched(llm, world.referee(drafter, window=48)) as referee,
    ):
        out = engine.generate(llm, prompts, lengths)
    assert out == expected
    referee.report.check(K)
    assert referee.report.carried[0] > referee.report.rejected[0] + referee.report.starts.total() - 3


def test_scheduling(world: World, vllm_log: list[str]) -> None:
    """Chunked prefill, preemption and resumption, prefix-cache hits: nothing is carried into the first step
    after any of them, and no context row is missing."""
    drafter = world.drafter("dflash")
    head = random_prompt(70, 80)
    prompts = [[*head[: 70 - 3 * (i % 2)], *random_prompt(3 + i, 81 + i)] for i in range(6)]
    lengths = [70] * 6
    expected = answers(world, prompts, lengths)
    options = {
        "enable_prefix_caching": True,
        "max_num_batched_tokens": 48,
        "max_num_seqs": 6,
        "num_gpu_blocks_override": 15,
    }
    with (
        engine.engine(world.target, drafter / "vllm", tokens=K, **options) as llm,
        engine.watched(llm, world.referee(drafter)) as referee,
    ):
        first = engine.generate(llm, prompts[:1], lengths[:1])
        out = engine.generate(llm, prompts, lengths)
        counters = {m.name: getattr(m, "value", 0) for m in llm.get_metrics()}
    assert first == expected[:1] and out == expected
    referee.report.check(K)
    assert counters["vllm:num_preemptions"] > 0
    assert counters["vllm:prefix_cache_hits"] > 0
    starts = referee.report.starts
    assert starts[0] and any(n % 32 == 0 and n for n in starts), starts  # hits start at a block
    assert any(n % 32 for n in starts), starts  # chunks do not
    assert not vllm_log, "the drafter's context is whole"


@pytest.mark.parametrize("fault", ["length", "target", "width", "embedding", "vocabulary", "switch"])
def test_mistakes_are_said_at_start(world: World, tmp_path: Path, monkeypatch, fault: str) -> None:
    folder, tokens, text = tmp_path / "drafter", K, ""
    own_size = {"seed": 9, "hidden_size": models.HIDDEN // 2} if fault == "vocabulary" else {}
    shutil.copytree(world.drafter("narrow" if own_size else "dflash", **own_size) / "vllm", folder)
    config = json.loads((folder / "config.json").read_text())
    if fault == "length":
        tokens, text = K + 1, rf"num_speculative_tokens={K + 1}.*at most {K}"
    elif fault == "target":
        config["num_target_layers"] = models.LAYERS + 2
        text = "made for another target.*num_target_layers=6.*is 4"
    elif fault == "width":
        config["target_hidden_size"] = models.HIDDEN * 2
        text = "made for another target.*target_hidden_size=128.*is 64"
    elif fault in ("embedding", "vocabulary"):
        tensors = load_file(folder / "model.safetensors")
        del tensors["carryover_embedding" if fault == "embedding" else "embed_tokens.weight"]
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        text = "no tensor 'carryover_embedding'.*--warm-start"
        if fault == "vocabulary":
            text = "hidden_size=32, its target 64, but it has no embed_tokens.weight of its own"
    else:
        monkeypatch.setenv(compat.ENVIRONMENT, "yes")
        text = "CARRYOVER='yes': must be 'on' or 'off'"
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=text), engine.engine(world.target, folder, tokens=tokens):
        pass
