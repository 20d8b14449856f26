"""Two processes under torchrun take the steps of one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_models
import torch
from safetensors.torch import load_file

from carryover_ext.cli import main
from carryover_ext.training.distributed import Ranks


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> tuple[Path, list[str]]:
    """A folder, and the arguments of `carryover train` for a recording in it."""
    folder = tmp_path_factory.mktemp("ddp")
    target = tiny_models.save_target(folder / "target")
    lines = (json.dumps({"prompt": f"number {i} of {i % 5}"}) for i in range(24))
    (folder / "p.jsonl").write_text("\n".join(lines) + "\n")
    record = ["record", f"--target={target}", f"--prompts={folder}/p.jsonl", f"--out={folder}/rec"]
    assert not main([*record, "--max-new-tokens=16"])
    train = ["train", f"--target={target}", f"--recordings={folder}/rec", "--taps=1", "--mask-token=271"]
    train += ["--draft-vocab=0", "--block=4", "--layers=1", "--sequences=4", "--anchors=6"]
    return folder, [*train, "--steps=12", "--cycle=2", "--reuse=2", "--save-every=0"]


def torchrun(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*command, "-m", "carryover_ext", *arguments],
        capture_output=True,
        text=True,
        env=environment,
        timeout=240,
        check=False,
    )


def curve(out: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (out / "curve.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("objective", ["plain", "carryover"])
def test_two_processes_take_the_steps_of_one(recorded, objective):
    folder, train = recorded
    one, two = folder / f"{objective}-1", folder / f"{objective}-2"
    assert not main([*train, f"--objective={objective}", f"--out={one}"])
    done = torchrun([*train, f"--objective={objective}", f"--out={two}"])
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("checkpoint in") == 1  # one process talks
    a, b = curve(one), curve(two)
    assert [r["step"] for r in a] == [r["step"] for r in b] == [4, 8, 12]
    # the model is bfloat16: sums over other batch sizes round differently
    assert [r["loss"] for r in a] == pytest.approx([r["loss"] for r in b], rel=5e-3)
    assert a[-1]["loss"] < a[0]["loss"]
    weights, others = (load_file(f / "checkpoint" / "model.safetensors") for f in (one, two))
    start = torch.load(one / "start.pt", weights_only=True)["weights"]
    moved = {k: (weights[k].float() - v).norm() for k, v in start.items() if not k.startswith("fc")}
    apart = {k: (weights[k].float() - others[k].float()).norm() for k in moved}
    assert sum(moved.values()) > 10 * sum(apart.values())


def test_a_share_for_every_process(recorded):
    folder, train = recorded
    done = torchrun([*train, f"--out={folder}/odd", "--sequences=3"])
    assert done.returncode != 0
    assert "sequences=3: must be a multiple of the 2 processes" in done.stderr
    assert [Ranks(r, 2).share(6) for r in range(2)] == [slice(0, 3), slice(3, 6)]
