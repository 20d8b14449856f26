"""The engine: limits, stop tokens, ragged batches, statistics, streaming, errors."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from tiny import Steered, plain, prompts, tiny_drafter, tiny_target

from carryover_ext.acceptance import Sampling, choose, mask_logits, probabilities, sample
from carryover_ext.engine import as_prompts, generate, stream
from carryover_ext.targets import TappedTarget

LENGTHS = (3, 9, 14)


def steered(
    plan: Any = lambda i, r: (3 * i + 2 * r) % 5, lengths: tuple[int, ...] = LENGTHS, count: int = 30
):
    target, inputs = tiny_target(), prompts(*lengths)
    truth = [plain(target, p, count)[0] for p in inputs]
    return target, inputs, truth, tiny_drafter(target, Steered).start(truth, list(lengths), plan)


@pytest.mark.parametrize("new", [[1, 1, 1], [1, 2, 9], [2, 2, 2], [17, 1, 4], [6, 6, 6], 5])
@pytest.mark.parametrize("drafting", [True, False])
def test_length_limits_are_per_request(new: Any, drafting: bool) -> None:
    target, inputs, truth, drafter = steered()
    out = generate(target, drafter if drafting else None, inputs, max_new_tokens=new, stop_token_ids=[])
    wanted = [new] * 3 if isinstance(new, int) else new
    assert out.tokens == [t[:n] for t, n in zip(truth, wanted, strict=True)]
    assert out.finish_reasons == ["length"] * 3 and out.prompt_lens == list(LENGTHS)


@pytest.mark.parametrize("new", [2, 3, 4, 5, 6, 11])
@pytest.mark.parametrize("good", [0, 2, 99])
def test_a_block_is_clamped_at_the_limit(new: int, good: int) -> None:
    target, inputs, truth, drafter = steered(lambda i, r: good, (9,))
    out = generate(target, drafter, inputs, max_new_tokens=new, stop_token_ids=[])
    assert out.tokens[0] == truth[0][:new]
    left = new - 1
    for r in out.rounds[1:]:
        assert r.num_drafted[0] <= max(left - 1, 0) and r.committed[0] <= left
        left -= r.committed[0]
    assert left == 0


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("where", [0, 1, 2, 4, 7])
@pytest.mark.parametrize("mode", ["plain", "all", "ragged"])
def test_stop_tokens(batch: int, where: int, mode: str) -> None:
    plan = (lambda i, r: 99) if mode == "all" else (lambda i, r: (3 * i + 2 * r) % 5)
    target, inputs, truth, drafter = steered(plan, LENGTHS[:batch])
    stop = truth[0][where]
    out = generate(
        target, None if mode == "plain" else drafter, inputs, max_new_tokens=20, stop_token_ids=[stop]
    )
    for got, full, reason in zip(out.tokens, truth, out.finish_reasons, strict=True):
        at = full.index(stop) if stop in full[:20] else None
        assert got == (full[:20] if at is None else full[: at + 1])
        assert reason == ("length" if at is None else "stop")


def test_stop_tokens_of_the_model_are_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    target, inputs, truth, drafter = steered(lengths=(9,))
    monkeypatch.setattr(target.generation_config, "eos_token_id", truth[0][3])
    out = generate(target, drafter, inputs, max_new_tokens=20)
    assert out.tokens[0] == truth[0][: truth[0].index(truth[0][3]) + 1]
    assert generate(target, drafter, inputs, max_new_tokens=20, stop_token_ids=[]).tokens[0] == truth[0][:20]


def test_a_finished_request_takes_no_part() -> None:
    target, inputs, _, drafter = steered()
    out = generate(target, drafter, inputs, max_new_tokens=[3, 20, 8], stop_token_ids=[])
    done = [False] * 3
    for r in out.rounds[1:]:
        for i in range(3):
            if done[i]:
                assert (r.num_accepted[i], r.tokens[i], r.num_drafted[i], r.num_carried[i]) == (-1, [], 0, 0)
                assert r.finished[i]
            done[i] = r.finished[i]
    for kind, entry in drafter.log[1:]:
        if kind == "commit":
            _, _, num_accepted, _ = entry
            assert num_accepted.shape == (3,)
    assert done == [True] * 3


def test_near_the_position_limit_the_others_go_on() -> None:
    target = tiny_target()
    inputs = prompts(250, 9)
    truth = [plain(target, inputs[0], 6)[0], plain(target, inputs[1], 25)[0]]
    drafter = tiny_drafter(target, Steered).start(
        [[*truth[0], *[0] * 20], truth[1]], [250, 9], lambda i, r: 2
    )
    out = generate(target, drafter, inputs, max_new_tokens=25, stop_token_ids=[])
    assert out.tokens == truth and out.finish_reasons == ["length", "length"]
    late = [r for r in out.rounds if r.num_accepted[0] == -1]
    assert late and sum(r.num_drafted[1] for r in late) > 0
    assert sum(r.num_carried[1] for r in late) > 0


@pytest.mark.parametrize("carry", [True, False])
@pytest.mark.parametrize("batch", [1, 3])
def test_statistics(carry: bool, batch: int) -> None:
    target, inputs, _, drafter = steered(lengths=LENGTHS[:batch])
    out = generate(
        target, drafter, inputs, max_new_tokens=[13, 8, 19][:batch], carry=carry, stop_token_ids=[]
    )
    for i in range(batch):
        assert [t for r in out.rounds for t in r.tokens[i]] == out.tokens[i]
    verified = [(r, i) for r in out.rounds[1:] for i in range(batch) if r.num_accepted[i] >= 0]
    assert out.num_verifications == len(verified)
    assert out.acceptance_length == sum(r.committed[i] for r, i in verified) / len(verified)
    assert out.num_accepted == sum(r.num_accepted[i] for r, i in verified) > 0
    for r, i in verified:
        # Nothing was cut by a stop token, so a round commits its accepted drafts and the bonus token.
        assert r.committed[i] == r.num_accepted[i] + 1
        expected = r.num_drafted[i] - r.num_accepted[i] if carry and not r.finished[i] else 0
        assert r.num_carried[i] == expected
        assert r.target_seconds > 0 and r.draft_seconds >= 0 and r.commit_seconds >= 0
    assert out.num_tokens == sum(len(t) for t in out.tokens)
    assert out.seconds > out.prefill_seconds > 0 and out.tokens_per_second > 0
    drafts = [e for k, e in drafter.log if k == "draft"]
    first = next(state for _, _, _, state in drafts)
    assert first[1].tolist() == [0] * batch


def test_stream_equals_generate() -> None:
    target, inputs, truth, drafter = steered()
    options = {"max_new_tokens": 12, "stop_token_ids": []}
    tokens: list[list[int]] = [[], [], []]
    for n, r in enumerate(stream(target, drafter, inputs, **options)):
        assert r.index == n
        for t, new in zip(tokens, r.tokens, strict=True):
            t.extend(new)
        if n == 0:
            assert [len(t) for t in tokens] == [1, 1, 1]
    assert tokens == generate(target, drafter, inputs, **options).tokens == [t[:12] for t in truth]


def test_a_stream_that_is_dropped_removes_its_hooks() -> None:
    target, inputs, _, drafter = steered()
    steps = stream(target, drafter, inputs, max_new_tokens=12, stop_token_ids=[])
    next(steps)
    steps.close()
    assert sum(len(layer._forward_hooks) for layer in target.model.layers) == 0
    assert not torch.is_inference_mode_enabled()


def test_shorter_blocks_are_allowed() -> None:
    target, inputs, truth, drafter = steered()
    out = generate(target, drafter, inputs, max_new_tokens=12, block_size=3, stop_token_ids=[])
    assert out.tokens == [t[:12] for t in truth]
    assert max(n for r in out.rounds for n in r.num_drafted) == 2


@pytest.mark.parametrize(
    "form",
    [
        torch.tensor([1, 2, 3]),
        torch.tensor([[1, 2, 3]]),
        [1, 2, 3],
        [[1, 2, 3]],
        [torch.tensor([1, 2, 3])],
        torch.tensor([1, 2, 3], dtype=torch.int32),
    ],
)
def test_prompt_forms(form: Any) -> None:
    rows = as_prompts(form)
    assert len(rows) == 1 and rows[0].dtype == torch.int64 and rows[0].tolist() == [1, 2, 3]


def test_ragged_prompt_form() -> None:
    assert [r.tolist() for r in as_prompts([[1], [2, 3]])] == [[1], [2, 3]]


def test_empty_batch() -> None:
    assert generate(tiny_target(), None, [], max_new_tokens=3).tokens == []


BAD: list[tuple[dict, Any, str]] = [
    ({"temperature": -1.0}, None, "temperature=-1.0"),
    ({"temperature": float("nan")}, None, "temperature=nan"),
    ({"temperature": 1.0, "top_k": -1}, None, "top_k=-1"),
    ({"temperature": 1.0, "top_p": 0.0}, None, "top_p=0.0"),
    ({"temperature": 1.0, "top_p": 1.5}, None, "top_p=1.5"),
    ({"draft_temperature": -0.1}, None, "draft_temperature=-0.1"),
    ({"block_size": 6}, None, r"block_size=6: must be in 2\.\.5"),
    ({"block_size": 1}, None, "block_size=1"),
    ({"max_new_tokens": 0}, None, "max_new_tokens=0"),
    ({"max_new_tokens": [3, 4]}, None, "max_new_tokens has 2 entries"),
    ({}, [[1, 24]], r"input_ids\[0\] has token 24: must be in 0\.\.23"),
    ({}, [[1], [-2, 1]], r"input_ids\[1\] has token -2"),
    ({}, [[]], r"input_ids\[0\] is"),
    ({}, "hello", "input_ids is a text: must be token ids"),
    ({}, ["hello", "you"], "input_ids is a text: must be token ids"),
    ({"max_new_tokens": 8.0}, None, r"max_new_tokens=8\.0: must be a whole number"),
    ({"max_new_tokens": None}, None, "max_new_tokens=None: must be a whole number"),
    ({"max_new_tokens": [2.5]}, None, r"max_new_tokens=\[2\.5\]: must be a whole number"),
    ({"temperature": None}, None, "temperature=None: must be a number"),
    ({"temperature": 1.0, "top_p": "0.9"}, None, "top_p='0.9': must be a number"),
    ({"temperature": 1.0, "top_k": 1.5}, None, r"top_k=1\.5: must be a whole number"),
    ({}, torch.zeros(1, 3), r"input_ids\[0\] is \(3,\) torch.float32"),
    ({}, torch.zeros(1, 2, 2, dtype=torch.int64), r"input_ids\[0\] is \(2, 2\)"),
    ({}, [list(range(20)) * 13], r"input_ids\[0\] has 260 tokens: the target takes 256"),
]


@pytest.mark.parametrize(("options", "inputs", "message"), BAD)
def test_bad_input(options: dict, inputs: Any, message: str) -> None:
    target = tiny_target()
    inputs = prompts(4) if inputs is None else inputs
    with pytest.raises(ValueError, match=message):
        generate(target, tiny_drafter(target), inputs, **{"max_new_tokens": 4, **options})
    assert sum(len(layer._forward_hooks) for layer in target.model.layers) == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 30}, "another vocabulary"),
        ({"num_target_layers": 5}, "num_layers=4"),
        (
            {"num_target_layers": 9, "target_layer_ids": [1, 7]},
            r"the target has decoder layers 0\.\.3, not 7",
        ),
        ({"target_hidden_size": 16}, r"embed_tokens_weight is \(24, 32\): .* target_hidden_size=16"),
    ],
)
def test_a_drafter_of_another_target(changes: dict, message: str) -> None:
    target = tiny_target()
    with pytest.raises(ValueError, match=message):
        generate(target, tiny_drafter(target, **changes), prompts(4), max_new_tokens=4)


def test_taps_must_be_the_drafters() -> None:
    target = tiny_target()
    with TappedTarget(target, [0, 1]) as tapped:
        with pytest.raises(ValueError, match=r"tapped at \[0, 1\]: the drafter was trained on taps \[1, 2\]"):
            generate(tapped, tiny_drafter(target), prompts(4), max_new_tokens=4)
        assert len(generate(tapped, None, prompts(4), max_new_tokens=4, stop_token_ids=[]).tokens[0]) == 4


# -- distributions -------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [0, 1, 3, 8, 50])
@pytest.mark.parametrize("p", [1.0, 0.9, 0.5, 0.01])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_top_k_top_p_against_a_loop(k: int, p: float, temperature: float) -> None:
    logits = torch.randn(4, 8)
    got = probabilities(logits, Sampling(temperature, k, p))
    for row, probs in zip(logits.double() / temperature, got, strict=True):
        order = sorted(range(8), key=lambda i: -float(row[i]))
        if 0 < k < 8:
            order = order[:k]
        weights = torch.softmax(row[order], 0)
        kept, mass = [], 0.0
        for i, w in zip(order, weights.tolist(), strict=True):
            if mass < p:
                kept.append((i, w))
            mass += w
        expected = torch.zeros(8, dtype=torch.float64)
        for i, w in kept:
            expected[i] = w / sum(x for _, x in kept)
        torch.testing.assert_close(probs.double(), expected, rtol=1e-5, atol=1e-6)


def test_mask_keeps_ties_and_greedy_ignores_it() -> None:
    logits = torch.tensor([[1.0, 1.0, 0.0]])
    assert mask_logits(logits, Sampling(1.0, top_k=1))[0].tolist() == [1.0, 1.0, float("-inf")]
    assert mask_logits(logits, Sampling(0.0, top_k=1)) is logits
    assert choose(logits, Sampling(0.0)).tolist() == [0]


def test_sample_never_takes_an_impossible_token() -> None:
    probs = torch.tensor([0.0, 0.3, 0.0, 0.7, 0.0]).expand(20000, 5)
    tokens = sample(probs, torch.Generator().manual_seed(0))
    counts = torch.bincount(tokens, minlength=5)
    assert counts[[0, 2, 4]].sum() == 0 and abs(int(counts[3]) - 14000) < 300


@pytest.mark.parametrize(
    ("sampling", "drafts"),
    [
        (Sampling(0.0, draft_temperature=1.0), Sampling(0.0)),
        (Sampling(0.8, 5, 0.9), Sampling(0.8, 5, 0.9)),
        (Sampling(1.0, draft_temperature=0.0), Sampling(0.0)),
        (Sampling(1.0, draft_temperature=0.3), Sampling(0.3)),
    ],
)
def test_sampling_of_the_drafts(sampling: Sampling, drafts: Sampling) -> None:
    assert sampling.drafts == drafts


@pytest.mark.parametrize("value", [1e-45, 1e-31, float("inf"), float("nan"), -1.0])
@pytest.mark.parametrize("name", ["temperature", "draft_temperature"])
def test_temperatures_that_would_overflow_are_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"^{name}={value}: must be"):
        Sampling(**{name: value})


@pytest.mark.parametrize("drafting", [True, False])
def test_smallest_temperature_is_greedy(drafting: bool) -> None:
    target, inputs = tiny_target(), prompts(*LENGTHS)
    drafter = tiny_drafter(target) if drafting else None
    greedy = generate(target, drafter, inputs, max_new_tokens=12)
    assert generate(target, drafter, inputs, max_new_tokens=12, temperature=1e-30).tokens == greedy.tokens


def test_prompts_of_numpy_numbers_and_a_tokenizers_mapping() -> None:
    ids = torch.tensor([3, 4]).numpy()
    for given in (ids, list(ids)):
        assert [p.tolist() for p in as_prompts(given)] == [[3, 4]]
    with pytest.raises(ValueError, match="pass its 'input_ids'"):
        as_prompts({"input_ids": [3, 4], "attention_mask": [1, 1]})


def test_float16_is_refused_with_what_to_do_before_anything_runs() -> None:
    target = tiny_target()
    half = copy.deepcopy(target).to(torch.float16)
    with pytest.raises(ValueError, match=r"target is float16.*torch.bfloat16"):
        generate(half, tiny_drafter(target), [3, 4], max_new_tokens=4)
    with pytest.raises(ValueError, match=r"drafter is float16.*torch.bfloat16"):
        generate(target, tiny_drafter(target).to(torch.float16), [3, 4], max_new_tokens=4)


def test_a_closed_tapped_target_is_refused() -> None:
    model = tiny_target()
    drafter = tiny_drafter(model)
    with TappedTarget(model, drafter.config.target_layer_ids) as target:
        generate(target, drafter, [3, 4], max_new_tokens=4)
    with pytest.raises(ValueError, match="closed TappedTarget"):
        generate(target, drafter, [3, 4], max_new_tokens=4)


def test_stop_tokens_from_an_iterator_and_numpy_numbers() -> None:
    target = tiny_target()
    asked = prompts(4)
    free = generate(target, None, asked, max_new_tokens=6, stop_token_ids=[])
    stop = free.tokens[0][3]
    out = generate(target, None, asked, max_new_tokens=np.int64(6), stop_token_ids=iter([stop]))
    assert out.tokens[0] == free.tokens[0][: free.tokens[0].index(stop) + 1]
    assert out.finish_reasons == ["stop"]
