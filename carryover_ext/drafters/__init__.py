"""Drafters. Each has the methods ``from_pretrained``, ``bind``, ``new_cache``, ``commit`` and ``draft``."""

from __future__ import annotations

from pathlib import Path

import torch

from ..config import DrafterConfig
from .dflash import DFlashDrafter, Drafts
from .markov import MarkovDrafter

__all__ = ["DFlashDrafter", "Drafts", "MarkovDrafter", "load_drafter"]


def load_drafter(directory: str | Path, dtype: torch.dtype = torch.bfloat16) -> DFlashDrafter:
    """Load a checkpoint folder as the drafter that its ``config.json`` describes.

    Raises what :meth:`DFlashDrafter.from_pretrained` raises.
    """
    config = DrafterConfig.from_pretrained(directory)
    return (MarkovDrafter if config.markov_rank > 0 else DFlashDrafter)._load(config, directory, dtype)
