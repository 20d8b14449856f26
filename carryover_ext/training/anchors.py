"""Batches of anchors: which recorded positions a step drafts from, and the labels of the slots after
them."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from carryover_ext.training.features import FeatureStore


@dataclass
class Batch:
    """S recorded sequences, right-padded to T, and N anchors of each.

    ids ``[S, T]``; lengths ``[S]``; prompt_lens ``[S]``; features ``[S, T, F]``; top_ids, top_probs ``[S,
    T, k]``; next_probs ``[S, T]`` (see :class:`~carryover_ext.training.features.Sequence`); anchors
    ``[S, N]`` int64 and valid ``[S, N]`` bool (False: the sequence has fewer positions
    than N).
    """

    ids: Tensor
    lengths: Tensor
    prompt_lens: Tensor
    features: Tensor
    top_ids: Tensor
    top_probs: Tensor
    next_probs: Tensor
    anchors: Tensor
    valid: Tensor

    def select(self, keep: Tensor) -> Batch:
        """The sequences ``keep`` (int64 indices)."""
        return Batch(**{f.name: getattr(self, f.name)[keep] for f in fields(self)})

    def to(self, device: torch.device) -> Batch:
        """The same on ``device``."""
        return Batch(**{f.name: getattr(self, f.name).to(device) for f in fields(self)})


def load_batch(
    store: FeatureStore,
    picks: list[int],
    num_anchors: int,
    generator: torch.Generator,
    share: slice = slice(None),
) -> Batch:
    """Reads sequences and draws anchors without replacement from each response.

    ``share`` is the part of ``picks`` that is read; anchors are drawn for all of them, so that processes that
    read other parts stay in step.

    An anchor is a response token with at least one token after it: the first response token is the anchor
    of the first round (the target's own prefill gave it), and its context is the prompt.
    """
    drawn = []
    for i in picks:
        recording = store.recording(i)
        prompt = len(recording.prompt_ids)
        order = torch.randperm(len(recording.ids) - 1 - prompt, generator=generator, device="cpu")
        drawn.append(order[:num_anchors].sort().values + prompt)
    rows, drawn = [store[i] for i in picks[share]], drawn[share]
    s, t = len(rows), max(len(r.ids) for r in rows)
    width, k = rows[0].features.shape[1], rows[0].top_ids.shape[1]
    ids = torch.zeros(s, t, dtype=torch.int64)
    features = torch.zeros(s, t, width, dtype=rows[0].features.dtype)
    top_ids = torch.zeros(s, t, k, dtype=torch.int64)
    top_probs = torch.zeros(s, t, k)
    next_probs = torch.zeros(s, t)
    anchors = torch.zeros(s, num_anchors, dtype=torch.int64)
    valid = torch.zeros(s, num_anchors, dtype=torch.bool)
    for j, (r, picked) in enumerate(zip(rows, drawn, strict=True)):
        n = len(r.ids)
        ids[j, :n], features[j, :n], next_probs[j, :n] = r.ids, r.features, r.next_probs
        top_ids[j, :n], top_probs[j, :n] = r.top_ids, r.top_probs
        anchors[j, : len(picked)], valid[j, : len(picked)] = picked, True
        anchors[j, len(picked) :] = r.prompt_len
    lengths = torch.tensor([len(r.ids) for r in rows])
    prompt_lens = torch.tensor([r.prompt_len for r in rows])
    return Batch(ids, lengths, prompt_lens, features, top_ids, top_probs, next_probs, anchors, valid)


def slot_labels(batch: Batch, anchors: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """Labels of slots 1..b-1 of each block: ``positions [S, N, b-1]`` (clamped to the batch) and
    ``inside`` (bool)."""
    positions = anchors[..., None] + torch.arange(1, block_size, device=anchors.device)
    inside = positions < batch.lengths[:, None, None]
    return positions.clamp(max=batch.ids.shape[1] - 1), inside


def gather_rows(values: Tensor, positions: Tensor) -> Tensor:
    """``values [S, T, ...]`` at ``positions [S, ...]`` of each sequence."""
    s = values.shape[0]
    index = torch.arange(s, device=positions.device).view(s, *([1] * (positions.dim() - 1)))
    return values[index, positions]
