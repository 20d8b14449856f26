"""A preallocated key/value cache for Transformers targets in which every request has its own length.

Rows are written at each request's own length, so a ragged batch needs no padding positions, and rolling back
rejected rows is
simply not advancing the length: nothing is cropped, moved or concatenated.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from carryover_ext import ops

ATTENTION = "carryover_slots"
# Up to so many rows a request this package's operator attends (on the CPU): it reads each request's own rows
# alone, where a mask makes PyTorch's read those of the longest for all. It was 1.1 to 3.2 times as fast.
OPERATOR_ROWS = 32
OPERATOR_DTYPES = (torch.bfloat16, torch.float32, torch.float64)


class _Step:
    """Where the rows of the forward in progress go; shared by all layers."""

    def __init__(self) -> None:
        self.start: int | None = None  # all requests have this length: a slice instead of an index
        self.index: Tensor | None = None  # [B * nkv * q] flat slots
        self.used = 0  # slots that attention looks at
        self.rows = 0
        self.lens: Tensor | None = None  # [B] committed rows, when the operator attends; None: PyTorch's does
        self.fresh: tuple[Tensor, Tensor] | None = None  # of the layer at hand: the new rows [B, nkv, q, d]


class SlotLayer(CacheLayerMixin):
    """Keys and values of one layer, ``[B, nkv, capacity, d]``, allocated at the first update."""

    is_sliding = False

    def __init__(self, step: _Step, batch: int, capacity: int) -> None:
        super().__init__()
        self.step, self.batch, self.capacity = step, batch, capacity
        self.keys: Tensor
        self.values: Tensor

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        heads = key_states.shape[1]
        self.keys = key_states.new_zeros(self.batch, heads, self.capacity, key_states.shape[-1])
        self.values = value_states.new_zeros(self.batch, heads, self.capacity, value_states.shape[-1])
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        step = self.step
        if step.start is not None:
            self.keys.narrow(2, step.start, step.rows).copy_(key_states)
            self.values.narrow(2, step.start, step.rows).copy_(value_states)
        else:
            assert step.index is not None
            d = self.keys.shape[-1]
            self.keys.view(-1, d).index_copy_(0, step.index, key_states.reshape(-1, d))
            self.values.view(-1, d).index_copy_(0, step.index, value_states.reshape(-1, d))
        step.fresh = key_states, value_states
        return self.keys.narrow(2, 0, step.used), self.values.narrow(2, 0, step.used)

    def get_seq_length(self) -> int:
        return self.step.used - self.step.rows

    def get_max_length(self) -> int:
        return self.capacity

    get_max_cache_shape = get_max_length  # its name in Transformers 4

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.step.used, 0


class SlotCache(Cache):
    """The cache of a :class:`carryover_ext.targets.TappedTarget`.

    Attributes:
        lens: ``[B]`` int32 on the device, committed rows of each request.
        host_lens: the same numbers as a list, kept in step by :meth:`advance`.
        capacity: slots of each request.
    """

    def __init__(
        self, layers: int, batch: int, capacity: int, kv_heads: int, device: torch.device | str = "cpu"
    ) -> None:
        self.step = _Step()
        super().__init__(layers=[SlotLayer(self.step, batch, capacity) for _ in range(layers)])
        self.batch, self.capacity, self.kv_heads = batch, capacity, kv_heads
        self.lens = torch.zeros(batch, dtype=torch.int32, device=device)
        self.host_lens = [0] * batch

    def begin(self, rows: int, operator: bool = False) -> Tensor:
        """Prepare for a forward of ``rows`` new rows a request; returns their positions ``[B, rows]`` int64.
        ``operator``: this package's operator attends (see :func:`slot_attention`).

        Raises ValueError when a request has no room for them.
        """
        longest = max(self.host_lens, default=0)
        if longest + rows > self.capacity:
            raise ValueError(
                f"rows={rows}: a request already has {longest} rows and the cache holds "
                f"capacity={self.capacity}"
            )
        step, device = self.step, self.lens.device
        step.rows, step.used = rows, longest + rows
        step.lens = self.lens if operator else None
        positions = self.lens.to(torch.int64)[:, None] + torch.arange(rows, device=device)
        step.start = longest if min(self.host_lens, default=0) == longest else None
        if step.start is None:
            heads = torch.arange(self.batch * self.kv_heads, device=device).view(self.batch, self.kv_heads, 1)
            step.index = (heads * self.capacity + positions[:, None, :]).reshape(-1)
        return positions

    def advance(self, num_committed: Tensor, host: list[int] | None = None) -> None:
        """Keep the first ``num_committed [B]`` rows of the last forward. ``host``: the same numbers, when
        already known.
        """
        self.lens.add_(num_committed.to(torch.int32))
        counts = num_committed.tolist() if host is None else host
        self.host_lens = [a + int(b) for a, b in zip(self.host_lens, counts, strict=True)]

    def place(self, first: int, other: SlotCache) -> None:
        """Copy all requests of ``other`` into the rows from ``first`` on."""
        used = max(other.host_lens, default=0)
        if first + other.batch > self.batch or used > self.capacity:
            raise ValueError(
                f"first={first}: {other.batch} requests of up to {used} rows do not fit into "
                f"{self.batch} of capacity={self.capacity}"
            )
        rows = slice(first, first + other.batch)
        for mine, theirs in zip(self.layers, other.layers, strict=True):
            if not mine.is_initialized:
                mine.lazy_initialization(theirs.keys, theirs.values)
            mine.keys[rows, :, :used] = theirs.keys[:, :, :used]
            mine.values[rows, :, :used] = theirs.values[:, :, :used]
        self.lens[rows] = other.lens
        self.host_lens[rows] = other.host_lens

    def select(self, keep: Tensor) -> None:
        """Keep the requests ``keep`` (int64 ``[n]``, on the device) and forget the others."""
        for layer in self.layers:
            layer.keys, layer.values, layer.batch = layer.keys[keep], layer.values[keep], len(keep)
        self.lens = self.lens[keep]
        self.host_lens = [self.host_lens[i] for i in keep.tolist()]
        self.batch = len(keep)

    def rows(self, request: int, count: int, layers: int) -> Tensor:
        """Keys and values of the first ``count`` rows of a request in the first layers, ``[count, layers, 2,
        nkv, d]`` in the CPU's memory."""
        both = [
            torch.stack([layer.keys[request, :, :count], layer.values[request, :, :count]])
            for layer in self.layers[:layers]
        ]
        return torch.stack(both).permute(3, 0, 1, 2, 4).contiguous().cpu()

    def reset_rows(self, rows: list[int] | None = None) -> None:
        """Forget the committed rows of the given requests (None: of all)."""
        for i in range(self.batch) if rows is None else rows:
            if not 0 <= i < self.batch:
                raise IndexError(f"rows={rows}: must be in 0..{self.batch - 1}")
            self.lens[i] = 0
            self.host_lens[i] = 0


