"""Training of the Markov drafter and of the anchor-first layout: gradients, replay, command line."""

from __future__ import annotations

import json

import pytest
import tiny_models
import torch
import torch.nn.functional as F
from test_training import TAPS, drafter_config, model, recorded, weights_for  # noqa: F401
from tiny import engine_rounds

from carryover_ext.cli import main
from carryover_ext.drafters import DFlashDrafter, MarkovDrafter, load_drafter
from carryover_ext.targets import TappedTarget
from carryover_ext.training import initial
from carryover_ext.training.anchors import load_batch
from carryover_ext.training.draft_verify_draft import Head, draft_and_verify
from carryover_ext.training.drafting import MARKOV_W1, MARKOV_W2
from carryover_ext.training.evaluation import Arm, evaluate_arms
from carryover_ext.training.features import FeatureStore
from carryover_ext.training.losses import soft_cross_entropy
from carryover_ext.training.target_pass import TargetPass
from carryover_ext.training.trainer import Trainer, TrainSettings, check_trainable

KINDS = {
    "dflash-anchor-first": {"sample_from_anchor": True},
    "markov": {"markov_rank": 4},
    "markov-anchor-first": {"markov_rank": 4, "sample_from_anchor": True},
    "markov-reduced": {"markov_rank": 4, "sample_from_anchor": True, "draft_vocab_size": 40},
}


def make(model, kind: str):  # noqa: F811
    """Config, weights (a head that says something) and draft vocabulary."""
    config = drafter_config(**KINDS[kind], architectures=["Qwen3DSparkModel"])
    weights = weights_for(config, model)
    if config.markov_rank:
        rows = config.draft_vocab_size or config.vocab_size
        weights[MARKOV_W1] = torch.randn(config.vocab_size, config.markov_rank)
        weights[MARKOV_W2] = torch.randn(rows, config.markov_rank)
    size = config.draft_vocab_size
    vocab = None if size is None else torch.randperm(config.vocab_size)[:size].sort().values
    return config, weights, vocab


def make_trainer(model, recorded, kind, objective="plain", steps=8, **settings) -> Trainer:  # noqa: F811
    config, weights, vocab = make(model, kind)
    target = TargetPass(model, TAPS)
    chosen = TrainSettings(objective, steps=steps, sequences=3, anchors=5, cycle=2, lr=3e-3, **settings)
    ones = torch.ones(config.num_features)
    return Trainer(config, weights, ones, Head.make(target, vocab), FeatureStore(*recorded), chosen, target)


@pytest.mark.parametrize("chunk", [3, 1000])
@pytest.mark.parametrize("k", [1, 4])
def test_cross_entropy_with_the_bias(chunk, k):
    g = torch.Generator().manual_seed(k)
    hidden, latent, w2 = (torch.randn(*s, generator=g) for s in ((10, 16), (10, 3), (20, 3)))
    head = torch.randn(20, 16, generator=g)
    ids = torch.stack([torch.randperm(20, generator=g)[:k] for _ in range(10)])
    probs, weights = torch.rand(10, k, generator=g), torch.rand(10, generator=g)
    one, two = ([x.clone().requires_grad_() for x in (hidden, latent, w2)] for _ in range(2))
    loss, best = soft_cross_entropy(one[0], head, ids, probs, weights, chunk, latent=one[1], w2=one[2])
    (2 * loss).backward()
    logits = two[0] @ head.t() + two[1] @ two[2].t()
    expected = -(weights[:, None] * probs * F.log_softmax(logits, -1).gather(1, ids)).sum() / weights.sum()
    (2 * expected).backward()
    torch.testing.assert_close(loss, expected)
    for a, b in zip(one, two, strict=True):
        torch.testing.assert_close(a.grad, b.grad)
    assert torch.equal(best, logits.argmax(-1))


