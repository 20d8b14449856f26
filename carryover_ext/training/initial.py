"""Where training starts: the target's own late layers, the draft vocabulary and the scale of the taps."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from carryover_ext.config import DrafterConfig
from carryover_ext.training.drafting import MARKOV_W1, MARKOV_W2
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


def from_target(config: DrafterConfig, target: TargetPass, rms: Tensor) -> dict[str, Tensor]:
    """Initial weights, float32 on the CPU: drafter layer i copies the target's layer L - n + i, ``fc`` passes
    the last tap on.

    With fewer MLP channels than the target the strongest (by the norms of their three weight vectors) are
    kept.
    ``fc`` works on rows divided by ``rms``; ``hidden_norm`` takes the scale back, so that the keys and
    values of the first layer start as the target's own.
    """
    layers: Any = target.decoder.layers
    h = config.hidden_size
    if layers[0].mlp.up_proj.weight.shape[1] != h:
        raise ValueError(
            f"hidden_size={h} differs from the target's; a start from its layers needs the same size"
        )

    def take(weight: Tensor) -> Tensor:
        return weight.detach().to("cpu", torch.float32)

    first = len(layers) - config.num_hidden_layers
    last = rms[-h:]
    weights: dict[str, Tensor] = {}
    fc = torch.zeros(h, config.num_features)
    fc[:, -h:] = torch.eye(h)
    weights["fc.weight"] = fc
    scale = last / last.square().mean().sqrt()
    weights["hidden_norm.weight"] = take(layers[first].input_layernorm.weight) * scale
    weights["norm.weight"] = take(target.decoder.norm.weight)
    for i in range(config.num_hidden_layers):
        source, name = layers[first + i], f"layers.{i}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{name}{norm}.weight"] = take(getattr(source, norm).weight)
        for proj in ("q_proj", "k_proj", "v_proj", "o_proj"):
            weights[f"{name}self_attn.{proj}.weight"] = take(getattr(source.self_attn, proj).weight)
        for norm in ("q_norm", "k_norm"):
            weights[f"{name}self_attn.{norm}.weight"] = torch.ones(int(config.head_dim or 0))
        gate, up, down = (take(getattr(source.mlp, f"{n}_proj").weight) for n in ("gate", "up", "down"))
        strength = gate.norm(dim=1) * up.norm(dim=1) * down.norm(dim=0)
        keep = strength.topk(config.intermediate_size).indices.sort().values
        weights[f"{name}mlp.gate_proj.weight"] = gate[keep]
        weights[f"{name}mlp.up_proj.weight"] = up[keep]
        weights[f"{name}mlp.down_proj.weight"] = down[:, keep]
    return {k: v.clone() for k, v in weights.items()}
