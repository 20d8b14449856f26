"""Which vLLM this package knows, and whether carrying is on: what it cannot be sure of runs as plain DFlash,
and says so.
"""

from __future__ import annotations

import importlib
import inspect
import os
from functools import cache, reduce
from typing import Any, cast

FIRST, LAST = (0, 29), (0, 33)  # versions whose hooks were compared with SIGNATURES, both included
ENVIRONMENT = "CARRYOVER"
KV_DTYPES = ("auto", "float32", "float16", "bfloat16")
# Backends that take the attended length from the device tensor that the segment extends.
BACKENDS = ("CPU_ATTN", "FLASH_ATTN", "TRITON_ATTN", "FLEX_ATTENTION")

_V1 = "vllm.v1.spec_decode.dflash"
_V2 = "vllm.v1.worker.gpu.spec_decode.dflash.speculator"
_DSPARK = "vllm.v1.worker.gpu.spec_decode.dspark.speculator"
# Per module of vLLM: the parameters, in order, that our overrides and wrappers rely on.
SIGNATURES: dict[str, dict[str, tuple[str, ...]]] = {
    _V1: {
        "DFlashProposer.__init__": ("self", "vllm_config", "device", "runner"),
        "DFlashProposer.set_inputs_first_pass": (
            "self",
            "target_token_ids",
            "next_token_ids",
            "target_positions",
            "target_hidden_states",
            "token_indices_to_sample",
            "cad",
            "num_rejected_tokens_gpu",
        ),
    },
    _V2: {
        "DFlashSpeculator.__init__": ("self", "vllm_config", "device"),
        "prepare_dflash_inputs": (
            "input_buffers",
            "query_slot_mapping",
            "context_positions",
            "context_slot_mapping",
            "sample_indices",
            "sample_pos",
            "sample_idx_mapping",
            "temperature",
            "seeds",
            "input_batch",
            "num_sampled",
            "num_rejected",
        ),
    },
    _DSPARK: {"DSparkSpeculator.__init__": ("self", "vllm_config", "device")},
}
# Further parameters of the wrapped function, wherever they stand.
NAMED = {
    "prepare_dflash_inputs": ("block_table", "block_size", "cp_size", "num_query_per_req", "max_model_len"),
}


def log() -> Any:
    """vLLM's logger, so that messages appear in its log and format."""
    from vllm.logger import init_logger

    return init_logger("vllm.plugins.carryover")


def carryover_wanted() -> bool:
    """``CARRYOVER=off`` leaves the segment out; ValueError for a value that is neither ``on`` nor ``off``."""
    value = os.environ.get(ENVIRONMENT, "on").strip().lower() or "on"
    if value not in ("on", "off"):
        raise ValueError(f"{ENVIRONMENT}={value!r}: must be 'on' or 'off'")
    return value == "on"


def plain(reason: str) -> None:
    """Say that the drafter runs as plain DFlash, why, and what to do about it."""
    log().warning(
        "CARRYOVER IS OFF: %s. Drafting goes on as plain DFlash with the same weights: outputs stay right, "
        "the gain of the carried rows is lost.",
        reason,
    )


def warn_of_prefix_caching(vllm_config: Any) -> None:
    """vLLM's own fault 47930, which low acceptance would otherwise be the only sign of."""
    if vllm_config.cache_config.enable_prefix_caching:
        log().warning(
            "prefix caching is on: with DFlash drafters vLLM may lose the drafter's context of cached "
            "prefixes and draft badly (vllm-project/vllm issue 47930); outputs stay right. If acceptance is "
            "low, start with --no-enable-prefix-caching"
        )


def version_problem(version: str) -> str | None:
    """Why this vLLM is not known to fit, or None."""
    numbers = version.split("+")[0].split(".")
    try:
        pair = (int(numbers[0]), int(numbers[1]))
    except (IndexError, ValueError):
        pair = (0, 0)
    if FIRST <= pair <= LAST:
        return None
    known = f"{FIRST[0]}.{FIRST[1]} to {LAST[0]}.{LAST[1]}"
    return (
        f"this plugin knows vLLM {known}, and this is {version}; install one of those, or a newer "
        "carryover_ext"
    )


def signature_problem(module_name: str) -> str | None:
    """Why the hooks in a module of vLLM are not what the overrides rely on, or None."""
    module = importlib.import_module(module_name)
    for path, expected in SIGNATURES[module_name].items():
        try:
            function: Any = reduce(getattr, path.split("."), cast(Any, module))
            found = tuple(inspect.signature(function).parameters)
        except (AttributeError, TypeError, ValueError) as error:
            return f"{module_name}.{path} is not there ({error})"
        missing = [name for name in NAMED.get(path, ()) if name not in found]
        # An override must take exactly what vLLM passes; a wrapper passes on what it does not know.
        same = found[: len(expected)] == expected if path in NAMED else found == expected
        if not same or missing:
            return f"{module_name}.{path} takes {', '.join(found)}; expected {', '.join(expected)}"
    return None


@cache
def signatures_fit(module_name: str) -> bool:
    """Whether version and signatures are known; says so once when they are not."""
    import vllm

    problem = version_problem(vllm.__version__) or signature_problem(module_name)
    if problem is None and module_name == _DSPARK:
        problem = signature_problem(_V2)  # DSpark inherits the wrapped function's caller
    if problem is not None:
        plain(problem)
    return problem is None
