"""How a drafter does on recordings that it is not trained on, while it is trained."""

from __future__ import annotations

import torch

from carryover_ext.config import DrafterConfig
from carryover_ext.training.anchors import gather_rows, load_batch
from carryover_ext.training.draft_verify_draft import Head, block_embeddings
from carryover_ext.training.drafting import draft_round
from carryover_ext.training.features import FeatureStore
from carryover_ext.training.forward import Params, draft_hidden, encode_rows


class Validation:
    """An estimate of the acceptance length on held-out recordings, at the same anchors each time it is asked.

    It counts what a plain run counts on its batches, so that the two can be compared and what lies between
    them was learned by heart: the best token of each slot against the recorded one, whatever the temperature
    of the recordings, at anchors drawn uniformly. (Decoding meets hard places more often, and sampled drafts
    are refused by chance; `carryover evaluate` replays both.)

    Args:
        store: the held-out recordings.
        limit: recordings that are looked at, taken evenly from all.
        anchors: anchors of each.
        batch: recordings looked at together.
    """

    def __init__(
        self, store: FeatureStore, head: Head, *, limit: int = 64, anchors: int = 32, batch: int = 8
    ) -> None:
        self.store, self.head, self.anchors = store, head, anchors
        count = min(limit, len(store))
        picks = [i * len(store) // count for i in range(count)]
        picks.sort(key=lambda i: len(store.recording(i).ids))
        self.batches = [picks[i : i + batch] for i in range(0, count, batch)]

    @torch.no_grad()
    def __call__(self, p: Params, config: DrafterConfig, feature_scale: torch.Tensor) -> dict[str, float]:
        """``held_out_al`` and ``held_out_slot1`` (share of right first drafts), without carried rows.

        Args:
            p: weights by checkpoint name, in the compute dtype.
            feature_scale: ``[F]`` factor on tapped rows.
        """
        draws = torch.Generator("cpu").manual_seed(0)
        tokens = hits = rounds = 0
        for picks in self.batches:
            for i in picks:
                self.store.read_ahead(i)
        for picks in self.batches:
            batch = load_batch(self.store, picks, self.anchors, draws).to(self.head.device)
            context = encode_rows(p, config, batch.features * feature_scale)
            first = block_embeddings(self.head, config, gather_rows(batch.ids, batch.anchors))
            hidden = draft_hidden(p, config, context, batch.anchors, first)
            held = draft_round(p, config, hidden, self.head, batch, batch.anchors)[1][batch.valid]
            tokens += int(held.sum()) + len(held)
            hits += int((held > 0).sum())
            rounds += len(held)
        return {"held_out_al": tokens / rounds, "held_out_slot1": hits / rounds}