def attention_mask(positions: Tensor, used: int, window: int, repeat: int, dtype: torch.dtype) -> Tensor:
    """Additive mask ``[B, 1, repeat * rows, used]``: slot s is visible at position t when ``s <= t`` (and ``t
    - s < window``).

    The rows are tiled ``repeat`` times for the query heads that share a key head, see :func:`slot_attention`.
    """
    slots = torch.arange(used, device=positions.device)
    visible = slots <= positions[..., None]
    if window > 0:
        visible &= positions[..., None] - slots < window
    mask = torch.zeros(visible.shape, dtype=dtype, device=positions.device).masked_fill_(
        ~visible, float("-inf")
    )
    return mask.repeat(1, repeat, 1)[:, None]


def slot_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    carryover_step: _Step | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Grouped-query attention without copying keys.

    ``query [B, nh, q, d]``, ``key`` and ``value [B, nkv, used, d]`` -> ``[B, q, nh, d]``. Where the step has
    ``lens``, the operator attends and the mask is one number, the window. Otherwise the mask is from
    :func:`attention_mask`, and the query heads of a key head become further query rows. With a soft cap
    (Gemma 2) the scores are then formed in the open: ``cap * tanh(s / cap)`` before the mask.
    """
    batch, heads, rows, d = query.shape
    if carryover_step is not None and carryover_step.lens is not None:
        assert carryover_step.fresh is not None and attention_mask is not None
        q, k, v, k_new, v_new = (x.transpose(1, 2) for x in (query, key, value, *carryover_step.fresh))
        return ops.segment_attention(
            q,
            k,
            v,
            carryover_step.lens,
            None,
            None,
            None,
            k_new,
            v_new,
            scale=scaling,
            causal=True,
            window=int(attention_mask),
            soft_cap=softcap or 0.0,
        ), None
    packed = query.reshape(batch, key.shape[1], -1, d)
    if softcap:
        scores = torch.matmul(packed, key.transpose(2, 3)) * (d**-0.5 if scaling is None else scaling)
        scores = torch.tanh(scores / softcap) * softcap
        if attention_mask is not None:
            scores = scores + attention_mask
        out = torch.matmul(torch.softmax(scores, -1, dtype=torch.float32).to(value.dtype), value)
    else:
        out = F.scaled_dot_product_attention(packed, key, value, attn_mask=attention_mask, scale=scaling)
    return out.view(batch, heads, rows, -1).transpose(1, 2), None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, slot_attention)
