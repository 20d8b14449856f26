"""Courses of events that both runners must master."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import engine
import models
import torch
from conftest import World, random_prompt


def lost_context(world: World, llm: Any, drafter: Path, log: list[str]) -> None:
    """vLLM's fault 47930: blocks are filled while the drafter does not look, and a request starts behind
    them. It drafts from a context with holes, which must be said; its output stays right."""
    found = engine.proposer(llm)
    head = random_prompt(102, 300)

    def blind(*args: Any, **kwargs: Any) -> torch.Tensor:
        count = args[0].num_reqs if engine.V2 else len(kwargs["next_token_ids"])
        return torch.zeros(count, models.BLOCK - 1, dtype=torch.int64)

    found.propose = blind
    engine.generate(llm, [[*head, 5]], 2)
    del found.propose
    assert not log
    prompt = [*head, 7]
    expected = world.answer(prompt, 20)
    with engine.watched(llm, world.referee(drafter)) as referee:
        out = engine.generate(llm, [prompt], 20)
    assert out == [expected]
    assert len(log) == 1 and "issue 47930" in log[0], log
    start = int(log[0].split("starts behind ")[1].split()[0])
    assert start in (64, 96)  # the V2 scheduler computes the last block again
    assert f"context of {start} of them was never written" in log[0]
    assert any(f"rows from {start} on came before" in fault for fault in referee.report.faults)
    # Blocks that it has seen are whole, in the same engine.
    found.watch.warned = False
    log.clear()
    head = random_prompt(102, 301)
    with engine.watched(llm, world.referee(drafter)) as referee:
        for last in (5, 7):
            engine.generate(llm, [[*head, last]], 8)
    assert referee.report.starts[start] and not referee.report.faults, referee.report
    assert not log
    # So are blocks that are filled in the step in which another request starts behind them.
    check, restored = found.watch.check, []

    def counted(request: str, table: torch.Tensor, tokens: Any, block_size: int) -> int:
        restored.append(len(tokens))
        return check(request, table, tokens, block_size)

    found.watch.check = counted
    head = random_prompt(102, 302)
    engine.generate(llm, [[*head, last] for last in (5, 7)], 8)
    del found.watch.check
    assert max(restored) in (64, 96), restored
    assert not log
