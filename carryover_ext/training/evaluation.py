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
from carryover_ext.training.anchors import Batch, gather_rows, load_batch, slot_labels
from carryover_ext.training.draft_verify_draft import Head, block_embeddings, rejected_rows
from carryover_ext.training.drafting import draft_round, recorded_ranks, sequence_generators
from carryover_ext.training.features import FeatureStore
from carryover_ext.training.forward import Params, draft_hidden, encode_rows
from carryover_ext.training.target_pass import TargetPass


@dataclass
class Arm:
    """One way to draft: weights (``fc`` with the feature scale folded in; an embedding and a head among them
    are used instead of the target's) and whether rejected rows are carried."""

    name: str
    params: Params
    config: DrafterConfig
    carry: bool


# What is counted of each replayed recording. `off_*` are counted in the rounds of an arm that carries, with
# its carried rows hidden: the same weights, anchors and tokens, so that only the rows differ.
COUNTS = (
    "rounds",
    "first_held",  # rounds whose first draft held
    "slots",  # drafted slots inside the answer, in rounds with carried rows
    # slots whose recorded token is among the best 1, 16
    *("recall1", "recall16", "off_recall1", "off_recall16"),
    "refused",  # drafts behind the first mistake, inside the answer
    "reconverged",  # of these, the ones that are the recorded token all the same
    *("carried_rounds", "carried_rows", "carried_mass"),  # rounds with carried rows, rows, share of attention
)


@dataclass
class Replayed:
    """One recording under one arm: response tokens committed, and :data:`COUNTS` by name."""

    category: str
    committed: int
    counts: dict[str, float]


@dataclass
class Tally:
    """What an arm's replays gave."""

    recordings: list[Replayed] = field(default_factory=list)

    def categories(self) -> list[str]:
        return sorted({r.category for r in self.recordings})

    def total(self, name: str, category: str | None = None) -> float:
        """Sum of a count over all recordings, or those of a category."""
        return sum(r.counts[name] for r in self.recordings if category in (None, r.category))

    def share(self, part: str, whole: str, category: str | None = None) -> float:
        """Ratio of two counts; NaN where the second is zero."""
        below = self.total(whole, category)
        return self.total(part, category) / below if below else float("nan")

    def acceptance_length(self, category: str | None = None) -> float:
        """Committed tokens / rounds, bonus included, micro-averaged; NaN without rounds."""
        tokens = sum(r.committed for r in self.recordings if category in (None, r.category))
        rounds = self.total("rounds", category)
        return tokens / rounds if rounds else float("nan")

    def figures(self, category: str | None = None) -> dict[str, float]:
        """Everything that is reported of the recordings (of a category), by name."""
        found = {
            "al": self.acceptance_length(category),
            "slot1": self.share("first_held", "rounds", category),
        }
        found |= {n: self.share(n, "slots", category) for n in COUNTS if "recall" in n}
        found["reconvergence"] = self.share("reconverged", "refused", category)
        found["carried_rows"] = self.share("carried_rows", "carried_rounds", category)
        found["attention_mass"] = self.share("carried_mass", "carried_rounds", category)
        return found | {"rounds": self.total("rounds", category)}


@dataclass
class _Carried:
    """Rejected rows of the round before: features ``[S, 1, K, F]``, positions and mask ``[S, 1, K]``."""

    features: Tensor
    positions: Tensor
    mask: Tensor

    def select(self, keep: Tensor) -> _Carried:
        return _Carried(self.features[keep], self.positions[keep], self.mask[keep])


