"""markov_sample: greedy and drawn blocks step by step, the sequential law, contracts."""

from __future__ import annotations

import pytest
import torch
from cases import DTYPE_IDS, DTYPES
from compare import assert_equal, chi_square
from torch import Tensor

from carryover_ext import ops, reference

VOCABULARIES = (1, 17, 512, 515, 2061)
RANKS = (1, 8, 256)
SIZES = ((0, 3), (1, 0), (1, 4), (3, 2), (9, 3))  # batch, steps


class Case:
    """Arguments of one call; the draft head may have fewer rows than the vocabulary."""

    def __init__(
        self, batch: int, steps: int, vocab: int, rank: int, dtype: torch.dtype, reduced: bool, whole=False
    ) -> None:
        tokens = vocab + 7
        draw = (lambda *s: torch.randint(-3, 4, s).float()) if whole else torch.randn
        scale = 1.0 if whole else 1.5 / rank**0.5
        self.logits = (draw(batch, steps, vocab) * (1.0 if whole else 2.0)).to(dtype)
        self.prev = torch.randint(0, tokens, (batch,))
        self.w1 = draw(tokens, rank).to(dtype)
        self.w2 = (draw(vocab, rank) * scale).to(dtype)
        self.d2t = torch.randperm(tokens)[:vocab].sort().values if reduced else None
        self.u = torch.rand(batch, steps)

    def run(self, function, temperature: float = 0.0, with_probs: bool = False, cast=lambda t: t):
        args = (cast(self.logits), self.prev, cast(self.w1), cast(self.w2), self.d2t, self.u)
        return function(*args, temperature, with_probs)

    def law(self, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        """Logits ``[B, K, Vd]`` along given tokens, by plain PyTorch in ``dtype``."""
        before = torch.cat([self.prev[:, None], tokens], 1)[:, : tokens.shape[1]].clamp(min=0)
        bias = self.w1.to(dtype)[before] @ self.w2.to(dtype).T
        return self.logits.to(dtype) + bias

    def columns(self, tokens: Tensor) -> Tensor:
        return tokens if self.d2t is None else torch.searchsorted(self.d2t, tokens)


def check(case: Case, temperature: float, found: tuple[Tensor, Tensor, Tensor]) -> None:
    """The float64 law along the tokens that came out agrees with every choice, up to rounding."""
    tokens, token_probs, probs = found
    exact = case.law(tokens, torch.float64)
    column = case.columns(tokens)[..., None]
    plain = case.law(tokens, case.logits.dtype).double()
    slack = 2 * float((plain - exact).abs().max()) + 1e-6 * float(exact.abs().max()) if exact.numel() else 0
    if case.d2t is not None:
        assert torch.isin(tokens, case.d2t).all()
    if temperature == 0:
        assert probs.shape[0] == 0 and (token_probs == 1).all()
        assert (exact.gather(-1, column)[..., 0] >= exact.amax(-1) - slack).all()
        return
    q = torch.softmax(exact / temperature, -1)
    allowed = 2 * (torch.softmax(plain / temperature, -1) - q).abs().amax() + 2e-6 if q.numel() else 0
    picked = q.gather(-1, column)[..., 0]
    assert ((token_probs.double() - picked).abs() <= allowed).all()
    if probs.shape[0]:
        assert ((probs.double() - q).abs() <= allowed).all()
        torch.testing.assert_close(probs.sum(-1), torch.ones(tokens.shape), atol=1e-5, rtol=0)
        assert_equal(probs.gather(-1, column)[..., 0], token_probs)
    after = q.cumsum(-1).gather(-1, column)[..., 0]
    border = allowed * q.shape[-1] ** 0.5 + 1e-6
    assert ((after - picked - border <= case.u) & (case.u <= after + border)).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("vocab", VOCABULARIES)
@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("reduced", (False, True), ids=("all", "d2t"))
@pytest.mark.parametrize("batch,steps", SIZES)
def test_every_choice(
    batch: int, steps: int, reduced: bool, rank: int, vocab: int, dtype: torch.dtype
) -> None:
    case = Case(batch, steps, vocab, rank, dtype, reduced)
    check(case, 0.0, case.run(ops.markov_sample))
    # float64 is the plain path and slow: one temperature of the large cases
    large = dtype == torch.float64 and rank * vocab > 100_000
    for temperature in (1.0,) if large else (0.5, 1.0, 1.5):
        found = case.run(ops.markov_sample, temperature, True)
        check(case, temperature, found)
        less = case.run(ops.markov_sample, temperature, False)
        assert less[2].shape == (0, steps, vocab)
        assert_equal(less[0], found[0])
        assert_equal(less[1], found[1])
    check(case, 1.0, case.run(reference.markov_sample, 1.0, True, lambda t: t.double()))


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=DTYPE_IDS[:2])
@pytest.mark.parametrize("rank", RANKS)
def test_every_choice_at_every_level(rank: int, dtype: torch.dtype, level: str) -> None:
    case = Case(6, 3, 1549, rank, dtype, True)
    check(case, 0.0, case.run(ops.markov_sample))
    check(case, 0.8, case.run(ops.markov_sample, 0.8, True))


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("vocab", VOCABULARIES)
@pytest.mark.parametrize("rank", (1, 8))
def test_whole_numbers_give_the_twins_tokens(rank: int, vocab: int, dtype: torch.dtype, level: str) -> None:
    """Sums are exact and full of ties: greedy tokens are equal, step by step."""
    case = Case(5, 4, vocab, rank, dtype, True, whole=True)
    for found, wanted in zip(case.run(ops.markov_sample), case.run(reference.markov_sample), strict=True):
        assert_equal(found, wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_draws_are_the_twins(dtype: torch.dtype) -> None:
    """Uniforms away from the borders: the same tokens, close probabilities."""
    case = Case(8, 3, 40, 4, dtype, True)
    exact = case.run(reference.markov_sample, 1.0, True, lambda t: t.double())
    ends = exact[2].double().cumsum(-1)
    near = (ends - case.u.double()[..., None]).abs().amin((1, 2)) < (
        1e-2 if dtype == torch.bfloat16 else 1e-5
    )
    found = case.run(ops.markov_sample, 1.0, True)
    assert not near.all() and torch.equal(found[0][~near], exact[0][~near])


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=DTYPE_IDS[:2])
def test_ties_nan_and_excluded_columns(dtype: torch.dtype, level: str) -> None:
    logits = torch.zeros(4, 1, 1500, dtype=dtype)
    logits[0, 0, [1499, 1300, 700]] = 5
    logits[1, 0, 3] = float("nan")
    logits[1, 0, 900] = 1
    logits[2] = float("-inf")
    logits[3] = float("nan")
    prev, w1, w2 = (
        torch.zeros(4, dtype=torch.long),
        torch.ones(1500, 3).to(dtype),
        torch.zeros(1500, 3).to(dtype),
    )
    tokens, _, _ = ops.markov_sample(logits, prev, w1, w2)
    assert tokens[:, 0].tolist() == [700, 900, 0, 0]
    for u in (0.0, 0.5, 1.0):
        logits[0] = float("-inf")
        logits[0, 0, 600:650] = torch.randn(50).to(dtype)
        tokens, q, probs = ops.markov_sample(logits, prev, w1, w2, None, torch.full((4, 1), u), 1.0, True)
        assert 600 <= int(tokens[0, 0]) < 650 and int(tokens[1, 0]) != 3
        assert tokens[2:, 0].tolist() == [0, 0] and q[2:, 0].tolist() == [1, 1]
        assert probs[0, 0, :600].sum() == 0 and probs[1, 0, 3] == 0 and (probs[2:, 0, 0] == 1).all()
        torch.testing.assert_close(probs.sum(-1), torch.ones(4, 1))


