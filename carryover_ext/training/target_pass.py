"""The frozen target over recorded sequences: prefixes once, then many blocks against the same prefix.

Tapped rows are taken by forward hooks (tap id k = output of decoder layer k). Blocks are verified by one
forward in which every block sees the recorded rows before its anchor and its own rows causally; see
:func:`carryover_ext.training.forward.shared_prefix_attention`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, DynamicCache, PreTrainedModel

from carryover_ext.targets import cache_argument
from carryover_ext.training.forward import shared_prefix_attention

_NAME = "carryover_shared_prefix"


@dataclass
class Prefix:
    """What the target keeps of recorded sequences: K/V of every layer, each ``[S, T, nkv, d]``."""

    keys: list[Tensor]
    values: list[Tensor]

    def select(self, keep: Tensor) -> Prefix:
        """The sequences ``keep`` (int64 indices)."""
        return Prefix([k[keep] for k in self.keys], [v[keep] for v in self.values])


@dataclass
class _Blocks:
    prefix: Prefix
    anchors: Tensor  # [S, N]
    block: int


def _blocks_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kw: Any
) -> tuple[Tensor, None]:
    """Attention function for Transformers: ``query [S, nh, N*b, d]``, own ``key, value [S, nkv, N*b,
    d]``."""
    if kw.get("softcap") is not None or kw.get("sliding_window") is not None:
        raise NotImplementedError(
            "training for targets with soft-capped or sliding attention is not supported yet"
        )
    blocks: _Blocks = kw["carryover_blocks"]
    s, n = blocks.anchors.shape
    b = blocks.block

    def split(x: Tensor) -> Tensor:
        return x.transpose(1, 2).reshape(s, n, b, x.shape[1], x.shape[3])

    layer: Any = module.layer_idx
    causal = torch.ones(1, 1, b, b, dtype=torch.bool, device=query.device).tril()
    out = shared_prefix_attention(
        split(query),
        blocks.prefix.keys[layer],
        blocks.prefix.values[layer],
        blocks.anchors,
        split(key),
        split(value),
        causal,
        kw["scaling"],
    )
    return out.reshape(s, n * b, *out.shape[3:]), None


AttentionInterface.register(_NAME, _blocks_attention)


class TargetPass:
    """Runs a frozen Transformers causal language model over training data.

    Args:
        model: a causal LM whose decoder is ``model.model`` with ``layers`` (Llama, Qwen2, Qwen3 families).
        tap_ids: decoder layers whose outputs are the drafter's features, concatenated in this order.
    """

    def __init__(self, model: PreTrainedModel, tap_ids: Sequence[int]) -> None:
        self.model = model.eval()
        self.decoder: Any = model.model
        self.tap_ids = list(tap_ids)
        layers = len(self.decoder.layers)
        bad = [t for t in self.tap_ids if not 0 <= t < layers]
        if bad:
            raise ValueError(f"tap_ids: {bad} are outside the target's layers 0..{layers - 1}")
        scaled = float(getattr(model.get_input_embeddings(), "scalar_embed_scale", 1.0)) != 1.0
        if scaled or getattr(model.config, "final_logit_softcapping", None):
            raise ValueError(
                f"model: a {model.config.model_type} target scales its embeddings or soft-caps its logits, "
                "which training does not compute yet; train for Llama, Qwen2 or Qwen3 targets"
            )
        self.head: Tensor = model.get_output_embeddings().weight
        self.embed: Tensor = model.get_input_embeddings().weight

    @property
    def device(self) -> torch.device:
        return self.embed.device

    @contextmanager
    def _taps(self) -> Iterator[dict[int, Tensor]]:
        kept: dict[int, Tensor] = {}

        def keep(index: int) -> Any:
            def hook(_module: nn.Module, _args: Any, output: Any) -> None:
                kept[index] = output[0] if isinstance(output, tuple) else output

            return hook

        handles = [self.decoder.layers[t].register_forward_hook(keep(t)) for t in set(self.tap_ids)]
        try:
            yield kept
        finally:
            for h in handles:
                h.remove()

    @contextmanager
    def _up_to_the_last_tap(self) -> Iterator[None]:
        """Leaves the layers behind the last tap out: nothing that is asked for needs them."""
        layers = self.decoder.layers
        self.decoder.layers = layers[: max(self.tap_ids) + 1]
        try:
            yield
        finally:
            self.decoder.layers = layers

    @torch.inference_mode()
    def prefix_kv(self, ids: Tensor) -> Prefix:
        """K/V of right-padded sequences ``ids [S, T]``, for :meth:`blocks`."""
        cache = DynamicCache(config=self.model.config)
        with self._up_to_the_last_tap():
            self.decoder(input_ids=ids, use_cache=True, **{cache_argument(self.decoder): cache})
        used = cache.layers[: max(self.tap_ids) + 1]
        return Prefix([c.keys.transpose(1, 2) for c in used], [c.values.transpose(1, 2) for c in used])

    @torch.inference_mode()
    def features(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Tapped rows ``[S, T, F]`` and final normed hidden states ``[S, T, Ht]`` of right-padded sequences
        ``ids [S, T]``."""
        with self._taps() as kept:
            out = self.decoder(input_ids=ids, use_cache=False)
        return torch.cat([kept[t] for t in self.tap_ids], -1), out.last_hidden_state

    @torch.inference_mode()
    def blocks(self, tokens: Tensor, anchors: Tensor, prefix: Prefix) -> Tensor:
        """Tapped rows ``[S, N, b, F]`` of blocks ``tokens [S, N, b]`` that start at ``anchors [S, N]``."""
        s, n, b = tokens.shape
        positions = (anchors[..., None] + torch.arange(b, device=anchors.device)).view(s, n * b)
        config = self.model.config
        saved = config._attn_implementation
        config._attn_implementation = _NAME
        try:
            with self._taps() as kept, self._up_to_the_last_tap():
                self.decoder(
                    input_ids=tokens.reshape(s, n * b),
                    position_ids=positions,
                    # used as it is; the attention function has its own
                    attention_mask=torch.zeros(1, 1, 1, 1, device=anchors.device),
                    use_cache=False,
                    carryover_blocks=_Blocks(prefix, anchors, b),
                )
        finally:
            config._attn_implementation = saved
        return torch.cat([kept[t] for t in self.tap_ids], -1).view(s, n, b, -1)