class _Replay:
    """Recordings decoded side by side with one arm; finished ones are left out when they are half of the
    batch."""

    def __init__(
        self,
        arm: Arm,
        head: Head,
        batch: Batch,
        target: TargetPass,
        generators: list[torch.Generator] | None,
    ) -> None:
        self.arm, self.batch, self.target, self.generators = arm, batch, target, generators
        self.head = head.of_drafter(arm.params)
        self.context = encode_rows(arm.params, arm.config, batch.features)
        self.prefix = target.prefix_kv(batch.ids) if arm.carry else None
        self.anchor = batch.prompt_lens.clone()
        self.carried: _Carried | None = None
        self.live = torch.arange(len(batch.lengths), device=head.device)  # the recording of each row
        self.totals = torch.zeros(len(batch.lengths), len(COUNTS), dtype=torch.float64, device=head.device)

    def run(self) -> list[dict[str, float]]:
        """:data:`COUNTS` of every recording."""
        while True:
            active = self.anchor < self.batch.lengths - 1
            if int(active.sum()) <= len(active) // 2:
                keep = active.nonzero()[:, 0]
                if len(keep) == 0:
                    return [dict(zip(COUNTS, row, strict=True)) for row in self.totals.tolist()]
                self._select(keep)
                active = active[keep]
            self._round(active)

    def _select(self, keep: Tensor) -> None:
        self.batch, self.context, self.live = self.batch.select(keep), self.context[keep], self.live[keep]
        self.anchor = self.anchor[keep]
        if self.prefix is not None:
            self.prefix = self.prefix.select(keep)
        if self.carried is not None:
            self.carried = self.carried.select(keep)
        if self.generators is not None:
            self.generators = [self.generators[i] for i in keep.tolist()]

    def _round(self, active: Tensor) -> None:
        p, config, head, batch = self.arm.params, self.arm.config, self.head, self.batch
        at = torch.where(active, self.anchor, batch.prompt_lens)[:, None]
        embeds = block_embeddings(head, config, gather_rows(batch.ids, at))
        counts = {"rounds": torch.ones_like(active)}
        if self.carried is None:
            hidden = draft_hidden(p, config, self.context, at, embeds)
        else:
            rows = encode_rows(p, config, self.carried.features, carried=True)
            mask, mass = self.carried.mask, list[Tensor]()
            hidden = draft_hidden(
                p, config, self.context, at, embeds, rows, self.carried.positions, mask, mass
            )
            without = draft_hidden(p, config, self.context, at, embeds)
            have = mask[:, 0].any(-1)
            counts |= {"carried_rounds": have, "carried_rows": mask[:, 0].sum(-1)}
            counts["carried_mass"] = torch.stack(mass)[..., : mask.shape[-1]].mean(0)[:, 0].sum(-1)
            for prefix, state in (("", hidden), ("off_", without)):
                rank, inside = recorded_ranks(p, config, state, head, batch, at)
                known = inside[:, 0] & have[:, None]
                counts["slots"] = known.sum(-1)
                for k in (1, 16):
                    counts[f"{prefix}recall{k}"] = ((rank[:, 0] < k) & known).sum(-1)
        drafts, m = draft_round(p, config, hidden, head, batch, at, self.generators)
        positions, inside = slot_labels(batch, at, config.verify_rows)
        behind = (inside & (torch.arange(positions.shape[-1], device=m.device) > m[..., None]))[:, 0]
        counts["refused"] = behind.sum(-1)
        counts["reconverged"] = (behind & (drafts == gather_rows(batch.ids, positions))[:, 0]).sum(-1)
        counts["first_held"] = m[:, 0] > 0
        for name, value in counts.items():
            self.totals[self.live, COUNTS.index(name)] += value * active
        if self.prefix is not None:
            block = torch.cat([gather_rows(batch.ids, at)[..., None], drafts], -1)
            rows, where, exists = rejected_rows(self.target, self.prefix, block, at, m)
            self.carried = _Carried(rows, where + (config.carry_positions == "shifted"), exists)
        self.anchor = torch.where(active, self.anchor + m[:, 0] + 1, self.anchor)


@torch.no_grad()
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
    """Replays up to ``limit`` recordings of ``store`` with every arm (all arms see the same recordings).

    Of answers drawn at temperature 1 each replay is one run of rejection sampling under the condition that
    it emitted the recorded answer (:mod:`carryover_ext.training.drafting`).
    """
    tallies = {arm.name: Tally() for arm in arms}
    picks = sorted(range(min(limit, len(store))), key=lambda i: len(store.recording(i).response_ids))
    generator = torch.Generator().manual_seed(0)
    for start in range(0, len(picks), batch):
        part = picks[start : start + batch]
        data = load_batch(store, part, 1, generator).to(head.device)
        categories = [store.recording(i).category for i in part]
        sampled = store.temperature(part[0]) > 0
        committed = (data.lengths - 1 - data.prompt_lens).tolist()
        for arm in arms:
            generators = sequence_generators(0, part, head.device) if sampled else None
            counts = _Replay(arm, head, data, target, generators).run()
            tallies[arm.name].recordings += map(Replayed, categories, committed, counts)
        if progress:
            progress(start + len(part), len(picks))
    return tallies


def as_compute(
    weights: dict[str, Tensor], dtype: torch.dtype, device: torch.device | None = None
) -> dict[str, Tensor]:
    """Checkpoint weights in the compute dtype, on ``device`` (None: where they are)."""
    return {k: v.to(device or v.device, dtype) for k, v in weights.items()}
