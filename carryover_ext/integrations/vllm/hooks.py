"""vLLM chooses its proposer classes by name in its own code, so the choice is made where they are
constructed: ``__new__`` of the stock class returns an instance of ours when the drafter is a Carryover
checkpoint.

The classes are changed when vLLM imports their modules. Importing the modules here would cost every process
of vLLM, the API server too, seconds and memory.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from . import MODELS, asks_to_carry, is_carryover

# Module of vLLM -> what is done to it once it is imported.
_SPECULATORS = "vllm.v1.worker.gpu.spec_decode"
PROPOSERS = {
    "vllm.v1.spec_decode.dflash": ("DFlashProposer", "v1", "CarryoverProposer"),
    f"{_SPECULATORS}.dflash.speculator": ("DFlashSpeculator", "v2", "CarryoverSpeculator"),
    f"{_SPECULATORS}.dflash2.speculator": ("DFlash2Speculator", "v2", "CarryoverDFlash2Speculator"),
    f"{_SPECULATORS}.dspark.speculator": ("DSparkSpeculator", "v2", "CarryoverDSparkSpeculator"),
}
FORMATS = "vllm.transformers_utils.configs.speculators.algos"


def _choose_class(module: ModuleType) -> None:
    """Let the stock class construct ours for a Carryover drafter."""
    name, ours, class_name = PROPOSERS[module.__name__]
    stock = getattr(module, name)
    if "__new__" in stock.__dict__:
        return

    def __new__(cls: type, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        if cls is stock and is_carryover(vllm_config):
            from .compat import signatures_fit

            if signatures_fit(module.__name__):
                cls = getattr(importlib.import_module(f"{__package__}.{ours}"), class_name)
        elif asks_to_carry(vllm_config) and not is_carryover(vllm_config):
            from .compat import plain

            found = vllm_config.speculative_config.draft_model_config.architectures
            plain(
                f"the drafter's config has carryover enabled, and its architectures {found} are none that "
                f"carries ({', '.join(MODELS)}); write the folder with `carryover export --to vllm`"
            )
        return object.__new__(cls)

    stock.__new__ = __new__


def _read_speculators(module: ModuleType) -> None:
    """Let the reader of the speculators format keep the Carryover block and select our architectures."""
    from . import DFLASH_ARCHITECTURE, DSPARK_ARCHITECTURE

    types = module.SUPPORTED_SPECULATORS_TYPES
    for name, architectures in (
        ("dflash", [DFLASH_ARCHITECTURE]),
        ("dspark", [DSPARK_ARCHITECTURE, "Qwen3DSparkModel"]),
    ):
        update = types.get(name)
        if update is None or getattr(update, "carryover", False):
            continue

        def wrapped(
            config_dict: dict[str, Any],
            pre_trained_config: dict[str, Any],
            update: Callable[..., None] = update,
            architectures: Sequence[str] = architectures,
        ) -> None:
            update(config_dict=config_dict, pre_trained_config=pre_trained_config)
            carry = config_dict.get("carryover_config")
            if carry and carry.get("enabled", True):
                pre_trained_config["architectures"] = list(architectures)
                pre_trained_config["carryover_config"] = carry

        wrapped.carryover = True  # type: ignore[attr-defined]
        types[name] = wrapped


PATCHES: dict[str, Callable[[ModuleType], None]] = dict.fromkeys(PROPOSERS, _choose_class)
PATCHES[FORMATS] = _read_speculators


class _PatchedLoader(importlib.abc.Loader):
    """Runs the module's own loader, then the patch."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        PATCHES[module.__name__](module)

    def __getattr__(self, name: str) -> Any:  # get_source and others, for tracebacks and inspect
        return getattr(self.loader, name)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules of PATCHES by the other finders and gives them the patched loader."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in PATCHES:
            return None
        for finder in sys.meta_path:
            if isinstance(finder, _Finder):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _PatchedLoader(spec.loader)
                return spec
        return None


def install() -> None:
    """Patch what is imported already, and the rest when vLLM imports it."""
    for name, patch in PATCHES.items():
        if name in sys.modules:
            patch(sys.modules[name])
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