@pytest.mark.parametrize("temperature", (0.0, 1.0))
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_padding_and_strides(dtype: torch.dtype, temperature: float) -> None:
    case = Case(5, 3, 100, 8, dtype, True)
    whole = case.run(ops.markov_sample, temperature, True)
    wide = torch.full((5, 6, 130), float("nan"), dtype=dtype)
    wide[:, ::2, :100] = case.logits
    case.logits = wide[:, ::2, :100]
    case.prev[[0, 3]] = -1
    tokens, q, probs = case.run(ops.markov_sample, temperature, True)
    for i in range(5):
        if i in (0, 3):
            assert (tokens[i] == -1).all() and (q[i] == 0).all()
            assert temperature == 0 or (probs[i] == 0).all()
        else:
            assert torch.equal(tokens[i], whole[0][i])
            torch.testing.assert_close(q[i], whole[1][i], atol=1e-6, rtol=1e-5)


def test_results_do_not_depend_on_the_batch(level: str) -> None:
    case = Case(7, 3, 700, 256, torch.bfloat16, False)
    together = case.run(ops.markov_sample, 1.0, True)
    for i in range(7):
        args = (case.logits[i : i + 1], case.prev[i : i + 1], case.w1, case.w2, None, case.u[i : i + 1])
        for one, many in zip(ops.markov_sample(*args, 1.0, True), together, strict=True):
            assert_equal(one, many[i : i + 1])


