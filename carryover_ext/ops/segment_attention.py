"""Attention of a block over the committed context, the temporary segment and the block itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._library import ops

_NAME = "carryover_ext::segment_attention"
# Scores that the backward holds at a time (elements of one of its few score-sized tensors).
_CHUNK = 1 << 23


def segment_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    context_lens: Tensor,
    k_segment: Tensor | None,
    v_segment: Tensor | None,
    segment_lens: Tensor | None,
    k_block: Tensor,
    v_block: Tensor,
    block_table: Tensor | None = None,
    *,
    scale: float | None = None,
    causal: bool = False,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
    block_lens: Tensor | None = None,
) -> Tensor:
    """Attention of ``b`` queries a request over three kinds of rows, without joining them.

    The keys of request i are its context rows ``0 .. context_lens[i]-1`` (positions equal to the row), its
    segment rows ``0 .. segment_lens[i]-1`` (positions ``context_lens[i] + j``) and its block rows (positions
    ``context_lens[i] + row``). Query row t of the block sees all of them; with ``causal`` only block rows
    ``<= t``; with ``window = W > 0`` only keys at positions above ``context_lens[i] + t - W``. Rows beyond
    these lengths are never read.

    Args:
        q: ``[B, b, nh, d]``. CPU: float32, bfloat16 (float32 accumulation) or float64 (plain, slow); d up to
            512. GPU: bfloat16 or float16 (float32 accumulation); d a multiple of 8 up to 256.
        k_cache, v_cache: ``[N, page, nkv, d]`` in the dtype of ``q``; nh is a multiple of nkv.
        context_lens: ``[B]`` int32 rows; -1 marks an inactive request, whose output is zero.
        k_segment, v_segment: ``[B, R, nkv, d]`` or None; ``segment_lens``: ``[B]`` int32, 0..R, or None.
        k_block, v_block: ``[B, b, nkv, d]``.
        block_table: ``[B, max_pages]`` int32: context row s of request i is row ``s % page`` of page
            ``block_table[i, s // page]``. None: request i owns page i whole (contiguous). Requests may share
            pages.
        scale: factor on the scores, above 0; None: ``1 / sqrt(d)``.
        causal: order inside the block.
        window: positions that a query sees behind it, itself included; 0: all.
        soft_cap: c > 0 replaces each score s by ``c * tanh(s / c)``.
        sinks: ``[nh]`` float32, one more logit in the softmax denominator of each head.
        block_lens: ``[B]`` int32, rows of the block that exist; None: all b.

    All float tensors may be strided except in their last dimension; nothing is copied. On a GPU their rows
    start at multiples of 16 bytes.

    On a GPU lengths and pages are read by the kernels alone, so that a captured graph follows them: lengths
    beyond their capacity are cut to it, pages outside the cache are taken as rows of zeros;
    :func:`check_segment_attention` finds both. Into how many pieces a long context is cut is decided from the
    shapes and the GPU: the last bits may depend on the batch size and on the capacity of the cache.
    Workspace (float32, PyTorch's allocator): ``pieces * B * b * nh * (d + 2)`` numbers, none for one piece.

    Returns:
        ``[B, b, nh, d]`` contiguous, in the dtype of ``q``. Zero for rows beyond ``block_lens``, for inactive
        requests and for queries that see no key. Visible queries and keys must be finite: the kernel,
        unlike the reference, does not pass a NaN in them on.

    Differentiable in q, k_cache, v_cache, k_segment, v_segment, k_block, v_block and sinks, once, on the CPU.

    Raises:
        RuntimeError: wrong dtype, shape, stride or device; on the CPU also a length beyond its capacity and a
            page outside the cache. The message names the argument, its index and value.

    Source: DFlash's block attention (arXiv 2602.06036) with the temporary segment of Carryover Drafting
    (arXiv 2609.14717); softmax in one pass with running maxima (FlashAttention, arXiv 2205.14135).
    """
    return ops.segment_attention(
        q,
        k_cache,
        v_cache,
        context_lens,
        k_segment,
        v_segment,
        segment_lens,
        k_block,
        v_block,
        block_table,
        sinks,
        block_lens,
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
        causal=causal,
        window=window,
        soft_cap=soft_cap,
    )


def check_segment_attention(
    k_cache: Tensor,
    context_lens: Tensor,
    k_segment: Tensor | None,
    segment_lens: Tensor | None,
    k_block: Tensor,
    block_table: Tensor | None = None,
    block_lens: Tensor | None = None,
) -> None:
    """Checks the lengths and pages of a call of :func:`segment_attention`, on any device.

    The op itself does so on the CPU; on a GPU it reads no values on the host. This function does, and waits
    for the GPU: for debugging, not for a decoding loop.

    Raises:
        RuntimeError: a length beyond its capacity or a page outside the cache, as the op on the CPU says it.
    """
    pages, page = k_cache.shape[:2]
    capacity = min(page * (1 if block_table is None else block_table.shape[1]), 1 << 30)
    limits: list[tuple[str, Tensor | None, int, int, str]] = [
        ("context_lens", context_lens, -1, capacity, "the cache (-1: inactive request)"),
        ("segment_lens", segment_lens, 0, 0 if k_segment is None else k_segment.shape[1], "k_segment"),
        ("block_lens", block_lens, 0, k_block.shape[1], "the block (b)"),
    ]
    for name, lens, least, most, of in limits:
        for i, n in enumerate([] if lens is None else lens.tolist()):
            if not least <= n <= most:
                raise RuntimeError(
                    f"segment_attention: {name}[{i}] = {n} is out of range; it must be {least}..{most}, the "
                    f"capacity of {of}"
                )
    if block_table is None:
        return
    needed = torch.arange(block_table.shape[1], device=block_table.device) * page < context_lens[:, None]
    wrong = (needed & ((block_table < 0) | (block_table >= pages))).nonzero()
    if wrong.shape[0] > 0:
        i, j = wrong[0].tolist()
        raise RuntimeError(
            f"segment_attention: block_table[{i}, {j}] = {int(block_table[i, j])} is out of range: "
            f"context_lens[{i}] = {int(context_lens[i])} needs this page, so it must be 0..{pages - 1}"
        )


@torch.library.register_fake(_NAME)
def _fake(q: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return q.new_empty(q.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Tensor) -> None:
    ctx.options = keyword_only_inputs
    ctx.present = [isinstance(x, Tensor) for x in inputs]
    ctx.save_for_backward(*(x for x in inputs if isinstance(x, Tensor)))


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    saved = iter(ctx.saved_tensors)
    inputs = [next(saved) if here else None for here in ctx.present]
    cache_grad = ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
    found = ops.segment_attention_backward(grad.contiguous(), *inputs, **ctx.options, cache_grad=cache_grad)
    where = {0: 0, 1: 1, 2: 2, 4: 3, 5: 4, 7: 5, 8: 6, 10: 7}  # argument -> result
    return tuple(
        found[where[i]] if i in where and ctx.needs_input_grad[i] else None for i in range(len(inputs))
    )


torch.library.register_autograd(_NAME, _backward, setup_context=_setup)


@torch.library.register_fake(_NAME + "_backward")
def _backward_fake(
    grad: Tensor,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    context_lens: Tensor,
    k_segment: Tensor | None,
    v_segment: Tensor | None,
    segment_lens: Tensor | None,
    k_block: Tensor,
    v_block: Tensor,
    block_table: Tensor | None,
    sinks: Tensor | None,
    block_lens: Tensor | None,
    *,
    cache_grad: bool,
    **options: Any,
) -> list[Tensor]:
    def like(x: Tensor | None, wanted: bool = True) -> Tensor:
        return x.new_empty(x.shape) if x is not None and wanted else q.new_empty(0)

    return [
        like(q),
        like(k_cache, cache_grad),
        like(v_cache, cache_grad),
        like(k_segment),
        like(v_segment),
        like(k_block),
        like(v_block),
        like(sinks),
    ]


def _groups(block_table: Tensor | None, lens: list[int], scores_a_row: int) -> list[tuple[int, int]]:
    """Runs of requests that share all their pages (anchors of one sequence): their context products are one
    GEMM."""
    tables = None if block_table is None else block_table.tolist()
    runs: list[tuple[int, int]] = []
    for i in range(len(lens)):
        if runs and tables is not None:
            first = runs[-1][0]
            longest = max(max(lens[first : i + 1]), 1)
            if tables[first] == tables[i] and (i + 1 - first) * scores_a_row * longest <= _CHUNK:
                runs[-1] = (first, i + 1)
                continue
        runs.append((i, i + 1))
    return [(a, b) for a, b in runs if max(lens[a:b]) >= 0]


@torch.library.impl(_NAME + "_backward", "CPU")
def _backward_kernel(
    grad: Tensor,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    context_lens: Tensor,
    k_segment: Tensor | None,
    v_segment: Tensor | None,
    segment_lens: Tensor | None,
    k_block: Tensor,
    v_block: Tensor,
    block_table: Tensor | None,
    sinks: Tensor | None,
    block_lens: Tensor | None,
    *,
    scale: float,
    causal: bool,
    window: int,
    soft_cap: float,
    cache_grad: bool,
) -> list[Tensor]:
    """Probabilities are computed again from the formula of the reference, in float32 (float64 for
    float64)."""
    exact = torch.float64 if q.dtype == torch.float64 else torch.float32
    _batch, rows, heads, d = q.shape
    page, kv_heads = k_cache.shape[1:3]
    group = heads // kv_heads
    lens = context_lens.tolist()

    def zeros(x: Tensor | None, wanted: bool = True, dtype: torch.dtype = exact) -> Tensor:
        return (
            torch.zeros(x.shape, dtype=dtype) if x is not None and wanted else torch.zeros(0, dtype=q.dtype)
        )

    dq, dk_block, dv_block = zeros(q), zeros(k_block), zeros(v_block)
    dk_cache, dv_cache = zeros(k_cache, cache_grad), zeros(v_cache, cache_grad)
    dk_segment, dv_segment = zeros(k_segment), zeros(v_segment)
    dsinks = zeros(sinks)
    at = torch.arange(rows)
    carried = 0 if k_segment is None else k_segment.shape[1]

    def queries(x: Tensor, live: Tensor) -> Tensor:  # [G, b, nh, d] -> [nkv, G, group * b, d]
        x = torch.where(live[..., None, None], x.to(exact), 0).unflatten(2, (kv_heads, group))
        return x.permute(2, 0, 3, 1, 4).reshape(kv_heads, -1, group * rows, d)

    def back(x: Tensor) -> Tensor:  # [nkv, G, group * b, d] -> [G, b, nh, d]
        return x.unflatten(2, (group, rows)).permute(1, 3, 0, 2, 4).reshape(-1, rows, heads, d)

    for first, stop in _groups(block_table, lens, heads * rows) if q.numel() else ():
        part = slice(first, stop)
        n = stop - first
        length = context_lens[part].long()[:, None]  # [G, 1]
        live = (at < (block_lens[part].long()[:, None] if block_lens is not None else rows)) & (length >= 0)
        longest = max(max(lens[part]), 0)
        s = torch.arange(longest)
        if block_table is None:
            slots = s + first * page
        else:
            slots = block_table[first].long()[s // page] * page + s % page
        k_context, v_context = (  # [nkv, C, d]
            c[slots // page, slots % page].to(exact).transpose(0, 1) for c in (k_cache, v_cache)
        )
        own_exists, own_position = live, length + at
        k_own, v_own = k_block[part], v_block[part]
        if carried and k_segment is not None and v_segment is not None and segment_lens is not None:
            j = torch.arange(carried)
            own_exists = torch.cat([(j < segment_lens[part, None]) & (length >= 0), live], 1)
            own_position = torch.cat([length + j, own_position], 1)
            k_own = torch.cat([k_segment[part], k_own], 1)
            v_own = torch.cat([v_segment[part], v_own], 1)
        k_own, v_own = (  # [nkv, G, O, d], unused rows may be NaN
            torch.where(own_exists[..., None, None], x.to(exact), 0).permute(2, 0, 1, 3)
            for x in (k_own, v_own)
        )
        qg, dout = queries(q[part], live), queries(grad[part], live)

        query_position = (length + at)[:, :, None]  # [G, b, 1]
        seen = torch.cat([(s < length), own_exists], 1)[:, None].expand(n, rows, -1) & live[:, :, None]
        if window > 0:
            position = torch.cat([s.expand(n, -1), own_position], 1)[:, None]
            seen = seen & (query_position - position < window)
        if causal:
            seen = torch.cat([seen[..., :-rows], seen[..., -rows:] & (at <= at[:, None])], -1)
        seen = seen.repeat(1, group, 1)  # [G, group * b, C + O]

        def with_own(shared: Tensor, own: Tensor, n: int = n) -> Tensor:
            return torch.cat([shared.unflatten(1, (n, group * rows)), own], -1)

        flat_q, flat_dout = qg.flatten(1, 2), dout.flatten(1, 2)  # [nkv, G * group * b, d]
        scores = with_own(flat_q @ k_context.transpose(1, 2), qg @ k_own.transpose(2, 3)).mul_(scale)
        slope = None
        if soft_cap > 0:
            scores = torch.tanh(scores / soft_cap)
            slope = 1 - scores.square()
            scores = scores * soft_cap
        scores = scores.masked_fill_(~seen, float("-inf"))
        none = ~seen.any(-1, keepdim=True)
        top = scores.amax(-1, keepdim=True)
        if sinks is not None:
            sink = (
                sinks.to(exact)
                .view(kv_heads, 1, group, 1)
                .expand(-1, n, -1, rows)
                .reshape(kv_heads, n, -1, 1)
            )
            top = torch.maximum(top, sink)
        p = torch.exp(scores - top.masked_fill(none, 0))
        total = p.sum(-1, keepdim=True)
        if sinks is not None:
            total = total + torch.exp(sink - top)
        p = p / total.masked_fill(none, 1)
        dp = with_own(flat_dout @ v_context.transpose(1, 2), dout @ v_own.transpose(2, 3))
        delta = (p * dp).sum(-1, keepdim=True)
        ds = p * (dp - delta)
        if slope is not None:
            ds = ds * slope
        ds = ds.mul_(scale)

        ds_own, p_own = ds[..., longest:], p[..., longest:]
        dq_part = ds_own @ k_own
        if longest > 0:
            ds_shared = ds[..., :longest].flatten(1, 2)
            dq_part = dq_part + (ds_shared @ k_context).view_as(dq_part)
            if cache_grad:
                p_shared = p[..., :longest].flatten(1, 2)
                for target, value in ((dk_cache, ds_shared.mT @ flat_q), (dv_cache, p_shared.mT @ flat_dout)):
                    target.view(-1, kv_heads, d).index_add_(0, slots, value.transpose(0, 1))
        dq[part] = back(dq_part)
        dk_own, dv_own = ((x.mT @ y).permute(1, 2, 0, 3) for x, y in ((ds_own, qg), (p_own, dout)))
        dk_block[part], dv_block[part] = dk_own[:, -rows:], dv_own[:, -rows:]
        if carried:
            dk_segment[part], dv_segment[part] = dk_own[:, :-rows], dv_own[:, :-rows]
        if sinks is not None:
            share = torch.exp(sink - top).masked_fill(none, 0) / total.masked_fill(none, 1)
            dsinks += (-share * delta).view(kv_heads, n, group, rows).sum((1, 3)).flatten()

    found = (dq, dk_cache, dv_cache, dk_segment, dv_segment, dk_block, dv_block)
    return [*(x.to(q.dtype) for x in found), dsinks.to(sinks.dtype) if sinks is not None else dsinks]
