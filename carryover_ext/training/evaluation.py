"""Acceptance length on held-out recordings: whole decoding runs replayed against the recorded answers, in
batches.

On greedy recordings the recorded token is what the target would say, so a replay gives the drafter's
acceptance length without generating anything. The target runs only for the drafted blocks whose rejects
are carried.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from carryover_ext.config import DrafterConfig
from carryover_ext.training.anchors import Batch, gather_rows, load_batch
from carryover_ext.training.draft_verify_draft import Head, block_embeddings
from carryover_ext.training.drafting import draft_round, sequence_generators
from carryover_ext.training.features import FeatureStore
from carryover_ext.training.forward import Params, draft_hidden, encode_rows
from carryover_ext.training.target_pass import TargetPass


@dataclass
class Arm:
    """One way to draft: weights (``fc`` with the feature scale folded in) and whether rejected rows are
    carried."""

    name: str
    params: Params
    config: DrafterConfig
    carry: bool


@dataclass
class Tally:
    """What replayed recordings gave: of each its category, tokens committed, rounds, and rounds whose first
    draft held."""

    recordings: list[tuple[str, int, int, int]] = field(default_factory=list)

    def _sums(self, category: str | None) -> tuple[int, int, int]:
        found = [r[1:] for r in self.recordings if category in (None, r[0])]
        tokens, rounds, first = (sum(column) for column in zip(*found, strict=True)) if found else (0, 0, 0)
        return tokens, rounds, first

    def categories(self) -> list[str]:
        return sorted({r[0] for r in self.recordings})

    def rounds(self, category: str | None = None) -> int:
        return self._sums(category)[1]

    def acceptance_length(self, category: str | None = None) -> float:
        """Committed tokens / rounds, bonus included, micro-averaged; NaN without rounds."""
        tokens, rounds, _ = self._sums(category)
        return tokens / rounds if rounds else float("nan")

    def slot1(self, category: str | None = None) -> float:
        """Share of rounds whose first draft held; NaN without rounds."""
        _, rounds, first = self._sums(category)
        return first / rounds if rounds else float("nan")


@dataclass
class _Carried:
    """Rejected rows of the round before: features ``[S, 1, K, F]``, positions and mask ``[S, 1, K]``."""

    features: Tensor
    positions: Tensor
    mask: Tensor


@torch.no_grad()
def _replay(
    arm: Arm,
    head: Head,
    batch: Batch,
    categories: list[str],
    target: TargetPass,
    tally: Tally,
    generators: list[torch.Generator] | None,
) -> None:
    b, config = arm.config.verify_rows, arm.config
    batch_tokens = (batch.lengths - 1 - batch.prompt_lens).tolist()
    context = encode_rows(arm.params, config, batch.features)
    prefix = target.prefix_kv(batch.ids) if arm.carry else None
    anchor, carried = batch.prompt_lens.clone(), None
    rounds, first_held = torch.zeros_like(anchor), torch.zeros_like(anchor)
    where = torch.arange(len(categories))  # the recording of each row that is still replayed
    totals = torch.zeros(len(categories), 2, dtype=torch.int64)
    while True:
        active = anchor < batch.lengths - 1
        if int(active.sum()) <= len(where) // 2:  # the finished ones would cost as much as the others
            totals[where] = torch.stack([rounds, first_held], -1)
            keep = active.nonzero()[:, 0]
            if len(keep) == 0:
                break
            batch, context, anchor, where = batch.select(keep), context[keep], anchor[keep], where[keep]
            rounds, first_held, active = rounds[keep], first_held[keep], active[keep]
            prefix = prefix and prefix.select(keep)
            carried = carried and _Carried(
                carried.features[keep], carried.positions[keep], carried.mask[keep]
            )
            generators = generators and [generators[i] for i in keep.tolist()]
        at = torch.where(active, anchor, batch.prompt_lens)[:, None]
        first = gather_rows(batch.ids, at)
        embeds = block_embeddings(head, config, first)
        rows = positions = mask = None
        if carried is not None:
            rows = encode_rows(arm.params, config, carried.features, carried=True)
            positions, mask = carried.positions, carried.mask
        hidden = draft_hidden(arm.params, config, context, at, embeds, rows, positions, mask)
        drafts, m = draft_round(arm.params, config, hidden, head, batch, at, generators)
        rounds += active
        first_held += active & (m[:, 0] > 0)
        if prefix is not None:
            rows = target.blocks(torch.cat([first[..., None], drafts], -1), at, prefix)
            source = m[..., None] + 1 + torch.arange(b - 1)
            mask = source < b
            source = source.clamp(max=b - 1)
            rows = torch.gather(rows, 2, source[..., None].expand(-1, -1, -1, rows.shape[-1]))
            shift = 1 if config.carry_positions == "shifted" else 0
            carried = _Carried(rows, at[..., None] + source + shift, mask)
        anchor = torch.where(active, anchor + m[:, 0] + 1, anchor)
    for category, committed, (n, held) in zip(categories, batch_tokens, totals.tolist(), strict=True):
        tally.recordings.append((category, committed, n, held))


def evaluate_arms(
    arms: list[Arm],
    head: Head,
    store: FeatureStore,
    target: TargetPass,
    *,
    limit: int = 96,
    batch: int = 32,
    temperature: float = 0.0,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Tally]:
    """Replays up to ``limit`` recordings of ``store`` with every arm (all arms see the same recordings).

    ``temperature``: that of the recordings, 0 or 1. At 1 each replay is one run of rejection sampling under
    the
    condition that it emitted the recorded answer (:mod:`carryover_ext.training.drafting`).
    """
    tallies = {arm.name: Tally() for arm in arms}
    picks = sorted(range(min(limit, len(store))), key=lambda i: len(store.recording(i).response_ids))
    generator = torch.Generator().manual_seed(0)
    for start in range(0, len(picks), batch):
        part = picks[start : start + batch]
        data = load_batch(store, part, 1, generator)
        categories = [store.recording(i).category for i in part]
        for arm in arms:
            generators = sequence_generators(0, part) if temperature else None
            _replay(arm, head, data, categories, target, tallies[arm.name], generators)
        if progress:
            progress(start + len(part), len(picks))
    return tallies


def as_compute(weights: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Checkpoint weights in the compute dtype."""
    return {k: v.to(dtype) for k, v in weights.items()}
