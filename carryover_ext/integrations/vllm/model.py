"""vLLM's DFlash, DFlash2 and DSpark models with one more parameter, the carryover embedding.

It is added to the rows that were rejected, after ``fc``. The proposers (:mod:`.v1`, :mod:`.v2`) mark these
rows of the buffer that they keep the states in, and leave the states alone: where vLLM fills that buffer
changes from version to version, and with 0.33 is inside the captured graph. The embedding lives in the hidden
size, which tensor parallelism replicates; the K and V projections after it are sharded by vLLM as ever.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3ForCausalLM, DFlashQwen3Model
from vllm.model_executor.models.qwen3_dflash2 import DFlash2Qwen3ForCausalLM, DFlash2Qwen3Model
from vllm.model_executor.models.qwen3_dspark import Qwen3DSparkForCausalLM

from carryover_ext.drafters.checkpoint import EMBED, HEAD

from .checks import target_width

EMBEDDING = "carryover_embedding"


def _add_embedding(model: nn.Module, config: Any, dtype: torch.dtype) -> None:
    model.register_parameter(
        EMBEDDING, nn.Parameter(torch.zeros(config.hidden_size, dtype=dtype), requires_grad=False)
    )


def _checked(
    weights: Iterable[tuple[str, Tensor]], seen: set[str], vocab_size: int
) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in weights:
        if name == "d2t":
            tokens = tensor + torch.arange(tensor.numel(), device=tensor.device)
            if tensor.numel() and int(tokens.max()) >= vocab_size:
                raise ValueError(
                    f"d2t names token {int(tokens.max())} of a vocabulary of {vocab_size}: it holds token "
                    "ids where vLLM wants the distance to the row; write the folder with "
                    "`carryover export --to vllm`"
                )
        seen.add(name)
        yield name, tensor


def _require_embedding(seen: set[str], folder: str) -> None:
    if EMBEDDING not in seen:
        raise ValueError(
            f"drafter {folder!r} has no tensor {EMBEDDING!r}, which its architecture needs; "
            "`carryover export --to vllm --warm-start` adds one that is zero, `--plain` writes a DFlash "
            "checkpoint"
        )


def _require_vocabulary(seen: set[str], config: Any, folder: str) -> None:
    """vLLM takes what a checkpoint does not have from the target, or leaves it uninitialised."""
    width = target_width(config)
    missing = [name for name in (EMBED, HEAD) if name not in seen]
    if config.hidden_size != width and missing:
        raise ValueError(
            f"drafter {folder!r} has hidden_size={config.hidden_size}, its target {width}, but it has no "
            f"{' and no '.join(missing)} of its own; write the folder with `carryover export --to vllm`"
        )


class _CarryoverModel(DFlashQwen3ForCausalLM):
    """What the three models share: the parameter is required, and marked rows get it."""

    marked: tuple[Tensor, Tensor] | None = None
    once = False

    def mark_rows(self, states: Tensor, rows: Tensor, once: bool = False) -> None:
        """A row of the buffer ``states [T, H]`` gets the embedding where ``rows [T]`` (bool) is True:
        ``once``, or whenever context is projected, also by a graph that was captured with these tensors.
        """
        self.marked, self.once = (states, rows), once

    def _rows(self, context_states: Tensor) -> Tensor | None:
        """The marks of rows of the buffer, None where nothing is marked."""
        if self.marked is None or not context_states.shape[0]:
            return None
        states, rows = self.marked
        row_bytes = states.stride(0) * states.element_size()
        first, rest = divmod(context_states.data_ptr() - states.data_ptr(), row_bytes)
        count = context_states.shape[0]
        if rest or first < 0 or first + count > rows.shape[0]:
            raise RuntimeError(
                "context_states are not rows of the proposer's states, where the rejected ones are marked: "
                "this vLLM is not one that carryover_ext knows; set CARRYOVER=off"
            )
        return rows[first : first + count]

    def precompute_and_store_context_kv(self, context_states: Tensor, *args: Any, **kwargs: Any) -> None:
        rows = None if self.post_norm else self._rows(context_states)
        if rows is not None:
            tagged = context_states + self.model.carryover_embedding
            context_states = torch.where(rows[:, None], tagged, context_states)
        super().precompute_and_store_context_kv(context_states, *args, **kwargs)
        if self.once:
            self.marked = None

    @property
    def post_norm(self) -> bool:
        carry = getattr(self.config, "carryover_config", None) or {}
        return carry.get("carry_embed_at") == "post_norm"

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Any:
        seen: set[str] = set()
        loaded = super().load_weights(_checked(weights, seen, self.config.vocab_size))
        _require_embedding(seen, self.draft_model_config.model)
        _require_vocabulary(seen, self.config, self.draft_model_config.model)
        if self.post_norm:
            self._project_with_embedding()
        return loaded

    def _project_with_embedding(self) -> None:
        """Embedding after the norm: the projection of K and V is linear, so that its image ``W E`` is added
        to what vLLM projects (before ``k_norm`` and RoPE)."""
        fused = getattr(self.model, "_fused_kv_weight", None)
        if fused is None:
            raise ValueError(
                f"drafter {self.draft_model_config.model!r} has carry_embed_at='post_norm' and quantised K/V "
                "projections, to which the embedding cannot be added; serve it unquantised, or train with "
                "carry_embed_at='pre_norm'"
            )
        image = nn.functional.linear(self.model.carryover_embedding, fused)
        # of the class: weights may be loaded again
        project = type(self.model)._project_context_kv.__get__(self.model)

        def projected(context_states: Tensor, *shape: int) -> tuple[Tensor, Tensor]:
            k, v = project(context_states, *shape)  # [L, T, nkv, d]
            rows = self._rows(context_states)
            if rows is None:
                return k, v
            of_k, of_v = image.view(k.shape[0], 2, 1, *k.shape[2:]).unbind(1)
            mask = rows[:, None, None]
            return torch.where(mask, k + of_k, k), torch.where(mask, v + of_v, v)

        self.model._project_context_kv = projected


class CarryoverDFlashModel(DFlashQwen3Model):
    def __init__(self, *, vllm_config: Any, start_layer_id: int = 0, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, start_layer_id=start_layer_id, prefix=prefix)
        _add_embedding(self, self.config, vllm_config.model_config.dtype)


class CarryoverDFlash2Model(DFlash2Qwen3Model):
    def __init__(self, *, vllm_config: Any, start_layer_id: int = 0, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, start_layer_id=start_layer_id, prefix=prefix)
        _add_embedding(self, self.config, vllm_config.model_config.dtype)


class CarryoverDFlashForCausalLM(_CarryoverModel):
    model_cls = CarryoverDFlashModel


class CarryoverDFlash2ForCausalLM(_CarryoverModel, DFlash2Qwen3ForCausalLM):
    model_cls = CarryoverDFlash2Model


class CarryoverDSparkForCausalLM(_CarryoverModel, Qwen3DSparkForCausalLM):
    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        _add_embedding(self.model, self.config, vllm_config.model_config.dtype)