@pytest.mark.parametrize("l1", [0.9, 1.0])
@pytest.mark.parametrize("bias", [False, True])
def test_distance_to_the_targets_distribution(l1, bias):
    """Sparse targets: padded ids have no mass, whatever they point at."""
    g = torch.Generator().manual_seed(3)
    hidden, latent, w2 = (torch.randn(*s, generator=g) for s in ((10, 16), (10, 3), (20, 3)))
    head = torch.randn(20, 16, generator=g)
    ids = torch.stack([torch.randperm(20, generator=g)[:5] for _ in range(10)])
    soft = torch.nn.functional.pad(torch.rand(10, 4, generator=g), (1, 0))
    soft[:, -1] = 0
    ids[:, -1] = ids[:, 1]
    soft = soft / soft.sum(-1, keepdim=True)
    soft[0] = 0
    probs, weights = torch.rand(10, 5, generator=g), torch.rand(10, generator=g)
    one, two = ([x.clone().requires_grad_() for x in (hidden, latent, w2)] for _ in range(2))
    markov = {"latent": one[1], "w2": one[2]} if bias else {}
    loss, _ = soft_cross_entropy(one[0], head, ids, probs, weights, 4, **markov, soft=soft, l1=l1)
    loss.backward()
    logits = two[0] @ head.t() + (two[1] @ two[2].t() if bias else 0)
    dense = torch.zeros(10, 20).scatter_add(1, ids, soft)
    distance = (logits.softmax(-1) - dense).abs().sum(-1)
    entropy = -(probs * F.log_softmax(logits, -1).gather(1, ids)).sum(-1)
    expected = (weights * ((1 - l1) * entropy + l1 * distance)).sum() / weights.sum()
    expected.backward()
    torch.testing.assert_close(loss, expected)
    for a, b in list(zip(one, two, strict=True))[: 3 if bias else 1]:
        torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize("layout", [False, True], ids=["dflash", "anchor-first"])
def test_a_silent_head_is_dflash(model, recorded, layout):  # noqa: F811
    """With w2 zero the loss, its gradients of the backbone and the drafts are those of no head."""
    found = []
    for rank in (0, 4):
        config = drafter_config(sample_from_anchor=layout, markov_rank=rank)
        weights = weights_for(config, model)
        target = TargetPass(model, TAPS)
        head, store = Head.make(target, None), FeatureStore(*recorded)
        if rank:
            weights[MARKOV_W1] = torch.randn(config.vocab_size, rank)
            weights[MARKOV_W2] = torch.zeros(config.vocab_size, rank)
        settings = TrainSettings(sequences=3, anchors=5)
        trainer = Trainer(config, weights, torch.ones(config.num_features), head, store, settings)
        batch = load_batch(store, [0, 3, 6], 4, torch.Generator().manual_seed(0))
        loss, sums = trainer.loss(batch, None)
        length = float(sums[0] / sums[2])
        loss.backward()
        rejects = draft_and_verify(weights, config, head, batch, None, trainer.feature_scale)
        found.append((loss, length, trainer.master["fc.weight"].grad, rejects.accepted))
        if rank:
            assert trainer.master[MARKOV_W2].grad.abs().max() > 0
            assert trainer.master[MARKOV_W1].grad.abs().max() == 0
    assert torch.equal(found[0][0], found[1][0]) and found[0][1] == found[1][1]
    assert torch.equal(found[0][2], found[1][2]) and torch.equal(found[0][3], found[1][3])


@pytest.mark.parametrize("size", [None, 40], ids=["whole", "reduced"])
def test_a_new_head_is_the_bigrams_of_the_recordings(model, recorded, size):  # noqa: F811
    """At full rank the bias is the smoothed log-ratio up to a constant a row; at a low one it is close."""
    config = drafter_config(markov_rank=96, draft_vocab_size=size)
    vocab = None if size is None else torch.randperm(config.vocab_size)[:size].sort().values
    ids = range(config.vocab_size) if vocab is None else vocab.tolist()
    store = FeatureStore(*recorded)
    counts = torch.zeros(config.vocab_size, config.vocab_size)
    for i in range(len(store)):
        row = store.recording(i).ids
        counts.index_put_((torch.tensor(row[:-1]), torch.tensor(row[1:])), torch.ones(()), accumulate=True)
    counts = counts[:, list(ids)]
    share = counts.sum(0) / counts.sum()
    smoothed = (counts + 5 * share) / (counts.sum(1, keepdim=True) + 5)
    wanted = 0.45 * torch.where(counts > 0, smoothed / share, (5 / (counts.sum(1, keepdim=True) + 5))).log()
    seen = counts.sum(1) > 0
    errors = []
    for rank in (96, 8):
        config.markov_rank = rank
        head = initial.markov_head(config, store, vocab)
        assert head[MARKOV_W1].shape == (config.vocab_size, rank) and head[MARKOV_W2].shape == (
            len(ids),
            rank,
        )
        bias = head[MARKOV_W1] @ head[MARKOV_W2].T
        assert bias[~seen].abs().max() < 1e-5  # nothing is known of what was never seen
        difference = (bias - wanted)[seen]
        errors.append(float((difference - difference.median(1, keepdim=True).values).abs().mean()))
    assert errors[0] < 1e-3 < errors[1] < float(wanted[seen].std())


