"""Kernels of vLLM and FlashInfer for the rows of bench/ops.py, where these packages are installed.

Each function returns ``{name: call}`` for the peers that are here; neither package is needed. What a peer
does otherwise than the op is in bench/README.md. Before a peer is timed its result is compared with the op's;
one that differs or fails is left out with a line that says so.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from common import Call
from torch import Tensor

PAGE = 32  # slots; vLLM's CPU attention wants a multiple


def installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


@functools.cache
def vllm_ops() -> Any | None:
    """vLLM's operators, registered for this platform."""
    if not installed("vllm"):
        return None
    from vllm import _custom_ops
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    if hasattr(current_platform, "register_triton_kernel_overrides"):
        current_platform.register_triton_kernel_overrides()
    return _custom_ops


def checked(name: str, make: Callable[[], tuple[Call, Callable[[], None]]]) -> dict[str, Call]:
    """The peer that `make` builds with its comparison, unless one of the two fails."""
    try:
        call, compare = make()
        compare()
    except Exception as error:
        reason = (str(error).splitlines() or ["without a reason"])[0][:160]
        print(f"{name}: left out ({type(error).__name__}: {reason})", file=sys.stderr)
        return {}
    return {name: call}


def close(actual: Tensor, expected: Tensor, tolerance: float = 0.02) -> None:
    torch.testing.assert_close(actual.float(), expected.float(), rtol=tolerance, atol=tolerance)


# ---- segment_attention: the segment and the block as rows of the paged cache, behind the context ----


