"""Carryover Drafting inside vLLM: found by its entry point (``vllm.general_plugins``), selected by the
architecture that ``carryover export --to vllm`` writes. Nothing changes for any other checkpoint.

vLLM loads the plugin in every process, so that importing this module must stay cheap: neither vLLM's model
code nor PyTorch is imported before an engine asks for a Carryover drafter.
"""

from __future__ import annotations

from typing import Any

DFLASH_ARCHITECTURE = "DFlashCarryoverDraftModel"  # vLLM keeps a name that starts with "DFlash" as it is
# The next two stand before vLLM's own name, by which vLLM knows the kind of drafter.
DFLASH2_ARCHITECTURE = "DFlash2CarryoverDraftModel"  # then "DFlash2DraftModel"
DSPARK_ARCHITECTURE = "CarryoverQwen3DSparkModel"  # then "Qwen3DSparkModel"
_MODEL = f"{__name__}.model"
MODELS = {
    DFLASH_ARCHITECTURE: f"{_MODEL}:CarryoverDFlashForCausalLM",
    DFLASH2_ARCHITECTURE: f"{_MODEL}:CarryoverDFlash2ForCausalLM",
    DSPARK_ARCHITECTURE: f"{_MODEL}:CarryoverDSparkForCausalLM",
}


def register() -> None:
    """Entry point: register the architectures and arrange that their drafters are built as this package's.

    May be called several times in a process.
    """
    from vllm import ModelRegistry

    from . import hooks

    known = ModelRegistry.get_supported_archs()
    for name, where in MODELS.items():
        if name not in known:
            ModelRegistry.register_model(name, where)
    hooks.install()


def is_carryover(vllm_config: Any) -> bool:
    """Whether the drafter of a ``VllmConfig`` is a Carryover checkpoint."""
    draft = getattr(vllm_config.speculative_config, "draft_model_config", None)
    return draft is not None and not set(MODELS).isdisjoint(draft.architectures or ())


def asks_to_carry(vllm_config: Any) -> bool:
    """Whether the drafter's config has carryover enabled, whatever its architecture."""
    draft = getattr(vllm_config.speculative_config, "draft_model_config", None)
    carry = getattr(getattr(draft, "hf_config", None), "carryover_config", None)
    return isinstance(carry, dict) and bool(carry.get("enabled", True))
