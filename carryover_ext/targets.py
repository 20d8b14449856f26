"""Transformers models as targets: taps by forward hooks, a slot cache, logits for the rows that need them and
no others.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .packing import pack_linears
from .pretrained import load_target, load_tokenizer
from .slot_cache import ATTENTION, OPERATOR_DTYPES, OPERATOR_ROWS, SlotCache, attention_mask

__all__ = ["TappedTarget", "load_target", "load_tokenizer"]

# Families whose decoder takes one mask, and those that take one for each layer type.
ONE_MASK = frozenset({"llama", "mistral", "gemma"})
MASK_BY_TYPE = frozenset({"qwen2", "qwen3", "gemma2", "gemma3_text"})
PREFILL_CHUNK = 1024
BY_LENGTH = frozenset({"dynamic", "longrope"})  # RoPE whose frequencies follow the longest row of a pass

# One for each model: a pass sets its attention and fills its hooks.
_LOCKS: WeakKeyDictionary[nn.Module, threading.Lock] = WeakKeyDictionary()
# How many tap a model, and the names of its modules that were in training mode before the first did. (The
# modules themselves would keep the model alive.)
_TAPPED: WeakKeyDictionary[nn.Module, tuple[int, list[str]]] = WeakKeyDictionary()
_TAPPED_LOCK = threading.Lock()


def _hold_eval(model: nn.Module) -> None:
    """Eval mode until as many calls of :func:`_release_eval` have followed."""
    with _TAPPED_LOCK:
        count, names = _TAPPED.get(model, (0, []))
        training = [name for name, module in model.named_modules() if module.training]
        _TAPPED[model] = count + 1, names + training
        model.eval()


def _release_eval(model: nn.Module) -> None:
    with _TAPPED_LOCK:
        count, names = _TAPPED.pop(model)
        if count > 1:  # another one still decodes
            _TAPPED[model] = count - 1, names
            return
        for name in names:
            model.get_submodule(name).training = True


def cache_argument(decoder: Any) -> str:
    """Name of the argument that takes the cache: Transformers 5.24 renames it and warns of the old one."""
    return "cache" if "cache" in inspect.signature(decoder.forward).parameters else "past_key_values"


def _rope_types(config: Any) -> set[str]:
    """Of all layers; Gemma 3 has parameters for each type of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    parts = [part for part in parameters.values() if isinstance(part, dict)]
    return {str(part.get("rope_type", "default")) for part in (parts or [parameters])}


