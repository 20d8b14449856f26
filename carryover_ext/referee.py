"""Why does a greedy output differ from plain decoding? Either rounding decided a near tie, or something
is wrong.

A 16-row verification adds up in another order than a 1-row step, so in bf16 the better of two nearly
equal logits may change.
The referee looks at the first token where two outputs part, with passes of its own that share nothing
with the engine: a fresh copy of the target in the same dtype and one in the next wider dtype, over the
common prefix, without any cache.

    gap       difference of the logits of the two disputed tokens, in the wider dtype
    rounding  how far the two dtypes differ at that place: twice (two logits) the largest difference among
    the ten best tokens

The difference is explained when gap <= rounding and both tokens are among the ten best. ``ulp``, one unit
in the last place at the magnitude of the better logit, is the least that rounding can be, since logits
themselves are stored in the dtype.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

BEST = 10
WIDER = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.float32: torch.float64}


def unit_in_last_place(value: float, dtype: torch.dtype) -> float:
    """Distance of neighbouring numbers of ``dtype`` at the magnitude of ``value``: 2^(exponent) * eps; 0
    for 0."""
    if value == 0.0:
        return 0.0
    return 2.0 ** math.floor(math.log2(abs(value))) * torch.finfo(dtype).eps


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Index of the first token that differs, the shorter length when one is a prefix of the other, None
    when equal."""
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return index
    return None if len(one) == len(other) else min(len(one), len(other))


def judge(
    narrow: torch.Tensor, wide: torch.Tensor, first: int, second: int, dtype: torch.dtype
) -> dict[str, Any]:
    """The verdict from logits ``[V]`` of one place in the dtype of the run and in a wider one, on two
    token ids."""
    narrow, wide = narrow.double(), wide.double()
    best = wide.topk(min(BEST, wide.numel())).indices
    gap = float((wide[first] - wide[second]).abs())
    ulp = unit_in_last_place(float(torch.maximum(wide[first], wide[second])), dtype)
    rounding = max(2 * float((narrow - wide)[best].abs().max()), ulp)
    known = {first, second} <= set(best.tolist())
    return {"gap": gap, "rounding": rounding, "ulp": ulp, "explained": known and gap <= rounding}


class Referee:
    """Judges differences against fresh copies of ``model`` (a Hugging Face causal LM); they are made when
    first needed."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.dtype: torch.dtype = next(model.parameters()).dtype
        self._copies: dict[torch.dtype, Any] = {}

    def _copy(self, dtype: torch.dtype) -> Any:
        if dtype not in self._copies:
            from transformers import AutoModelForCausalLM

            copy = AutoModelForCausalLM.from_config(
                self.model.config, dtype=dtype, attn_implementation="sdpa"
            )
            copy.load_state_dict(self.model.state_dict())
            self._copies[dtype] = copy.eval().to(next(self.model.parameters()).device)
        return self._copies[dtype]

    @torch.inference_mode()
    def _logits(self, dtype: torch.dtype, ids: Sequence[int]) -> torch.Tensor:
        model = self._copy(dtype)
        tokens = torch.tensor([list(ids)], device=next(model.parameters()).device)
        return model(input_ids=tokens, use_cache=False).logits[0, -1]

    def explain(
        self, prompt: Sequence[int], plain: Sequence[int], other: Sequence[int]
    ) -> dict[str, Any] | None:
        """None when the outputs are equal; else index, the two tokens, gap, rounding, ulp and
        ``explained``."""
        index = first_difference(plain, other)
        if index is None:
            return None
        found: dict[str, Any] = {"index": index}
        if index >= min(len(plain), len(other)):
            # One output stops inside the other: no tie can do that, since both see the same stop tokens
            # and limits.
            return found | {
                "plain": None,
                "other": None,
                "gap": None,
                "rounding": None,
                "ulp": None,
                "explained": False,
            }
        prefix = [*prompt, *plain[:index]]
        verdict = judge(
            self._logits(self.dtype, prefix),
            self._logits(WIDER[self.dtype], prefix),
            plain[index],
            other[index],
            self.dtype,
        )
        return found | {"plain": plain[index], "other": other[index]} | verdict
