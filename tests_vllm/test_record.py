"""`carryover record --backend vllm`: answers of the real engine, drawn at temperature 1."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import engine  # noqa: F401  sets up vLLM for one process

sys.path.append(str(Path(__file__).parents[1] / "tests"))  # behind: conftest is the one of this folder
from tiny_models import VOCAB, save_target

from carryover_ext.cli import main
from carryover_ext.training.recordings import load_shard, shards


def test_record(tmp_path: Path) -> None:
    target = save_target(tmp_path / "target")
    prompts = ["same"] * 6 + ["another"]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps({"prompt": p}) + "\n" for p in prompts))
    words = ["record", "--target", target, "--prompts", tmp_path / "p.jsonl", "--out", tmp_path / "rec"]
    words += ["--backend", "vllm", "--batch", 4, "--max-new-tokens", 24, "--temperature", 1]
    assert main(["--traceback", *map(str, words), "--shard-size=4"]) == 0
    rows = [row for shard in shards(tmp_path / "rec") for row in load_shard(shard)]
    assert [len(shard.read_text().splitlines()) for shard in shards(tmp_path / "rec")] == [4, 3]
    assert all(0 < len(row.response_ids) <= 24 and max(row.response_ids) < VOCAB for row in rows)
    assert rows[0].prompt_ids == rows[5].prompt_ids != rows[6].prompt_ids
    assert len({tuple(row.response_ids) for row in rows[:6]}) > 3  # drawn, each on its own
