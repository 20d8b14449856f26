"""Carryover inside engines of others. Each sub-package imports its engine only when the engine loads it."""
