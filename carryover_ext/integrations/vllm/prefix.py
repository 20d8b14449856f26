"""Notices when the drafter's context of restored tokens is missing: vLLM's own fault 47930, of which low
acceptance would otherwise be the only sign.

DFlash drafters write the K/V of their context from the target's states. Tokens whose K/V was restored (a
prefix-cache hit, a connector) bring no states; their drafter rows are there only if the drafter wrote them
when the blocks were filled. The watch remembers which token each slot of the drafter's cache was written for
and, when a request starts behind restored tokens, compares.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .compat import log
from .segment import PAD_SLOT, slots_of

NOBODY = -1  # the token of a slot that no context row was written to


class PrefixWatch:
    """What the drafter wrote, by slot. ``tokens [num_slots + 1]`` int32; the last is for rows without one.

    It stops with its first warning; until then a start behind restored tokens costs one host sync.
    """

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self.tokens = torch.full((num_slots + 1,), NOBODY, dtype=torch.int32, device=device)
        self.warned = False

    @classmethod
    def of(cls, vllm_config: Any, kv_cache_config: Any, device: torch.device) -> PrefixWatch | None:
        """A watch over the slots of the engine's cache, None where vLLM restores no tokens."""
        connector = getattr(vllm_config, "kv_transfer_config", None)
        if not vllm_config.cache_config.enable_prefix_caching and connector is None:
            return None
        block_size = max(group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups)
        return cls(kv_cache_config.num_blocks * block_size, device)

    def _index(self, slots: Tensor) -> Tensor:
        nowhere = self.tokens.shape[0] - 1
        return torch.where((slots >= 0) & (slots < nowhere), slots, nowhere)

    def note(self, slots: Tensor, tokens: Tensor, carried: Tensor, query: Tensor) -> None:
        """A step's writes: context rows ``tokens [T]`` at ``slots [T]``, of which ``carried [T]`` (bool) are
        no context, and the query block at ``query [Q]``; slot -1 is not written."""
        if not self.warned:
            written = tokens.to(torch.int32).masked_fill(carried, NOBODY)
            self.tokens[self._index(slots)] = written
            self.tokens[self._index(query)] = NOBODY

    def check(self, request: str, table: Tensor, tokens: Sequence[int], block_size: int) -> int:
        """Warn if the drafter's rows of restored ``tokens`` are missing; how many are.

        ``table [pages]`` holds the request's blocks; pages that a sliding window has left behind are 0.
        """
        if self.warned or not tokens:
            return 0
        index = torch.arange(len(tokens), device=table.device)
        slots = slots_of(table[None], torch.zeros_like(index), index, block_size, len(tokens))
        expected = torch.tensor(tokens, dtype=torch.int32, device=table.device)
        wrong = (self.tokens[self._index(slots)] != expected) & (slots != PAD_SLOT)
        missing = int(wrong.sum())
        if missing:
            self.warned = True
            log().warning(
                "request %s starts behind %d restored tokens, and the drafter's context of %d of them was "
                "never written (vllm-project/vllm issue 47930): it drafts badly for such requests, outputs "
                "stay right. Start with --no-enable-prefix-caching and without a KV connector. Said once",
                request,
                len(tokens),
                missing,
            )
        return missing
