"""Acceptance length on held-out recordings: whole decoding runs replayed against the recorded answers, in
batches.

On greedy recordings the recorded token is what the target would say, so a replay gives the drafter's
acceptance length without generating anything. The target runs only for the drafted blocks whose rejects
are carried.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from carryover_ext.config import DrafterConfig
from carryover_ext.training.anchors import Batch, gather_rows, load_batch, slot_labels
from carryover_ext.training.draft_verify_draft import Head, block_embeddings, draft_tokens
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
    """Committed tokens and verification rounds by category, and as pairs by recording; hits of slot 1."""

    committed: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    rounds: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    slot1: int = 0
    recordings: list[tuple[int, int]] = field(default_factory=list)

    def acceptance_length(self, category: str | None = None) -> float:
        """Committed tokens / rounds, bonus included, micro-averaged; NaN without rounds."""
        if category is None:
            rounds, committed = sum(self.rounds.values()), sum(self.committed.values())
        else:
            rounds, committed = self.rounds[category], self.committed[category]
        return committed / rounds if rounds else float("nan")


@torch.no_grad()
def _replay(
    arm: Arm, head: Head, batch: Batch, categories: list[str], target: TargetPass, tally: Tally
) -> None:
    b, config = arm.config.verify_rows, arm.config
    s = len(categories)
    context = encode_rows(arm.params, config, batch.features)
    prefix = target.prefix_kv(batch.ids) if arm.carry else None
    anchor = batch.prompt_lens.clone()
    rejected: Tensor | None = None
    positions: Tensor | None = None
    mask = torch.zeros(s, 1, b - 1, dtype=torch.bool)
    rounds = torch.zeros(s, dtype=torch.int64)
    while True:
        active = anchor < batch.lengths - 1
        if not bool(active.any()):
            committed = batch.lengths - 1 - batch.prompt_lens
            tally.recordings += zip(committed.tolist(), rounds.tolist(), strict=True)
            return
        rounds += active
        at = torch.where(active, anchor, batch.prompt_lens)[:, None]
        first = gather_rows(batch.ids, at)
        embeds = block_embeddings(head, config, first)
        carried = None if rejected is None else encode_rows(arm.params, config, rejected, carried=True)
        hidden = draft_hidden(arm.params, config, context, at, embeds, carried, positions, mask)
        drafts = draft_tokens(arm.params, config, hidden, head, first)
        where, inside = slot_labels(batch, at, b)
        hit = (drafts == gather_rows(batch.ids, where)) & inside
        m = hit.int().cumprod(-1).sum(-1)  # [s, 1]
        for i in torch.nonzero(active)[:, 0].tolist():
            step = min(int(m[i, 0]) + 1, int(batch.lengths[i] - 1 - anchor[i]))
            tally.committed[categories[i]] += step
            tally.rounds[categories[i]] += 1
            tally.slot1 += int(hit[i, 0, 0])
        if prefix is not None:
            rows = target.blocks(torch.cat([first[..., None], drafts], -1), at, prefix)
            source = m[..., None] + 1 + torch.arange(b - 1)
            mask = source < b
            source = source.clamp(max=b - 1)
            rejected = torch.gather(rows, 2, source[..., None].expand(-1, -1, -1, rows.shape[-1]))
            positions = at[..., None] + source + (1 if config.carry_positions == "shifted" else 0)
        anchor = torch.where(active, anchor + m[:, 0] + 1, anchor)


def evaluate_arms(
    arms: list[Arm],
    head: Head,
    store: FeatureStore,
    target: TargetPass,
    *,
    limit: int = 96,
    batch: int = 32,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Tally]:
    """Replays up to ``limit`` recordings of ``store`` with every arm (all arms see the same recordings)."""
    tallies = {arm.name: Tally() for arm in arms}
    picks = sorted(range(min(limit, len(store))), key=lambda i: len(store.recording(i).response_ids))
    generator = torch.Generator().manual_seed(0)
    for start in range(0, len(picks), batch):
        part = picks[start : start + batch]
        data = load_batch(store, part, 1, generator)
        categories = [store.recording(i).category for i in part]
        for arm in arms:
            _replay(arm, head, data, categories, target, tallies[arm.name])
        if progress:
            progress(start + len(part), len(picks))
    return tallies


def as_compute(weights: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Checkpoint weights in the compute dtype."""
    return {k: v.to(dtype) for k, v in weights.items()}
