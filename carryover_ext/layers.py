"""Layers of the drafter: norms, rotary table, and a decoder layer whose attention sees context, segment and
block.

Tensor names are those of the z-lab DFlash checkpoints (``layers.{i}.self_attn.q_proj.weight`` and so on).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import ops
from .config import DrafterConfig
from .packing import PackedWeight, linear


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension, computed in float32 for lower
    precisions.
    """

    def __init__(self, size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Functional RMSNorm; ``weight`` broadcasts against the last dimensions of ``x`` (``[d]`` or ``[heads,
    d]``).
    """
    if x.dtype in (torch.float32, torch.float64):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight
    y = x.float()
    return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def rotary_table(config: DrafterConfig, length: int, device: torch.device | str | None = None) -> Tensor:
    """Cosines and sines for positions ``0..length-1``: float32 ``[length, rot]``, cosines in the first half.

    neox style: dimension ``i`` is rotated with dimension ``i + rot/2``. Scaled variants (``linear``,
    ``llama3``, ``yarn``, ...) take their frequencies and attention factor from Transformers' definitions, so
    that both sides agree.
    """
    rot, factor = config.rotary_dim, 1.0
    kind = (config.rope_parameters or {}).get("rope_type", "default")
    if kind == "default":
        inverse = config.rope_theta ** -(torch.arange(0, rot, 2, dtype=torch.float64) / rot)
    else:
        inverse, factor = _scaled_frequencies(config, kind)
    angles = torch.arange(length, dtype=torch.float64)[:, None] * inverse.double()[None, :]
    return (
        (torch.cat([angles.cos(), angles.sin()], -1) * factor)
        .to(device=device, dtype=torch.float32)
        .contiguous()
    )


def _scaled_frequencies(config: DrafterConfig, kind: str) -> tuple[Tensor, float]:
    from transformers import Qwen3Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    if kind not in ROPE_INIT_FUNCTIONS:
        known = ", ".join(["default", *sorted(ROPE_INIT_FUNCTIONS)])
        raise ValueError(f"rope_parameters.rope_type={kind!r}: must be one of {known}")
    shim = Qwen3Config(
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters={"rope_theta": config.rope_theta, **(config.rope_parameters or {})},
    )
    inverse, factor = ROPE_INIT_FUNCTIONS[kind](shim, torch.device("cpu"))
    return inverse, float(factor)


def apply_rotary(x: Tensor, cos_sin: Tensor) -> Tensor:
    """Rotate ``x [..., heads, d]`` by table rows ``cos_sin [..., rot]`` (float32); dimensions past ``rot``
    stay as they are.
    """
    half = cos_sin.shape[-1] // 2
    table = cos_sin if x.dtype == torch.float64 else cos_sin.to(torch.float32)
    cos, sin = table[..., None, :half], table[..., None, half:]
    y = x if x.dtype in (torch.float32, torch.float64) else x.float()
    a, b = y[..., :half], y[..., half : 2 * half]
    parts = [a * cos - b * sin, b * cos + a * sin]
    if 2 * half < x.shape[-1]:
        parts.append(y[..., 2 * half :])
    return torch.cat(parts, -1).to(x.dtype)


class DraftAttention(nn.Module):
    """Weights of one attention layer. The forward lives in the drafter, which fuses the projections."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        d = int(config.head_dim or 0)
        self.q_proj = nn.Linear(config.hidden_size, config.num_attention_heads * d, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, config.num_key_value_heads * d, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, config.num_key_value_heads * d, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * d, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(d, config.rms_norm_eps)
        self.k_norm = RMSNorm(d, config.rms_norm_eps)

    def qkv_weight(self) -> Tensor:
        """``[(nh + 2 nkv) d, H]``: query rows, key rows, value rows."""
        return torch.cat([self.q_proj.weight, self.k_proj.weight, self.v_proj.weight])

    def qk_norm_weight(self) -> Tensor:
        """``[nh + nkv, d]``: one row of norm weights for each query head and each key head."""
        d = self.q_norm.weight.shape[0]
        heads = (self.q_proj.out_features // d, self.k_proj.out_features // d)
        return torch.cat([self.q_norm.weight.expand(heads[0], d), self.k_norm.weight.expand(heads[1], d)])


class DraftMLP(nn.Module):
    """SwiGLU: ``down(silu(gate(x)) * up(x))``."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def gate_up_weight(self) -> Tensor:
        """``[2 I, H]``: gate rows, then up rows."""
        return torch.cat([self.gate_proj.weight, self.up_proj.weight])


class DraftLayer(nn.Module):
    """One pre-norm decoder layer. ``input_layernorm`` applies to block rows only, never to context rows."""

    def __init__(self, config: DrafterConfig, layer: int) -> None:
        super().__init__()
        self.self_attn = DraftAttention(config)
        self.mlp = DraftMLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.window = config.layer_window(layer)
        self.causal = config.layer_causal(layer)
        self.num_heads = config.num_attention_heads
        self.num_kv_heads = config.num_key_value_heads
        self.eps = config.rms_norm_eps

    def fused(self, dtype: torch.dtype | None = None) -> tuple[Tensor, ...]:
        """Weights in the order in which :func:`layer_forward` takes them, ``dtype`` None: as they are.
        Differentiable.
        """
        weights = (
            self.input_layernorm.weight,
            self.self_attn.qkv_weight(),
            self.self_attn.qk_norm_weight(),
            self.self_attn.o_proj.weight,
            self.post_attention_layernorm.weight,
            self.mlp.gate_up_weight(),
            self.mlp.down_proj.weight,
        )
        return weights if dtype is None else tuple(w.to(dtype) for w in weights)


def attention_inputs(
    h: Tensor,
    qkv_weight: Tensor | PackedWeight,
    qk_norm: Tensor,
    cos_sin: Tensor,
    num_heads: int,
    num_kv_heads: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of the block rows: ``h [B, b, H]`` -> ``[B, b, heads, d]`` views.

    One GEMM; query and key heads are normed and rotated together; values are neither normed nor rotated.
    """
    rows = linear(h, qkv_weight).unflatten(-1, (num_heads + 2 * num_kv_heads, qk_norm.shape[-1]))
    split = num_heads + num_kv_heads
    turned = apply_rotary(rms_norm(rows[..., :split, :], qk_norm, eps), cos_sin)
    return turned[..., :num_heads, :], turned[..., num_heads:, :], rows[..., split:, :]


def mlp_forward(h: Tensor, gate_up: Tensor | PackedWeight, down: Tensor | PackedWeight) -> Tensor:
    """SwiGLU with gate and up in one GEMM."""
    gate, up = linear(h, gate_up).chunk(2, -1)
    return linear(F.silu(gate) * up, down)


def block_forward(
    layers: Sequence[DraftLayer],
    weights: Sequence[Sequence[Any]],
    x: Tensor,
    cos_sin: Tensor,
    context: tuple[Tensor, Tensor],
    context_lens: Tensor,
    segment: tuple[Tensor, Tensor] | None,
    segment_lens: Tensor | None,
    block_table: Tensor | None,
    block_lens: Tensor | None = None,
) -> Tensor:
    """All layers over the block rows ``x [B, b, H]``, before the final norm. Differentiable.

    ``weights``: :meth:`DraftLayer.fused` of each layer. ``cos_sin [B, b, rot]``: table rows at the block's
    positions. ``context`` and ``segment``: keys and values with a leading layer dimension; shapes of a layer
    as in :func:`carryover_ext.ops.segment_attention`.
    """
    for i, layer in enumerate(layers):
        norm1, qkv, qk_norm, o, norm2, gate_up, down = weights[i]
        h = rms_norm(x, norm1, layer.eps)
        q, k, v = attention_inputs(h, qkv, qk_norm, cos_sin, layer.num_heads, layer.num_kv_heads, layer.eps)
        out = ops.segment_attention(
            q,
            context[0][i],
            context[1][i],
            context_lens,
            None if segment is None else segment[0][i],
            None if segment is None else segment[1][i],
            None if segment is None else segment_lens,
            k,
            v,
            block_table,
            causal=layer.causal,
            window=layer.window,
            block_lens=block_lens,
        )
        x = x + linear(out.flatten(-2), o)
        x = x + mlp_forward(rms_norm(x, norm2, layer.eps), gate_up, down)
    return x
