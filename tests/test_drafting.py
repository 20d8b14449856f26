"""Sampled drafts under the condition that rejection sampling emitted the recorded answer: the law of both."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from compare import chi_square
from torch import Tensor

from carryover_ext.training.anchors import Batch
from carryover_ext.training.drafting import (
    MARKOV_W1,
    MARKOV_W2,
    couple,
    draft_round,
    draw,
    recorded_ranks,
    sequence_generators,
)
from carryover_ext.training.forward import shared_prefix_attention

VOCAB, ROWS = 6, 60_000


def laws(seed: int) -> tuple[Tensor, Tensor]:
    """The drafter's q and the target's p over a small vocabulary, with a token that each never says."""
    g = torch.Generator().manual_seed(seed)
    q, p = (torch.randn(2, VOCAB, generator=g) * 1.5).softmax(-1)
    q[1], p[4] = 0, 0
    return q / q.sum(), p / p.sum()


def coupled(q: Tensor, p: Tensor, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Emitted tokens drawn from p, and the drafts and verdicts that belong to them."""
    g = torch.Generator().manual_seed(seed)
    token = draw(p.expand(ROWS, -1), g)
    ids, probs = torch.arange(VOCAB).expand(ROWS, -1), p.expand(ROWS, -1)
    drawn, held = couple(q.repeat(ROWS, 1), token, p[token], ids, probs, g)
    return token, drawn, held


def joint(q: Tensor, p: Tensor) -> Tensor:
    """Law ``[draft, emitted]`` of one step of rejection sampling (Leviathan et al., arXiv 2211.17192)."""
    residual = (p - q).clamp(min=0)
    law = (q - p).clamp(min=0)[:, None] * (residual / residual.sum())[None]
    return law + torch.diag(torch.minimum(p, q))


@pytest.mark.parametrize("seed", range(4))
def test_drafts_and_answers_have_the_law_of_rejection_sampling(seed):
    q, p = laws(seed)
    token, drawn, held = coupled(q, p, seed)
    assert torch.equal(held, token == drawn)  # a refused draft is another token than the emitted one
    counts = torch.bincount(drawn * VOCAB + token, minlength=VOCAB**2)
    law = joint(q, p).flatten()
    assert counts[law == 0].sum() == 0
    assert chi_square(counts, law) > 1e-4


def test_chi_square_notices_a_draft_that_ignores_the_answer():
    q, p = laws(0)
    token, _, _ = coupled(q, p, 0)
    drawn = draw(q.expand(ROWS, -1), torch.Generator().manual_seed(1))
    counts = torch.bincount(drawn * VOCAB + token, minlength=VOCAB**2)
    allowed = joint(q, p).flatten() > 0
    assert counts[~allowed].sum() > 0 or chi_square(counts, joint(q, p).flatten()) < 1e-8


def test_an_answer_outside_the_draft_vocabulary_never_holds():
    q, p = laws(2)
    n = 500
    token, prob = torch.full((n,), -1), torch.full((n,), 0.3)
    ids = torch.arange(VOCAB).repeat(n, 1)
    ids[:, 0] = -1
    drawn, held = couple(q.repeat(n, 1), token, prob, ids, p.repeat(n, 1), torch.Generator().manual_seed(0))
    assert not held.any() and ((drawn >= 0) & (drawn < VOCAB)).all()


def test_equal_laws_always_hold():
    q, _ = laws(3)
    _, _, held = coupled(q, q, 3)
    assert held.all()


def small_batch(tokens: int = 12) -> Batch:
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(0, VOCAB, (2, tokens), generator=g)
    shape = (2, tokens)
    return Batch(
        ids=ids,
        lengths=torch.tensor([tokens, tokens - 3]),
        prompt_lens=torch.tensor([2, 3]),
        features=torch.zeros(*shape, 1),
        top_ids=torch.arange(VOCAB).expand(*shape, -1).clone(),
        top_probs=torch.full((*shape, VOCAB), 1 / VOCAB),
        next_probs=torch.full(shape, 1 / VOCAB),
        anchors=torch.tensor([[2, 5], [3, 7]]),
        valid=torch.ones(2, 2, dtype=torch.bool),
    )


HEAD = SimpleNamespace(head=torch.eye(VOCAB), ids=torch.arange(VOCAB), index=torch.arange(VOCAB))
CONFIG = SimpleNamespace(verify_rows=4, first_slot=1, markov_rank=0)


