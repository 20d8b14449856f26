"""One round at many anchors of recorded answers: what is drafted there, and how many drafts hold.

Greedy recordings: the recorded token is what the target says, a draft holds when it is that token.

Sampled recordings (temperature 1): the recorded token x is a draw from the target's p. Rejection sampling
draws d from the drafter's q, keeps it with probability min(1, p(d) / q(d)) and otherwise emits a draw from
(p - q)+. Read backwards, from the emitted token to the draft, the same joint law is: with probability
min(1, q(x) / p(x)) the draft was x and held, otherwise it was a draw from (q - p)+ and was refused. So a
recorded answer stands for one run of exact rejection sampling, and no new text is needed to learn what the
drafter's rejects are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from carryover_ext.drafters.adapter import MARKOV_W1, MARKOV_W2
from carryover_ext.training.anchors import Batch, gather_rows, slot_labels
from carryover_ext.training.forward import Params


def slot_rows(config: Any, hidden: Tensor) -> Tensor:
    """The rows ``[S, N, K, H]`` of blocks ``hidden [S, N, b, H]`` that predict the K tokens after the anchor:
    the one place of training that knows the layout. Contiguous: a bf16 product with strided rows took 50
    times as
    long."""
    return hidden[:, :, config.first_slot :].contiguous()


def head_scores(rows: Tensor, head: Tensor) -> Tensor:
    """``rows [..., H] @ head [Vd, H]`` as one product of two matrices."""
    return F.linear(rows.flatten(0, -2), head).unflatten(0, rows.shape[:-1])


def sequence_generators(
    seed: int, sequences: Sequence[int], device: torch.device | str = "cpu"
) -> list[torch.Generator]:
    """One generator for each sequence of a batch: processes that share it draw what one process would."""
    return [torch.Generator(device).manual_seed(seed + i) for i in sequences]


def best(scores: Tensor) -> Tensor:
    """argmax of the last dimension; ``max`` is four times as fast as ``argmax`` in bf16."""
    return scores.max(-1).indices


def draw(weights: Tensor, generator: torch.Generator) -> Tensor:
    """Index ``[M]`` drawn from each row of non-negative ``weights [M, V]``."""
    race = torch.empty_like(weights).exponential_(generator=generator)
    return (weights / race).argmax(-1)


def couple(
    q: Tensor,
    token: Tensor,
    token_prob: Tensor,
    top_ids: Tensor,
    top_probs: Tensor,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """Drafts from ``q`` under the condition that rejection sampling emitted ``token``; see the module
    docstring.

    Args:
        q: ``[M, V]`` float32 the drafter's distributions.
        token: ``[M]`` int64 emitted tokens, -1 where the drafter cannot draft it; ``token_prob [M]`` float32
        their
            probability p under the target.
        top_ids: ``[M, k]`` int64 tokens (-1: none) and ``top_probs [M, k]`` float32 the target's p there; p
        is taken as 0
            elsewhere, which only matters for which token a refused draft was.

    Returns:
        Drafted tokens ``[M]`` and whether they held ``[M]``.
    """
    likely = q.gather(1, token.clamp(min=0)[:, None])[:, 0] * (token >= 0)
    chance = torch.rand(len(token), generator=generator, device=q.device)
    held = chance * token_prob < likely
    p = torch.zeros_like(q).scatter_add_(1, top_ids.clamp(min=0), top_probs * (top_ids >= 0))
    excess = (q - p).clamp(min=0)
    excess = torch.where(excess.sum(-1, keepdim=True) > 0, excess, q)  # equal up to rounding
    return torch.where(held, token, draw(excess, generator)), held


def _greedy(p: Params, config: Any, logits: Tensor, head: Any, token: Tensor) -> Tensor:
    """Head rows ``[M, K]`` of the most probable drafts, left to right where there is a Markov head."""
    if config.markov_rank == 0:
        return best(logits)
    rows = []
    for k in range(logits.shape[1]):
        row = best(logits[:, k] + F.linear(p[MARKOV_W1][token], p[MARKOV_W2]))
        token = head.ids[row]
        rows.append(row)
    return torch.stack(rows, -1)


def _sampled(
    p: Params,
    config: Any,
    logits: Tensor,
    head: Any,
    token: Tensor,
    recorded: tuple[Tensor, Tensor, Tensor, Tensor],
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """Head rows ``[M, K]`` of sampled drafts and the number that hold ``[M]``.

    ``recorded``: head row of the recorded token of each slot (-1: none), its probability, and the target's
    most
    probable head rows with their probabilities.
    """
    label, prob, top, top_probs = recorded
    alive = torch.ones_like(token, dtype=torch.bool)
    accepted = torch.zeros_like(token)
    rows = []
    for k in range(logits.shape[1]):
        scores = logits[:, k]
        if config.markov_rank > 0:
            scores = scores + F.linear(p[MARKOV_W1][token], p[MARKOV_W2])
        q = torch.softmax(scores, -1, dtype=torch.float32)
        row, held = couple(q, label[:, k], prob[:, k], top[:, k], top_probs[:, k], generator)
        if not bool(alive.all()):  # behind a refused draft nothing is judged
            row = torch.where(alive, row, draw(q, generator))
        alive = alive & held
        accepted += alive
        token = head.ids[row]
        rows.append(row)
    return torch.stack(rows, -1), accepted


@torch.no_grad()
def recorded_ranks(
    p: Params, config: Any, hidden: Tensor, head: Any, batch: Batch, anchors: Tensor
) -> tuple[Tensor, Tensor]:
    """How many head rows stand before the recorded token in each slot of blocks ``hidden [S, N, b,
    H]``, given the
    recorded tokens before it: ranks ``[S, N, K]`` (the head's size where it has no row for the token) and
    which slots
    lie inside the answer ``[S, N, K]``."""
    positions, inside = slot_labels(batch, anchors, config.verify_rows)
    scores = head_scores(slot_rows(config, hidden), head.head)
    if config.markov_rank > 0:
        before = gather_rows(batch.ids, positions - 1)
        scores = scores + F.linear(p[MARKOV_W1][before], p[MARKOV_W2])
    label = head.index[gather_rows(batch.ids, positions)]
    row = label.clamp(min=0)[..., None]
    own = scores.gather(-1, row)
    # bfloat16 scores are often equal: of those the first row is the one that is drafted
    before_it = (scores == own) & (torch.arange(scores.shape[-1], device=scores.device) < row)
    rank = ((scores > own) | before_it).sum(-1)
    return torch.where(label >= 0, rank, scores.shape[-1]), inside


@torch.no_grad()
def draft_round(
    p: Params,
    config: Any,
    hidden: Tensor,
    head: Any,
    batch: Batch,
    anchors: Tensor,
    generators: Sequence[torch.Generator] | None = None,
) -> tuple[Tensor, Tensor]:
    """Drafts ``[S, N, K]`` (token ids) of blocks ``hidden [S, N, b, H]`` at ``anchors [S, N]``, and how many
    of them
    hold ``[S, N]``: greedy, or sampled with one generator a sequence."""
    positions, inside = slot_labels(batch, anchors, config.verify_rows)
    first, recorded = gather_rows(batch.ids, anchors), gather_rows(batch.ids, positions)
    slots = slot_rows(config, hidden)
    if generators is None:
        chunks = zip(slots.flatten(0, 1).split(256), first.flatten().split(256), strict=True)
        found = [head.ids[_greedy(p, config, head_scores(x, head.head), head, t)] for x, t in chunks]
        drafts = torch.cat(found).view_as(recorded)
        return drafts, ((drafts == recorded) & inside).int().cumprod(-1).sum(-1)
    if bool(batch.next_probs.isnan().any()):
        raise ValueError(
            "features: made by an earlier version, without the probabilities of the recorded tokens, which "
            "temperature 1 needs; delete the folder to have them made again"
        )
    label = torch.where(inside, head.index[recorded], -1)
    before = positions - 1
    prob, top_probs = gather_rows(batch.next_probs, before), gather_rows(batch.top_probs, before)
    top = head.index[gather_rows(batch.top_ids, before)]
    drafts, accepted = torch.empty_like(recorded), torch.empty_like(anchors)
    for s, generator in enumerate(generators):
        judged = (label[s], prob[s], top[s], top_probs[s])
        rows, accepted[s] = _sampled(
            p, config, head_scores(slots[s], head.head), head, first[s], judged, generator
        )
        drafts[s] = head.ids[rows]
    return drafts, accepted
