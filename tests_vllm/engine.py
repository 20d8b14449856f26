"""Starting small engines in this process, and watching their proposers."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from referee import Referee

LIMIT = 256
V2 = os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1"


def settings(target: Path, drafter: Path | None, tokens: int, method: str, changes: dict[str, Any]) -> dict:
    """Arguments of ``vllm.LLM`` for a small deterministic engine in float32."""
    options: dict[str, Any] = {
        "model": str(target),
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": LIMIT,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 512,
        "block_size": 32,
        "disable_log_stats": False,
        "enable_prefix_caching": False,
        "seed": 0,
    }
    if drafter is not None:
        options["speculative_config"] = {
            "method": method,
            "model": str(drafter),
            "num_speculative_tokens": tokens,
        }
    speculative = changes.pop("speculative", None)
    if speculative:
        options["speculative_config"] |= speculative
    return options | changes


@contextmanager
def engine(
    target: Path, drafter: Path | None = None, *, tokens: int = 4, method: str = "dflash", **changes: Any
) -> Iterator[Any]:
    """A running ``vllm.LLM``; it is torn down at the end, so that the next one finds a clean process."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    llm = LLM(**settings(target, drafter, tokens, method, changes))
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


def runner(llm: Any) -> Any:
    """The model runner of an engine in this process."""
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker
    return getattr(worker, "worker", worker).model_runner


def proposer(llm: Any) -> Any:
    found = runner(llm)
    return found.speculator if V2 else found.drafter


class Rows(NamedTuple):
    """One request of one round: see :meth:`Referee.judge`."""

    request: str
    prompt: list[int]
    known: list[int]
    tokens: Tensor
    positions: Tensor
    states: Tensor
    rejected: int
    anchor: int


@contextmanager
def watched(llm: Any, referee: Referee) -> Iterator[Referee]:
    """Every draft of the engine goes past the referee."""
    drafter = proposer(llm)
    watch(drafter, runner(llm), referee)
    try:
        yield referee
    finally:
        del drafter.propose  # uncovers the method of the class


def watch(drafter: Any, of_runner: Any, referee: Referee) -> None:
    propose = drafter.propose

    def watching(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("dummy_run"):
            return propose(*args, **kwargs)
        rounds = _rows_v2(of_runner, *args) if V2 else _rows_v1(of_runner, kwargs)
        drafts = propose(*args, **kwargs).clone()
        # From 0.33 on V2 may ask for none, for requests that end: context is stored, old drafts come back.
        asked = kwargs.get("num_speculative_tokens")  # None: all
        for i, rows in enumerate(rounds):
            drafts[i, :asked] = referee.judge(*rows, drafts[i, :asked])
        return drafts

    drafter.propose = watching


def _rows_v1(of_runner: Any, a: dict[str, Any]) -> list[Rows]:
    batch, starts = of_runner.input_batch, a["common_attn_metadata"].query_start_loc.tolist()
    rejected = a.get("num_rejected_tokens_gpu")
    counts = [0] * (len(starts) - 1) if rejected is None else rejected.tolist()
    columns = [a[f"target_{name}"].clone() for name in ("token_ids", "positions", "hidden_states")]
    return [
        Rows(
            request,
            of_runner.requests[request].prompt_token_ids,
            batch.token_ids_cpu[i].tolist(),
            *(column[starts[i] : starts[i + 1]] for column in columns),
            counts[i],
            int(a["next_token_ids"][i]),
        )
        for i, request in enumerate(batch.req_ids)
    ]


def _rows_v2(of_runner: Any, batch: Any, _attention: Any, _slots: Any, _last: Any, *rest: Any) -> list[Rows]:
    aux, num_sampled, num_rejected, last_sampled, next_prefill = rest[:5]
    states, n = of_runner.req_states, batch.num_tokens
    starts = batch.query_start_loc.tolist()
    columns = [x[:n].clone() for x in (batch.input_ids, batch.positions, torch.cat(aux, -1))]
    rows = []
    for i, request in enumerate(batch.req_ids):
        slot = int(batch.idx_mapping[i])
        known = states.all_token_ids.gpu[slot].tolist()
        rows.append(
            Rows(
                request,
                known[: int(states.prompt_len.np[slot])],
                known,
                *(column[starts[i] : starts[i + 1]] for column in columns),
                int(num_rejected[i]),
                int((last_sampled if num_sampled[i] else next_prefill).view(-1)[slot]),
            )
        )
    return rows


def generate(
    llm: Any, prompts: Sequence[Sequence[int]], lengths: int | Sequence[int], **options: Any
) -> list[list[int]]:
    """Token ids of the answers (greedy unless told otherwise); never stops before ``lengths``."""
    from vllm import SamplingParams

    wanted = [lengths] * len(prompts) if isinstance(lengths, int) else lengths
    params = [
        SamplingParams(
            **({"temperature": 0.0, "max_tokens": n, "ignore_eos": True, "detokenize": False} | options)
        )
        for n in wanted
    ]
    out = llm.generate([{"prompt_token_ids": list(p)} for p in prompts], params, use_tqdm=False)
    return [list(o.outputs[0].token_ids) for o in out]


def metrics(llm: Any) -> dict[str, Any]:
    """vLLM's counters of speculative decoding, by short name."""
    found = {}
    for metric in llm.get_metrics():
        if "spec_decode" in metric.name:
            value = getattr(metric, "value", None)
            found[metric.name.rsplit("spec_decode_", 1)[1]] = metric.values if value is None else value
    return found
