"""Two ranks, each with half of the drafter's K/V heads: the referee sits in every worker process."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import engine
import models
import pytest
from conftest import World, random_prompt

pytestmark = pytest.mark.skipif(engine.V2, reason="VLLM_USE_V2_MODEL_RUNNER=1: this is a test of V1")
K = models.BLOCK - 1


def place(worker: Any, drafter: str, target: str, truth: bytes) -> tuple[int, int]:
    """In a worker: watch its proposer. Returns its rank and the K/V heads that it keeps."""
    from referee import Referee

    answers = pickle.loads(truth)
    runner = worker.model_runner
    worker.referee = Referee(
        Path(drafter),
        Path(target),
        limit=engine.LIMIT,
        truth=lambda prompt: answers.get(tuple(prompt)),
    )
    engine.watch(runner.drafter, runner, worker.referee)
    return worker.rank, runner.drafter.model.model.layers[0].self_attn.num_kv_heads


def report(worker: Any) -> bytes:
    return pickle.dumps(worker.referee.report)


def test_two_ranks(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # functions travel to the workers
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    drafter = world.drafter("dflash")
    prompts, lengths = [random_prompt(5, 91), random_prompt(12, 92), random_prompt(2, 93)], [50, 40, 45]
    expected = [world.answer(prompt, length) for prompt, length in zip(prompts, lengths, strict=True)]
    truth = {tuple(prompt): world.truth(prompt) for prompt in prompts}
    with engine.engine(world.target, drafter / "vllm", tokens=K, tensor_parallel_size=2) as llm:
        where = (str(drafter / "own"), str(world.target), pickle.dumps(truth))
        ranks = llm.collective_rpc(place, args=where)
        out = engine.generate(llm, prompts, lengths)
        reports = [pickle.loads(found) for found in llm.collective_rpc(report)]
    assert out == expected
    assert sorted(ranks) == [(0, 1), (1, 1)]  # each has one of the two K/V heads
    for found in reports:
        found.check(K)
