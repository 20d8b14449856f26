"""Drafters. Each has the methods ``from_pretrained``, ``bind``, ``new_cache``, ``commit`` and ``draft``."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from ..config import DrafterConfig
from .checkpoint import EMBED, HEAD, check_tensors
from .dflash import DFlashDrafter, Drafts
from .markov import MarkovDrafter

__all__ = ["DFlashDrafter", "Drafts", "MarkovDrafter", "check_checkpoint", "load_drafter"]


def load_drafter(directory: str | Path, dtype: torch.dtype = torch.bfloat16) -> DFlashDrafter:
    """Load a checkpoint folder as the drafter that its ``config.json`` describes.

    Raises what :meth:`DFlashDrafter.from_pretrained` raises.
    """
    config = DrafterConfig.from_pretrained(directory)
    return (MarkovDrafter if config.markov_rank > 0 else DFlashDrafter)._load(config, directory, dtype)


def check_checkpoint(config: DrafterConfig, tensors: dict[str, Tensor], directory: str | Path) -> None:
    """ValueError unless the tensors of a folder are those of its config, the carryover embedding aside.

    Copies of the target's embedding and head are taken out of ``tensors``.
    """
    with torch.device("meta"):
        kind = MarkovDrafter if config.markov_rank > 0 else DFlashDrafter
        expected = kind(config, mask_embedding="mask_embedding" in tensors).state_dict()
    expected.pop("carryover_embedding", None)
    for name in {EMBED, HEAD} - set(expected):
        tensors.pop(name, None)
    check_tensors({k: v for k, v in tensors.items() if k != "carryover_embedding"}, expected, directory)