def paged(kv: tuple[tuple[Tensor, ...], tuple[Tensor, ...]], carried: int) -> SimpleNamespace:
    """Keys and values ``(context, segment, block)`` in the rows and slots of a paged cache."""
    (context, segment, block), (v_context, v_segment, v_block) = kv
    batch, length, heads, d = context.shape
    total = length + carried + block.shape[1]
    pages = -(-total // PAGE)
    slots = torch.arange(batch)[:, None] * pages * PAGE + torch.arange(total)
    return SimpleNamespace(
        pages=pages,
        total=total,
        table=torch.arange(batch * pages, dtype=torch.int32).view(batch, pages),
        lens=torch.full((batch,), total, dtype=torch.int32),
        old=(context.flatten(0, 1), v_context.flatten(0, 1), slots[:, :length].flatten()),
        new=(
            torch.cat([segment[:, :carried], block], 1).flatten(0, 1),
            torch.cat([v_segment[:, :carried], v_block], 1).flatten(0, 1),
            slots[:, length:].flatten(),
        ),
        shape=(batch * pages, PAGE, heads, d),
    )


def attention(args: tuple, carried: int, expected: Tensor) -> dict[str, Call]:
    """`args` of segment_attention, all requests with `carried` rows; `expected` is its result."""
    q, k_cache, v_cache, _, k_segment, v_segment, _, k_block, v_block = args
    kv = (k_cache, k_segment, k_block), (v_cache, v_segment, v_block)
    found: dict[str, Call] = {}
    if vllm_ops() is not None and not q.is_cuda:
        found |= checked("vLLM", lambda: _vllm_cpu_attention(q, paged(kv, carried), expected))
    if installed("vllm") and q.is_cuda:
        found |= checked("vLLM", lambda: _vllm_flash_attention(q, paged(kv, carried), expected))
    if installed("flashinfer") and q.is_cuda:
        found |= checked("FlashInfer", lambda: _flashinfer_attention(q, paged(kv, carried), expected))
    return found


def _starts(q: Tensor) -> Tensor:
    return torch.arange(q.shape[0] + 1, dtype=torch.int32) * q.shape[1]


def _vllm_cpu_attention(q: Tensor, p: SimpleNamespace, expected: Tensor) -> tuple[Call, Callable[[], None]]:
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    vllm = vllm_ops()
    batch, rows, heads, d = q.shape
    pages, page, kv_heads, _ = p.shape
    isa = _get_attn_isa(q.dtype, PAGE, d)
    both = torch.zeros(pages, kv_heads, 2 * page, d, dtype=q.dtype)
    k_cache, v_cache = both.chunk(2, dim=2)
    vllm.cpu_attn_reshape_and_cache(*p.old[:2], k_cache, v_cache, p.old[2], isa)
    plan = vllm.cpu_attn_get_scheduler_metadata(
        batch, heads, kv_heads, d, p.lens, q.dtype, _starts(q), False, -1, isa, True
    )
    flat, out, starts = q.flatten(0, 1), torch.empty(batch * rows, heads, d, dtype=q.dtype), _starts(q)

    def call() -> Tensor:
        vllm.cpu_attn_reshape_and_cache(*p.new[:2], k_cache, v_cache, p.new[2], isa)
        vllm.cpu_attention_with_kv_cache(
            flat, k_cache, v_cache, out, starts, p.lens, d**-0.5, False, None, -1, p.table, 0.0, plan, None
        )
        return out

    return call, lambda: close(call().view_as(expected), expected)


def _vllm_flash_attention(q: Tensor, p: SimpleNamespace, expected: Tensor) -> tuple[Call, Callable[[], None]]:
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    vllm = vllm_ops()
    k_cache, v_cache = (torch.zeros(p.shape, dtype=q.dtype) for _ in "kv")
    one = torch.ones(1)
    starts, flat = _starts(q), q.flatten(0, 1)

    def write(k: Tensor, v: Tensor, slots: Tensor) -> None:
        vllm.reshape_and_cache_flash(k, v, k_cache, v_cache, slots, "auto", one, one)

    def call() -> Tensor:
        write(*p.new)
        return flash_attn_varlen_func(
            flat, k_cache, v_cache, max_seqlen_q=q.shape[1], cu_seqlens_q=starts, max_seqlen_k=p.total,
            seqused_k=p.lens, softmax_scale=q.shape[-1] ** -0.5, causal=False, block_table=p.table,
        )  # fmt: skip

    write(*p.old)
    return call, lambda: close(call().view_as(expected), expected)


def _flashinfer_attention(q: Tensor, p: SimpleNamespace, expected: Tensor) -> tuple[Call, Callable[[], None]]:
    import flashinfer

    batch, _, heads, d = q.shape
    _, page, kv_heads, _ = p.shape
    caches = tuple(torch.zeros(p.shape, dtype=q.dtype) for _ in "kv")
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(torch.empty(128 << 20, dtype=torch.uint8), "NHD")
    wrapper.plan(
        _starts(q), torch.arange(batch + 1, dtype=torch.int32) * p.pages, p.table.flatten(),
        torch.full((batch,), (p.total - 1) % page + 1, dtype=torch.int32), heads, kv_heads, d, page,
        causal=False, q_data_type=q.dtype,
    )  # fmt: skip
    flat = q.flatten(0, 1)

    def write(k: Tensor, v: Tensor, slots: Tensor) -> None:
        for cache, rows in zip(caches, (k, v), strict=True):
            cache.flatten(0, 1).index_copy_(0, slots, rows)

    def call() -> Tensor:
        write(*p.new)
        return wrapper.run(flat, caches)

    write(*p.old)
    return call, lambda: close(call().view_as(expected), expected)


# ---- project_kv: vLLM's norm, linear layer and rotation, one after the other ----


def projection(
    features: Tensor, positions: Tensor, weights: tuple, expected: tuple[Tensor, Tensor]
) -> dict[str, Call]:
    """Without the embedding of carried rows, which vLLM does not have; `expected` without it, too."""
    if vllm_ops() is None:
        return {}
    return checked("vLLM", lambda: _vllm_projection(features, positions, weights, expected))


def _vllm_projection(
    features: Tensor, positions: Tensor, weights: tuple, expected: tuple[Tensor, Tensor]
) -> tuple[Call, Callable[[], None]]:
    vllm = vllm_ops()
    fc, norm, kv_weight, k_norm, cos_sin, _ = weights
    layers, rows, heads, d = expected[0].shape
    table, repeated = cos_sin.to(features.dtype), positions.long().repeat(layers)

    def call() -> tuple[Tensor, Tensor]:
        u = F.linear(features, fc)
        h = torch.empty_like(u)
        vllm.rms_norm(h, u, norm, 1e-6)
        k, v = F.linear(h, kv_weight).view(rows, layers, 2, heads, d).permute(2, 1, 0, 3, 4).contiguous()
        normed = torch.empty_like(k)
        for layer in range(layers):
            vllm.rms_norm(normed[layer], k[layer], k_norm[layer], 1e-6)
        vllm.rotary_embedding(repeated, normed.view(layers * rows, heads * d), None, d, table, True)
        return normed, v

    def compare() -> None:
        for mine, theirs in zip(expected, call(), strict=True):  # its table of cosines is rounded, too
            close(theirs, mine, 0.05)

    return call, compare


# ---- accept ----


def acceptance(args: tuple, expected: tuple[Tensor, Tensor]) -> dict[str, Call]:
    """`args` of accept. Sampling peers draw their own numbers: the same law, not the same tokens. What is
    compared then is that drafts come first."""
    tokens, logits, q, _, temperature = args
    found: dict[str, Call] = {}
    if vllm_ops() is not None:
        found |= checked("vLLM", lambda: _vllm_rejection(tokens, logits, q, temperature, expected))
    if installed("flashinfer") and temperature > 0 and logits.is_cuda:
        found |= checked("FlashInfer", lambda: _flashinfer_chain(tokens, logits, q))
    return found


def _leads_with_drafts(out: Tensor, tokens: Tensor) -> None:
    assert out.shape == (tokens.shape[0], tokens.shape[1] + 1)
    for drafted, row in zip(tokens.tolist(), out.tolist(), strict=True):
        emitted = [t for t in row if t >= 0]
        assert emitted and emitted[:-1] == drafted[: len(emitted) - 1]


def _vllm_rejection(
    tokens: Tensor, logits: Tensor, q: Tensor | None, temperature: float, expected: tuple[Tensor, Tensor]
) -> tuple[Call, Callable[[], None]]:
    from vllm.v1.sample.rejection_sampler import rejection_sample

    batch, drafts = tokens.shape
    greedy = temperature == 0
    sampling = SimpleNamespace(
        all_greedy=greedy, all_random=not greedy, generators={}, temperature=torch.full((batch,), temperature)
    )
    ends = torch.arange(1, batch + 1, dtype=torch.int32) * drafts
    flat, probs = tokens.flatten().int(), None if q is None else q.flatten(0, 1)

    def call() -> Tensor:
        last = logits[:, -1].float()  # vLLM takes rows out of all logits and makes them float32
        judged = logits[:, :-1].flatten(0, 1).float()
        if greedy:
            bonus = last.argmax(-1)
        else:  # as vLLM's sampler draws it
            judged /= temperature
            law = (last / temperature).softmax(-1)
            bonus = law.div_(torch.empty_like(law).exponential_()).argmax(-1)
        return rejection_sample(
            flat, [drafts] * batch, drafts, ends, probs, judged, bonus[:, None].int(),
            sampling,
        )  # fmt: skip

    def compare() -> None:
        out = call()
        _leads_with_drafts(out, tokens)
        if greedy:
            accepted, token = expected
            assert ((out >= 0).sum(1) == accepted + 1).all()
            assert (out.gather(1, accepted.long()[:, None])[:, 0] == token).all()

    return call, compare


def _flashinfer_chain(tokens: Tensor, logits: Tensor, q: Tensor | None) -> tuple[Call, Callable[[], None]]:
    from flashinfer.sampling import chain_speculative_sampling

    flat = tokens.int()

    def call() -> Tensor:
        return chain_speculative_sampling(q, flat, logits.float().softmax(-1))[0]

    return call, lambda: _leads_with_drafts(call(), tokens)
