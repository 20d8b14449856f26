"""Parallel draft-verify-draft: the drafter's own rejects for many anchors at once (Carryover Drafting,
arXiv 2609.14717).

Draft #1 at every anchor without gradient; the recorded tokens say how many drafts hold (on greedy
recordings that is the target's own judgement); the frozen target computes the hidden states of the
drafted blocks in one forward; the rejected rows and the next anchors are what draft #2 trains on. Rejects
that are not the drafter's own make acceptance collapse (DFlow, arXiv 2609.06498), so they are always made
with the weights at hand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from carryover_ext.drafters.checkpoint import EMBED, HEAD
from carryover_ext.training.anchors import Batch, gather_rows
from carryover_ext.training.drafting import draft_round
from carryover_ext.training.forward import Params, draft_hidden, encode_rows
from carryover_ext.training.target_pass import Prefix, TargetPass


@dataclass
class Head:
    """The rows of the embedding and head that the drafter uses, both frozen: the target's, or its own.

    embed ``[V, H]``; head ``[Vd, H]``; ids ``[Vd]`` target token of each head row; index ``[V]`` head row
    of each token or -1.
    """

    embed: Tensor
    head: Tensor
    ids: Tensor
    index: Tensor

    @property
    def device(self) -> torch.device:
        return self.embed.device

    @classmethod
    def make(cls, target: TargetPass, vocab: Tensor | None) -> Head:
        size = target.embed.shape[0]
        device = target.embed.device
        ids = torch.arange(size, device=device) if vocab is None else vocab.to(device)
        index = torch.full((size,), -1, dtype=torch.int64, device=device)
        index[ids] = torch.arange(len(ids), device=device)
        return cls(target.embed.detach(), target.head.detach()[ids].contiguous(), ids, index)

    def of_drafter(self, weights: Mapping[str, Tensor]) -> Head:
        """The same with a drafter's own embedding and head, where its weights have them."""
        if EMBED not in weights:
            return self
        return replace(self, embed=weights[EMBED].to(self.embed), head=weights[HEAD].to(self.head))


@dataclass
class Rejects:
    """What one round left behind, and where the next one starts.

    accepted ``[S, N]``; anchors ``[S, N]`` the next anchors; valid ``[S, N]``; features ``[S, N, K,
    F]`` rejected rows packed to the front, positions ``[S, N, K]`` their verify positions, mask ``[S,
    N, K]`` which exist (all None when the target was not asked).
    """

    accepted: Tensor
    anchors: Tensor
    valid: Tensor
    features: Tensor | None = None
    positions: Tensor | None = None
    mask: Tensor | None = None


def block_embeddings(head: Head, config: Any, tokens: Tensor) -> Tensor:
    """``[S, N, b, H]`` embeddings of blocks that start with ``tokens [S, N]``, masks behind."""
    masks = tokens.new_full((*tokens.shape, config.block_size - 1), config.mask_token_id)
    return head.embed[torch.cat([tokens[..., None], masks], -1)]


@torch.no_grad()
def rejected_rows(
    target: TargetPass, prefix: Prefix, blocks: Tensor, anchors: Tensor, accepted: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """What verification leaves of ``blocks [S, N, b]`` that start at ``anchors [S, N]`` and of which
    ``accepted [S, N]`` drafts hold: rejected rows packed to the front ``[S, N, b-1, F]``, their verify
    positions and which of them exist ``[S, N, b-1]``."""
    b = blocks.shape[-1]
    source = accepted[..., None] + 1 + torch.arange(b - 1, device=anchors.device)  # row of the block
    exists = source < b
    source = source.clamp(max=b - 1)
    # The anchor and the drafts that hold are recorded tokens: their K/V are in the prefix.
    rows = target.blocks(blocks.gather(-1, source), anchors + accepted + 1, prefix)
    return rows, anchors[..., None] + source, exists


@torch.no_grad()
def draft_and_verify(
    p: Params,
    config: Any,
    head: Head,
    batch: Batch,
    target: TargetPass | None,
    feature_scale: Tensor,
    generators: Sequence[torch.Generator] | None = None,
    prefix: Prefix | None = None,
) -> Rejects:
    """One round at every anchor of ``batch``; with ``target`` None only the acceptance is computed.

    ``feature_scale [F]`` multiplies tapped rows before ``fc`` (see :mod:`carryover_ext.training.trainer`);
    ``generators``: one a sequence where the answers were sampled (:mod:`carryover_ext.training.drafting`),
    None for greedy ones. ``prefix``: the target's K/V of the sequences, where they are kept.
    """
    context = encode_rows(p, config, batch.features * feature_scale)
    first = gather_rows(batch.ids, batch.anchors)
    hidden = draft_hidden(p, config, context, batch.anchors, block_embeddings(head, config, first))
    drafts, accepted = draft_round(p, config, hidden, head, batch, batch.anchors, generators)
    following = batch.anchors + accepted + 1
    valid = batch.valid & (following < batch.lengths[:, None] - 1)
    following = torch.where(valid, following, batch.prompt_lens[:, None])
    rejects = Rejects(accepted, following, valid)
    if target is not None:
        blocks = torch.cat([first[..., None], drafts], -1)
        prefix = prefix or target.prefix_kv(batch.ids)
        rows, positions, exists = rejected_rows(target, prefix, blocks, batch.anchors, accepted)
        # a clone: what inference mode made cannot be trained on
        rejects.features, rejects.positions, rejects.mask = rows.clone(), positions, exists & valid[..., None]
    return rejects
