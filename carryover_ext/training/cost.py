"""Operations of a training step and the machine's measured matrix rate, so that progress can show the
share reached."""

from __future__ import annotations

import time

import torch
import torch.nn.functional as F

from carryover_ext.config import DrafterConfig


def step_operations(
    config: DrafterConfig,
    *,
    sequences: int,
    length: int,
    anchors: int,
    head_rows: int,
    carried: bool,
) -> float:
    """Floating-point operations (2 a multiply-add) of one optimiser step, forward and backward.

    Counted: matrix products only. Weights that train cost three forwards (forward, gradient of the input,
    gradient of the weight); the features need no gradient, so ``fc`` costs two; the frozen head costs two
    (see losses), the Markov head's second factor three.
    """
    h, d, b = config.hidden_size, int(config.head_dim or 0), config.block_size
    kv = 2 * config.num_key_value_heads * d * h
    layer = 2 * config.num_attention_heads * d * h + kv + 3 * config.intermediate_size * h
    rows = sequences * anchors * b
    carried_rows = sequences * anchors * config.num_drafts if carried else 0
    context_rows = sequences * length
    fc = config.num_features * h
    own = b + (config.num_drafts if carried else 0)
    attention = 2 * config.num_attention_heads * d * rows * (length + own)
    layers = config.num_hidden_layers
    forward_backward = 3 * layers * (rows * layer + (context_rows + carried_rows) * kv + attention)
    encode = 2 * fc * (context_rows + carried_rows)
    head = (2 * h + 3 * config.markov_rank) * head_rows * sequences * anchors * config.num_drafts
    return 2.0 * (forward_backward + encode + head)


def now(device: torch.device) -> float:
    """Seconds of a clock, read when the work that a GPU was given is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def matrix_rate(device: torch.device, dtype: torch.dtype, size: int | None = None, repeats: int = 7) -> float:
    """Operations a second of a large linear layer in ``dtype``: the ceiling that a step is compared with
    (best of runs). ``size``: 1536 on a CPU, 8192 on a GPU."""
    size = size or (8192 if device.type == "cuda" else 1536)
    x, w = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    best = float("inf")
    for _ in range(repeats):
        start = now(device)
        F.linear(x, w)
        best = min(best, now(device) - start)
    return 2.0 * size**3 / best
