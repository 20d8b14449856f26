"""One plain DFlash engine in a process of its own: what it drafted and answered, and whose code did it.

    python plain_run.py TARGET DRAFTER

Prints one JSON line. It imports nothing of this package, so that it also runs where the package is not
installed.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import random
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
V2 = os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1"
if V2:
    import interpreter  # noqa: F401  before vllm

_SPECULATORS = "vllm.v1.worker.gpu.spec_decode"
# What the plugin could touch: classes with all that they define, functions, and tables of functions.
NAMES = (
    "vllm.v1.sample.rejection_sampler:expand_batch_to_tokens",
    "vllm.v1.sample.rejection_sampler:rejection_sample",
    "vllm.transformers_utils.configs.speculators.algos:SUPPORTED_SPECULATORS_TYPES",
    "vllm.model_executor.models.qwen3_dflash:DFlashQwen3Model",
    "vllm.model_executor.models.qwen3_dflash:DFlashQwen3ForCausalLM",
    "vllm.model_executor.models.qwen3_dflash2:DFlash2Qwen3ForCausalLM",
    "vllm.model_executor.models.qwen3_dspark:Qwen3DSparkForCausalLM",
    *(
        (
            f"{_SPECULATORS}.dflash.speculator:DFlashSpeculator",
            f"{_SPECULATORS}.dflash.speculator:prepare_dflash_inputs",
            f"{_SPECULATORS}.dflash2.speculator:DFlash2Speculator",
            f"{_SPECULATORS}.dspark.speculator:DSparkSpeculator",
            "vllm.v1.worker.gpu.model_runner:GPUModelRunner",
        )
        if V2
        else (
            "vllm.v1.spec_decode.dflash:DFlashProposer",
            "vllm.v1.worker.gpu_model_runner:GPUModelRunner",
        )
    ),
)


def origin(value: Any) -> str:
    """Where a function's code stands, relative to its package; another value's type."""
    value = getattr(value, "__func__", getattr(value, "fget", None) or value)
    code = getattr(value, "__code__", None)
    if code is None:
        return type(value).__name__
    path = code.co_filename.split("site-packages/")[-1]
    return f"{value.__module__}.{value.__qualname__} {path}:{code.co_firstlineno}"


def origins() -> dict[str, str]:
    found = {}
    for name in NAMES:
        module, attribute = name.split(":")
        value = getattr(importlib.import_module(module), attribute)
        if isinstance(value, type):
            bases = [base.__name__ for base in value.__mro__]
            found[name] = f"{value.__module__}.{value.__qualname__} {bases}"
            found |= {f"{name}.{key}": origin(part) for key, part in vars(value).items() if callable(part)}
        elif isinstance(value, dict):
            found |= {f"{name}[{key}]": origin(part) for key, part in value.items()}
        else:
            found[name] = origin(value)
    return found


def main() -> None:
    import torch
    from vllm import LLM, SamplingParams

    target, drafter = sys.argv[1:]
    llm = LLM(
        target,
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=8,
        max_num_batched_tokens=512,
        block_size=32,
        enable_prefix_caching=False,
        seed=0,
        speculative_config={"method": "dflash", "model": drafter, "num_speculative_tokens": 4},
    )
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker
    runner = getattr(worker, "worker", worker).model_runner
    drafting = runner.speculator if V2 else runner.drafter
    propose, drafts, bits = drafting.propose, [], hashlib.sha256()

    def watching(*args: Any, **kwargs: Any) -> Any:
        out = propose(*args, **kwargs)
        if not kwargs.get("dummy_run"):
            states = torch.cat(args[4], -1)[: args[0].num_tokens] if V2 else kwargs["target_hidden_states"]
            bits.update(states.numpy().tobytes())
            drafts.append(out.tolist())
        return out

    own = sorted(vars(runner))  # before anything of ours is in it
    drafting.propose = watching
    generator = random.Random(3)
    prompts = [[generator.randrange(4, 300) for _ in range(n)] for n in (5, 17, 2, 31)]
    params = [
        SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True, detokenize=False)
        for n in (12, 24, 16, 8)
    ]
    out = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    result = {
        "proposer": f"{type(drafting).__module__}.{type(drafting).__qualname__}",
        "model": f"{type(drafting.model).__module__}.{type(drafting.model).__qualname__}",
        "runner": own,
        "origins": origins(),
        "package": getattr(sys.modules.get("carryover_ext"), "__file__", None),
        "finders": [getattr(finder, "__module__", "") for finder in map(type, sys.meta_path)],
        "drafts": drafts,
        "states": bits.hexdigest(),
        "prompts": prompts,
        "answers": [list(o.outputs[0].token_ids) for o in out],
    }
    print("\n" + json.dumps(result))


if __name__ == "__main__":
    main()