def test_the_bias_is_that_of_the_recorded_token_before(model, recorded):  # noqa: F811
    """w1 rows of tokens that stand before a supervised slot get gradients, others do not."""
    trainer = make_trainer(model, recorded, "markov-anchor-first")
    batch = load_batch(trainer.store, [0], 1, torch.Generator().manual_seed(0))
    trainer.loss(batch, None)[0].backward()
    a, n = int(batch.anchors[0, 0]), int(batch.lengths[0])
    before = set(batch.ids[0, a : min(a + 5, n - 1)].tolist())
    touched = trainer.master[MARKOV_W1].grad.abs().sum(-1).nonzero()[:, 0].tolist()
    assert set(touched) == before


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_training_lowers_the_loss(model, recorded, kind):  # noqa: F811
    trainer = make_trainer(model, recorded, kind, "carryover", 60, distill=0.3, carry_warmup=4)
    before = {k: v.detach().clone() for k, v in trainer.master.items()}
    rows = []
    while trainer.step < 60:
        rows.append(trainer.run_cycle())
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.3
    assert not any(torch.equal(before[k], v) for k, v in trainer.master.items())
    most = trainer.config.verify_rows
    assert all(1 <= r["al"] <= most and 1 <= r["al_first"] <= most for r in rows)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_replay_equals_the_engine(model, recorded, kind):  # noqa: F811
    config, weights, vocab = make(model, kind)
    drafter = (MarkovDrafter if config.markov_rank else DFlashDrafter)(config).eval()
    drafter.load_state_dict(weights | ({} if vocab is None else {"d2t": vocab}))
    store, pass_ = FeatureStore(*recorded), TargetPass(model, TAPS)
    arms = [Arm("off", weights, config, False), Arm("on", weights, config, True)]
    tallies = evaluate_arms(arms, Head.make(pass_, vocab), store, pass_, limit=20, batch=7)
    target = TappedTarget(model, TAPS)
    for carry, name in ((False, "off"), (True, "on")):
        rounds = engine_rounds(target, drafter, store, 20, carry)
        assert rounds > 20 and tallies[name].total("rounds") == rounds
    target.close()


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"markov_rank": 4, "markov_head_type": "gated"}, "markov_head_type"),
        ({"markov_rank": 4, "markov_head_type": "rnn"}, "markov_head_type"),
        ({"enable_confidence_head": True}, "enable_confidence_head"),
    ],
)
def test_heads_that_do_not_train_are_refused(change, name):
    with pytest.raises(ValueError, match=name):
        check_trainable(drafter_config(**change), [])


def test_l1_moves_the_drafter_towards_the_target(model, recorded):  # noqa: F811
    trainer = make_trainer(model, recorded, "markov", "plain", 40, distill=0.0, l1=0.9)
    rows = [trainer.run_cycle() for _ in range(20)]
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.1
    with pytest.raises(ValueError, match=r"l1=1\.5"):
        TrainSettings(l1=1.5)


