"""The same ops in plain PyTorch: the ground truth of every test, and the form to read first.

Each function has the signature of its namesake in :mod:`carryover_ext.ops` and runs in any float dtype,
float64
included. They check nothing; see the ops for shapes, dtypes and errors.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def gather_rejected(
    hidden: Tensor, row_start: Tensor, num_accepted: Tensor, max_rejected: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Twin of :func:`carryover_ext.ops.gather_rejected`."""
    start, end = row_start[:-1], row_start[1:]
    active = num_accepted >= 0
    lens = torch.where(active, (end - start - num_accepted - 1).clamp(max=max_rejected), 0)
    j = torch.arange(max_rejected, device=hidden.device)
    index = torch.where(j < lens[:, None], start[:, None] + num_accepted[:, None] + 1 + j, -1)
    padded = torch.cat((hidden, hidden.new_zeros(1, hidden.shape[1])))  # row -1 is the zero row
    return padded[index.long()], index.to(torch.int32), lens.to(torch.int32)


def rms_norm(x: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x^2) + eps)`` over the last dimension, in the dtype of x."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def rotate(x: Tensor, cos_sin: Tensor) -> Tensor:
    """RoPE, neox style: x ``[..., d]``, cos_sin ``[..., rot]`` (rot/2 cosines, rot/2 sines), rot <= d."""
    half = cos_sin.shape[-1] // 2
    cos, sin = cos_sin[..., :half], cos_sin[..., half:]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)


def project_kv(
    features: Tensor,
    positions: Tensor,
    fc_weight: Tensor,
    norm_weight: Tensor,
    kv_weight: Tensor,
    k_norm_weight: Tensor,
    cos_sin: Tensor,
    carry_embedding: Tensor | None = None,
    carried: Tensor | None = None,
    *,
    eps: float = 1e-6,
    carry_embed_at: str = "pre_norm",
) -> tuple[Tensor, Tensor]:
    """Twin of :func:`carryover_ext.ops.project_kv`."""
    dtype, wide = features.dtype, _wide(features.dtype)
    layers, dim = k_norm_weight.shape
    embed: Tensor | float = 0.0
    if carried is not None and carry_embedding is not None:
        embed = torch.where(carried[:, None], carry_embedding.to(wide), 0.0)
    x = F.linear(features, fc_weight).to(wide)
    if carry_embed_at == "pre_norm":
        x = x + embed
    h = rms_norm(x, eps) * norm_weight.to(wide)
    if carry_embed_at == "post_norm":
        h = h + embed
    kv = F.linear(h.to(dtype), kv_weight).unflatten(1, (layers, 2, -1, dim))
    k, v = kv[:, :, 0].to(wide), kv[:, :, 1]
    k = rms_norm(k, eps) * k_norm_weight.to(wide)[:, None]
    k = rotate(k, cos_sin.to(wide)[positions.clamp(min=0).long()][:, None, None])
    padding = (positions < 0)[:, None, None, None]
    k, v = k.to(dtype).masked_fill(padding, 0.0), v.masked_fill(padding, 0.0)
    return k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous()


