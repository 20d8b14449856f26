"""`project_kv`: tapped target features to the keys and values of every drafter layer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .._library import below_autocast
from .._library import ops as _ops


def embed_before_norm(carry_embed_at: str) -> bool:
    """True for ``pre_norm``, False for ``post_norm``; ValueError for anything else."""
    if carry_embed_at not in ("pre_norm", "post_norm"):
        raise ValueError(f"carry_embed_at={carry_embed_at!r} is not one of 'pre_norm', 'post_norm'")
    return carry_embed_at == "pre_norm"


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
    """Projects tapped target features to K and V of all drafter layers.

    For each row: ``u = fc(f)``; with ``pre_norm`` ``u += E`` on carried rows; ``h = rmsnorm(u) *
    norm_weight``; with ``post_norm`` ``h += E`` on carried rows; ``K, V = kv_weight h``; K is RMS-normed per
    head, scaled by `k_norm_weight` and rotated (RoPE, neox style) at the row's position. V is neither normed
    nor rotated. Norms and rotation accumulate in float32 (float64 for float64 inputs); h is rounded to the
    dtype before the second GEMM.

    Args:
        features: ``[T, F]`` float32, bfloat16 or float64 (GPU: bfloat16 or float16): the tapped layers of a
            row side by side.
        positions: ``[T]`` int32, the RoPE position of each row, below P; -1 marks a padding row, whose K and
            V are 0.
        fc_weight: ``[H, F]``, dtype of `features` like all weights but `cos_sin`.
        norm_weight: ``[H]``.
        kv_weight: ``[L*2*nkv*d, H]``, layer by layer, in each the K rows and then the V rows.
        k_norm_weight: ``[L, d]``.
        cos_sin: ``[P, rot]`` float32: rot/2 columns of cosines, then rot/2 of sines; rot <= d (partial
            rotary).
        carry_embedding: ``[H]`` or None: E, the learned embedding of carried rows.
        carried: ``[T]`` bool or None: rows that get the embedding; needs `carry_embedding`.
        eps: of both norms.
        carry_embed_at: ``pre_norm`` or ``post_norm``.

    Returns:
        ``k, v``, each ``[L, T, nkv, d]`` in the dtype of `features`.

    Differentiable in `features`, all weights and `carry_embedding`. T = 0 gives empty results.

    On a GPU (bfloat16, float16) nothing waits for the device, so the call can be captured into a graph; the
    workspace comes from PyTorch's allocator. A row whose position is out of range there becomes 0;
    :func:`check_project_kv` reports it, and a build with CARRYOVER_DEBUG=1 traps.

    Raises:
        RuntimeError: wrong dtype, shape or device, a position outside -1..P-1 (on the CPU), `carried` without
            an embedding.
        ValueError: unknown `carry_embed_at`.

    Source: DFlash (arXiv 2602.06036) for the projection, arXiv 2609.14717 for the embedding.
    """
    before = embed_before_norm(carry_embed_at)
    return _ops.project_kv(
        features, positions, fc_weight, norm_weight, kv_weight, k_norm_weight, cos_sin, carry_embedding,
        carried, eps=eps, carry_pre_norm=before,
    )  # fmt: skip


@torch.library.register_fake("carryover_ext::project_kv")
def _fake(
    features, positions, fc_weight, norm_weight, kv_weight, k_norm_weight, cos_sin, carry_embedding, carried,
    *, eps, carry_pre_norm,
):  # fmt: skip
    layers, dim = k_norm_weight.shape
    heads = kv_weight.shape[0] // (2 * layers * dim)
    shape = (layers, features.shape[0], heads, dim)
    return features.new_empty(shape), features.new_empty(shape)


def check_project_kv(positions: Tensor, cos_sin: Tensor) -> None:
    """Raises what :func:`project_kv` raises on the CPU for positions that `cos_sin` has no row for; for
    debugging on a GPU, where such rows become 0 instead. Waits for the device.

    Args:
        positions, cos_sin: as for :func:`project_kv`, on any device.

    Raises:
        RuntimeError: the first position outside -1..P-1, by its index.
    """
    _ops.check_project_kv(positions.detach().cpu(), cos_sin.shape[0])


@torch.library.register_fake("carryover_ext::check_project_kv")
def _fake_check(positions, positions_end) -> None:
    return None


def _setup_context(ctx, inputs, keyword_only_inputs, output) -> None:
    ctx.save_for_backward(*inputs)
    ctx.eps = keyword_only_inputs["eps"]
    ctx.carry_pre_norm = keyword_only_inputs["carry_pre_norm"]


def _norm_backward(grad: Tensor, normed: Tensor, scale: Tensor) -> Tensor:
    """Gradient of ``normed = x * scale`` with ``scale = rsqrt(mean(x^2) + eps)``, with respect to x."""
    return scale * (grad - normed * (grad * normed).mean(-1, keepdim=True))


@below_autocast
def _backward(ctx, grad_k, grad_v):
    """The formula written out, on recomputed intermediates: the forward pass keeps its inputs only."""
    features, positions, fc, norm_weight, kv_weight, k_norm_weight, cos_sin, embedding, carried = (
        ctx.saved_tensors
    )
    dtype = features.dtype
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    layers, dim = k_norm_weight.shape
    rows = features.shape[0]
    # Rows of padding may hold anything, and get no gradient; so do rows out of range, zeros on a GPU.
    live = (positions >= 0) & (positions < cos_sin.shape[0])
    if rows == 0 or cos_sin.shape[0] == 0:
        cos_sin = cos_sin.new_zeros(1, cos_sin.shape[1])  # no row is live, and nothing is looked up
    features = torch.where(live[:, None], features, 0.0)
    heads = kv_weight.shape[0] // (2 * layers * dim)
    marks = None
    if embedding is not None and carried is not None:
        marks = carried[:, None].to(wide)

    # Forward again.
    x = F.linear(features, fc).to(wide)
    if marks is not None and ctx.carry_pre_norm:
        x = x + marks * embedding.to(wide)
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + ctx.eps)
    normed = x * scale
    h = normed * norm_weight.to(wide)
    if marks is not None and not ctx.carry_pre_norm:
        h = h + marks * embedding.to(wide)
    h = h.to(dtype)
    kv = F.linear(h, kv_weight).view(rows, layers, 2, heads, dim)
    k = kv[:, :, 0].to(wide)
    k_scale = torch.rsqrt(k.square().mean(-1, keepdim=True) + ctx.eps)
    k_normed = k * k_scale

    # Second epilogue: undo the rotation, then k_norm.
    live = live[:, None, None, None]
    gk = torch.where(live, grad_k.transpose(0, 1).to(wide), 0.0)
    gv = torch.where(live, grad_v.transpose(0, 1).to(wide), 0.0)
    half = cos_sin.shape[1] // 2
    table = cos_sin.to(wide)[positions.clamp(0, cos_sin.shape[0] - 1).long()][:, None, None, :]
    cos, sin = table[..., :half], table[..., half:]
    a, b, rest = gk[..., :half], gk[..., half : 2 * half], gk[..., 2 * half :]
    gk = torch.cat((a * cos + b * sin, b * cos - a * sin, rest), -1)
    grad_k_norm = (gk * k_normed).sum((0, 2)).to(dtype)
    gk = _norm_backward(gk * k_norm_weight.to(wide)[:, None, :], k_normed, k_scale)
    gkv = torch.stack((gk, gv), 2).to(dtype).flatten(1)

    # Second GEMM, first epilogue, first GEMM.
    grad_kv = gkv.t() @ h
    gh = (gkv @ kv_weight).to(wide)
    grad_norm = (gh * normed).sum(0).to(dtype)
    gx = _norm_backward(gh * norm_weight.to(wide), normed, scale)
    grad_embedding = None
    if marks is not None:
        grad_embedding = (marks * (gx if ctx.carry_pre_norm else gh)).sum(0).to(dtype)
    gx = gx.to(dtype)
    grad_fc = gx.t() @ features
    grad_features = gx @ fc
    return grad_features, None, grad_fc, grad_norm, grad_kv, grad_k_norm, None, grad_embedding, None


torch.library.register_autograd("carryover_ext::project_kv", _backward, setup_context=_setup_context)