def test_a_sampled_round_counts_leading_drafts_and_stays_inside_the_answer():
    batch = small_batch()
    hidden = torch.zeros(2, 2, 4, VOCAB)  # q uniform as p is: all hold, up to the end of the answer
    drafts, accepted = draft_round(
        {}, CONFIG, hidden, HEAD, batch, batch.anchors, sequence_generators(0, [0, 1])
    )
    assert accepted.tolist() == [[3, 3], [3, 1]]
    assert torch.equal(drafts[0, 0], batch.ids[0, 3:6])
    hidden = torch.nn.functional.one_hot(batch.ids[:, [3, 6]], VOCAB)[:, :, None].expand(-1, -1, 4, -1) * 50.0
    drafts, accepted = draft_round(
        {}, CONFIG, hidden, HEAD, batch, batch.anchors, sequence_generators(0, [0, 1])
    )
    hit = drafts == torch.stack(
        [batch.ids[s][batch.anchors[s][:, None] + torch.arange(1, 4)] for s in (0, 1)]
    )
    assert (accepted <= hit.int().cumprod(-1).sum(-1)).all()


def test_each_sequence_draws_for_itself():
    """A process that holds only the second sequence drafts what one process with both would."""
    batch = small_batch()
    hidden = torch.randn(2, 2, 4, VOCAB, generator=torch.Generator().manual_seed(5))
    both = draft_round({}, CONFIG, hidden, HEAD, batch, batch.anchors, sequence_generators(9, [0, 1]))
    part = batch.select(torch.tensor([1]))
    alone = draft_round({}, CONFIG, hidden[1:], HEAD, part, part.anchors, sequence_generators(9, [1]))
    assert torch.equal(both[0][1:], alone[0]) and torch.equal(both[1][1:], alone[1])


def test_features_without_probabilities_say_what_to_do():
    batch = small_batch()
    batch.next_probs.fill_(float("nan"))
    with pytest.raises(ValueError, match=r"earlier version.*temperature 1.*delete the folder"):
        draft_round(
            {},
            CONFIG,
            torch.zeros(2, 2, 4, VOCAB),
            HEAD,
            batch,
            batch.anchors,
            sequence_generators(0, [0, 1]),
        )


@pytest.mark.parametrize("rank", [0, 3])
def test_ranks_of_the_recorded_tokens(rank):
    g = torch.Generator().manual_seed(rank)
    batch, hidden = small_batch(), torch.randn(2, 2, 4, VOCAB, generator=g)
    index = torch.tensor([0, 1, 2, 3, -1, -1])
    head = SimpleNamespace(head=torch.randn(4, VOCAB, generator=g), ids=torch.arange(4), index=index)
    params = {MARKOV_W1: torch.randn(VOCAB, 3, generator=g), MARKOV_W2: torch.randn(4, 3, generator=g)}
    config = SimpleNamespace(verify_rows=4, first_slot=1, markov_rank=rank)
    ranks, inside = recorded_ranks(params, config, hidden, head, batch, batch.anchors)
    for s, n, k in torch.cartesian_prod(torch.arange(2), torch.arange(2), torch.arange(3)).tolist():
        place = int(batch.anchors[s, n]) + 1 + k
        assert bool(inside[s, n, k]) == (place < int(batch.lengths[s]))
        if not inside[s, n, k]:
            continue
        scores = head.head @ hidden[s, n, 1 + k]
        if rank:
            scores = scores + params[MARKOV_W2] @ params[MARKOV_W1][batch.ids[s, place - 1]]
        token = int(batch.ids[s, place])
        order = scores.argsort(descending=True).tolist()
        assert ranks[s, n, k] == (order.index(token) if token < 4 else 4)


def test_equal_scores_rank_by_row():
    """Only the token that would be drafted counts as recalled at 1."""
    batch = small_batch()
    head = SimpleNamespace(head=torch.zeros(VOCAB, VOCAB), ids=torch.arange(VOCAB), index=torch.arange(VOCAB))
    config = SimpleNamespace(verify_rows=4, first_slot=1, markov_rank=0)
    ranks, inside = recorded_ranks({}, config, torch.zeros(2, 2, 4, VOCAB), head, batch, batch.anchors)
    for s, n, k in inside.nonzero().tolist():
        assert ranks[s, n, k] == batch.ids[s, int(batch.anchors[s, n]) + 1 + k]


def test_attention_mass_of_own_rows():
    """Without a prefix all attention is on own rows; hidden ones get none; with a prefix there is less."""
    g = torch.Generator().manual_seed(0)
    q, shared = torch.randn(1, 2, 3, 4, 8, generator=g), torch.randn(1, 5, 2, 8, generator=g)
    own = torch.randn(1, 2, 6, 2, 8, generator=g)
    mask = torch.ones(1, 2, 3, 6, dtype=torch.bool)
    mask[..., 2] = False
    mass: list[Tensor] = []
    shared_prefix_attention(q, shared, shared, torch.tensor([[0, 4]]), own, own, mask, 0.3, mass)
    assert mass[0].shape == (1, 2, 6) and (mass[0][..., 2] == 0).all()
    torch.testing.assert_close(mass[0][0, 0].sum(), torch.ones(()))
    assert 0.2 < mass[0][0, 1].sum() < 0.99
