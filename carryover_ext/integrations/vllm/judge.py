"""A fault of vLLM's CPU backend that sampled output would otherwise be blamed on the drafter for.

``expand_batch_to_tokens`` gives each drafted token its request's temperature. On the CPU (seen in 0.32.0) its
kernel writes into an integer copy, so that the temperatures stay uninitialised memory and, with any
speculative drafter, output at temperature above 0 does not follow the target's law.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .compat import log


def expand(
    x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> Tensor:
    """vLLM's function, in PyTorch: ``x [B]`` repeated to ``[num_tokens]`` by the cumulative counts; values of
    ``replace_from`` become ``replace_to``."""
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    y = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    return y.repeat_interleave(counts.long(), output_size=num_tokens)


def mend(device: torch.device) -> bool:
    """Replace vLLM's function if it gives wrong values on ``device``; returns whether it did, and says so."""
    from vllm.v1.sample import rejection_sampler

    x = torch.tensor([0.75, 0.0, 1.625], device=device)
    ends = torch.tensor([2, 3, 5], dtype=torch.int32, device=device)
    right = torch.tensor([0.75, 0.75, 1.0, 1.625, 1.625], device=device)
    try:
        fits = torch.equal(rejection_sampler.expand_batch_to_tokens(x, ends, 5, 0, 1), right)
    except (TypeError, RuntimeError, AttributeError):  # 0.30 has no kernel of it for the CPU
        fits = False
    if fits:
        return False
    rejection_sampler.expand_batch_to_tokens = expand
    log().warning(
        "this vLLM expands temperatures wrongly on %s, so that sampled output with drafts would not follow "
        "the target's law; its function was replaced. Servers without a Carryover drafter keep the fault",
        device.type,
    )
    return True
