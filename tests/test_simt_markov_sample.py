"""The CUDA kernels of markov_sample, run on the CPU by the simulator."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from compare import Guarded, assert_equal
from simt import SCHEDULES, Schedule, call, unavailable
from test_markov_sample import OFFSETS, PHILOX, SEEDS, Case, check, seeded
from torch import Tensor

from carryover_ext import ops, reference

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "bench"))

import sampling_model

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))

DTYPES = (torch.bfloat16, torch.float16)
VOCABULARIES = (1, 17, 128, 515)
RANKS = (1, 8, 24, 256)
SIZES = ((0, 3), (1, 0), (1, 3), (3, 2))


def kernel(multiprocessors: int = 2, **options):
    """A function with the arguments of the op; outputs between canaries, workspace of the exact size."""

    def run(
        logits, prev, w1, w2, d2t, u, temperature: float, with_probs: bool = False, seeds=None, offsets=None
    ) -> tuple[Tensor, ...]:
        batch, steps, vocab = logits.shape
        full = with_probs and temperature > 0
        tokens = Guarded((batch, steps), torch.int64, fill=-99)
        token_probs = Guarded((batch, steps), torch.float32)
        probs = Guarded((batch if full else 0, steps, vocab), torch.float32)
        size = call("markov_sample", batch, vocab, function="workspace")
        workspace = torch.full((size // 4,), float("nan"))
        call(
            "markov_sample", logits, prev, w1, w2, d2t, u if temperature > 0 else None, seeds, offsets,
            temperature, logits.dtype == torch.bfloat16, multiprocessors, tokens.tensor, token_probs.tensor,
            probs.tensor if full else None, workspace, **options,
        )  # fmt: skip
        for guarded in (tokens, token_probs, probs):
            guarded.check()
        return tokens.tensor, token_probs.tensor, probs.tensor

    return run


@pytest.mark.parametrize("batch", [1, 8, 9, 16, 17, 100])
@pytest.mark.parametrize("rank", [1, 256, 513, 1025, 2048])
def test_the_model_repeats_the_plan(batch: int, rank: int) -> None:
    tiles = call("markov_sample", batch, rank, function="request_tiles")
    assert tiles == sampling_model.markov_request_tiles(batch, rank)
    smem = call("markov_sample", tiles, rank, function="smem")
    assert smem == sampling_model.markov_smem(tiles, rank) and smem <= 99 << 10  # what the smallest GPU has
    workspace = call("markov_sample", batch, 151936, function="workspace")
    assert workspace == sampling_model.markov_workspace(batch, 151936)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", VOCABULARIES)
@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("batch,steps", SIZES)
def test_every_choice(batch: int, steps: int, rank: int, vocab: int, dtype: torch.dtype) -> None:
    case = Case(batch, steps, vocab, rank, dtype, reduced=True)
    check(case, 0.0, case.run(kernel()))
    found = case.run(kernel(), 0.7, True)
    check(case, 0.7, found)
    less = case.run(kernel(), 0.7, False)
    assert less[2].shape == (0, steps, vocab)
    assert_equal(less[0], found[0])
    assert_equal(less[1], found[1])


@pytest.mark.parametrize("batch", [8, 9, 17, 33])
def test_batches_beyond_a_tile(batch: int) -> None:
    case = Case(batch, 2, 300, 40, torch.bfloat16, reduced=False)
    check(case, 0.0, case.run(kernel()))
    check(case, 1.0, case.run(kernel(), 1.0, True))


@pytest.mark.parametrize("multiprocessors", [1, 3, 100])
def test_results_do_not_depend_on_the_grid(multiprocessors: int) -> None:
    case = Case(3, 2, 1549, 72, torch.bfloat16, reduced=True)
    for temperature in (0.0, 1.0):
        wanted = case.run(kernel(2), temperature, True)
        found = case.run(kernel(multiprocessors), temperature, True)
        for a, b in zip(found, wanted, strict=True):
            assert_equal(a, b)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rank", (1, 8))
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_whole_numbers_give_the_twins_tokens(vocab: int, rank: int, dtype: torch.dtype) -> None:
    case = Case(3, 3, vocab, rank, dtype, True, whole=True)
    for found, wanted in zip(case.run(kernel()), case.run(reference.markov_sample), strict=True):
        assert_equal(found, wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ties_nan_and_excluded_columns(dtype: torch.dtype) -> None:
    logits = torch.zeros(4, 1, 700, dtype=dtype)
    logits[0, 0, [699, 600, 300]] = 5
    logits[1, 0, 3] = float("nan")
    logits[1, 0, 500] = 1
    logits[2] = float("-inf")
    logits[3] = float("nan")
    prev, w1, w2 = (
        torch.zeros(4, dtype=torch.long),
        torch.ones(700, 8).to(dtype),
        torch.zeros(700, 8).to(dtype),
    )
    tokens, _, _ = kernel()(logits, prev, w1, w2, None, None, 0.0, False)
    assert tokens[:, 0].tolist() == [300, 500, 0, 0]
    for u in (0.0, 0.5, 1.0):
        logits[0] = float("-inf")
        logits[0, 0, 250:300] = torch.randn(50).to(dtype)
        uniforms = torch.full((4, 1), u)
        tokens, q, probs = kernel()(logits, prev, w1, w2, None, uniforms, 1.0, True)
        assert 250 <= int(tokens[0, 0]) < 300 and int(tokens[1, 0]) != 3
        assert tokens[2:, 0].tolist() == [0, 0] and q[2:, 0].tolist() == [1, 1]
        assert probs[0, 0, :250].sum() == 0 and probs[1, 0, 3] == 0 and (probs[2:, 0, 0] == 1).all()
        torch.testing.assert_close(probs.sum(-1), torch.ones(4, 1))


@pytest.mark.parametrize("temperature", (0.0, 1.0))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_padding_and_strides(dtype: torch.dtype, temperature: float) -> None:
    case = Case(5, 2, 100, 8, dtype, True)
    whole = case.run(kernel(), temperature, True)
    wide = torch.full((5, 4, 130), float("nan"), dtype=dtype)
    wide[:, ::2, :100] = case.logits
    case.logits = wide[:, ::2, :100]
    case.prev[[0, 3]] = -1
    found = case.run(kernel(), temperature, True)
    for i in range(5):
        if i in (0, 3):
            assert (found[0][i] == -1).all() and (found[1][i] == 0).all()
            assert temperature == 0 or (found[2][i] == 0).all()
        else:
            for a, b in zip(found[: 3 if temperature > 0 else 2], whole, strict=False):
                assert_equal(a[i], b[i])


@pytest.mark.parametrize("counter,key,wanted", PHILOX)
def test_the_shared_generator_gives_the_known_answers(counter: tuple, key: tuple, wanted: tuple) -> None:
    assert tuple(call("markov_sample", counter, key, function="philox4x32")) == wanted


@pytest.mark.parametrize("offsets", (None, OFFSETS), ids=("from-0", "offsets"))
def test_seeds_draw_what_their_uniforms_draw(offsets: Tensor | None) -> None:
    """Bit by bit; and new values in the same tensors draw anew."""
    case = Case(7, 3, 300, 8, torch.bfloat16, True)
    case.prev[2] = -1
    seeds = SEEDS.clone()
    for _ in range(2):
        case.u = reference.philox_uniforms(seeds, offsets, 3)
        found = seeded(case, kernel(), seeds, offsets, 1.0, True)
        for a, b in zip(found, case.run(kernel(), 1.0, True), strict=True):
            assert_equal(a, b)
        seeds += 1
    assert (found[0][2] == -1).all() and (found[1][2] == 0).all()


def test_seeded_draws_are_those_of_the_op_and_of_the_twin() -> None:
    """The same tokens on the CPU, in the simulator and by the twin, unless u is at a border of the CDF."""
    case = Case(7, 3, 40, 8, torch.bfloat16, True)
    exact = seeded(case, reference.markov_sample, SEEDS, OFFSETS, 1.0, True, cast=lambda t: t.double())
    u = reference.philox_uniforms(SEEDS, OFFSETS, 3).double()
    near = (exact[2].double().cumsum(-1) - u[..., None]).abs().amin((1, 2)) < 1e-2
    assert near.sum() < 6
    for function in (kernel(), ops.markov_sample):
        assert torch.equal(seeded(case, function, SEEDS, OFFSETS, 1.0)[0][~near], exact[0][~near])


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("temperature", (0.0, 1.0))
def test_schedules_give_the_same_bits(temperature: float, schedule: Schedule) -> None:
    case = Case(3, 2, 515, 136, torch.bfloat16, True)
    wanted = case.run(kernel(), temperature, True)
    for a, b in zip(case.run(kernel(schedule=schedule), temperature, True), wanted, strict=True):
        assert_equal(a, b)


@pytest.mark.parametrize("kind", ["asan", "tsan"])
@pytest.mark.parametrize("rank", [5, 136])
@pytest.mark.parametrize("temperature", (0.0, 1.0))
def test_sanitizers(temperature: float, rank: int, kind: str) -> None:
    case = Case(3, 2, 300, rank, torch.bfloat16, True)
    check(case, temperature, case.run(kernel(kind=kind, schedule=SCHEDULES[3]), temperature, True))
