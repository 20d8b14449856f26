"""The trained drafters of the repository."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch

from carryover_ext.config import DrafterConfig
from carryover_ext.drafters import adapter, load_drafter
from carryover_ext.engine import generate
from carryover_ext.pretrained import cache_home, encode_chat, load_target

SHIPPED = Path(__file__).parent.parent / "carryover_ext" / "checkpoints"
TRAINED = sorted(str(path.parent.relative_to(SHIPPED)) for path in SHIPPED.glob("*/*/*/config.json"))


def test_shipped_checkpoints_are_complete() -> None:
    """Both kinds for both targets, with and without Carryover, each with its card, in 40 MB."""
    kinds = itertools.product(
        ("qwen2.5-coder-0.5b", "smollm2-135m"), ("dflash", "markov"), ("baseline", "carryover")
    )
    assert ["/".join(names) for names in kinds] == TRAINED
    for name in TRAINED:
        card = (SHIPPED / name / "README.md").read_text()
        assert all(f"| {row} |" in card for row in ("target", "shape", "data", "training", "AL", "licence"))
    assert sum(path.stat().st_size for path in SHIPPED.rglob("*.safetensors")) <= 40e6


@pytest.mark.parametrize("name", TRAINED)
def test_shipped_checkpoint(name: str) -> None:
    target, kind, arm = name.split("/")
    drafter = load_drafter(SHIPPED / name, torch.float32)
    assert isinstance(drafter.config, DrafterConfig) and drafter.config.carryover == (arm == "carryover")
    assert (drafter.config.markov_rank > 0) == (kind == "markov")
    assert all(bool(p.isfinite().all()) for p in drafter.parameters())
    if adapter.is_adapter(SHIPPED / name):  # so that it is not read with another base than its own
        assert "base_digest" in json.loads((SHIPPED / name / adapter.CONFIG).read_text())
    if not (cache_home() / "targets" / target / "config.json").is_file():
        pytest.skip(f"{target} is not in the cache; `carryover env --fetch {target}` fetches it")
    model, tokenizer = load_target(target, torch.float32)
    ids = encode_chat(
        tokenizer, [{"role": "user", "content": "Write a Python function that adds two numbers."}]
    )
    base = generate(model, None, ids, max_new_tokens=32, stop_token_ids=[])
    out = generate(model, drafter, ids, max_new_tokens=32, stop_token_ids=[])
    assert out.tokens == base.tokens and out.num_accepted > 0
