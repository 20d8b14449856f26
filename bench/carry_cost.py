"""What carrying costs in vLLM, at equal acceptance: one engine in this process that carries in every other
round.

    python bench/carry_cost.py --target smollm2-135m --limit 4

Rounds with and without carried rows alternate at random over the same prompts, so that the machine's noise
and the acceptance fall on both alike. Printed: the median time of a draft with and without, and the
difference as a share of a whole round. (vLLM can force the acceptance, bench/serve.py --forced-acceptance,
on GPUs only.)
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")

from serve import spread

from carryover_ext import bench
from carryover_ext.config import DrafterConfig
from carryover_ext.environment import environment
from carryover_ext.export import export_checkpoint
from carryover_ext.pretrained import encode_chat, load_tokenizer, target_path


class Clock:
    """Wraps a proposer's ``propose``: decides whether the round carries, and times it."""

    def __init__(self, proposer: Any, seed: int = 0) -> None:
        self.proposer, self.propose = proposer, proposer.propose
        self.random = random.Random(seed)
        self.drafts: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
        self.rounds: list[float] = []
        self.last = 0.0
        proposer.propose = self

    def __call__(self, **kwargs: Any) -> Any:
        rejected = kwargs.get("num_rejected_tokens_gpu")
        counts = rejected is not None and bool((rejected > 0).any())  # nothing to carry says nothing
        self.proposer.carrying = carry = self.random.random() < 0.5
        start, cpu = time.perf_counter(), time.process_time()
        out = self.propose(**kwargs)
        end = time.perf_counter()
        if counts:
            self.drafts[carry].append((end - start, time.process_time() - cpu))
            if self.last:
                self.rounds.append(end - self.last)
        self.last = end if rejected is not None else 0.0
        return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--drafter", help="folder of the Carryover drafter (default: the repository's)")
    parser.add_argument("--prompts", default="demo")
    parser.add_argument("--limit", type=int, default=4, help="prompts in all (default 4)")
    parser.add_argument("--batch", type=int, default=1, help="requests at a time (default 1)")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--out", type=Path, default=Path("runs/serve"))
    args = parser.parse_args()
    from vllm import LLM, SamplingParams

    settings = bench.Settings(args.target, "", [], drafter=args.drafter)
    settings.kind = bench.kind_of(settings, "dflash")
    source = bench.checkpoint_folder(settings, "carryover")
    folder = args.out / "drafters" / "carryover"
    markov = DrafterConfig.from_pretrained(source).markov_rank > 0  # which the V1 runner has not
    export_checkpoint(source, folder, "vllm", target=target_path(args.target), drop_markov=markov)
    speculative = {
        "method": "dflash",
        "model": str(folder),
        "num_speculative_tokens": DrafterConfig.from_pretrained(folder).num_drafts,
    }
    llm = LLM(
        target_path(args.target),
        dtype=args.dtype,
        max_model_len=2048,
        max_num_seqs=args.batch,
        enable_prefix_caching=False,
        enforce_eager=True,
        speculative_config=speculative,
    )
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker
    clock = Clock(getattr(worker, "worker", worker).model_runner.drafter)
    tokenizer = load_tokenizer(args.target)
    prompts = spread(bench.read_prompts(args.prompts), args.limit)
    ids = [encode_chat(tokenizer, [{"role": "user", "content": prompt.turns[0]}]) for prompt in prompts]
    params = SamplingParams(temperature=0.0, max_tokens=args.max_new_tokens, ignore_eos=True)
    llm.generate([{"prompt_token_ids": tokens} for tokens in ids], params, use_tqdm=False)
    on, off = clock.drafts[True], clock.drafts[False]
    turn = median(clock.rounds)
    found = {
        "rounds": {"on": len(on), "off": len(off)},
        "round_ms": 1e3 * turn,
        "draft_ms": {"on": 1e3 * median(x for x, _ in on), "off": 1e3 * median(x for x, _ in off)},
        "draft_cpu_ms": {"on": 1e3 * median(x for _, x in on), "off": 1e3 * median(x for _, x in off)},
    }
    for key in ("draft_ms", "draft_cpu_ms"):
        share = (found[key]["on"] - found[key]["off"]) / found["round_ms"]
        found[f"cost_by_{key}"] = share
        print(
            f"{key}: {found[key]['on']:.3f} with, {found[key]['off']:.3f} without carried rows; "
            f"{100 * share:+.2f} % of a round of {found['round_ms']:.1f} ms ({len(on)} and {len(off)} rounds)"
        )
    args.out.mkdir(parents=True, exist_ok=True)
    settings = {key: str(value) for key, value in vars(args).items()}
    path = args.out / f"carry_cost_{args.batch}.json"
    path.write_text(json.dumps(found | {"settings": settings, "environment": environment()}, indent=1) + "\n")
    print(f"Written: {path}")


if __name__ == "__main__":
    main()
