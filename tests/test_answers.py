"""Answers of the engine with the features that fall off on the way, against plain recomputation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny_models
import torch
from tiny import tiny_target

from carryover_ext.cli import main
from carryover_ext.pretrained import load_target
from carryover_ext.targets import TappedTarget
from carryover_ext.training.answers import EngineBackend
from carryover_ext.training.features import build_features
from carryover_ext.training.prefixes import build_prefixes
from carryover_ext.training.recordings import PromptIds, load_shard, record
from carryover_ext.training.target_pass import TargetPass

TAPS = [0, 2]


@pytest.fixture(scope="module")
def model():
    return tiny_target(layers=4).float().requires_grad_(False)


def prompts_for(model, count: int) -> list[list[int]]:
    g = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, 30, (count,), generator=g).tolist()
    return [torch.randint(0, model.config.vocab_size, (n,), generator=g).tolist() for n in lengths]


def plain(model, prompt: list[int], most: int, stops: set[int]) -> list[int]:
    ids = list(prompt)
    while len(ids) < len(prompt) + most:
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] in stops:
            break
    return ids[len(prompt) :]


@pytest.mark.parametrize("batch", [1, 5, 64])
def test_answers_are_the_target_s_own_with_stops_and_ragged_prompts(model, batch):
    prompts = prompts_for(model, 11)
    first = [plain(model, p, 12, set()) for p in prompts]
    stops = {first[0][3], first[4][7]}  # some answers end early, at different steps
    expected = [plain(model, p, 12, stops) for p in prompts]
    assert len({len(a) for a in expected}) > 2
    backend = EngineBackend(
        TappedTarget(model), max_new_tokens=12, temperature=0.0, stop_token_ids=stops, batch=batch, seed=0
    )
    answers = backend(prompts, 0)
    assert [a for a, _ in answers] == expected
    assert [f for _, f in answers] == ["stop" if a[-1] in stops else "length" for a in expected]
    assert backend.features is None


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("batch", [2, 64])
def test_features_are_those_of_a_pass_over_the_recording(model, tmp_path, temperature, batch):
    prompts = [PromptIds("c", "s", p) for p in prompts_for(model, 9)]
    backend = EngineBackend(
        TappedTarget(model, TAPS),
        max_new_tokens=14,
        temperature=temperature,
        stop_token_ids=set(range(0, model.config.vocab_size, 9)),
        batch=batch,
        seed=4,
        keep_kv=True,
    )
    found = {}
    record(
        prompts,
        backend,
        tmp_path / "rec",
        settings={},
        shard_size=6,
        keep=lambda stem: found.setdefault(stem, (backend.features, backend.prefixes)),
    )
    build_features(tmp_path / "rec", tmp_path / "feat", TargetPass(model, TAPS))
    build_prefixes(tmp_path / "rec", tmp_path / "kv", TargetPass(model, TAPS))
    assert list(found) == ["shard-00000", "shard-00001"]
    for folder, stem, data in (
        (f, s, d) for s, both in found.items() for f, d in zip(("feat", "kv"), both, strict=True)
    ):
        expected = torch.load(tmp_path / folder / f"{stem}.pt")
        assert set(data) == set(expected)
        for name, value in expected.items():
            assert data[name].dtype == value.dtype
            torch.testing.assert_close(data[name], value, rtol=1e-4, atol=1e-4)


def test_sampled_answers_depend_on_the_place_and_not_on_the_call(model):
    def run(prompts, first):
        return EngineBackend(
            TappedTarget(model), max_new_tokens=8, temperature=1.0, stop_token_ids=(), batch=4, seed=1
        )(prompts, first)

    prompts = prompts_for(model, 8)
    assert run(prompts, 0) == run(prompts, 0)
    assert run(prompts, 0) != run(prompts, 8)


def test_a_prompt_past_the_target_s_positions_is_named(model):
    backend = EngineBackend(
        TappedTarget(model),
        max_new_tokens=model.config.max_position_embeddings,
        temperature=0.0,
        stop_token_ids=(),
        batch=4,
        seed=0,
    )
    with pytest.raises(ValueError, match=r"max_new_tokens=.* positions"):
        backend([[1, 2]], 0)


def prompt_file(folder: Path) -> Path:
    path = folder / "p.jsonl"
    path.write_text("".join(json.dumps({"category": "c", "prompt": f"number {i}"}) + "\n" for i in range(9)))
    return path


def test_recorded_features_are_used_by_training(tmp_path, capsys):
    target, other = (tiny_models.save_target(tmp_path / name, seed) for seed, name in enumerate(("t", "o")))
    out = tmp_path / "rec"
    line = ["record", "--prompts", str(prompt_file(tmp_path)), "--out", str(out), "--features", "--taps", "1"]
    line += ["--max-new-tokens", "8", "--shard-size", "4", "--batch", "4", "--keep-prefixes", "--target"]
    assert main([*line, str(target)]) == 0
    features = tmp_path / "rec-features"
    prefixes = tmp_path / "rec-features-prefixes"
    made = {f: f.stat().st_mtime_ns for f in [*features.glob("shard-*.pt"), *prefixes.glob("shard-*.pt")]}
    assert len(made) == 6
    model, _ = load_target(str(target))
    taps = json.loads((features / "features.json").read_text())["tap_ids"]
    build_features(out, features, TargetPass(model, taps))
    build_prefixes(out, prefixes, TargetPass(model, taps))
    assert {f: f.stat().st_mtime_ns for f in made} == made
    assert sum(len(load_shard(s)) for s in out.glob("shard-*.jsonl")) == 9
    assert main([*line, str(other)]) == 2
    assert "use a new folder" in capsys.readouterr().err


def test_features_need_the_engine(tmp_path, capsys):
    line = ["record", "--prompts", str(prompt_file(tmp_path)), "--out", str(tmp_path / "r")]
    assert main([*line, "--features", "--backend", "vllm"]) == 2
    assert "--backend engine" in capsys.readouterr().err
    assert main([*line, "--keep-prefixes"]) == 2
    assert "only with --features" in capsys.readouterr().err
