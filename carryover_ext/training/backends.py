"""Recorded answers by vLLM, where it is installed. The other way: :mod:`carryover_ext.training.answers`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from carryover_ext.training.recordings import Backend


def vllm_backend(
    target: str, *, max_new_tokens: int, temperature: float, max_prompt_tokens: int, batch: int, seed: int
) -> Backend:
    """Continuous batching by vLLM; ``target`` is a folder or hub id.

    On a GPU every prompt has a seed of its own. vLLM cannot do that on a CPU: there the engine is seeded with
    the place of the first prompt that it answers, so that a resumed run goes on with other draws.

    Raises:
        RuntimeError: vLLM cannot be imported.
    """
    try:
        from vllm import LLM, SamplingParams  # type: ignore[import-not-found, unused-ignore]
        from vllm.platforms import current_platform  # type: ignore[import-not-found, unused-ignore]
    except ImportError as e:
        raise RuntimeError(
            f"backend='vllm' needs vLLM in this environment ({e}); use backend='engine'"
        ) from e
    own_seeds = not current_platform.is_cpu()
    engine: Any = None

    def run(prompts: Sequence[list[int]], first: int) -> list[tuple[list[int], str]]:
        nonlocal engine
        if engine is None:
            engine = LLM(
                target,
                dtype="bfloat16",
                max_model_len=max_prompt_tokens + max_new_tokens + 8,
                max_num_seqs=batch,
                enable_prefix_caching=False,
                seed=seed + first,
            )
        sampling = [
            SamplingParams(
                temperature=temperature,
                max_tokens=max_new_tokens,
                seed=seed + first + i if own_seeds and temperature > 0 else None,
            )
            for i in range(len(prompts))
        ]
        out = engine.generate([{"prompt_token_ids": p} for p in prompts], sampling, use_tqdm=False)
        return [(list(o.outputs[0].token_ids), str(o.outputs[0].finish_reason)) for o in out]

    return run
