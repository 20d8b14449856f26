"""The commands of docs/training.md that made the repository's drafters, with a tiny target."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_models
import torch

from carryover_ext.drafters import MarkovDrafter, load_drafter

DOC = Path(__file__).parents[1] / "docs" / "training.md"
SMALLER = [
    ("--target T", "--target TINY"),
    ("--recordings R", "--recordings rec"),
    ("--taps 3 --intermediate 448 --draft-vocab 16384", "--taps 1 --draft-vocab 100 --mask-token 271"),
    ("--markov-rank 40", "--markov-rank 8"),
    ("--carry-warmup 48", "--carry-warmup 2"),
]


@pytest.mark.slow
@pytest.mark.skipif(not DOC.is_file(), reason="a wheel has no docs")
def test_the_recipe_makes_a_pair(tmp_path):
    text = DOC.read_text(encoding="utf-8")
    recipe = (
        text.split("## How the drafters of this repository were made")[1].split("```")[1].removeprefix("sh\n")
    )
    for old, new in SMALLER:
        assert old in recipe
        recipe = recipe.replace(old, new)
    recipe = re.sub(r"--rank \d+", "--rank 4", re.sub(r"--steps \d+", "--steps 4", recipe))
    carry = recipe.index("pair=")
    control = (
        recipe[carry:].replace("runs/c", "runs/b").replace("--objective carryover", "--objective shifted")
    )
    control = control.replace(" --carry-init runs/let-in/checkpoint", "").replace("--keep-prefixes ", "")
    tiny_models.save_target(tmp_path / "TINY")
    lines = [json.dumps({"prompt": f"number {i} and more"}) + "\n" for i in range(40)]
    (tmp_path / "p.jsonl").write_text("".join(lines))
    script = [
        "set -e",
        f'carryover() {{ "{sys.executable}" -m carryover_ext "$@"; }}',
        "carryover record --target TINY --prompts p.jsonl --out rec --features --keep-prefixes --taps 1 "
        "--max-new-tokens 24",
        recipe,
        control,
        "carryover export runs/b8/checkpoint --to compact --target TINY --out baseline",
        "carryover export runs/c8/checkpoint --to adapter --base baseline --rank 16 --target TINY "
        "--out carryover",
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run(["bash", "-c", "\n".join(script)], cwd=tmp_path, check=True, env=environment)
    pair = [load_drafter(tmp_path / name) for name in ("baseline", "carryover")]
    assert all(isinstance(drafter, MarkovDrafter) and drafter.config.block_size == 8 for drafter in pair)
    assert [drafter.config.carryover for drafter in pair] == [False, True]
    embedding, start = (
        d.carryover_embedding.detach() for d in (pair[1], load_drafter(tmp_path / "runs/let-in/checkpoint"))
    )
    assert start.norm() > 0 and not torch.equal(embedding, start)
