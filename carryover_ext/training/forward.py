"""The drafter's forward for many anchors that share one recorded prefix, and the attention it needs.

Training runs N blocks a sequence in parallel. All blocks of a sequence attend to the same context rows
(each to its own prefix of them), then to rows of their own: the carried rows and the block. Scores
against the shared rows are one matrix product a sequence; scores against own rows are a small batched
product; one softmax joins them. Blocks never see each other because their keys are never multiplied, so
nothing is computed only to be masked.

Works on a plain dict of tensors with the checkpoint's names, so that float32 master weights can be cast
once a step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Params = Mapping[str, Tensor]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm over the last dimension in float32, result in the dtype of ``x``."""
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return (y * weight.float()).to(x.dtype)


def rope_cos_sin(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin ``[..., head_dim / 2]`` in float32 of neox-style rotary embeddings."""
    inverse = theta ** (
        -torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions.device) / head_dim
    )
    angle = positions.double()[..., None] * inverse
    return angle.cos().float(), angle.sin().float()


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates ``x [..., heads, d]`` by ``cos, sin [..., d / 2]`` (broadcast over heads)."""
    a, b = x.float().chunk(2, -1)
    c, s = cos[..., None, :], sin[..., None, :]
    return torch.cat([a * c - b * s, b * c + a * s], -1).to(x.dtype)


def shared_prefix_attention(
    q: Tensor,
    k_shared: Tensor,
    v_shared: Tensor,
    prefix: Tensor,
    k_own: Tensor,
    v_own: Tensor,
    own_mask: Tensor,
    scale: float,
    own_mass: list[Tensor] | None = None,
) -> Tensor:
    """Attention of N blocks a sequence over a shared prefix and rows of their own.

    Args:
        q: ``[S, N, b, nh, d]`` queries.
        k_shared, v_shared: ``[S, T, nkv, d]`` rows that all blocks of a sequence share.
        prefix: ``[S, N]`` int64; block j sees the shared rows ``< prefix[s, j]``.
        k_own, v_own: ``[S, N, O, nkv, d]`` rows that only block j sees.
        own_mask: bool, broadcastable to ``[S, N, b, O]``; True = visible.
        scale: factor on the scores.
        own_mass: takes the share of attention that each own row gets, ``[S, N, O]``, mean over queries and
        heads.

    Returns:
        ``[S, N, b, nh, d]`` in the dtype of ``q``.
    """
    s, n, b, nh, d = q.shape
    t, nkv = k_shared.shape[1:3]
    o = k_own.shape[2]
    g = nh // nkv
    # [S, nkv, N, b*g, d]: the queries of one KV head are one tile
    qg = (q * scale).view(s, n, b, nkv, g, d).permute(0, 3, 1, 2, 4, 5).reshape(s, nkv, n, b * g, d)
    ks, vs = k_shared.transpose(1, 2), v_shared.transpose(1, 2)
    ko = k_own.permute(0, 3, 1, 2, 4)
    vo = v_own.permute(0, 3, 1, 2, 4)
    shared = torch.matmul(qg.reshape(s, nkv, n * b * g, d), ks.transpose(2, 3)).view(s, nkv, n, b * g, t)
    own = torch.matmul(qg, ko.transpose(3, 4))
    hidden_shared = torch.arange(t, device=q.device)[None, None] >= prefix[..., None]  # [S, N, T]
    hidden_own = ~own_mask.expand(s, n, b, o)[:, :, :, None].expand(s, n, b, g, o).reshape(s, n, b * g, o)
    scores = torch.cat(
        [
            shared.masked_fill(hidden_shared[:, None, :, None], float("-inf")),
            own.masked_fill(hidden_own[:, None], float("-inf")),
        ],
        -1,
    )
    p = torch.softmax(scores, -1, dtype=torch.float32).to(q.dtype)
    if own_mass is not None:
        own_mass.append(p[..., t:].float().mean((1, 3)))
    out = torch.matmul(p[..., :t].reshape(s, nkv, n * b * g, t), vs).view(s, nkv, n, b * g, d)
    out = out + torch.matmul(p[..., t:], vo)
    return out.view(s, nkv, n, b, g, d).permute(0, 2, 3, 1, 4, 5).reshape(s, n, b, nh, d)


def encode_rows(p: Params, config: Any, features: Tensor, carried: bool = False) -> Tensor:
    """``fc`` and ``hidden_norm`` of tapped rows ``[..., F]``, whatever dtype they were recorded in;
    ``carried`` adds the carryover embedding."""
    u = F.linear(features.to(p["fc.weight"].dtype), p["fc.weight"])
    pre = config.carry_embed_at == "pre_norm"
    if carried and pre:
        u = u + p["carryover_embedding"].to(u.dtype)
    h = rms_norm(u, p["hidden_norm.weight"], config.rms_norm_eps)
    if carried and not pre:
        h = h + p["carryover_embedding"].to(h.dtype)
    return h


def _key_value(
    p: Params, config: Any, layer: str, rows: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    shape = (*rows.shape[:-1], config.num_key_value_heads, config.head_dim)
    k = F.linear(rows, p[layer + "k_proj.weight"]).view(shape)
    v = F.linear(rows, p[layer + "v_proj.weight"]).view(shape)
    return apply_rope(rms_norm(k, p[layer + "k_norm.weight"], config.rms_norm_eps), cos, sin), v


def draft_hidden(
    p: Params,
    config: Any,
    context: Tensor,
    anchors: Tensor,
    block_embeds: Tensor,
    carried: Tensor | None = None,
    carried_positions: Tensor | None = None,
    carried_mask: Tensor | None = None,
    own_mass: list[Tensor] | None = None,
) -> Tensor:
    """Last hidden states (after the final norm) of N blocks a sequence.

    Args:
        p: parameters by checkpoint name, in the compute dtype.
        context: ``[S, T, H]`` encoded rows of the recorded sequence (:func:`encode_rows`).
        anchors: ``[S, N]`` int64 position of each block's anchor; block j sees context rows before it.
        block_embeds: ``[S, N, b, H]`` embeddings of the anchor token and the masks.
        carried: ``[S, N, R, H]`` encoded rejected rows, ``carried_positions [S, N, R]`` their rotary
        positions,
            ``carried_mask [S, N, R]`` bool, True where a row exists.
        own_mass: takes of each layer the share of attention that each carried row and each block row gets,
            ``[S, N, R + b]``.

    Returns:
        ``[S, N, b, H]``.
    """
    s, n, b = block_embeds.shape[:3]
    nh, d, eps = config.num_attention_heads, config.head_dim, config.rms_norm_eps
    theta = config.rope_theta
    device = anchors.device
    block_positions = anchors[..., None] + torch.arange(b, device=device)
    ctx_rope = rope_cos_sin(torch.arange(context.shape[1], device=device)[None], d, theta)
    blk_rope = rope_cos_sin(block_positions, d, theta)
    own_mask = torch.ones(1, 1, b, b, dtype=torch.bool, device=device)
    if config.layer_causal(0):
        own_mask = own_mask.tril()
    if carried is not None:
        assert carried_positions is not None and carried_mask is not None
        car_rope = rope_cos_sin(carried_positions, d, theta)
        own_mask = torch.cat(
            [carried_mask[:, :, None].expand(-1, -1, b, -1), own_mask.expand(s, n, b, b)], -1
        )
    x = block_embeds
    for i in range(config.num_hidden_layers):
        name = f"layers.{i}."
        attn = name + "self_attn."
        h = rms_norm(x, p[name + "input_layernorm.weight"], eps)
        q = F.linear(h, p[attn + "q_proj.weight"]).view(s, n, b, nh, d)
        q = apply_rope(rms_norm(q, p[attn + "q_norm.weight"], eps), *blk_rope)
        k_own, v_own = _key_value(p, config, attn, h, *blk_rope)
        k_ctx, v_ctx = _key_value(p, config, attn, context, *ctx_rope)
        if carried is not None:
            k_car, v_car = _key_value(p, config, attn, carried, *car_rope)
            k_own, v_own = torch.cat([k_car, k_own], 2), torch.cat([v_car, v_own], 2)
        o = shared_prefix_attention(q, k_ctx, v_ctx, anchors, k_own, v_own, own_mask, d**-0.5, own_mass)
        x = x + F.linear(o.reshape(s, n, b, nh * d), p[attn + "o_proj.weight"])
        h = rms_norm(x, p[name + "post_attention_layernorm.weight"], eps)
        gate = F.linear(h, p[name + "mlp.gate_proj.weight"])
        up = F.linear(h, p[name + "mlp.up_proj.weight"])
        x = x + F.linear(F.silu(gate) * up, p[name + "mlp.down_proj.weight"])
    return rms_norm(x, p["norm.weight"], eps)
