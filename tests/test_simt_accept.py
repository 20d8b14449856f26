"""The CUDA kernels of accept, run on the CPU by the simulator."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from compare import Guarded, assert_equal
from simt import SCHEDULES, Schedule, call, unavailable
from test_accept import greedy_case, plausible, sampled_case
from torch import Tensor

from carryover_ext import reference

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "bench"))

import sampling_model

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
VOCABULARIES = (1, 2, 17, 1000, 8192, 8193, 20003)


def run(tokens: Tensor, logits: Tensor, q: Tensor | None, u: Tensor | None, temperature: float, **options):
    """num_accepted and next_token; outputs between canaries, workspace of the exact size."""
    batch, drafts = tokens.shape
    accepted, token = Guarded((batch,), torch.int32, fill=99), Guarded((batch,), torch.int64, fill=99)
    size = call("accept", batch, drafts, logits.shape[2], function="workspace")
    workspace = torch.full((size // 8,), float("nan"), dtype=torch.float64)
    dtype = str(logits.dtype).removeprefix("torch.")
    args = (tokens, logits, q, u, temperature, dtype, accepted.tensor, token.tensor, workspace)
    call("accept", *args, **options)
    accepted.check()
    token.check()
    return accepted.tensor, token.tensor


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_the_model_repeats_the_plan(vocab: int) -> None:
    assert call("accept", 3, 7, vocab, function="workspace") == sampling_model.accept_workspace(3, 7, vocab)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", VOCABULARIES)
@pytest.mark.parametrize("batch,drafts", [(0, 3), (1, 0), (1, 7), (3, 15)])
def test_greedy(batch: int, drafts: int, vocab: int, dtype: torch.dtype) -> None:
    tokens, logits = greedy_case(batch, drafts, vocab, dtype)
    tokens[torch.rand(batch, drafts) < 0.05] = -1
    for found, wanted in zip(
        run(tokens, logits, None, None, 0.0), reference.accept(tokens, logits), strict=True
    ):
        assert_equal(found, wanted)


def test_greedy_takes_the_lowest_index_on_ties() -> None:
    logits = torch.zeros(3, 1, 20000)
    logits[0, 0, [19999, 9000, 8500]] = 5
    logits[1] = float("-inf")
    logits[2] = float("nan")
    logits[2, 0, 12345] = -3
    accepted, token = run(torch.empty(3, 0, dtype=torch.long), logits, None, None, 0.0)
    assert token.tolist() == [8500, 0, 12345] and accepted.tolist() == [0, 0, 0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("one_hot", (False, True), ids=("sampled-drafts", "chosen-drafts"))
@pytest.mark.parametrize("vocab", VOCABULARIES[1:])
def test_every_draw(vocab: int, one_hot: bool, dtype: torch.dtype) -> None:
    for temperature in (0.3, 1.0):
        tokens, logits, q = sampled_case(4, 5, vocab, dtype, temperature, one_hot)
        tokens[torch.rand(4, 5) < 0.05] = -1
        u = torch.rand(4, 6)
        plausible(tokens, logits, q, u, temperature, run(tokens, logits, q, u, temperature))


@pytest.mark.parametrize("u", (0.0, 0.5, 1.0 - 2**-24, 1.0))
def test_excluded_tokens_never_come_out(u: float) -> None:
    logits = torch.full((1, 2, 20000), float("-inf"))
    logits[:, :, 8100:8300] = torch.randn(200)  # on both sides of a chunk's end
    q = torch.zeros(1, 1, 20000)
    q[0, 0, 8100:8250] = 1 / 150
    uniforms = torch.full((1, 2), u)
    for token, probs in ((8110, None), (8110, q), (5, None)):
        _, out = run(torch.tensor([[token]]), logits, probs, uniforms, 1.0)
        assert 8100 <= int(out) < 8300


def test_padding_draws_from_the_whole_law() -> None:
    logits = torch.tensor([[[0.0, 3.0, 0.0, 0.0]] * 3])
    q = torch.tensor([[[0.0, 1.0, 0.0, 0.0]] * 2])
    accepted, token = run(torch.tensor([[-1, 1]]), logits, q, torch.tensor([[0.9, 0.9, 0.5]]), 1.0)
    assert accepted.tolist() == [0] and token.tolist() == [1]


def test_equal_laws_hold_every_draft() -> None:
    logits = torch.randn(5, 8, 300)
    q = torch.softmax(logits[:, :7], -1)
    tokens = torch.multinomial(q.reshape(-1, 300), 1).view(5, 7)
    accepted, _ = run(tokens, logits, q, torch.rand(5, 8) * 0.999, 1.0)
    assert (accepted == 7).all()


def test_p_equal_to_q_leaves_p() -> None:
    """A draft of weight 0 refused although p is q: the residual is nothing, p itself is the law."""
    logits = torch.tensor([[[0.0, 0.0, float("-inf"), float("-inf")]] * 2])
    q = torch.tensor([[[0.5, 0.5, 0.0, 0.0]]])
    for u, wanted in ((0.2, 0), (0.8, 1)):
        accepted, token = run(torch.tensor([[3]]), logits, q, torch.tensor([[0.0, u]]), 1.0)
        assert accepted.tolist() == [0] and token.tolist() == [wanted]


@pytest.mark.parametrize("temperature", (0.0, 1.0))
def test_strided_and_unaligned_logits(temperature: float) -> None:
    tokens, logits, q = sampled_case(3, 4, 9001, torch.bfloat16, 1.0, False)
    u = torch.rand(3, 5)
    wide = torch.full((3, 5, 9020), float("nan"), dtype=torch.bfloat16)
    wide[..., 3:9004] = logits
    wide_q = torch.full((3, 4, 9010), float("nan"))
    wide_q[..., 1:9002] = q
    found = run(tokens, wide[..., 3:9004], wide_q[..., 1:9002], u, temperature)
    if temperature > 0:
        plausible(tokens, logits, q, u, temperature, found)
    else:
        for a, b in zip(found, reference.accept(tokens, logits), strict=True):
            assert_equal(a, b)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("temperature", (0.0, 0.8))
def test_schedules_give_the_same_bits(temperature: float, schedule: Schedule) -> None:
    tokens, logits, q = sampled_case(2, 3, 9001, torch.bfloat16, 0.8, False)
    u = torch.rand(2, 4)
    first = run(tokens, logits, q, u, temperature)
    for a, b in zip(first, run(tokens, logits, q, u, temperature, schedule=schedule), strict=True):
        assert_equal(a, b)


@pytest.mark.parametrize("kind", ["asan", "tsan"])
@pytest.mark.parametrize("temperature", (0.0, 1.0))
@pytest.mark.parametrize("one_hot", (False, True))
def test_sanitizers(temperature: float, one_hot: bool, kind: str) -> None:
    tokens, logits, q = sampled_case(2, 3, 8201, torch.bfloat16, 1.0, one_hot)
    u = torch.rand(2, 4)
    found = run(tokens, logits, q, u, temperature, kind=kind, schedule=SCHEDULES[1])
    if temperature > 0:
        plausible(tokens, logits, q, u, temperature, found)
    else:
        for a, b in zip(found, reference.accept(tokens, logits), strict=True):
            assert_equal(a, b)
