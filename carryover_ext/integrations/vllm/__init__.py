"""Carryover Drafting inside vLLM: found by its entry point (``vllm.general_plugins``), selected by the
architecture that ``carryover export --to vllm`` writes. Nothing changes for any other checkpoint.

vLLM loads the plugin in every process, so that importing this module must stay cheap: neither vLLM's model
code nor PyTorch is imported before an engine asks for a Carryover drafter.
"""

from __future__ import annotations

from typing import Any

DFLASH_ARCHITECTURE = "DFlashCarryoverDraftModel"  # vLLM keeps a name that starts with "DFlash" as it is
DSPARK_ARCHITECTURE = (
    "CarryoverQwen3DSparkModel"  # stands before "Qwen3DSparkModel", by which vLLM knows DSpark
)
MODELS = {
    DFLASH_ARCHITECTURE: "carryover_ext.integrations.vllm.model:CarryoverDFlashForCausalLM",
    DSPARK_ARCHITECTURE: "carryover_ext.integrations.vllm.model:CarryoverDSparkForCausalLM",
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
