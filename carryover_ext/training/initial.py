"""Where training starts: the target's own late layers, the draft vocabulary and the scale of the taps."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from carryover_ext.config import DrafterConfig
from carryover_ext.drafters.adapter import MARKOV_W1, MARKOV_W2
from carryover_ext.drafters.checkpoint import EMBED, HEAD
from carryover_ext.training.features import FeatureStore
from carryover_ext.training.target_pass import TargetPass


def tap_rms(store: FeatureStore, sequences: int = 256, skip: int = 4) -> Tensor:
    """RMS of every tapped dimension ``[F]`` over the first sequences; the first rows of a sequence
    (attention sinks with enormous states) are left out."""
    total: Tensor | None = None
    rows = 0
    for i in range(min(sequences, len(store))):
        x = store[i].features[skip:].float()
        total = x.square().sum(0) if total is None else total + x.square().sum(0)
        rows += len(x)
    assert total is not None
    return (total / rows).sqrt().clamp(min=1e-6)


def draft_vocabulary(store: FeatureStore, vocab_size: int, size: int) -> tuple[Tensor, float]:
    """The ``size`` most frequent tokens of responses (prompts count a quarter), sorted, and the share of
    response tokens that they cover."""
    counts = torch.zeros(vocab_size)
    response = torch.zeros(vocab_size)
    for i in range(len(store)):
        row = store.recording(i)
        response += torch.bincount(torch.tensor(row.response_ids), minlength=vocab_size)
        counts += 0.25 * torch.bincount(torch.tensor(row.prompt_ids), minlength=vocab_size)
    counts += response
    ids = counts.topk(size).indices.sort().values
    return ids, float(response[ids].sum() / response.sum())


def markov_head(
    config: DrafterConfig,
    store: FeatureStore,
    vocab: Tensor | None,
    *,
    scale: float = 0.45,
    prior: float = 5.0,
) -> dict[str, Tensor]:
    """A Markov head that starts as the bigram statistics of the recordings.

    ``w2 @ w1[a]`` is the best approximation of its rank to ``scale * log(P(b | a) / P(b))``, up to a
    constant a row, which a softmax does not see; P(b | a) is smoothed by ``prior`` counts of P(b), and rows
    count by the square root of how often a occurs. ``scale`` is under 1 because the drafter's own logits
    know much of it already.

    Returns:
        ``w1 [V, r]`` and ``w2 [Vd, r]``, float32.
    """
    size = config.vocab_size if vocab is None else len(vocab)
    index = torch.full((config.vocab_size,), -1, dtype=torch.int64)
    index[torch.arange(size) if vocab is None else vocab] = torch.arange(size)
    keys = []
    for i in range(len(store)):
        ids = torch.tensor(store.recording(i).ids)
        after = index[ids[1:]]
        keys.append((ids[:-1] * size + after)[after >= 0])
    pairs, count = torch.cat(keys).unique(return_counts=True)
    before, after, count = pairs // size, pairs % size, count.float()
    first = torch.zeros(config.vocab_size).index_add_(0, before, count)
    second = torch.zeros(size).index_add_(0, after, count)
    share = second[after] / second.sum()
    value = scale * torch.log((count + prior * share) / (prior * share))
    weight = first.sqrt()
    shape = (config.vocab_size, size)
    table = torch.sparse_coo_tensor(
        torch.stack([before, after]), value * weight[before], shape, check_invariants=True
    ).coalesce()
    rank = config.markov_rank
    with torch.random.fork_rng():  # svd_lowrank draws from the global generator
        torch.manual_seed(0)
        u, s, v = torch.svd_lowrank(table, q=min(rank + 8, *shape), niter=2)
    u, s, v = (F.pad(x[..., :rank], (0, rank - min(rank, x.shape[-1]))) for x in (u, s, v))
    w1, w2 = u * s.sqrt() / weight.clamp(min=1.0)[:, None], v * s.sqrt()
    balance = (w2.square().mean() / w1[first > 0].square().mean()).pow(0.25)  # AdamW steps alike in both
    return {MARKOV_W1: w1 * balance, MARKOV_W2: w2 / balance}


def leading_directions(target: TargetPass, size: int) -> Tensor:
    """The orthonormal directions ``[Ht, size]`` of the target's residual stream that its logits depend on
    most: right singular vectors of the head, with the weights of the final norm folded in.

    They make the smallest error of the head that a drafter of this hidden size can have. The embedding has no
    say: of it a block needs the anchor's row and the mask's, and a tied one has the same directions.
    """
    head = target.head.detach().float() * target.decoder.norm.weight.detach().float()
    return torch.linalg.eigh((head.T @ head).double().cpu()).eigenvectors[:, -size:].flip(1).float()


def _strongest_heads(v: Tensor, o: Tensor, config: DrafterConfig) -> tuple[Tensor, Tensor]:
    """Rows of the query heads and of the KV heads that a drafter keeps of ``v [nkv * d, *]`` and
    ``o [*, nh * d]``: the KV heads whose kept query heads are the strongest, by the norms of both weights.
    All of them, in order, when it has as many as the target."""
    d = int(config.head_dim or 0)
    group, kept = o.shape[1] // v.shape[0], config.num_attention_heads // config.num_key_value_heads
    of_queries = o.view(o.shape[0], -1, group, d).square().sum((0, 3))
    strength = (of_queries * v.view(-1, d, v.shape[1]).square().sum((1, 2))[:, None]).sqrt()
    values, queries = strength.topk(kept, dim=1)
    heads = values.sum(1).topk(config.num_key_value_heads).indices.sort().values
    chosen = heads[:, None] * group + queries[heads].sort(1).values

    def rows(index: Tensor) -> Tensor:
        return (index.flatten()[:, None] * d + torch.arange(d)).flatten()

    return rows(chosen), rows(heads)


def from_target(
    config: DrafterConfig, target: TargetPass, rms: Tensor, vocab: Tensor | None = None
) -> dict[str, Tensor]:
    """Initial weights, float32 on the CPU: drafter layer i copies the target's layer L - n + i, ``fc`` passes
    the last tap on.

    With fewer MLP channels or heads than the target the strongest (by the norms of their weights) are kept.
    ``fc`` works on rows divided by ``rms``; ``hidden_norm`` takes the scale back, so that the keys and
    values of the first layer start as the target's own.

    A drafter of another hidden size works in the :func:`leading_directions` of the residual stream: all
    matrices are projected, the norms' weights are folded into what reads behind them, and the norms keep one
    number, the share of the length of a row that these directions have (by ``rms``). Its embedding and head
    (rows ``vocab [Vd]``, None: all) are the target's, projected. The target's biases are left out.
    """
    layers: Any = target.decoder.layers
    h, width = config.hidden_size, int(config.target_hidden_size or 0)

    def take(weight: Tensor) -> Tensor:
        return weight.detach().to("cpu", torch.float32)

    last = rms[-width:].cpu()
    length = last.square().mean().sqrt()
    first = len(layers) - config.num_hidden_layers
    basis = leading_directions(target, h) if config.own_vocabulary else None
    within = length if basis is None else (basis * last[:, None]).square().sum(0).mean().sqrt()

    def norm(weight: Tensor) -> Tensor:
        return take(weight) if basis is None else torch.full((h,), float(within / length))

    def reads(matrix: Tensor, before: Tensor) -> Tensor:
        """A matrix that reads the residual stream behind a norm with the weights ``before``."""
        return take(matrix) if basis is None else (take(matrix) * take(before)) @ basis

    def writes(matrix: Tensor) -> Tensor:
        return take(matrix) if basis is None else basis.T @ take(matrix)

    weights: dict[str, Tensor] = {}
    fc = torch.zeros(h, config.num_features)
    if basis is None:
        fc[:, -h:] = torch.eye(h)
        weights["hidden_norm.weight"] = take(layers[first].input_layernorm.weight) * (last / length)
    else:
        fc[:, -width:] = basis.T * (last / within)
        weights["hidden_norm.weight"] = norm(layers[first].input_layernorm.weight)
        weights[EMBED] = take(target.embed) @ basis
        head = target.head if vocab is None else target.head[vocab.to(target.head.device)]
        weights[HEAD] = reads(head, target.decoder.norm.weight)
    weights["fc.weight"] = fc
    weights["norm.weight"] = norm(target.decoder.norm.weight)
    for i in range(config.num_hidden_layers):
        source, name = layers[first + i], f"layers.{i}."
        before, after = source.input_layernorm.weight, source.post_attention_layernorm.weight
        weights[f"{name}input_layernorm.weight"] = norm(before)
        weights[f"{name}post_attention_layernorm.weight"] = norm(after)
        attention = source.self_attn
        q, k, v = (reads(getattr(attention, f"{n}_proj").weight, before) for n in "qkv")
        o = writes(attention.o_proj.weight)
        queries, heads = _strongest_heads(v, o, config)
        for proj, weight in (("q", q[queries]), ("k", k[heads]), ("v", v[heads]), ("o", o[:, queries])):
            weights[f"{name}self_attn.{proj}_proj.weight"] = weight
        for head_norm in ("q_norm", "k_norm"):
            weights[f"{name}self_attn.{head_norm}.weight"] = torch.ones(int(config.head_dim or 0))
        gate, up = (reads(getattr(source.mlp, f"{n}_proj").weight, after) for n in ("gate", "up"))
        down = writes(source.mlp.down_proj.weight)
        strength = gate.norm(dim=1) * up.norm(dim=1) * down.norm(dim=0)
        keep = strength.topk(config.intermediate_size).indices.sort().values
        weights[f"{name}mlp.gate_proj.weight"] = gate[keep]
        weights[f"{name}mlp.up_proj.weight"] = up[keep]
        weights[f"{name}mlp.down_proj.weight"] = down[:, keep]
    return {k: v.clone() for k, v in weights.items()}
