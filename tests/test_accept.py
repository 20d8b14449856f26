"""accept: greedy, rejection sampling draw by draw, and the law of what comes out."""

from __future__ import annotations

import pytest
import torch
from cases import DTYPE_IDS, DTYPES
from compare import assert_equal
from torch import Tensor

from carryover_ext import ops, reference

VOCABULARIES = (1, 2, 17, 1000, 1024, 1025, 5003)


def greedy_case(batch: int, drafts: int, vocab: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Logits with many ties, drafts of which about half are right."""
    logits = torch.randint(-3, 4, (batch, drafts + 1, vocab)).to(dtype)
    best = logits.argmax(-1)[:, :drafts]
    other = torch.randint(0, vocab, (batch, drafts))
    return torch.where(torch.rand(batch, drafts) < 0.7, best, other), logits


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("vocab", VOCABULARIES)
@pytest.mark.parametrize("batch,drafts", [(0, 3), (1, 0), (1, 7), (5, 15)])
def test_greedy(batch: int, drafts: int, vocab: int, dtype: torch.dtype) -> None:
    tokens, logits = greedy_case(batch, drafts, vocab, dtype)
    tokens[torch.rand(batch, drafts) < 0.05] = -1
    for found, wanted in zip(ops.accept(tokens, logits), reference.accept(tokens, logits), strict=True):
        assert_equal(found, wanted)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=DTYPE_IDS[:2])
def test_greedy_at_every_level(dtype: torch.dtype, level: str) -> None:
    tokens, logits = greedy_case(9, 7, 3001, dtype)
    for found, wanted in zip(ops.accept(tokens, logits), reference.accept(tokens, logits), strict=True):
        assert_equal(found, wanted)


def test_greedy_takes_the_lowest_index_on_ties(level: str) -> None:
    logits = torch.zeros(2, 1, 3000)
    logits[0, 0, [2999, 1700, 1500]] = 5
    logits[1] = float("-inf")
    accepted, token = ops.accept(torch.empty(2, 0, dtype=torch.long), logits)
    assert token.tolist() == [1500, 0] and accepted.tolist() == [0, 0]


# ---- sampling, draw by draw ----------------------------------------------------------------------


def sampled_case(batch: int, drafts: int, vocab: int, dtype: torch.dtype, temperature: float, one_hot: bool):
    logits = (torch.randn(batch, drafts + 1, vocab) * 2).to(dtype)
    q = torch.softmax(logits[:, :drafts].float() / temperature + torch.randn(batch, drafts, vocab), -1)
    if one_hot:
        return logits[:, :drafts].argmax(-1), logits, None
    flat = q.reshape(-1, vocab)
    drawn = torch.multinomial(flat, 1) if len(flat) else torch.empty(0, dtype=torch.long)
    return drawn.view(batch, drafts), logits, q


def plausible(tokens: Tensor, logits: Tensor, q: Tensor | None, u: Tensor, temperature: float, found) -> None:
    """The float64 law agrees with every decision, up to the rounding of the border that decides."""
    accepted, token = (x.tolist() for x in found)
    p = torch.softmax(logits.double() / temperature, -1)
    drafts = tokens.shape[1]
    slack = 3e-6
    for i in range(len(accepted)):
        m = accepted[i]
        assert 0 <= m <= drafts
        for k in range(m + (m < drafts)):
            x = int(tokens[i, k])
            if x < 0:
                assert k == m
                break
            left, right = float(u[i, k]) * (1.0 if q is None else float(q[i, k, x])), float(p[i, k, x])
            if k < m:
                assert left < right + slack, f"request {i} kept draft {k}: {left} against {right}"
            else:
                assert left >= right - slack, f"request {i} refused draft {k}: {left} against {right}"
        weights = p[i, m].clone()
        if m < drafts and tokens[i, m] >= 0:
            if q is None:
                weights[tokens[i, m]] = 0
            else:
                weights = (weights - q[i, m].double()).clamp(min=0)
        weights /= weights.sum()
        after = weights.cumsum(0)
        y, target = token[i], float(u[i, drafts])
        assert float(after[y] - weights[y]) - slack * 10 <= target <= float(after[y]) + slack * 10, (
            f"request {i}: token {y} ends at {float(after[y])}, weighs {float(weights[y])}, drawn at {target}"
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("one_hot", (False, True), ids=("sampled-drafts", "chosen-drafts"))
@pytest.mark.parametrize("vocab", VOCABULARIES[1:])
@pytest.mark.parametrize("temperature", (0.3, 1.0))
def test_every_draw(vocab: int, one_hot: bool, temperature: float, dtype: torch.dtype) -> None:
    tokens, logits, q = sampled_case(6, 7, vocab, dtype, temperature, one_hot)
    tokens[torch.rand(6, 7) < 0.05] = -1
    u = torch.rand(6, 8)
    plausible(tokens, logits, q, u, temperature, ops.accept(tokens, logits, q, u, temperature))
    plausible(tokens, logits, q, u, temperature, reference.accept(tokens, logits, q, u, temperature))


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=DTYPE_IDS[:2])
@pytest.mark.parametrize("one_hot", (False, True), ids=("sampled-drafts", "chosen-drafts"))
def test_every_draw_at_every_level(one_hot: bool, dtype: torch.dtype, level: str) -> None:
    tokens, logits, q = sampled_case(8, 5, 2500, dtype, 0.8, one_hot)
    u = torch.rand(8, 6)
    plausible(tokens, logits, q, u, 0.8, ops.accept(tokens, logits, q, u, 0.8))


@pytest.mark.parametrize("u", (0.0, 0.5, 1.0 - 2**-24, 1.0))
def test_excluded_tokens_never_come_out(u: float, level: str) -> None:
    logits = torch.full((1, 2, 3000), float("-inf"))
    logits[:, :, 1200:1300] = torch.randn(100)
    q = torch.zeros(1, 1, 3000)
    q[0, 0, 1200:1250] = 1 / 50
    for probs in (None, q):
        _, token = ops.accept(torch.tensor([[1210]]), logits, probs, torch.full((1, 2), u), 1.0)
        assert 1200 <= int(token) < 1300
    _, token = ops.accept(torch.tensor([[5]]), logits, None, torch.full((1, 2), u), 1.0)
    assert 1200 <= int(token) < 1300


def test_padding_draws_from_the_whole_law() -> None:
    """Token -1 is no draft: nothing is subtracted from p."""
    logits = torch.tensor([[[0.0, 3.0, 0.0, 0.0]] * 3])
    q = torch.tensor([[[0.0, 1.0, 0.0, 0.0]] * 2])
    accepted, token = ops.accept(torch.tensor([[-1, 1]]), logits, q, torch.tensor([[0.9, 0.9, 0.5]]), 1.0)
    assert accepted.tolist() == [0] and token.tolist() == [1]


def test_equal_laws_hold_every_draft() -> None:
    logits = torch.randn(20, 8, 300)
    q = torch.softmax(logits[:, :7], -1)
    tokens = torch.multinomial(q.reshape(-1, 300), 1).view(20, 7)
    accepted, _ = ops.accept(tokens, logits, q, torch.rand(20, 8) * 0.999, 1.0)
    assert (accepted == 7).all()


def test_disjoint_supports_hold_none() -> None:
    logits = torch.full((50, 2, 40), float("-inf"))
    logits[:, :, :20] = torch.randn(50, 2, 20)
    q = torch.zeros(50, 1, 40)
    q[:, :, 20:] = 1 / 20
    tokens = torch.randint(20, 40, (50, 1))
    accepted, token = ops.accept(tokens, logits, q, torch.rand(50, 2), 1.0)
    assert (accepted == 0).all() and (token < 20).all()


def test_strided_logits(level: str) -> None:
    tokens, logits, q = sampled_case(3, 4, 100, torch.float32, 1.0, False)
    u = torch.rand(3, 5)
    wide = torch.randn(3, 5, 120)
    wide[..., :100] = logits
    for temperature in (0.0, 1.0):
        found = ops.accept(tokens, wide[..., :100], q, u, temperature)
        for a, b in zip(found, ops.accept(tokens, logits, q, u, temperature), strict=True):
            assert_equal(a, b)


# ---- the law of what comes out -------------------------------------------------------------------


def chi_square_p(counts: Tensor, law: Tensor) -> float:
    """P-value of Pearson's test. Cells that expect fewer than five are pooled."""
    expected = law.double() * counts.sum()
    order = expected.argsort(descending=True)
    expected, observed = expected[order], counts.double()[order]
    large = int((expected >= 5).sum())
    if large < len(expected) and expected[large:].sum() > 0:
        expected = torch.cat([expected[:large], expected[large:].sum()[None]])
        observed = torch.cat([observed[:large], observed[large:].sum()[None]])
    else:
        assert observed[large:].sum() == 0, "a token of probability 0 came out"
        expected, observed = expected[:large], observed[:large]
    statistic = ((observed - expected) ** 2 / expected).sum()
    freedom = torch.tensor((len(expected) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))


def test_chi_square_p_knows_its_table() -> None:
    """11.0705 is the 5 % point of five degrees of freedom."""
    law = torch.full((6,), 1 / 6, dtype=torch.float64)
    counts = torch.full((6,), 1000.0, dtype=torch.float64)
    assert chi_square_p(counts, law) == 1.0
    off = (11.0705 * 1000 / 2) ** 0.5
    assert chi_square_p(counts + torch.tensor([off, -off, 0, 0, 0, 0]), law) == pytest.approx(0.05, abs=1e-4)


VOCAB, ROUNDS = 12, 60_000


def target_law() -> Tensor:
    """Logits of two rows: the second depends on nothing, so that pairs have a product law."""
    generator = torch.Generator().manual_seed(3)
    return torch.randn(3, VOCAB, generator=generator) * 1.3


def drafts_of(kind: str, p: Tensor) -> tuple[Tensor, Tensor | None]:
    """Drafts ``[n, 2]`` and the q that drew them."""
    n = ROUNDS
    if kind == "equal":
        q = p[:2].clone()
    elif kind == "one-hot":
        return p[:2].argmax(-1).expand(n, 2).contiguous(), None
    elif kind == "one-hot-poor":
        return p[:2].argmin(-1).expand(n, 2).contiguous(), None
    elif kind == "one-hot-sampled":  # any deterministic or external choice is allowed, tokens vary
        return torch.randint(0, VOCAB, (n, 2)), None
    elif kind == "disjoint":
        q = torch.zeros(2, VOCAB)
        q[:, -3:] = torch.tensor([0.2, 0.3, 0.5])
    else:  # "other"
        q = torch.softmax(torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(5)) * 1.5, -1)
    drawn = torch.stack([torch.multinomial(q[k], n, replacement=True) for k in range(2)], 1)
    return drawn, q.expand(n, 2, VOCAB).contiguous()