def test_a_state_from_before_a_setting_resumes(model, recorded, tmp_path):  # noqa: F811
    trainer = make_trainer(model, recorded, "markov")
    trainer.save_state(tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    del state["settings"]["l1"]
    torch.save(state, tmp_path / "state.pt")
    trainer.load_state(tmp_path / "state.pt")
    with pytest.raises(ValueError, match=r"'l1': \(0\.0, 0\.5\)"):
        make_trainer(model, recorded, "markov", l1=0.5).load_state(tmp_path / "state.pt")


def test_train_and_evaluate_commands(tmp_path, capsys):
    target = tiny_models.save_target(tmp_path / "target")
    prompts = "".join(json.dumps({"prompt": f"number {i}"}) + "\n" for i in range(12))
    (tmp_path / "p.jsonl").write_text(prompts)
    common = [f"--target={target}"]
    record = [f"--prompts={tmp_path}/p.jsonl", f"--out={tmp_path}/rec", "--max-new-tokens=12"]
    assert not main(["record", *common, *record])
    train = ["train", *common, f"--recordings={tmp_path}/rec", "--taps=1", "--mask-token=271", "--layers=1"]
    train += ["--steps=2", "--anchors=4", "--cycle=1", "--block=4"]
    first = ["--drafter=markov", "--markov-rank=8", "--layout=anchor-first", "--draft-vocab=100"]
    assert not main([*train, *first, f"--out={tmp_path}/a"])
    drafter = load_drafter(tmp_path / "a" / "checkpoint")
    assert isinstance(drafter, MarkovDrafter) and drafter.config.markov_rank == 8
    assert (
        drafter.config.sample_from_anchor and drafter.config.verify_rows == 5 and drafter.d2t.numel() == 100
    )
    init = f"--init={tmp_path}/a/checkpoint"
    assert not main([*train, init, "--objective=carryover", f"--out={tmp_path}/b"])
    carry = load_drafter(tmp_path / "b" / "checkpoint")
    assert isinstance(carry, MarkovDrafter) and carry.config.carryover and carry.config.sample_from_anchor
    assert main([*train, init, "--layout=dflash", f"--out={tmp_path}/c"]) == 2
    assert "--layout dflash: --init" in capsys.readouterr().err
    assert main([*train, init, "--drafter=dflash", f"--out={tmp_path}/c"]) == 2
    assert "--drafter dflash: --init" in capsys.readouterr().err
    # The same embedding in another drafter, which has none of its own to begin with.
    given = [*train, init, f"--carry-init={tmp_path}/b/checkpoint", "--lr=1e-12"]
    assert not main([*given, "--objective=carryover", f"--out={tmp_path}/d"])
    moved = load_drafter(tmp_path / "d" / "checkpoint").carryover_embedding
    assert torch.equal(moved, carry.carryover_embedding) and moved.abs().max() > 0
    assert main([*given, f"--out={tmp_path}/e"]) == 2 and not (tmp_path / "e").exists()
    assert "only with --objective carryover" in capsys.readouterr().err
    given[-2] = f"--carry-init={tmp_path}/a/checkpoint"
    assert main([*given, "--objective=carryover", f"--out={tmp_path}/e"]) == 2
    assert "has no carryover_embedding" in capsys.readouterr().err
    # A run that was begun with it is not gone on with without it.
    assert main([*train, init, "--lr=1e-12", "--objective=carryover", f"--out={tmp_path}/d"]) == 2
    assert f"--carry-init None: --out {tmp_path}/d was begun from other weights" in capsys.readouterr().err
    run = ["evaluate", *common, f"--recordings={tmp_path}/rec", f"--drafter={tmp_path}/b/checkpoint"]
    assert not main([*run, f"--out={tmp_path}/result.json"])
    found = json.loads((tmp_path / "result.json").read_text())
    assert set(found["arms"]) == {"carryover-off", "carryover"} and found["settings"]["drafter"] == "markov"
    assert set(found["gains"]) == {"carryover/carryover-off"} and found["tasks"][-1] == "all"


def test_a_head_is_added_to_a_dflash_checkpoint(tmp_path, capsys):
    target = tiny_models.save_target(tmp_path / "target")
    (tmp_path / "p.jsonl").write_text("".join(json.dumps({"prompt": f"n {i}"}) + "\n" for i in range(12)))
    common = [f"--target={target}"]
    record = [f"--prompts={tmp_path}/p.jsonl", f"--out={tmp_path}/rec", "--max-new-tokens=12"]
    assert not main(["record", *common, *record])
    start = tiny_models.save_drafter(tmp_path / "dflash", False)
    train = ["train", *common, f"--recordings={tmp_path}/rec", f"--init={start}", f"--out={tmp_path}/a"]
    train += ["--steps=1", "--anchors=4", "--cycle=1", "--drafter=markov", "--markov-rank=4"]
    assert main([*train, "--rank=2"]) == 2 and not (tmp_path / "a").exists()
    assert "--rank 2: a Markov head stays as it is" in capsys.readouterr().err
    assert not main(train)
    drafter = load_drafter(tmp_path / "a" / "checkpoint")
    assert isinstance(drafter, MarkovDrafter) and not drafter.config.sample_from_anchor
