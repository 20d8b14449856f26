"""`carryover evaluate`: a replay is real decoding; checkpoints that cannot be compared are refused."""

from __future__ import annotations

import json

import pytest
from test_training import TAPS, drafter_config, model, recorded, weights_for  # noqa: F401
from tiny_models import VOCAB, save_drafter, save_target

from carryover_ext.cli import main
from carryover_ext.config import DSPARK, DrafterConfig
from carryover_ext.drafters import DFlashDrafter, MarkovDrafter
from carryover_ext.training.draft_verify_draft import Head
from carryover_ext.training.evaluation import Arm, evaluate_arms
from carryover_ext.training.features import FeatureStore
from carryover_ext.training.target_pass import TargetPass


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A target with recordings, drafters of either kind, and the arguments that they share."""
    folder = tmp_path_factory.mktemp("evaluate")
    save_target(folder / "target")
    (folder / "p.jsonl").write_text("".join(json.dumps({"prompt": f"n {i}"}) + "\n" for i in range(4)))
    common = [f"--target={folder}/target"]
    assert not main(
        ["record", *common, f"--prompts={folder}/p.jsonl", f"--out={folder}/rec", "--max-new-tokens=8"]
    )
    save_drafter(folder / "carry", True)
    save_drafter(folder / "short", True, block=4)
    save_drafter(folder / "plain", False)
    save_drafter(folder / "other", False, seed=3)
    save_drafter(folder / "deep", True, num_target_layers=9)
    save_drafter(folder / "wide", True, vocab_size=VOCAB + 8)
    save_drafter(folder / "scaled", True, input_embedding_scale=8.0)
    config = DrafterConfig.from_pretrained(folder / "plain")
    DFlashDrafter(config, mask_embedding=True).save_pretrained(folder / "mask")
    config.markov_rank, config.architectures, config.markov_head_type = 4, [DSPARK], "gated"
    MarkovDrafter(config).save_pretrained(folder / "gated")
    return folder, ["evaluate", *common, f"--recordings={folder}/rec", "--all", f"--out={folder}/x.json"]


@pytest.mark.parametrize(
    ("drafter", "baseline", "message"),
    [
        ("plain", "other", "has no carryover embedding"),
        ("short", "plain", "drafts 3 tokens a round and --baseline"),
        ("deep", None, "num_layers=4: the drafter was made for a target of num_target_layers=9"),
        ("wide", None, f"has {VOCAB} rows: the drafter has vocab_size={VOCAB + 8}"),
        ("mask", None, r"--drafter .*mask: config: mask_embedding"),
        ("scaled", None, "config: input_embedding_scale"),
        ("gated", None, r"--drafter .*gated: config: markov_head_type"),
    ],
)
def test_what_would_be_wrong_is_refused(world, capsys, drafter, baseline, message):
    folder, run = world
    names = [f"--drafter={folder}/{drafter}"] + [f"--baseline={folder}/{baseline}"] * (baseline is not None)
    with pytest.raises(ValueError, match=message):
        main(["--traceback", *run, *names])
    assert not (folder / "x.json").exists()


def test_other_temperatures_are_refused(world):
    folder, run = world
    drafts = f"--drafter={folder}/carry"
    manifest = folder / "rec" / "manifest.json"
    before = manifest.read_text()
    manifest.write_text(json.dumps(json.loads(before) | {"temperature": 0.7}))
    try:
        with pytest.raises(ValueError, match=r"temperature=0.7: .*rec must have been recorded at 0 or 1"):
            main(["--traceback", *run, drafts])
    finally:
        manifest.write_text(before)


def test_features_of_another_target_are_refused(world):
    folder, run = world
    names = [*run[2:-1], f"--drafter={folder}/carry", f"--out={folder}/first.json"]
    assert not main([*run[:2], *names])
    save_target(folder / "twin", seed=9)
    with pytest.raises(ValueError, match="holds features made with"):
        main(["--traceback", "evaluate", f"--target={folder}/twin", *names])
    path = folder / "rec-features" / "features.json"
    before = path.read_text()
    path.write_text("{")
    with pytest.raises(ValueError, match=r"features.json: damaged"):
        main(["--traceback", *run[:2], *names])
    path.write_text(json.dumps({k: v for k, v in json.loads(before).items() if k != "target"}))
    assert not main([*run[:2], *names])  # made by an earlier version
    path.write_text(before)


def test_each_arm_counts_every_recording_once(world):
    folder, run = world
    out = folder / "both.json"
    assert not main([*run[:-1], f"--out={out}", f"--drafter={folder}/carry", f"--baseline={folder}/plain"])
    doc = json.loads(out.read_text())
    assert list(doc["arms"]) == ["baseline", "carryover-off", "carryover"]
    assert doc["settings"]["recordings"] == 4


def test_replay_equals_the_engine(model, recorded):  # noqa: F811
    """Acceptance measured on recordings is the acceptance of real decoding of the same prompts."""
    engine = pytest.importorskip("carryover_ext.engine")
    from carryover_ext.targets import TappedTarget

    config = drafter_config()
    weights = weights_for(config, model)
    drafter = DFlashDrafter(config).eval()
    drafter.load_state_dict(weights)
    store = FeatureStore(*recorded)
    pass_ = TargetPass(model, TAPS)
    head = Head.make(pass_, None)
    arms = [Arm("off", weights, config, False), Arm("on", weights, config, True)]
    tallies = evaluate_arms(arms, head, store, pass_, limit=20, batch=7)
    target = TappedTarget(model, TAPS)
    target.bind(drafter)
    for carry, name in ((False, "off"), (True, "on")):
        committed = rounds = 0
        for i in range(20):
            row = store.recording(i)
            out = engine.generate(
                target,
                drafter,
                [row.prompt_ids],
                # room for whole blocks: near its limit the engine drafts shorter ones
                max_new_tokens=len(row.response_ids) + config.block_size,
                carry=carry,
                stop_token_ids=[],
            )
            wanted = len(row.response_ids) - 1  # the first token is the prefill's
            assert out.tokens[0][: wanted + 1] == row.response_ids
            done = 0
            for r in out.rounds[1:]:
                if done >= wanted:
                    break
                done += r.committed[0]
                rounds += 1
            committed += wanted
        assert rounds > 20
        assert tallies[name].total("rounds") == rounds
        assert sum(r.committed for r in tallies[name].recordings) == committed
