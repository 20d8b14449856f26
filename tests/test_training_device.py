"""Training on a GPU, as far as a machine without one can tell: every tensor is made on a device that was
named.

The steps run under a default device without values ("meta"): a tensor that forgot to name its device would
be there, and mixing it with the others fails or gives other numbers.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from test_training import TAPS, drafter_config, model, recorded, weights_for  # noqa: F401

from carryover_ext.config import DSPARK
from carryover_ext.training import initial
from carryover_ext.training.anchors import load_batch
from carryover_ext.training.commands import training_device
from carryover_ext.training.draft_verify_draft import Head, draft_and_verify
from carryover_ext.training.drafting import sequence_generators
from carryover_ext.training.evaluation import Arm, _Replay
from carryover_ext.training.features import FeatureStore
from carryover_ext.training.target_pass import TargetPass
from carryover_ext.training.trainer import Trainer, TrainSettings

NOWHERE = torch.device("meta")


@pytest.fixture(params=["dflash", "markov"])
def made(request, model, recorded):  # noqa: F811
    store = FeatureStore(*recorded)
    target = TargetPass(model, TAPS)
    config, weights = drafter_config(), weights_for(drafter_config(), model)
    if request.param == "markov":
        config = dataclasses.replace(config, markov_rank=4, architectures=[DSPARK])
        weights |= initial.markov_head(config, store, None)
    return store, target, Head.make(target, None), config, weights


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_step_makes_nothing_on_another_device(made, temperature):
    store, target, head, config, weights = made
    settings = TrainSettings(objective="carryover", steps=2, sequences=2, anchors=4, cycle=1)

    def step():
        trainer = Trainer(config, weights, torch.ones(config.num_features), head, store, settings, target)
        batch = load_batch(store, [0, 1], 4, trainer.generator)
        generators = sequence_generators(0, [0, 1]) if temperature else None
        return trainer, batch, generators

    def losses(trainer, batch, generators):
        p = trainer.compute_weights()
        rejects = draft_and_verify(p, config, head, batch, target, trainer.feature_scale, generators)
        plain, _ = trainer.loss(batch, None)
        loss, sums = trainer.loss(batch, rejects)
        (plain + loss).backward()
        return [plain.detach(), loss.detach(), sums, trainer.master["fc.weight"].grad]

    expected = losses(*step())
    again = step()
    with NOWHERE:
        found = losses(*again)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_replay_makes_nothing_on_another_device(made, temperature):
    store, target, head, config, weights = made

    def replay():
        batch = load_batch(store, [0, 1, 2], 1, torch.Generator().manual_seed(0))
        generators = sequence_generators(0, [0, 1, 2]) if temperature else None
        return batch, generators

    arm = Arm("carryover", weights, config, True)
    batch, generators = replay()
    expected = _Replay(arm, head, batch, target, generators).run()
    batch, generators = replay()
    with NOWHERE:
        found = _Replay(arm, head, batch, target, generators).run()
    assert found == expected


def test_the_check_sees_a_tensor_without_a_device():
    with NOWHERE, pytest.raises((RuntimeError, NotImplementedError)):
        (torch.ones(2, device="cpu") + torch.arange(2)).tolist()


def test_device_names():
    assert training_device("cpu") == torch.device("cpu")
    assert training_device(None).type == ("cuda" if torch.cuda.is_available() else "cpu")
    with pytest.raises(ValueError, match=r"--device mps: this machine has"):
        training_device("mps")
    with pytest.raises(ValueError, match=r"--device gpu: this machine has"):
        training_device("gpu")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match=r"--device cuda: this machine has only cpu"):
            training_device("cuda")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_step_on_a_gpu_is_the_step_of_the_cpu(made):
    store, _, _, config, weights = made
    results = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        target = TargetPass(made[1].model.to(device), TAPS)
        settings = TrainSettings(objective="carryover", steps=2, sequences=2, anchors=4, cycle=1)
        trainer = Trainer(
            config, weights, torch.ones(config.num_features), Head.make(target, None), store, settings, target
        )
        row = trainer.run_cycle()
        results.append((row["loss"], row["al_first"], trainer.export_weights()["fc.weight"]))
    made[1].model.to("cpu")
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-3) and results[0][1] == results[1][1]
    torch.testing.assert_close(results[0][2], results[1][2], rtol=1e-2, atol=1e-3)
