"""Which vLLM this package knows, and whether carrying is on: what it cannot be sure of runs as plain DFlash,
and says so.
"""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Mapping
from functools import cache, reduce
from typing import Any, cast

FIRST, LAST = (0, 29), (0, 33)  # versions whose hooks were compared with SIGNATURES, both included
ENVIRONMENT = "CARRYOVER"
KV_DTYPES = ("auto", "float32", "float16", "bfloat16")
# Backends that take the attended length from the device tensor that the segment extends.
BACKENDS = ("CPU_ATTN", "FLASH_ATTN", "TRITON_ATTN", "FLEX_ATTENTION")

_V1 = "vllm.v1.spec_decode.dflash"
_SPECULATORS = "vllm.v1.worker.gpu.spec_decode"
_V2 = f"{_SPECULATORS}.dflash.speculator"
_DFLASH2 = f"{_SPECULATORS}.dflash2.speculator"
_DSPARK = f"{_SPECULATORS}.dspark.speculator"
_MODEL = "vllm.model_executor.models.qwen3_dflash"
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
        "DFlashSpeculator.set_attn": ("self", "model_state", "kv_cache_config"),
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
    f"{_SPECULATORS}.speculator": {"DraftModelSpeculator.load_model": ("self", "target_model")},
    _DFLASH2: {"DFlash2Speculator.__init__": ("self", "vllm_config", "device")},
    _DSPARK: {"DSparkSpeculator.__init__": ("self", "vllm_config", "device")},
    _MODEL: {
        "DFlashQwen3Model._project_context_kv": ("self", "context_states"),
        "DFlashQwen3ForCausalLM.__init__": ("self", "vllm_config", "prefix"),
        "DFlashQwen3ForCausalLM.load_weights": ("self", "weights"),
        "DFlashQwen3ForCausalLM.precompute_and_store_context_kv": (
            "self",
            "context_states",
            "context_positions",
            "context_slot_mapping",
        ),
    },
}
# Further parameters of functions that ours pass everything on to, wherever they stand.
NAMED: dict[str, tuple[str, ...]] = {
    "prepare_dflash_inputs": ("block_table", "block_size", "cp_size", "num_query_per_req", "max_model_len"),
    "DFlashSpeculator.set_attn": ("block_tables",),
    "DraftModelSpeculator.load_model": (),
    "DFlashQwen3Model._project_context_kv": ("num_ctx", "num_layers", "num_kv_heads", "head_dim"),
    "DFlashQwen3ForCausalLM.precompute_and_store_context_kv": (),
}
# What else must fit for the class that a module gives.
RELY_ON = {
    _V1: (_MODEL,),
    _V2: (f"{_SPECULATORS}.speculator", _MODEL),
    _DFLASH2: (_V2, f"{_SPECULATORS}.speculator", _MODEL),
    _DSPARK: (_V2, f"{_SPECULATORS}.speculator", _MODEL),
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


def compare(module_name: str, found: Mapping[str, tuple[str, ...] | None]) -> str | None:
    """Why functions of a module are not what the overrides rely on, or None.

    ``found``: their parameters, by the names of ``SIGNATURES``; None or absent: the function is not there.
    """
    for path, expected in SIGNATURES[module_name].items():
        parameters = found.get(path)
        if parameters is None:
            return f"{module_name}.{path} is not there"
        missing = [name for name in NAMED.get(path, ()) if name not in parameters]
        # An override must take exactly what vLLM passes; a wrapper passes on what it does not know.
        same = parameters[: len(expected)] == expected if path in NAMED else parameters == expected
        if not same or missing:
            return (
                f"{module_name}.{path} takes {', '.join(parameters)}; expected "
                f"{', '.join((*expected, *NAMED.get(path, ())))}"
            )
    return None


def signature_problem(module_name: str) -> str | None:
    """:func:`compare` for a module of the vLLM that is installed."""
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        return f"{module_name} is not there ({error})"
    found: dict[str, tuple[str, ...] | None] = {}
    for path in SIGNATURES[module_name]:
        try:
            function: Any = reduce(getattr, path.split("."), cast(Any, module))
            found[path] = tuple(inspect.signature(function).parameters)
        except (AttributeError, TypeError, ValueError):
            found[path] = None
    return compare(module_name, found)


@cache
def signatures_fit(module_name: str) -> bool:
    """Whether version and signatures are known; says so once when they are not."""
    import vllm

    problem = version_problem(vllm.__version__)
    for name in (module_name, *RELY_ON[module_name]):
        problem = problem or signature_problem(name)
    if problem is not None:
        plain(problem)
    return problem is None
