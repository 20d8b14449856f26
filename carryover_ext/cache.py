"""The drafter's keys and values: committed context (contiguous or paged) and the temporary segment.

Rules of the segment: it holds at most ``R = block_size - 1`` rows per request and layer, is replaced whole by
every commit, and is empty after prefill, after a full accept, and after :meth:`DrafterCache.reset`. It never
enters the committed part.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class DrafterCache:
    """Keys and values of ``L`` drafter layers for ``B`` requests.

    Attributes:
        k, v: committed context ``[L, N, page, nkv, d]``. Contiguous: ``N = B`` and ``page`` is the capacity.
        block_table: ``[B, max_pages]`` int32 page ids, or None when contiguous.
        lens: ``[B]`` int32, committed rows of each request; row ``s`` has position ``s``.
        k_segment, v_segment: ``[L, B, R, nkv, d]``. Rows ``j >= segment_lens[i]`` are never read.
        segment_lens: ``[B]`` int32.
        cos_sin: ``[P, rot]`` float32 rotary table that covers every position of the cache and of a block
            after it.
    """

    def __init__(
        self,
        *,
        layers: int,
        batch: int,
        capacity: int,
        kv_heads: int,
        head_dim: int,
        segment_rows: int,
        cos_sin: Tensor,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        page_size: int | None = None,
        block_table: Tensor | None = None,
    ) -> None:
        if batch < 0 or capacity < 1:
            raise ValueError(
                f"batch={batch}, capacity={capacity}: batch must be at least 0 and capacity at least 1"
            )
        if page_size is not None and page_size < 1:
            raise ValueError(f"page_size={page_size}: must be at least 1, or None for a contiguous cache")
        if page_size is None:
            if block_table is not None:
                raise ValueError(
                    "block_table is given but page_size is None: a block table needs a page size"
                )
            pages, page = batch, capacity
        else:
            per_request = -(-capacity // page_size)
            if block_table is None:
                table = torch.arange(batch * per_request, dtype=torch.int32).view(batch, per_request)
                block_table = table.to(device)
            if block_table.dtype != torch.int32 or block_table.dim() != 2 or block_table.shape[0] != batch:
                raise ValueError(
                    f"block_table is {tuple(block_table.shape)} {block_table.dtype}: must be "
                    f"[{batch}, pages] int32"
                )
            pages, page = (int(block_table.max()) + 1 if block_table.numel() else 0), page_size
            capacity = block_table.shape[1] * page_size
        self.page_size = page_size
        self.capacity = capacity
        self.block_table = block_table
        shape, segment = (
            (layers, pages, page, kv_heads, head_dim),
            (layers, batch, segment_rows, kv_heads, head_dim),
        )
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = torch.zeros(shape, dtype=dtype, device=device)
        self.k_segment = torch.zeros(segment, dtype=dtype, device=device)
        self.v_segment = torch.zeros(segment, dtype=dtype, device=device)
        self.lens = torch.zeros(batch, dtype=torch.int32, device=device)
        self.segment_lens = torch.zeros(batch, dtype=torch.int32, device=device)
        self.cos_sin = cos_sin

    @property
    def batch(self) -> int:
        return self.lens.shape[0]

    @property
    def segment_rows(self) -> int:
        """Rows that the segment can hold for each request."""
        return self.k_segment.shape[2]

    def reset(self, rows: Sequence[int] | Tensor | None = None) -> None:
        """Forget the committed rows and the segment of the given requests (None: of all), for the slot's next
        owner.
        """
        if rows is None:
            self.lens.zero_()
            self.segment_lens.zero_()
            return
        index = torch.as_tensor(rows, dtype=torch.int64, device=self.lens.device)
        if index.numel() and (int(index.min()) < 0 or int(index.max()) >= self.batch):
            raise IndexError(f"rows={index.tolist()}: must be in 0..{self.batch - 1}")
        self.lens.index_fill_(0, index, 0)
        self.segment_lens.index_fill_(0, index, 0)

    def drop_segment(self) -> None:
        """Empty the segment of every request and keep the committed rows (preemption, or a change of tokens
        outside).
        """
        self.segment_lens.zero_()

    def requests(self, row_start: Tensor, rows: int) -> Tensor:
        """The request ``[rows]`` int64 that owns each row, from ``row_start [B+1]`` int32."""
        index = torch.arange(rows, dtype=row_start.dtype, device=row_start.device)
        return torch.searchsorted(row_start, index, right=True) - 1

    def positions(self, row_start: Tensor, rows: int) -> Tensor:
        """Verify positions ``[rows]`` int32: each request's rows follow its committed ones."""
        request = self.requests(row_start, rows)
        offset = torch.arange(rows, dtype=torch.int32, device=row_start.device) - row_start[request]
        return self.lens[request] + offset

    def slots(self, positions: Tensor, row_start: Tensor) -> Tensor:
        """Flat cache slots ``[T]`` int64 (page * page size + offset) of rows at ``positions [T]`` int32.

        -1 (written nowhere) for a position of -1 and for one past the capacity: rows after the last slot can
        only be rejected ones.
        """
        request = self.requests(row_start, positions.shape[0])
        where = positions.to(torch.int64)
        inside = (where >= 0) & (where < self.capacity)
        safe = where.clamp(0, self.capacity - 1)
        if self.block_table is None:
            slot = request * self.capacity + safe
        else:
            assert self.page_size is not None
            page = self.block_table[request, safe // self.page_size].to(torch.int64)
            slot = page * self.page_size + safe % self.page_size
        return torch.where(inside, slot, -1)
