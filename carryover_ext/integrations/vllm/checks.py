"""What is checked when the engine starts: mistakes of the user are errors with the remedy; what this package
does not know about the machine turns carrying off, loudly
(:func:`carryover_ext.integrations.vllm.compat.plain`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ...config import CarryoverConfig
from . import DSPARK_ARCHITECTURE
from .compat import BACKENDS, KV_DTYPES, carryover_wanted


@dataclass(frozen=True)
class Plan:
    """What a drafter is to do. ``off``: why nothing is carried, None: rows are carried. ``shifted``: carried
    rows get the position that they predict. ``window``: smallest sliding window of the layers, 0: none.
    ``limit``: positions of the drafter's rotary table."""

    off: str | None
    shifted: bool
    window: int
    limit: int


def target_width(draft: Any) -> int | None:
    """Width of the states that a drafter's hf config was made for; as vLLM reads it, its own where none is
    named."""
    return getattr(draft, "target_hidden_size", None) or getattr(draft, "hidden_size", None)


def check_target(draft: Any, target: Any, name: str) -> None:
    """ValueError when the drafter was made for another target (hf configs; absent keys are not checked)."""
    shapes = (
        ("num_target_layers", "num_hidden_layers", "decoder layers"),
        ("target_hidden_size", "hidden_size", "hidden size"),
        ("vocab_size", "vocab_size", "vocabulary"),
    )
    for key, of_target, what in shapes:
        width = key == "target_hidden_size"
        made_for = target_width(draft) if width else getattr(draft, key, None)
        found = getattr(target, of_target, None)
        if made_for is not None and found is not None and made_for != found:
            raise ValueError(
                f"drafter {name!r} was made for another target: its {key}={made_for}, the target's {what} is "
                f"{found}. Serve the target that the drafter was trained on, or name the drafter of this one"
            )


def check_length(draft: Any, tokens: int, dspark: bool, name: str) -> None:
    """ValueError when more tokens are to be drafted than the block that the drafter was trained with."""
    block = getattr(draft, "block_size", None)
    if block is None:
        return
    anchor_first = dspark and bool(getattr(draft, "sample_from_anchor", True))
    most = block if anchor_first else block - 1
    if tokens > most:
        raise ValueError(
            f"num_speculative_tokens={tokens}: drafter {name!r} was trained with block_size={block}, which "
            f"drafts at most {most}; set num_speculative_tokens to {most} or less"
        )


def make_plan(vllm_config: Any) -> Plan:
    """Check a ``VllmConfig`` and decide. ValueError for a mistake; see :class:`Plan`."""
    speculative = vllm_config.speculative_config
    model = speculative.draft_model_config
    draft, name = model.hf_config, model.model
    check_target(draft, vllm_config.model_config.hf_text_config, name)
    dspark = DSPARK_ARCHITECTURE in (model.architectures or ())
    check_length(draft, speculative.num_speculative_tokens, dspark, name)
    carry = CarryoverConfig.from_dict(getattr(draft, "carryover_config", None) or {}, f"drafter {name!r}")
    layers = getattr(draft, "layer_types", None) or ()
    window = getattr(draft, "sliding_window", None) if "sliding_attention" in layers else None
    return Plan(
        off=_why_off(vllm_config) if carry.enabled else "the drafter's carryover_config has enabled: false",
        shifted=carry.carry_positions == "shifted",
        window=int(window or 0),
        limit=int(getattr(draft, "max_position_embeddings", 0) or vllm_config.model_config.max_model_len),
    )


def _why_off(vllm_config: Any) -> str | None:
    if not carryover_wanted():
        return "CARRYOVER=off is set"
    speculative, parallel = vllm_config.speculative_config, vllm_config.parallel_config
    dtype = getattr(speculative, "kv_cache_dtype", None) or vllm_config.cache_config.cache_dtype
    if dtype not in KV_DTYPES:
        return (
            f"kv_cache_dtype={dtype!r} is not one that carried rows were tested with "
            f"({', '.join(KV_DTYPES)}); "
            "start with --kv-cache-dtype auto"
        )
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) != 1:
            return f"{name}={getattr(parallel, name)} spreads a request's slots over ranks; set it to 1"
    if getattr(speculative, "disable_padded_drafter_batch", False):
        return "disable_padded_drafter_batch drops the rejected rows before the drafter sees them; unset it"
    return None


def backend_problem(names: Iterable[str]) -> str | None:
    """Why an attention backend of the drafter's layers is not known to fit, or None."""
    unknown = sorted(set(names) - set(BACKENDS))
    if not unknown:
        return None
    return (
        f"attention backend {', '.join(unknown)} of the drafter was not tested with carried rows; choose one "
        "of "
        f'{", ".join(BACKENDS)} with "attention_backend" in --speculative-config'
    )
