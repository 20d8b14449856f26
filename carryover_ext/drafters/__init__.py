"""Drafters. Each has the methods ``from_pretrained``, ``bind``, ``new_cache``, ``commit`` and ``draft``."""

from .dflash import DFlashDrafter, Drafts

__all__ = ["DFlashDrafter", "Drafts"]