@pytest.mark.parametrize("temperature", (0.0, 1.0))
def test_results_do_not_depend_on_the_threads(temperature: float) -> None:
    case = Case(3, 4, 5003, 64, torch.bfloat16, True)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = case.run(ops.markov_sample, temperature, True)
        torch.set_num_threads(3)
        for one, many in zip(alone, case.run(ops.markov_sample, temperature, True), strict=True):
            assert_equal(one, many)
    finally:
        torch.set_num_threads(threads)


# ---- the law of what comes out -------------------------------------------------------------------

SMALL, STEPS, ROUNDS = 6, 3, 60_000


def sequential_law(case: Case, temperature: float, biased: bool = True) -> Tensor:
    """Exact probability of each of the words of STEPS tokens, as an index in base SMALL."""
    law = torch.ones(1, dtype=torch.float64)
    for k in range(STEPS):
        before = case.prev[:1] if k == 0 else torch.arange(SMALL).repeat(SMALL ** (k - 1))
        bias = case.w1.double()[before] @ case.w2.double().T
        q = torch.softmax((case.logits[0, k].double() + bias * biased) / temperature, -1)
        law = (law[:, None] * q.expand(law.numel(), SMALL)).flatten()
    return law


def observed(case: Case, temperature: float) -> Tensor:
    many = (case.logits.expand(ROUNDS, -1, -1), case.prev.expand(ROUNDS).contiguous(), case.w1, case.w2)
    tokens, _, _ = ops.markov_sample(*many, None, torch.rand(ROUNDS, STEPS), temperature, False)
    index = (tokens * SMALL ** torch.arange(STEPS - 1, -1, -1)).sum(-1)
    return torch.bincount(index, minlength=SMALL**STEPS)


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("temperature", (0.5, 1.0, 1.5))
def test_blocks_follow_the_sequential_law(temperature: float, dtype: torch.dtype) -> None:
    case = Case(1, STEPS, SMALL, 4, dtype, False)
    assert chi_square(observed(case, temperature), sequential_law(case, temperature)) > 1e-4


@pytest.mark.parametrize("temperature", (1e30, 1e46, 1e300))
def test_nothing_finite_is_too_hot(temperature: float, level: str) -> None:
    """Float32 has no inverse of it; the law is the uniform one."""
    case = Case(2, 3, 700, 8, torch.float32, False)
    tokens, token_probs, probs = case.run(ops.markov_sample, temperature, True)
    torch.testing.assert_close(probs, torch.full_like(probs, 1 / 700))
    torch.testing.assert_close(token_probs, torch.full_like(token_probs, 1 / 700))
    assert_equal(tokens, (case.u.double() * 700).floor().long())


def test_the_law_without_the_bias_fails_the_same_test() -> None:
    """The negative control: the test above can fail."""
    case = Case(1, STEPS, SMALL, 4, torch.float32, False)
    assert chi_square(observed(case, 1.0), sequential_law(case, 1.0, biased=False)) < 1e-8


# ---- seeds: the numbers come from a counter-based generator ----------------------------------------

# The published known answers of Random123 (kat_vectors): counter, key, result.
PHILOX = (
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
)
SEEDS = torch.tensor([0, 1, -1, 2**62 + 5, -(2**63), 0x299F31D0A4093822, 12345])
OFFSETS = torch.tensor([0, 2**32 - 2, -3, 2**63 - 2, 7, 99, -(2**63)])  # carries into the upper word, wraps


@pytest.mark.parametrize("counter,key,wanted", PHILOX)
def test_the_twin_gives_the_known_answers(counter: tuple, key: tuple, wanted: tuple) -> None:
    found = reference.philox4x32(torch.tensor(counter), torch.tensor(key))
    assert tuple(found.tolist()) == wanted


def test_uniforms_are_the_upper_bits_of_the_first_word() -> None:
    u = reference.philox_uniforms(torch.tensor([0, -1]), torch.tensor([0, -1]), 2)
    assert u[0, 0] == (0x6627E8D5 >> 8) / 2**24
    # Counter 2^64 - 1, then 0: the words are those of the plain integers.
    assert u[1, 1] == reference.philox_uniforms(torch.tensor([-1]), None, 1)[0, 0]
    many = reference.philox_uniforms(torch.arange(1000), None, 64)
    assert many.dtype == torch.float32 and many.min() >= 0 and many.max() < 1
    assert chi_square(torch.histc(many, 64, 0, 1), torch.full((64,), 1 / 64)) > 1e-4
    assert many.unique().numel() > 0.99 * many.numel()


