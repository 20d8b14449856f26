"""Drafters. Each has the methods ``from_pretrained``, ``bind``, ``new_cache``, ``commit`` and ``draft``."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from ..config import DrafterConfig
from .checkpoint import check_tensors
from .dflash import DFlashDrafter, Drafts
from .markov import MarkovDrafter

__all__ = ["DFlashDrafter", "Drafts", "MarkovDrafter", "check_checkpoint", "load_drafter"]


def load_drafter(directory: str | Path, dtype: torch.dtype | None = None) -> DFlashDrafter:
    """Load a checkpoint folder as the drafter that its ``config.json`` describes. ``dtype`` None is the
    one that this machine is fast with (:func:`carryover_ext.packing.fast_dtype`), as for a target.

    Raises what :meth:`DFlashDrafter.from_pretrained` raises.
    """
    config = DrafterConfig.from_pretrained(directory)
    return (MarkovDrafter if config.markov_rank > 0 else DFlashDrafter)._load(config, directory, dtype)


def check_checkpoint(config: DrafterConfig, tensors: dict[str, Tensor], directory: str | Path) -> None:
    """ValueError unless the tensors of a folder are those of its config. Whether there must be a carryover
    embedding is the caller's to judge.

    Copies of the target's embedding and head are taken out of ``tensors``.
    """
    with torch.device("meta"):
        kind = MarkovDrafter if config.markov_rank > 0 else DFlashDrafter
        expected = kind(config, mask_embedding="mask_embedding" in tensors).state_dict()
    if "carryover_embedding" in tensors:
        expected.setdefault("carryover_embedding", tensors["carryover_embedding"])
    else:
        expected.pop("carryover_embedding", None)
    check_tensors(tensors, expected, directory)
