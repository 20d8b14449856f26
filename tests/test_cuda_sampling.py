"""gather_rejected, accept and markov_sample on a GPU: reference, graph capture, streams, bad arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from cases import RAGGED, int32
from compare import assert_equal
from test_accept import greedy_case, plausible, sampled_case
from test_markov_sample import Case, check
from torch import Tensor

from carryover_ext import ops, reference

DEVICE = "cuda"
OPS = ("gather_rejected", "accept", "markov_sample")
HAS_KERNELS = all(
    torch._C._dispatch_has_kernel_for_dispatch_key(f"carryover_ext::{name}", "CUDA") for name in OPS
)
pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.skipif(not HAS_KERNELS, reason="built without CUDA kernels (CARRYOVER_CUDA=1)"),
]
DTYPES = (torch.bfloat16, torch.float16)


def moved(args: Sequence[Any], device: str = DEVICE) -> list[Any]:
    return [x.to(device) if isinstance(x, Tensor) else x for x in args]


def on_gpu(op: Callable[..., Any]) -> Callable[..., Any]:
    """The op with its tensors sent to the GPU and its results fetched."""
    return lambda *args: tuple(moved(op(*moved(args)), "cpu"))


gather, accept, markov = (on_gpu(op) for op in (ops.gather_rejected, ops.accept, ops.markov_sample))


@pytest.mark.parametrize("dtype", (*DTYPES, torch.float32), ids=str)
@pytest.mark.parametrize("limit", [0, 1, 7, 15])
@pytest.mark.parametrize("ragged", RAGGED, ids=lambda r: r.name)
@pytest.mark.parametrize("width", [0, 33, 4096])
def test_gather(ragged, limit: int, width: int, dtype: torch.dtype) -> None:
    args = (torch.randn(ragged.total, width).to(dtype), ragged.row_start(), ragged.num_accepted(), limit)
    for found, wanted in zip(gather(*args), reference.gather_rejected(*args), strict=True):
        assert_equal(found, wanted)


@pytest.mark.parametrize("dtype", (*DTYPES, torch.float32), ids=str)
@pytest.mark.parametrize("vocab", (1, 17, 8193, 151936))
@pytest.mark.parametrize("batch,drafts", [(0, 3), (1, 0), (1, 7), (5, 15)])
def test_greedy(batch: int, drafts: int, vocab: int, dtype: torch.dtype) -> None:
    tokens, logits = greedy_case(batch, drafts, vocab, dtype)
    tokens[torch.rand(batch, drafts) < 0.05] = -1
    for found, wanted in zip(accept(tokens, logits), reference.accept(tokens, logits), strict=True):
        assert_equal(found, wanted)


@pytest.mark.parametrize("dtype", (*DTYPES, torch.float32), ids=str)
@pytest.mark.parametrize("one_hot", (False, True), ids=("sampled-drafts", "chosen-drafts"))
@pytest.mark.parametrize("vocab", (2, 1000, 8193, 50003))
@pytest.mark.parametrize("temperature", (0.3, 1.0))
def test_every_draw(vocab: int, one_hot: bool, temperature: float, dtype: torch.dtype) -> None:
    tokens, logits, q = sampled_case(6, 7, vocab, dtype, temperature, one_hot)
    u = torch.rand(6, 8)
    plausible(tokens, logits, q, u, temperature, accept(tokens, logits, q, u, temperature))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", (1, 515, 20003))
@pytest.mark.parametrize("rank", (1, 24, 256))
@pytest.mark.parametrize("batch,steps", [(0, 3), (1, 0), (1, 15), (9, 3), (33, 2)])
def test_markov(batch: int, steps: int, rank: int, vocab: int, dtype: torch.dtype) -> None:
    case = Case(batch, steps, vocab, rank, dtype, reduced=True)
    check(case, 0.0, case.run(markov))
    found = case.run(markov, 0.7, True)
    check(case, 0.7, found)
    for a, b in zip(found[:2], case.run(markov, 0.7, False)[:2], strict=True):
        assert_equal(a, b)


def test_accept_and_carry_in_a_captured_graph() -> None:
    """One graph of accept and gather_rejected: acceptance changes from replay to replay, shapes do not."""
    tokens, logits, q = sampled_case(6, 7, 5003, torch.bfloat16, 1.0, False)
    tokens, logits, q, u = moved((tokens, logits, q, torch.rand(6, 8)))
    hidden, start = moved((torch.randn(48, 64).bfloat16(), torch.arange(7).int() * 8))

    def step() -> tuple[Tensor, ...]:
        accepted, token = ops.accept(tokens, logits, q, u, 1.0)
        return accepted, token, *ops.gather_rejected(hidden, start, accepted, 7)

    step()  # outside the graph once: the library is loaded
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    seen = set()
    for _ in range(100):
        u.copy_(torch.rand(6, 8))
        graph.replay()
        for a, b in zip(captured, step(), strict=True):
            assert_equal(a, b, "replay")
        seen.add(tuple(captured[0].tolist()))
    assert len(seen) > 10


def test_markov_in_a_captured_graph() -> None:
    case = Case(5, 7, 5003, 256, torch.bfloat16, reduced=True)
    args = moved((case.logits, case.prev, case.w1, case.w2, case.d2t, case.u))
    ops.markov_sample(*args, 1.0, True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = ops.markov_sample(*args, 1.0, True)
    for _ in range(100):
        args[1].copy_(torch.randint(-1, 5003, (5,)))
        args[5].copy_(torch.rand(5, 7))
        graph.replay()
        for a, b in zip(captured, ops.markov_sample(*args, 1.0, True), strict=True):
            assert_equal(a, b, "replay")


def test_a_captured_graph_draws_anew_from_seeds_and_offsets() -> None:
    case = Case(5, 7, 5003, 256, torch.bfloat16, reduced=True)
    args = moved((case.logits, case.prev, case.w1, case.w2, case.d2t))
    seeds, offsets = moved((torch.tensor([0, 1, -1, 2**62, 1]), torch.tensor([0, 7, 2**32 - 3, -5, 7])))
    ops.markov_sample(*args, None, 1.0, True, seeds, offsets)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = ops.markov_sample(*args, None, 1.0, True, seeds, offsets)
    seen = set()
    for _ in range(100):
        offsets += 7
        graph.replay()
        u = reference.philox_uniforms(seeds.cpu(), offsets.cpu(), 7).to(DEVICE)
        for a, b in zip(captured, ops.markov_sample(*args, u, 1.0, True), strict=True):
            assert_equal(a, b, "replay")
        seen.add(tuple(captured[0].flatten().tolist()))
    assert len(seen) > 90


def test_reruns_and_streams_give_the_same_bits() -> None:
    tokens, logits, q = sampled_case(4, 7, 20003, torch.bfloat16, 1.0, False)
    judged = moved((tokens, logits, q, torch.rand(4, 8), 1.0))
    case = Case(4, 3, 20003, 256, torch.bfloat16, reduced=True)
    drafted = moved((case.logits, case.prev, case.w1, case.w2, case.d2t, case.u, 1.0, True))

    def both() -> tuple[Tensor, ...]:
        return *ops.accept(*judged), *ops.markov_sample(*drafted)

    first = both()
    streams = [torch.cuda.Stream() for _ in range(2)]
    for i in range(1000):
        stream = streams[i % 2]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            different = torch.stack([(a != b).any() for a, b in zip(both(), first, strict=True)]).any()
        torch.cuda.current_stream().wait_stream(stream)
        assert not different, f"run {i}"


def _accept(**change: Any) -> None:
    args = {
        "draft_tokens": torch.zeros(2, 3, dtype=torch.long), "target_logits": torch.zeros(2, 4, 9),
        "draft_probs": None, "uniforms": None, "temperature": 0.0,
    }  # fmt: skip
    on = {name: x.to(DEVICE) if isinstance(x, Tensor) else x for name, x in args.items()}
    ops.accept(**on | change)


def _markov(**change: Any) -> None:
    args = {
        "base_logits": torch.zeros(2, 3, 9).bfloat16(), "prev_tokens": torch.zeros(2, dtype=torch.long),
        "markov_w1": torch.zeros(9, 4).bfloat16(), "markov_w2": torch.zeros(9, 4).bfloat16(),
    }  # fmt: skip
    ops.markov_sample(**{name: x.to(DEVICE) for name, x in args.items()} | change)


def _gather(**change: Any) -> None:
    args = {"hidden": torch.zeros(4, 8).bfloat16(), "row_start": int32(0, 4), "num_accepted": int32(1)}
    ops.gather_rejected(**{name: x.to(DEVICE) for name, x in args.items()} | {"max_rejected": 3} | change)


BAD: dict[str, tuple[Callable[..., None], dict[str, Any], str]] = {
    "accept-cpu": (_accept, {"draft_tokens": torch.zeros(2, 3).long()}, "draft_tokens must be on the GPU"),
    "accept-float64": (_accept, {"target_logits": torch.zeros(2, 4, 9, dtype=torch.float64)}, "on the GPU"),
    "accept-uniforms": (_accept, {"temperature": 1.0}, "uniforms is None at temperature 1"),
    "markov-cpu": (_markov, {"markov_w1": torch.zeros(9, 4).bfloat16()}, "markov_w1 must be on the GPU"),
    "markov-seeds": (
        _markov,
        {"temperature": 1.0, "seeds": torch.zeros(2).long()},
        "seeds must be on the GPU",
    ),
    "markov-none": (_markov, {"temperature": 1.0}, "uniforms is None at temperature 1; .* or seeds"),
    "gather-cpu": (_gather, {"row_start": int32(0, 4)}, "row_start must be on the GPU"),
    "gather-limit": (_gather, {"max_rejected": -1}, "max_rejected must be >= 0, got -1"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_named(name: str) -> None:
    call, change, message = BAD[name]
    with pytest.raises((RuntimeError, NotImplementedError), match=message):
        call(**change)


def test_a_rank_beyond_shared_memory_is_refused() -> None:
    weight = torch.zeros(9, 2056, dtype=torch.bfloat16, device=DEVICE)
    with pytest.raises(RuntimeError, match="markov_w1 has rank 2056; on the GPU it must be at most 2048"):
        _markov(markov_w1=weight, markov_w2=weight)