def emitted(tokens: Tensor, accepted: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
    """First tokens of all rounds, and (first, second) as one index of the rounds that emitted two or more."""
    first = torch.where(accepted > 0, tokens[:, 0], token)
    more = accepted > 0
    second = torch.where(accepted > 1, tokens[:, 1], token)
    return first, (first * VOCAB + second)[more]


def run_law(
    kind: str, dtype: torch.dtype, temperature: float, judged: str | None = None
) -> tuple[float, float]:
    torch.manual_seed(11)
    logits = target_law().to(dtype)
    if kind == "disjoint":
        logits[:, -3:] = float("-inf")
    p = torch.softmax(logits.double() / temperature, -1)
    tokens, q = drafts_of(kind, p.float())
    if judged == "uniform-q":
        q = torch.full_like(q, 1 / VOCAB)
    elif judged == "draft-temperature":  # drawn from q, judged by a sharpened q
        q = torch.softmax(q.log() / 0.7, -1)
    rows = logits.expand(ROUNDS, 3, VOCAB).contiguous()
    accepted, token = ops.accept(tokens, rows, q, torch.rand(ROUNDS, 3), temperature)
    first, pair = emitted(tokens, accepted, token)
    first_p = chi_square_p(first.bincount(minlength=VOCAB), p[0])
    # Given that the first draft held, the second token follows row 1 whatever the first was.
    second = chi_square_p((pair % VOCAB).bincount(minlength=VOCAB), p[1]) if len(pair) > 500 else 1.0
    return first_p, second


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("temperature", (0.6, 1.0))
@pytest.mark.parametrize("kind", ("other", "equal", "one-hot", "one-hot-poor", "one-hot-sampled", "disjoint"))
def test_output_follows_the_target_law(kind: str, temperature: float, dtype: torch.dtype) -> None:
    first, second = run_law(kind, dtype, temperature)
    assert first > 1e-4 and second > 1e-4, f"p-values {first:.2e}, {second:.2e}"


@pytest.mark.parametrize("judged", ("uniform-q", "draft-temperature"))
def test_a_wrong_q_fails_the_same_test(judged: str) -> None:
    """The negative control: the test above can fail."""
    first, _ = run_law("other", torch.float32, 1.0, judged)
    assert first < 1e-6, f"p-value {first:.2e}"


def test_noise_shared_with_the_drafts_fails_the_same_test() -> None:
    """Drafts drawn with the very uniforms that judge them."""
    torch.manual_seed(2)
    logits = target_law()
    p = torch.softmax(logits.double(), -1)
    q = torch.softmax(torch.randn(VOCAB, generator=torch.Generator().manual_seed(5)) * 1.5, -1)
    u = torch.rand(ROUNDS, 2)
    tokens = torch.searchsorted(q.cumsum(0), u[:, :1].contiguous()).clamp(max=VOCAB - 1)
    rows, probs = logits[:2].expand(ROUNDS, 2, VOCAB).contiguous(), q.expand(ROUNDS, 1, VOCAB).contiguous()
    accepted, token = ops.accept(tokens, rows, probs, u, 1.0)
    first = torch.where(accepted > 0, tokens[:, 0], token)
    assert chi_square_p(first.bincount(minlength=VOCAB), p[0]) < 1e-6


# ---- contracts -----------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", (0.0, 0.7))
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("one_hot", (False, True))
def test_opcheck(temperature: float, dtype: torch.dtype, one_hot: bool) -> None:
    tokens, logits, q = sampled_case(3, 4, 50, dtype, 1.0, one_hot)
    args = (tokens, logits, q, torch.rand(3, 5), temperature)
    torch.library.opcheck(torch.ops.carryover_ext.accept.default, args)


BAD = {
    "tokens-dtype": (
        {"draft_tokens": torch.zeros(2, 3, dtype=torch.int32)},
        r"draft_tokens must be int64, got int32",
    ),
    "tokens-rank": (
        {"draft_tokens": torch.zeros(3, dtype=torch.long)},
        r"draft_tokens must have shape \[B, K\]",
    ),
    "tokens-high": ({"draft_tokens": torch.full((2, 3), 9)}, r"draft_tokens\[0, 0\] = 9 is out of range"),
    "tokens-low": ({"draft_tokens": torch.full((2, 3), -2)}, r"draft_tokens\[0, 0\] = -2 is out of range"),
    "logits-dtype": (
        {"target_logits": torch.zeros(2, 4, 9).half()},
        r"target_logits must be float32, bfloat16 or",
    ),
    "logits-rows": (
        {"target_logits": torch.zeros(2, 3, 9)},
        r"target_logits must have shape \[B, K \+ 1, V\]",
    ),
    "probs-dtype": (
        {"draft_probs": torch.zeros(2, 3, 9).double()},
        r"draft_probs must be float32, got float64",
    ),
    "probs-shape": ({"draft_probs": torch.zeros(2, 3, 8)}, r"draft_probs must have shape \[B, K, V\]"),
    "uniforms-none": ({"uniforms": None}, r"uniforms is None at temperature 1"),
    "uniforms-shape": ({"uniforms": torch.zeros(2, 3)}, r"uniforms must have shape \[B, K \+ 1\]"),
    "uniforms-range": ({"uniforms": torch.full((2, 4), 1.5)}, r"uniforms\[0, 0\] = 1.5 is out of range"),
    "temperature": ({"temperature": -1.0}, r"temperature must be 0 \(greedy\) or .* got -1"),
    "temperature-nan": ({"temperature": float("nan")}, r"temperature must be 0 \(greedy\) or"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_named(name: str) -> None:
    good = {
        "draft_tokens": torch.zeros(2, 3, dtype=torch.long),
        "target_logits": torch.zeros(2, 4, 9),
        "draft_probs": torch.full((2, 3, 9), 1 / 9),
        "uniforms": torch.zeros(2, 4),
        "temperature": 1.0,
    }
    change, message = BAD[name]
    with pytest.raises(RuntimeError, match=message):
        ops.accept(**{**good, **change})
