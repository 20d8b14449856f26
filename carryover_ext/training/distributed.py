"""Data-parallel training: each process takes its share of a batch's sequences; sums go over all of them.

All processes hold the same weights and draw the same random numbers, so that a run of several processes
takes the steps of one process, up to the order of additions. Started by ``torchrun``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Ranks:
    """This process (``rank``) among ``size``; the default is a run of one."""

    rank: int = 0
    size: int = 1

    @property
    def first(self) -> bool:
        """Whether this process writes files and talks to people."""
        return self.rank == 0

    def share(self, count: int) -> slice:
        """This process's part of ``count`` sequences, which must be a multiple of ``size``."""
        each = count // self.size
        return slice(self.rank * each, (self.rank + 1) * each)

    def sum(self, tensors: Sequence[Tensor]) -> None:
        """Adds float32 ``tensors`` up over all processes, in place, in one transfer."""
        if self.size == 1:
            return
        flat = torch.cat([t.reshape(-1) for t in tensors])
        dist.all_reduce(flat)
        for t, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
            t.copy_(part.view_as(t))

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()

    def close(self) -> None:
        """Leaves the group; the others may still be at work."""
        if self.size > 1:
            dist.barrier()
            dist.destroy_process_group()


def from_environment() -> Ranks:
    """The ranks that ``torchrun`` gave this process, connected by gloo; a run of one without it."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return Ranks()
    if not dist.is_initialized():
        # the others wait while the first one makes the features: that may take hours
        dist.init_process_group("gloo", timeout=timedelta(days=1))
    return Ranks(dist.get_rank(), size)
