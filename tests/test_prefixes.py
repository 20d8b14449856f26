"""The target's K/V of recordings, kept on disk: the same rejects as from a forward pass."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from test_training import TAPS, drafter_config, model, recorded, weights_for  # noqa: F401
from tiny_models import save_drafter, save_target

from carryover_ext.cli import main
from carryover_ext.training import features
from carryover_ext.training.anchors import load_batch
from carryover_ext.training.draft_verify_draft import Head, draft_and_verify
from carryover_ext.training.features import FeatureStore, JoinedStore
from carryover_ext.training.prefixes import PrefixStore, build_prefixes, stack_prefixes
from carryover_ext.training.recordings import shards
from carryover_ext.training.target_pass import TargetPass
from carryover_ext.training.trainer import Trainer, TrainSettings


@pytest.fixture(scope="module")
def kept(model, recorded, tmp_path_factory):  # noqa: F811
    folder = tmp_path_factory.mktemp("kept") / "prefixes"
    build_prefixes(recorded[0], folder, TargetPass(model, TAPS), batch_tokens=64)
    return folder


def test_kept_prefixes_are_the_targets_own(model, recorded, kept):  # noqa: F811
    target, config = TargetPass(model, TAPS), drafter_config()
    one = FeatureStore(*recorded, prefixes=PrefixStore(kept))
    store = JoinedStore([one, one])
    picks = [0, 3, len(one) + 5, len(store) - 1]
    batch = load_batch(store, picks, 6, torch.Generator().manual_seed(0))
    prefix = stack_prefixes([store.prefix(i) for i in picks], batch.ids.shape[1], torch.zeros(1))
    made = target.prefix_kv(batch.ids)
    assert len(prefix.keys) == len(made.keys) == max(TAPS) + 1
    for mine, other in zip((*prefix.keys, *prefix.values), (*made.keys, *made.values), strict=True):
        for s, n in enumerate(batch.lengths.tolist()):
            torch.testing.assert_close(mine[s, :n], other[s, :n], atol=1e-5, rtol=1e-5)
    weights = weights_for(config, model)
    arguments = (weights, config, Head.make(target, None), batch, target, torch.ones(config.num_features))
    with_kept, without = draft_and_verify(*arguments, prefix=prefix), draft_and_verify(*arguments)
    assert torch.equal(with_kept.anchors, without.anchors) and torch.equal(with_kept.mask, without.mask)
    assert with_kept.mask.any()
    torch.testing.assert_close(
        with_kept.features[with_kept.mask], without.features[with_kept.mask], atol=1e-4, rtol=1e-4
    )


def test_what_a_cycle_reads_is_asked_for_before(model, recorded, kept, monkeypatch):  # noqa: F811
    asked = []
    monkeypatch.setattr(features, "read_ahead", lambda rows: asked.append((rows.data_ptr(), rows.nbytes)))
    one = FeatureStore(*recorded, prefixes=PrefixStore(kept))
    store = JoinedStore([one])
    config, target = drafter_config(), TargetPass(model, TAPS)
    settings = TrainSettings(objective="carryover", steps=2, sequences=2, anchors=4, cycle=2)
    weights, scale = weights_for(config, model), torch.ones(config.num_features)
    trainer = Trainer(config, weights, scale, Head.make(target, None), store, settings, target)
    trainer.run_cycle()
    read = {(x.data_ptr(), x.nbytes) for i in range(len(store)) for x in (store[i].features, store.prefix(i))}
    assert len(asked) == 2 * 2 * 2 and set(asked) <= read


def test_read_ahead_takes_any_rows(recorded):  # noqa: F811
    rows = FeatureStore(*recorded)[0].features
    before = rows.clone()
    for part in (rows, rows[1:2], rows[:0], torch.ones(3)):
        features.read_ahead(part)
    assert torch.equal(rows, before)


def test_a_kept_prefix_is_what_is_verified_against(model, recorded, kept):  # noqa: F811
    target, config = TargetPass(model, TAPS), drafter_config()
    store = FeatureStore(*recorded, prefixes=PrefixStore(kept))
    batch = load_batch(store, [0, 1], 4, torch.Generator().manual_seed(0))
    parts = [torch.zeros_like(store.prefix(i)) for i in (0, 1)]
    zeros = stack_prefixes(parts, batch.ids.shape[1], torch.zeros(1))
    arguments = (
        weights_for(config, model),
        config,
        Head.make(target, None),
        batch,
        target,
        torch.ones(config.num_features),
    )
    one, other = draft_and_verify(*arguments, prefix=zeros), draft_and_verify(*arguments)
    assert not torch.allclose(one.features[one.mask], other.features[other.mask], atol=1e-3)


def test_only_missing_shards_are_made_and_others_are_refused(model, recorded, kept, tmp_path):  # noqa: F811
    folder = tmp_path / "copy"
    shutil.copytree(kept, folder)
    names = [s.stem for s in shards(recorded[0])]
    (folder / f"{names[1]}.pt").unlink()
    before = (folder / f"{names[0]}.pt").stat().st_mtime_ns
    seen = []
    build_prefixes(
        recorded[0], folder, TargetPass(model, TAPS), progress=lambda done, n: seen.append((done, n))
    )
    assert seen == [(i + 1, len(names)) for i in range(len(names))]
    assert (folder / f"{names[0]}.pt").stat().st_mtime_ns == before and (folder / f"{names[1]}.pt").exists()
    with pytest.raises(ValueError, match="holds prefixes made with"):
        build_prefixes(recorded[0], folder, TargetPass(model, [0]))
    (folder / "prefixes.json").write_text("{")
    with pytest.raises(ValueError, match=r"prefixes.json: damaged .* delete the folder"):
        build_prefixes(recorded[0], folder, TargetPass(model, TAPS))
    store = PrefixStore(kept)
    with pytest.raises(ValueError, match=r"shard-00000.pt was made from other recordings; delete"):
        store("shard-00000", 0, [5, 5, 5])
    ids = FeatureStore(*recorded).recording(0).ids
    assert store("shard-00000", 0, ids).shape[0] == len(ids)
    with pytest.raises(ValueError, match=r"made from other recordings"):  # of the same length
        store("shard-00000", 0, [ids[0] ^ 1, *ids[1:]])


def test_training_from_the_command_line(tmp_path):
    folder = tmp_path
    save_target(folder / "target")
    save_drafter(folder / "start", True)
    (folder / "p.jsonl").write_text("".join(json.dumps({"prompt": f"n {i}"}) + "\n" for i in range(6)))
    common = [f"--target={folder}/target"]
    record = ["record", *common, f"--prompts={folder}/p.jsonl", f"--out={folder}/rec", "--max-new-tokens=12"]
    assert not main(record)
    curves = []
    for name, extra in (("one", []), ("two", ["--keep-prefixes"])):
        words = ["train", *common, f"--recordings={folder}/rec", f"--out={folder}/{name}", *extra]
        words += [
            f"--init={folder}/start",
            "--objective=carryover",
            "--steps=4",
            "--sequences=2",
            "--anchors=3",
        ]
        assert not main([*words, "--cycle=2", "--save-every=0"])
        lines = (folder / name / "curve.jsonl").read_text().splitlines()
        curves.append([json.loads(line)["loss"] for line in lines])
    assert curves[0] == pytest.approx(curves[1], rel=2e-3)  # the target computes in bfloat16
    assert (folder / "rec-features-prefixes" / "shard-00000.pt").exists()