def commit_and_carry(
    features: Tensor,
    positions: Tensor,
    row_start: Tensor,
    num_accepted: Tensor,
    slot_mapping: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_segment: Tensor,
    v_segment: Tensor,
    segment_lens: Tensor,
    fc_weight: Tensor,
    norm_weight: Tensor,
    kv_weight: Tensor,
    k_norm_weight: Tensor,
    cos_sin: Tensor,
    carry_embedding: Tensor | None = None,
    *,
    eps: float = 1e-6,
    carry_embed_at: str = "pre_norm",
    carry: bool = True,
) -> None:
    """Twin of :func:`carryover_ext.ops.commit_and_carry`: project, then a loop over the rows."""
    rejected = torch.zeros_like(positions, dtype=torch.bool)
    for i, m in enumerate(num_accepted.tolist()):
        if m >= 0:
            rejected[int(row_start[i]) + m + 1 : int(row_start[i + 1])] = True
    k, v = project_kv(
        features, positions, fc_weight, norm_weight, kv_weight, k_norm_weight, cos_sin, carry_embedding,
        rejected if carry and carry_embedding is not None else None, eps=eps, carry_embed_at=carry_embed_at,
    )  # fmt: skip
    page, room = k_cache.shape[2], k_segment.shape[2]
    for i, m in enumerate(num_accepted.tolist()):
        length = 0
        for t in range(int(row_start[i]), int(row_start[i + 1])):
            if m < 0 or positions[t] < 0:
                continue
            if not rejected[t]:
                slot = int(slot_mapping[t])
                if slot >= 0:
                    k_cache[:, slot // page, slot % page] = k[:, t]
                    v_cache[:, slot // page, slot % page] = v[:, t]
            elif carry and length < room:
                k_segment[:, i, length] = k[:, t]
                v_segment[:, i, length] = v[:, t]
                length += 1
        segment_lens[i] = length


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
    """Twin of :func:`carryover_ext.ops.segment_attention`: concatenated keys, one mask, one softmax, in the
    dtype of ``q``."""
    batch, rows, heads, d = q.shape
    page, kv_heads = k_cache.shape[1:3]
    group = heads // kv_heads
    scale = d**-0.5 if scale is None else scale
    length = context_lens.long()[:, None]
    at = torch.arange(rows, device=q.device)
    live = at < (block_lens.long()[:, None] if block_lens is not None else rows)  # [B, b]

    # Per part of the keys: rows, which of them exist, and their positions.
    slots = torch.arange(page * (block_table.shape[1] if block_table is not None else 1), device=q.device)
    exists = (slots < length) & (length >= 0)
    if block_table is None:
        k_context, v_context = k_cache[:batch], v_cache[:batch]
    else:
        pages = torch.where(exists, block_table.long()[:, slots // page], 0)
        offsets = torch.where(exists, slots % page, 0)
        k_context, v_context = (c[pages, offsets] for c in (k_cache, v_cache))
    parts = [(k_context, v_context, exists, slots.expand(batch, -1))]
    if k_segment is not None:
        assert v_segment is not None and segment_lens is not None
        j = torch.arange(k_segment.shape[1], device=q.device)
        parts.append((k_segment, v_segment, (j < segment_lens[:, None]) & (length >= 0), length + j))
    parts.append((k_block, v_block, live & (length >= 0), length + at))

    # Rows that do not exist may hold anything, NaN included.
    k = torch.cat([torch.where(e[..., None, None], k, 0) for k, _, e, _ in parts], 1)
    v = torch.cat([torch.where(e[..., None, None], v, 0) for _, v, e, _ in parts], 1)
    query = torch.where(live[..., None, None], q, 0)
    seen = torch.cat([e for _, _, e, _ in parts], 1)[:, None].expand(-1, rows, -1)
    if window > 0:
        position = torch.cat([p for _, _, _, p in parts], 1)
        seen = seen & ((length + at)[:, :, None] - position[:, None] < window)
    if causal:
        before = torch.ones(rows, k.shape[1], dtype=torch.bool, device=q.device)
        before[:, k.shape[1] - rows :] = at <= at[:, None]
        seen = seen & before
    seen = (seen & live[..., None])[:, None, None]  # [B, 1, 1, b, keys]

    grouped = query.unflatten(2, (kv_heads, group)).permute(0, 2, 3, 1, 4)  # [B, nkv, group, b, d]
    scores = grouped @ k.permute(0, 2, 3, 1)[:, :, None] * scale
    if soft_cap > 0:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        extra = sinks.to(q.dtype).view(kv_heads, group, 1, 1).expand(batch, -1, -1, rows, 1)
        scores = torch.cat([scores, extra], -1)
    none = ~seen.any(-1, keepdim=True)  # queries that see no key: zero
    p = torch.softmax(scores.masked_fill(none, 0), -1).masked_fill(none, 0)[..., : k.shape[1]]
    out = p @ v.permute(0, 2, 1, 3)[:, :, None]
    return out.permute(0, 3, 1, 2, 4).reshape(batch, rows, heads, d)


def accept(
    draft_tokens: Tensor,
    target_logits: Tensor,
    draft_probs: Tensor | None = None,
    uniforms: Tensor | None = None,
    temperature: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Twin of :func:`carryover_ext.ops.accept`."""
    batch, drafts = draft_tokens.shape
    rows = torch.arange(batch, device=draft_tokens.device)
    if temperature == 0:
        best = target_logits.argmax(-1)
        accepted = (best[:, :drafts] == draft_tokens).long().cumprod(1).sum(1)
        return accepted.int(), best[rows, accepted]
    assert uniforms is not None
    exact = torch.float64 if target_logits.dtype == torch.float64 else torch.float32
    p = torch.softmax(target_logits.to(exact) / temperature, -1)
    token = draft_tokens.clamp(min=0)[..., None]
    p_token = p[:, :drafts].gather(2, token)[..., 0]
    q_token = 1.0 if draft_probs is None else draft_probs.gather(2, token)[..., 0].to(exact)
    held = (uniforms[:, :drafts] * q_token < p_token) & (draft_tokens >= 0)
    accepted = held.long().cumprod(1).sum(1)

    weights = p[rows, accepted].double()  # the law of the next token, not normalised
    if drafts > 0:
        stop = accepted.clamp(max=drafts - 1)
        refused = draft_tokens[rows, stop]
        if draft_probs is None:
            q = torch.zeros_like(weights).scatter_(1, refused.clamp(min=0)[:, None], 1.0)
        else:
            q = draft_probs[rows, stop].double()
        residual = (weights - q).clamp(min=0)
        # Nothing left (p equals q up to rounding): p itself.
        use = (accepted < drafts) & (refused >= 0) & (residual.sum(-1) > 0)
        weights = torch.where(use[:, None], residual, weights)
    cdf = weights.cumsum(-1)
    drawn = torch.searchsorted(cdf, uniforms[:, drafts:].double() * cdf[:, -1:], right=True)[:, 0]
    last = weights.shape[-1] - 1 - (weights > 0).long().flip(-1).argmax(-1)
    return accepted.int(), torch.minimum(drawn, last)


def philox4x32(counter: Tensor, key: Tensor) -> Tensor:
    """Philox4x32-10: four words of random bits for each counter ``[..., 4]`` under a key ``[..., 2]``. Words
    are int64 numbers of 0..2^32 - 1."""
    mask = 0xFFFFFFFF
    c0, c1, c2, c3 = counter.unbind(-1)
    k0, k1 = key.unbind(-1)
    for _ in range(10):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2  # modulo 2^64: the bits are right, whatever the sign
        c0, c1, c2, c3 = (b >> 32 & mask) ^ c1 ^ k0, b & mask, (a >> 32 & mask) ^ c3 ^ k1, a & mask
        k0, k1 = k0 + 0x9E3779B9 & mask, k1 + 0xBB67AE85 & mask
    return torch.stack((c0, c1, c2, c3), -1)


def philox_uniforms(seeds: Tensor, offsets: Tensor | None, steps: int) -> Tensor:
    """``[B, steps]`` float32 in [0, 1): number ``offsets + k`` of each seed's stream (int64 ``[B]``). What
    :func:`markov_sample` draws with."""
    at = (
        torch.arange(steps, device=seeds.device)
        + (torch.zeros_like(seeds) if offsets is None else offsets)[:, None]
    )
    words = torch.stack((at & 0xFFFFFFFF, at >> 32 & 0xFFFFFFFF), -1)
    counter = torch.cat((words, torch.zeros_like(words)), -1)
    key = torch.stack((seeds & 0xFFFFFFFF, seeds >> 32 & 0xFFFFFFFF), -1)[:, None].expand(-1, steps, -1)
    return (philox4x32(counter, key)[..., 0] >> 8).float() * 2.0**-24


def markov_sample(
    base_logits: Tensor,
    prev_tokens: Tensor,
    markov_w1: Tensor,
    markov_w2: Tensor,
    d2t: Tensor | None = None,
    uniforms: Tensor | None = None,
    temperature: float = 0.0,
    with_probs: bool = False,
    seeds: Tensor | None = None,
    offsets: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Twin of :func:`carryover_ext.ops.markov_sample`: one step after the other."""
    batch, steps, vocab = base_logits.shape
    if seeds is not None:
        uniforms = philox_uniforms(seeds, offsets, steps)
    wide = _wide(base_logits.dtype)
    padding = prev_tokens < 0
    tokens = prev_tokens.new_empty(batch, steps)
    token_probs = torch.empty(batch, steps, dtype=torch.float32, device=base_logits.device)
    full = with_probs and temperature > 0
    probs = torch.empty(batch if full else 0, steps, vocab, dtype=torch.float32, device=base_logits.device)
    x = prev_tokens
    for k in range(steps):
        bias = F.linear(markov_w1[x.clamp(min=0)], markov_w2)
        logits = base_logits[:, k].to(wide) + bias.to(wide)
        logits = torch.where(logits.isnan(), float("-inf"), logits)
        column = logits.argmax(-1)
        q_token = torch.ones(batch, dtype=wide, device=base_logits.device)
        if temperature > 0:
            assert uniforms is not None
            none = logits.amax(-1, keepdim=True) == float("-inf")
            first = torch.arange(vocab, device=base_logits.device) == 0
            logits = torch.where(none, torch.where(first, 0.0, float("-inf")), logits)
            q = torch.softmax(logits / temperature, -1)
            cdf = q.double().cumsum(-1)
            drawn = torch.searchsorted(cdf, uniforms[:, k, None].double() * cdf[:, -1:], right=True)[:, 0]
            last = vocab - 1 - (q > 0).long().flip(-1).argmax(-1)
            column = torch.minimum(drawn, last)
            q_token = q.gather(1, column[:, None])[:, 0]
            if full:
                probs[:, k] = q.masked_fill(padding[:, None], 0)
        chosen = column if d2t is None else d2t[column]
        x = tokens[:, k] = torch.where(padding, -1, chosen)
        token_probs[:, k] = torch.where(padding, 0.0, q_token)
    return tokens, token_probs, probs