class TappedTarget:
    """A causal language model of the Llama, Mistral, Qwen2, Qwen3 or Gemma 1-3 families, tapped at decoder
    layers.

    Tap id k is the output of decoder layer k (``hidden_states[k + 1]`` in Transformers), before the final
    norm. Hooks keep the tapped layers' outputs and nothing else. The model is used as it is, but for being
    put into eval mode; :meth:`close` removes the hooks, and puts what was in training mode back into it.
    Passes over one model by several threads follow each other.

    Args:
        model: a ``...ForCausalLM``.
        pack_weights: give the linear layers packed weights while this object lives, where that is possible;
            False: do not. See :mod:`carryover_ext.packing`.
        tap_ids: decoder layers to tap, in the order in which their states are laid side by side. Empty: no
            features.
    """

    def __init__(self, model: Any, tap_ids: Sequence[int] = (), pack_weights: bool | None = None) -> None:
        decoder = model.get_decoder() if hasattr(model, "get_decoder") else model.model
        config = decoder.config
        family = config.model_type
        if family not in ONE_MASK | MASK_BY_TYPE:
            raise ValueError(f"model_type={family!r}: must be one of {sorted(ONE_MASK | MASK_BY_TYPE)}")
        if getattr(config, "use_bidirectional_attention", False):
            raise ValueError("use_bidirectional_attention=True: the target must be causal")
        for kind in _rope_types(config):
            if kind in BY_LENGTH:
                raise ValueError(
                    f"rope_type={kind!r}: the frequencies depend on the largest position of a pass, drafted "
                    "rows included, so that the output would not be the target's own; must be a type whose "
                    "frequencies are fixed, as 'default', 'linear', 'llama3' or 'yarn'"
                )
        self.model, self.decoder, self.config = model, decoder, config
        self.layers: nn.ModuleList = decoder.layers
        self.tap_ids = list(tap_ids)
        for tap in self.tap_ids:
            if not 0 <= tap < len(self.layers):
                raise ValueError(
                    f"tap_ids={self.tap_ids}: the target has decoder layers "
                    f"0..{len(self.layers) - 1}, not {tap}"
                )
        self.head: nn.Linear = model.get_output_embeddings()
        self.soft_cap: float | None = getattr(config, "final_logit_softcapping", None)
        self._cache_name = cache_argument(decoder)
        self._unpack = pack_linears([self.layers, self.head]) if pack_weights is not False else lambda: None
        self._taps: dict[int, Tensor] = {}
        self._running = False
        self._lock = _LOCKS.setdefault(model, threading.Lock())
        self.closed = False
        _hold_eval(model)
        self._hooks = [self.layers[tap].register_forward_hook(self._keep(tap)) for tap in self.tap_ids]

    def _keep(self, tap: int) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            if self._running:  # another one may be tapping the same model
                self._taps[tap] = output[0] if isinstance(output, tuple) else output

        return hook

    def close(self) -> None:
        """Remove the hooks and packed weights from the model, and eval mode where it was not."""
        if not self.closed:
            _release_eval(self.model)
        self.closed = True
        self._unpack()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def __enter__(self) -> TappedTarget:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # -- facts -------------------------------------------------------------------------------------
    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def hidden_size(self) -> int:
        return int(self.config.hidden_size)

    @property
    def vocab_size(self) -> int:
        return int(self.head_weight.shape[0])

    @property
    def max_length(self) -> int:
        """Positions that the model was made for."""
        return int(self.config.max_position_embeddings)

    @property
    def embed_weight(self) -> Tensor:
        return self.decoder.get_input_embeddings().weight

    @property
    def embed_scale(self) -> float:
        """Factor that the model applies to its embeddings: ``sqrt(hidden_size)`` in the Gemma families,
        otherwise 1.
        """
        return self.hidden_size**0.5 if self.config.model_type.startswith("gemma") else 1.0

    @property
    def head_weight(self) -> Tensor:
        return self.head.weight

    @property
    def device(self) -> torch.device:
        return self.head_weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.head_weight.dtype

    def bind(self, drafter: Any) -> Any:
        """Give a drafter this target's embedding and head, and check that it was made for this target."""
        return drafter.bind(
            self.embed_weight,
            self.head_weight,
            embed_scale=self.embed_scale,
            logit_soft_cap=self.soft_cap,
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            tap_ids=self.tap_ids or None,
        )

    # -- forward -----------------------------------------------------------------------------------
    def new_cache(self, batch: int, capacity: int) -> SlotCache:
        """An empty cache for ``batch`` requests; ``capacity`` includes the rows of a block past the last
        committed one.
        """
        return SlotCache(self.num_layers, batch, capacity, int(self.config.num_key_value_heads), self.device)

    def _window(self, kind: str) -> int:
        sliding = kind == "sliding_attention" or (self.config.model_type == "mistral")
        return int(getattr(self.config, "sliding_window", None) or 0) if sliding else 0

    def _masks(self, positions: Tensor, cache: SlotCache) -> Any:
        used = cache.step.used
        repeat = int(self.config.num_attention_heads) // int(self.config.num_key_value_heads)

        def make(kind: str) -> Tensor | None:
            window = self._window(kind)
            if cache.step.lens is not None:  # the operator needs no more than the window
                return torch.full((1, 1, 1, 1), window)
            # One row of requests of one length: every slot in use is visible, so there is nothing to mask.
            if positions.shape[1] == 1 and cache.step.start is not None and not 0 < window < used:
                return None
            return attention_mask(positions, used, window, repeat, self.dtype)

        if self.config.model_type in ONE_MASK:
            mask = make("full_attention")
            # Without any mask the model would build its own for a cache that it does not know.
            return attention_mask(positions, used, 0, repeat, self.dtype) if mask is None else mask
        return {kind: make(kind) for kind in set(self.config.layer_types)}

    def forward(self, cache: SlotCache, tokens: Tensor) -> Tensor:
        """Run the decoder over ``tokens [B, q]`` int64 after each request's committed rows: normed rows ``[B,
        q, Ht]``.

        The rows are written behind the committed ones and count as committed only after ``cache.advance``.
        """
        rows = tokens.shape[1]
        able = self.device.type == "cpu" and self.dtype in OPERATOR_DTYPES
        positions = cache.begin(rows, operator=able and rows <= OPERATOR_ROWS)
        config = self.config
        with self._lock:
            before = config._attn_implementation
            config._attn_implementation = ATTENTION
            self._running = True
            try:
                out = self.decoder(
                    input_ids=tokens,
                    attention_mask=self._masks(positions, cache),
                    position_ids=positions,
                    use_cache=True,
                    carryover_step=cache.step,
                    **{self._cache_name: cache},
                )
            finally:
                self._running = False
                config._attn_implementation = before
        return out.last_hidden_state

    def features(self) -> Tensor | None:
        """Tapped states of the last forward, side by side: ``[B, q, n * Ht]``; None without taps."""
        if not self.tap_ids:
            return None
        states = [self._taps[tap] for tap in self.tap_ids]
        self._taps.clear()
        return torch.cat(states, -1)

    def logits(self, rows: Tensor) -> Tensor:
        """Head (and final soft cap) over normed rows ``[..., Ht]`` -> ``[..., V]``."""
        out = self.head(rows)
        if self.soft_cap:
            out = torch.tanh(out / self.soft_cap) * self.soft_cap
        return out

    def prefill(self, cache: SlotCache, prompts: Sequence[Tensor]) -> tuple[Tensor, Tensor | None, Tensor]:
        """Commit ragged prompts (int64 ``[n_i]``, at least one token each) into an empty cache.

        Returns logits of each last row ``[B, V]``, features ``[T, n * Ht]`` of all rows packed by request
        (None without taps), and ``row_start [B+1]`` int32. Short prompts are padded on the right; padding is
        overwritten before anything can see it.
        """
        lengths = [int(p.numel()) for p in prompts]
        for i, n in enumerate(lengths):
            if n < 1:
                raise ValueError(f"prompts[{i}] is empty: a prompt needs at least one token")
        longest, device = max(lengths), self.device
        padded = torch.zeros(len(prompts), longest, dtype=torch.int64, device=device)
        for i, prompt in enumerate(prompts):
            padded[i, : lengths[i]] = prompt
        size = torch.tensor(lengths, device=device)
        last = torch.zeros(len(prompts), self.hidden_size, dtype=self.dtype, device=device)
        packed: list[list[Tensor]] = [[] for _ in prompts]
        for start in range(0, longest, PREFILL_CHUNK):
            chunk = padded[:, start : start + PREFILL_CHUNK]
            rows = self.forward(cache, chunk)
            features = self.features()
            # Padding counts as committed until the last chunk is through, so that all requests stay aligned.
            cache.advance(torch.full_like(cache.lens, chunk.shape[1]), [chunk.shape[1]] * len(prompts))
            for i, n in enumerate(lengths):
                if start < n <= start + chunk.shape[1]:
                    last[i] = rows[i, n - 1 - start]
                if features is not None and n > start:
                    packed[i].append(features[i, : n - start])
        cache.lens.copy_(size)
        cache.host_lens = list(lengths)
        row_start = F.pad(size.cumsum(0), (1, 0)).to(torch.int32)
        merged = torch.cat([f for request in packed for f in request]) if self.tap_ids else None
        return self.logits(last), merged, row_start

    def verify(self, cache: SlotCache, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        """Run a block ``[B, b]`` int64: logits ``[B, b, V]`` and features ``[B, b, n * Ht]`` of every row,
        accepted or not.
        """
        rows = self.forward(cache, tokens)
        return self.logits(rows), self.features()
