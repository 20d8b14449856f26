"""The look at held-out recordings while training: what it counts, and that training does not notice."""

from __future__ import annotations

import json

import pytest
import tiny_models
import torch
from test_training import TAPS, drafter_config, make_trainer, model, recorded, weights_for  # noqa: F401

from carryover_ext.cli import main
from carryover_ext.training.anchors import load_batch
from carryover_ext.training.draft_verify_draft import Head
from carryover_ext.training.features import FeatureStore, JoinedStore
from carryover_ext.training.forward import draft_hidden, encode_rows
from carryover_ext.training.target_pass import TargetPass
from carryover_ext.training.trainer import train
from carryover_ext.training.validation import Validation


@pytest.fixture(scope="module")
def head(model):  # noqa: F811
    return Head.make(TargetPass(model, TAPS), None)


def test_it_counts_what_one_round_at_a_time_counts(model, recorded, head):  # noqa: F811
    config, store = drafter_config(), FeatureStore(*recorded)
    weights = weights_for(config, model)
    scale = torch.linspace(0.5, 1.5, config.num_features)
    tokens = hits = rounds = 0
    for i in range(len(store)):
        row = store[i]
        ids = row.ids.tolist()
        context = encode_rows(weights, config, row.features[None] * scale)
        for anchor in range(row.prompt_len, len(ids) - 1):
            embeds = head.embed[torch.tensor([[[ids[anchor], *[config.mask_token_id] * 4]]])]
            hidden = draft_hidden(weights, config, context, torch.tensor([[anchor]]), embeds)
            drafts = (hidden[0, 0, 1:] @ head.head.T).argmax(-1).tolist()
            held = 0
            while held < len(drafts) and ids[anchor + 1 + held : anchor + 2 + held] == [drafts[held]]:
                held += 1
            tokens, hits, rounds = tokens + held + 1, hits + (held > 0), rounds + 1
    assert 0 < hits < rounds
    validation = Validation(store, head, anchors=1000, batch=3)
    assert validation(weights, config, scale) == {
        "held_out_al": pytest.approx(tokens / rounds),
        "held_out_slot1": pytest.approx(hits / rounds),
    }


def test_it_counts_what_training_counts_at_every_temperature(model, recorded, head):  # noqa: F811
    """Also of sampled answers, whose acceptance by chance is another figure."""
    config = drafter_config()
    greedy, sampled = FeatureStore(*recorded), FeatureStore(*recorded, temperature=1.0)
    both = Validation(JoinedStore([greedy, sampled]), head, limit=1000, anchors=1000, batch=4)
    assert sorted(i for picks in both.batches for i in picks) == list(range(len(greedy) + len(sampled)))
    trainer = make_trainer(model, recorded, "plain")
    found = both(trainer.compute_weights(), config, trainer.feature_scale)
    assert found == both(trainer.compute_weights(), config, trainer.feature_scale)
    everything = load_batch(greedy, list(range(len(greedy))), 1000, torch.Generator().manual_seed(0))
    lengths, hits, anchors = trainer.loss(everything, None)[1].tolist()
    assert found["held_out_al"] == pytest.approx(lengths / anchors)
    assert found["held_out_slot1"] == pytest.approx(hits / anchors) and hits > 0
    assert len(Validation(greedy, head, limit=6).batches) == 1


def test_training_takes_the_same_course_with_it(model, recorded, head, tmp_path):  # noqa: F811
    rows = {}
    for name, validation in (("with", Validation(FeatureStore(*recorded), head)), ("without", None)):
        seen = rows[name] = []
        train(
            make_trainer(model, recorded, "plain", steps=14),
            tmp_path / name,
            seen.append,
            lambda: None,
            validation=validation,
            validate_every=6,
        )
    assert [r["step"] for r in rows["with"] if "held_out_al" in r] == [6, 12, 14]
    assert not any("held_out_al" in r for r in rows["without"])
    assert [r["loss"] for r in rows["with"]] == [r["loss"] for r in rows["without"]]
    written = [json.loads(line) for line in (tmp_path / "with" / "curve.jsonl").read_text().splitlines()]
    assert written == rows["with"]


def test_the_train_command_shows_it(tmp_path, capsys):
    target = tiny_models.save_target(tmp_path / "target")
    prompts = tmp_path / "p.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"number {i}"}) + "\n" for i in range(12)))
    common = [f"--target={target}"]
    record = ["record", *common, f"--prompts={prompts}", f"--out={tmp_path}/rec", "--max-new-tokens=12"]
    assert not main(record)
    command = ["train", *common, f"--recordings={tmp_path}/rec", "--steps=2", "--anchors=4", "--cycle=1"]
    command += ["--taps=1", "--mask-token=271", "--draft-vocab=0", "--layers=1"]
    with pytest.raises(SystemExit):
        main([*command, f"--out={tmp_path}/a", "--validate-every=-1"])
    assert "argument --validate-every: -1 is negative" in capsys.readouterr().err
    for name, every, looks in (("b", 1, 2), ("c", 200, 1), ("d", 0, 0)):
        assert not main([*command, f"--out={tmp_path}/{name}", f"--validate-every={every}"])
        lines = (tmp_path / name / "curve.jsonl").read_text().splitlines()
        assert sum("held_out_al" in json.loads(line) for line in lines) == looks
        assert ("held out" in capsys.readouterr().out) == (looks > 0)


def test_a_prompt_that_one_folder_holds_out_is_trained_on_in_none(tmp_path, capsys):
    """Prompts come twice in real sets; answers at T = 0 would then be known by heart."""
    target = tiny_models.save_target(tmp_path / "target")
    prompts = [json.dumps({"prompt": f"number {i}"}) + "\n" for i in range(6)]
    common = [f"--target={target}"]
    for name, lines in (("a", prompts), ("b", prompts[::-1])):
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
        record = ["record", *common, f"--prompts={tmp_path}/{name}.jsonl", f"--out={tmp_path}/{name}"]
        assert not main([*record, "--max-new-tokens=12"])
    train = ["train", *common, "--steps=1", "--anchors=4", "--cycle=1", "--taps=1", "--mask-token=271"]
    train += ["--draft-vocab=0", "--layers=1", f"--out={tmp_path}/run", "--recordings"]
    assert not main([*train, f"{tmp_path}/a", f"{tmp_path}/b"])
    assert "8 recordings" in capsys.readouterr().out  # of 12: the first of each, and the same prompts there
    evaluate = ["--traceback", "evaluate", *common, f"--recordings={tmp_path}/a"]
    evaluate += [f"--baseline={tmp_path}/run/checkpoint", f"--out={tmp_path}/x.json"]
    assert not main(evaluate)
    with pytest.raises(FileNotFoundError, match=r"no recording in .*a to use here"):
        main([*evaluate, "--trained-on", f"{tmp_path}/b"])