def seeded(
    case: Case, function, seeds: Tensor, offsets: Tensor | None, temperature: float = 1.0,
    with_probs: bool = False, cast=lambda t: t,
):  # fmt: skip
    args = (cast(case.logits), case.prev, cast(case.w1), cast(case.w2), case.d2t, None)
    return function(*args, temperature, with_probs, seeds, offsets)


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("offsets", (None, OFFSETS), ids=("from-0", "offsets"))
def test_seeds_draw_what_their_uniforms_draw(offsets: Tensor | None, dtype: torch.dtype) -> None:
    """Bit by bit: the op's numbers are those of the twin's generator."""
    case = Case(7, 4, 100, 8, dtype, True)
    case.prev[2] = -1
    case.u = reference.philox_uniforms(SEEDS, offsets, 4)
    for a, b in zip(
        seeded(case, ops.markov_sample, SEEDS, offsets, 0.9, True),
        case.run(ops.markov_sample, 0.9, True),
        strict=True,
    ):
        assert_equal(a, b)
    for a, b in zip(
        seeded(case, reference.markov_sample, SEEDS, offsets, 0.9, True),
        case.run(reference.markov_sample, 0.9, True),
        strict=True,
    ):
        assert_equal(a, b)


def test_a_seed_and_an_offset_draw_the_same_at_any_place() -> None:
    """Every request of a batch, and its last steps alone: offset + k is what counts."""
    case = Case(7, 4, 300, 8, torch.bfloat16, False)
    case.logits[:] = case.logits[:1, :1].clone()
    case.prev[:] = 3
    case.w2.zero_()  # every step has the same law
    offsets = torch.arange(7)
    tokens = seeded(case, ops.markov_sample, torch.full((7,), 99), offsets, 1.0)[0]
    for i in range(7):
        for k in range(4):
            assert tokens[i, k] == tokens[min(i + k, 6), max(0, i + k - 6)]
    turned = torch.tensor([4, 2, 6, 0, 1, 5, 3])
    again = seeded(case, ops.markov_sample, torch.full((7,), 99), offsets[turned], 1.0)[0]
    assert torch.equal(again, tokens[turned])
    assert tokens.unique().numel() > 3


@pytest.mark.parametrize("by", ("seed", "offset"))
def test_seeded_blocks_follow_the_sequential_law(by: str) -> None:
    """Over seeds, and over the blocks of one seed."""
    case = Case(1, STEPS, SMALL, 4, torch.float32, False)
    n = torch.arange(ROUNDS)
    seeds, offsets = (n, None) if by == "seed" else (torch.full_like(n, 5), n * STEPS)
    many = (case.logits.expand(ROUNDS, -1, -1), case.prev.expand(ROUNDS).contiguous(), case.w1, case.w2)
    tokens = ops.markov_sample(*many, None, None, 1.0, False, seeds, offsets)[0]
    index = (tokens * SMALL ** torch.arange(STEPS - 1, -1, -1)).sum(-1)
    assert chi_square(torch.bincount(index, minlength=SMALL**STEPS), sequential_law(case, 1.0)) > 1e-4


def test_greedy_ignores_seeds() -> None:
    case = Case(7, 2, 30, 4, torch.float32, False)
    greedy = seeded(case, ops.markov_sample, SEEDS, OFFSETS, 0.0, True)
    for a, b in zip(greedy, case.run(ops.markov_sample), strict=True):
        assert_equal(a, b)


# ---- contracts -----------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature,with_probs", [(0.0, False), (0.0, True), (0.7, False), (0.7, True)])
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("batch,steps", [(3, 4), (0, 4), (2, 0)])
def test_opcheck(batch: int, steps: int, dtype: torch.dtype, temperature: float, with_probs: bool) -> None:
    case = Case(batch, steps, 30, 5, dtype, True)
    args = (case.logits, case.prev, case.w1, case.w2, case.d2t, case.u, temperature, with_probs)
    torch.library.opcheck(torch.ops.carryover_ext.markov_sample.default, args)
    args = (*args[:5], None, *args[6:], torch.arange(batch), torch.full((batch,), 2**40))
    torch.library.opcheck(torch.ops.carryover_ext.markov_sample.default, args)


def test_compiled_with_a_symbolic_batch() -> None:
    torch.compiler.reset()
    compiled = torch.compile(ops.markov_sample, fullgraph=True, backend="aot_eager", dynamic=True)
    for batch in (2, 5):
        case = Case(batch, 3, 30, 5, torch.float32, True)
        for a, e in zip(case.run(compiled, 1.0, True), case.run(ops.markov_sample, 1.0, True), strict=True):
            assert_equal(a, e)


