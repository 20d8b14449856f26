"""Where the carried rows live in a paged cache that knows one sequence a request: pure tensor code, no vLLM.

vLLM hands the drafter every verified row, the rejected ones as padding behind the accepted ones, and lays the
query block over them. Carryover keeps the rejected rows where verification put them and moves the block
back::

    slot      0 .. n-1            n .. n+r-1            n+r .. n+r+Q-1
    holds     accepted context    rejected rows (+ E)   query block (anchor, masks)
    position  0 .. n-1            n .. n+r-1            n .. n+Q-1

Position is what RoPE sees; slots and positions part at the block. The scheduler already reserves these slots
for verification plus drafting. The next round overwrites them, so that nothing has to be remembered between
rounds: a request that was preempted, resumed, started from a cached prefix, or that took another's slot has
no drafts to reject in its first step, hence nothing carried.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

PAD_SLOT = -1


def carried_rows(
    rejected: Tensor, context_lens: Tensor, query_rows: int, max_len: int, window: int = 0
) -> Tensor:
    """How many rejected rows each request carries: ``[B]``, dtype of ``context_lens``.

    Args:
        rejected: ``[B]`` integer, rows of this step that were rejected (0 where nothing was drafted).
        context_lens: ``[B]`` integer, accepted rows: the anchor's position.
        query_rows: Q, rows of the query block.
        max_len: slots of a request; the segment shrinks at the limit.
        window: smallest sliding window of the drafter's layers, 0: none. vLLM counts windows in slots, which
            the segment shifts against positions; a request carries only while its window reaches over
            everything, where both counts agree.
    """
    end = context_lens + query_rows
    carried = torch.minimum(rejected.to(context_lens.dtype), (max_len - end).clamp_min(0))
    if window > 0:
        carried = torch.where(end + carried <= window, carried, torch.zeros_like(carried))
    return carried


@dataclass(frozen=True)
class RejectedRows:
    """The rows of a step that are carried. ``carried [T]`` bool; ``dropped [T]`` bool: rejected, but past the
    limit; ``request [T]`` int64, the owner of each row."""

    carried: Tensor
    dropped: Tensor
    request: Tensor


def find_rejected(num_rows: int, row_start: Tensor, rejected: Tensor, carried: Tensor) -> RejectedRows:
    """Which of ``num_rows`` rows are carried; rows behind ``row_start[B]`` are padding and are not.

    ``row_start [B+1]``, ``rejected [B]`` and ``carried [B]`` are integer tensors on one device; no host sync.
    """
    ends = row_start[1:].long()
    rows = torch.arange(num_rows, device=ends.device)
    request = torch.bucketize(rows, ends, right=True).clamp_max(max(ends.shape[0] - 1, 0))
    offset = rows - (ends - rejected.long())[request]
    inside = (offset >= 0) & (rows < ends[request])
    kept = inside & (offset < carried.long()[request])
    return RejectedRows(kept, inside & ~kept, request)


def slots_of(block_table: Tensor, request: Tensor, index: Tensor, block_size: int, max_len: int) -> Tensor:
    """Flat cache slots (int64) of row numbers ``index`` of ``request`` (same shape): -1 past ``max_len`` and
    in vLLM's null block 0.
    """
    index = index.long()
    page = (index // block_size).clamp(0, block_table.shape[1] - 1)
    block = block_table[request, page].long()
    inside = (index < max_len) & (block != 0)
    return torch.where(inside, block * block_size + index % block_size, PAD_SLOT)


def query_slots(block_table: Tensor, first: Tensor, query_rows: int, block_size: int, max_len: int) -> Tensor:
    """Slots ``[B * Q]`` of query blocks that start at row ``first [B]`` of each request."""
    batch, device = first.shape[0], first.device
    index = first.long()[:, None] + torch.arange(query_rows, device=device)
    request = torch.arange(batch, device=device)[:, None].expand(batch, query_rows)
    return slots_of(block_table[:batch], request, index, block_size, max_len).flatten()
