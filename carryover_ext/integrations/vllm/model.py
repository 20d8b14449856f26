"""vLLM's DFlash and DSpark models with one more parameter, the carryover embedding.

The embedding is added by the proposers (:mod:`.v1`, :mod:`.v2`) to the rows that were rejected, after ``fc``
and before the norm, so that these models compute what the stock ones do. It lives in the hidden size, which
tensor parallelism replicates; the K and V projections after it are sharded by vLLM as ever.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3ForCausalLM, DFlashQwen3Model
from vllm.model_executor.models.qwen3_dspark import Qwen3DSparkForCausalLM

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


class CarryoverDFlashModel(DFlashQwen3Model):
    def __init__(self, *, vllm_config: Any, start_layer_id: int = 0, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, start_layer_id=start_layer_id, prefix=prefix)
        _add_embedding(self, self.config, vllm_config.model_config.dtype)


class CarryoverDFlashForCausalLM(DFlashQwen3ForCausalLM):
    model_cls = CarryoverDFlashModel

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Any:
        seen: set[str] = set()
        loaded = super().load_weights(_checked(weights, seen, self.config.vocab_size))
        _require_embedding(seen, self.draft_model_config.model)
        return loaded


class CarryoverDSparkForCausalLM(Qwen3DSparkForCausalLM):
    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        _add_embedding(self.model, self.config, vllm_config.model_config.dtype)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Any:
        seen: set[str] = set()
        loaded = super().load_weights(_checked(weights, seen, self.config.vocab_size))
        _require_embedding(seen, self.draft_model_config.model)
        return loaded