BAD = {
    "logits-dtype": (
        {"base_logits": torch.zeros(2, 3, 9).half()},
        "base_logits must be float32, bfloat16 or",
    ),
    "logits-rank": ({"base_logits": torch.zeros(2, 9)}, r"base_logits must have shape \[B, K, Vd\]"),
    "logits-stride": (
        {"base_logits": torch.zeros(2, 3, 18)[..., ::2]},
        "base_logits must be contiguous in its last dimension",
    ),
    "logits-empty": ({"base_logits": torch.zeros(2, 3, 0)}, "base_logits must have a vocabulary"),
    "prev-dtype": ({"prev_tokens": torch.zeros(2).int()}, "prev_tokens must be int64, got int32"),
    "prev-shape": ({"prev_tokens": torch.zeros(3).long()}, r"prev_tokens must have shape \[B\] = \[2\]"),
    "prev-high": (
        {"prev_tokens": torch.tensor([0, 12])},
        r"prev_tokens\[1\] = 12 is out of range; .* 0\.\.11",
    ),
    "prev-low": ({"prev_tokens": torch.tensor([-2, 0])}, r"prev_tokens\[0\] = -2 is out of range"),
    "w1-dtype": ({"markov_w1": torch.zeros(12, 4).double()}, "markov_w1 must have the dtype of base_logits"),
    "w1-stride": ({"markov_w1": torch.zeros(4, 12).T}, "markov_w1 must be contiguous"),
    "w2-shape": ({"markov_w2": torch.zeros(9, 3)}, r"markov_w2 must have shape \[Vd, r\] = \[9, 4\]"),
    "w2-dtype": ({"markov_w2": torch.zeros(9, 4).bfloat16()}, "markov_w2 must have the dtype of base_logits"),
    "d2t-dtype": ({"d2t": torch.zeros(9).int()}, "d2t must be int64, got int32"),
    "d2t-shape": ({"d2t": torch.zeros(8).long()}, r"d2t must have shape \[Vd\] = \[9\]"),
    "d2t-high": ({"d2t": torch.full((9,), 12)}, r"d2t\[0\] = 12 is out of range; .* a row of markov_w1"),
    "no-d2t": (
        {"markov_w1": torch.zeros(8, 4)},
        "base_logits has 9 columns and markov_w1 only 8 rows; give d2t",
    ),
    "uniforms-none": ({"uniforms": None}, r"uniforms is None at temperature 1; .* or seeds"),
    "both": ({"seeds": torch.zeros(2).long()}, "uniforms and seeds are both given; give one of them"),
    "offsets-alone": ({"offsets": torch.zeros(2).long()}, "offsets are given without seeds"),
    "seeds-dtype": ({"uniforms": None, "seeds": torch.zeros(2).int()}, "seeds must be int64, got int32"),
    "seeds-shape": (
        {"uniforms": None, "seeds": torch.zeros(3).long()},
        r"seeds must have shape \[B\] = \[2\]",
    ),
    "seeds-stride": (
        {"uniforms": None, "seeds": torch.zeros(4).long()[::2]},
        "seeds must be contiguous",
    ),
    "offsets-dtype": (
        {"uniforms": None, "seeds": torch.zeros(2).long(), "offsets": torch.zeros(2)},
        "offsets must be int64, got float32",
    ),
    "offsets-shape": (
        {"uniforms": None, "seeds": torch.zeros(2).long(), "offsets": torch.zeros(2, 1).long()},
        r"offsets must have shape \[B\] = \[2\], got \[2, 1\]",
    ),
    "uniforms-shape": ({"uniforms": torch.zeros(2, 4)}, r"uniforms must have shape \[B, K\] = \[2, 3\]"),
    "uniforms-range": ({"uniforms": torch.full((2, 3), -0.5)}, r"uniforms\[0, 0\] = -0.5 is out of range"),
    "temperature": ({"temperature": -1.0}, r"temperature must be 0 \(greedy\) or .* got -1"),
    "temperature-nan": ({"temperature": float("nan")}, r"temperature must be 0 \(greedy\) or"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_named(name: str) -> None:
    good = {
        "base_logits": torch.zeros(2, 3, 9),
        "prev_tokens": torch.zeros(2).long(),
        "markov_w1": torch.zeros(12, 4),
        "markov_w2": torch.zeros(9, 4),
        "d2t": None,
        "uniforms": torch.zeros(2, 3),
        "temperature": 1.0,
    }
    change, message = BAD[name]
    with pytest.raises(RuntimeError, match=message):
        ops.markov_sample(**{**good, **change})
