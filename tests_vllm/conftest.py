"""Models for the engine tests, and one plain engine that says what every answer must be."""

from __future__ import annotations

import os
import random
import sys
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1":
    import interpreter  # noqa: F401  before vllm

import models
import pytest
import torch
from referee import Referee


def random_prompt(length: int, seed: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(4, models.VOCAB) for _ in range(length)]


@dataclass
class World:
    """A target, its drafters by name, and the target's own greedy answers."""

    root: Path
    target: Path
    answers: dict[tuple[int, ...], list[int]] = field(default_factory=dict)

    def drafter(self, name: str, **options) -> Path:
        folder = self.root / name
        if not folder.exists():
            models.save_drafter(folder, self.target, **options)
        return folder

    def answer(self, prompt: list[int], length: int) -> list[int]:
        """The greedy answer of Transformers in float32."""
        from transformers import AutoModelForCausalLM

        known = self.answers.get(tuple(prompt), [])
        if len(known) < length:
            model = AutoModelForCausalLM.from_pretrained(self.target, dtype=torch.float32)
            tokens = torch.tensor([prompt])
            options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
            known = model.generate(tokens, max_new_tokens=length, **options)[0, len(prompt) :].tolist()
            self.answers[tuple(prompt)] = known
        return known[:length]

    def truth(self, prompt: list[int]) -> list[int] | None:
        known = self.answers.get(tuple(prompt))
        return None if known is None else [*prompt, *known]

    def referee(self, drafter: Path, **options) -> Referee:
        import engine

        options = {"limit": engine.LIMIT, "truth": self.truth} | options
        return Referee(drafter / "own", self.target, **options)


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    root = tmp_path_factory.mktemp("models")
    return World(root, models.save_target(root / "target"))


@pytest.fixture
def vllm_log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Warnings of the plugin; vLLM's loggers do not propagate to pytest's."""
    from carryover_ext.integrations.vllm import compat

    lines: list[str] = []
    log = compat.log()
    monkeypatch.setattr(log, "warning", lambda text, *values: lines.append(text % values))
    return lines
