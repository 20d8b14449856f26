"""Real vLLM servers on loopback, driven with given prompts: plain, baseline, carryover-off, carryover.

    python bench/serve.py --target smollm2-135m --prompts prompts.jsonl --limit 8

In each repetition every arm gets a server, one after the other, in an order that rotates, so that a slow
quarter of an hour of the machine falls on all arms, and one server's memory is enough. With --resident all
servers stay up, and requests go to one of them at a time: the arms then alternate within minutes. On a GPU
give each its part of the memory: --vllm-args="--gpu-memory-utilization 0.2". Run it with a Python that has
vLLM and carryover_ext (`make test-vllm` makes one: .venv-vllm/bin/python).

vLLM's CPU backend samples wrongly at temperature above 0 with any drafter; the plugin mends that where its
drafter runs. There the baseline is served as a Carryover checkpoint with a zero embedding and CARRYOVER=off,
which drafts the same tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import serve_report

from carryover_ext import bench
from carryover_ext.config import DrafterConfig
from carryover_ext.environment import environment
from carryover_ext.export import export_checkpoint
from carryover_ext.packing import dtype_name
from carryover_ext.pretrained import encode_chat, load_tokenizer, target_path

COUNTERS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_accepted_tokens_per_pos")


@dataclass
class Server:
    """A running server: the arm that it serves, where, and its process."""

    arm: str
    url: str
    process: subprocess.Popen[bytes]
    log: Path


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="smollm2-135m", help="a name, a Hugging Face folder, or a hub id")
    parser.add_argument("--drafter", help="folder of the Carryover drafter (default: the repository's)")
    parser.add_argument("--baseline", help="folder of the baseline drafter (default: the repository's)")
    parser.add_argument(
        "--kind",
        choices=bench.KINDS,
        help="which of the repository's drafters (default: that of a folder that is named, else markov on a "
        "GPU and with --drop-markov, dflash where vLLM has no others)",
    )
    parser.add_argument("--prompts", default="demo", help="JSON lines in the Spec-Bench form, or 'demo'")
    parser.add_argument(
        "--limit", type=int, default=8, help="prompts in all, spread over the tasks (default 8)"
    )
    parser.add_argument("--arms", default=",".join(bench.ARMS))
    parser.add_argument(
        "--concurrency", default="1,2,4,8,16", help="requests at a time (default %(default)s)"
    )
    parser.add_argument("--temperature", default="0,1", help="comma-separated (default %(default)s)")
    parser.add_argument("--repeat", type=int, default=3, help="rounds over all arms (default 3)")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--tokens", type=int, help="drafts a round (default: as the drafter was trained)")
    parser.add_argument(
        "--dtype",
        default="auto",
        choices=("auto", "bfloat16", "float16", "float32"),
        help="auto: bfloat16, or float32 on a CPU without instructions for it",
    )
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument(
        "--forced-acceptance",
        type=float,
        metavar="LENGTH",
        help="accept as if AL were LENGTH (vLLM's synthetic acceptance): arms then differ in cost alone",
    )
    parser.add_argument(
        "--drop-markov",
        action="store_true",
        help="serve Markov drafters without their head, as DFlash: vLLM's CPU backend has no other",
    )
    parser.add_argument("--resident", action="store_true", help="all servers at once (needs their memory)")
    parser.add_argument("--compile", action="store_true", help="let vLLM compile on the CPU, too")
    parser.add_argument("--vllm-args", default="", help="further arguments of `vllm serve`")
    parser.add_argument("--start-timeout", type=float, default=900, help="seconds a server may take to start")
    parser.add_argument("--out", type=Path, default=Path("runs/serve"))
    args = parser.parse_args()
    args.dtype = dtype_name(args.dtype)
    return args


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def on_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def export_drafters(args: argparse.Namespace, arms: list[bench.Arm], sampled: bool) -> None:
    """Write the drafters of ``arms`` for vLLM, where :func:`command` looks for them. UserError for one that
    is missing or does not fit."""
    settings = bench.Settings(
        args.target, "", [], drafter=args.drafter, baseline=args.baseline, kind=args.kind
    )
    settings.kind = bench.kind_of(settings, "markov" if on_gpu() or args.drop_markov else "dflash")
    if args.drop_markov and settings.kind != "markov":
        raise bench.UserError("--drop-markov: DFlash drafters have no Markov head; leave it out")
    for which in sorted({arm.drafter for arm in arms if arm.drafter}):
        source = bench.checkpoint_folder(settings, which)
        mended = which == "baseline" and sampled and not on_gpu()
        out = args.out / "drafters" / which
        try:
            config = DrafterConfig.from_pretrained(source)
            mended = mended and not config.carryover
            if config.markov_rank and not (args.drop_markov or on_gpu()):
                raise ValueError("a Markov drafter needs vLLM's V2 runner, hence a GPU, or --drop-markov")
            export_checkpoint(
                source,
                out,
                "vllm",
                target=target_path(args.target),
                warm_start=mended,
                drop_markov=args.drop_markov,
            )
        except (OSError, ValueError) as e:
            raise bench.UserError(f"drafter {source}: {e}") from e


def command(args: argparse.Namespace, arm: bench.Arm, port: int) -> list[str]:
    """`vllm serve`, by its module: the CPU wheel's console script lacks the metadata it asks for."""
    parts = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", target_path(args.target)]
    parts += ["--served-model-name", "target", "--host", "127.0.0.1", "--port", str(port)]
    parts += ["--dtype", args.dtype, "--max-model-len", str(args.max_model_len)]
    parts += ["--max-num-seqs", str(max(numbers(args.concurrency, int)))]
    parts += ["--no-enable-prefix-caching"]
    if not (args.compile or on_gpu()):
        parts += ["--enforce-eager"]
    parts += shlex.split(args.vllm_args)
    if arm.drafter:
        folder = args.out / "drafters" / arm.drafter
        config = DrafterConfig.from_pretrained(folder)
        speculative: dict[str, Any] = {
            "method": "dspark" if config.markov_rank else "dflash",
            "model": str(folder),
            "num_speculative_tokens": args.tokens or config.num_drafts,
        }
        if args.forced_acceptance:
            speculative["rejection_sample_method"] = "synthetic"
            speculative["synthetic_acceptance_length"] = args.forced_acceptance
        parts += ["--speculative-config", json.dumps(speculative)]
    return parts


@contextmanager
def serving(args: argparse.Namespace, arm: bench.Arm) -> Iterator[Server]:
    """Start one server and wait until it answers; it is ended on the way out."""
    port, log = free_port(), args.out / f"{arm.name}.log"
    env = os.environ | {"CARRYOVER": "on" if arm.carry else "off", "VLLM_NO_USAGE_STATS": "1"}
    env.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GB; without it vLLM takes half of the memory
    with log.open("wb") as file:
        process = subprocess.Popen(
            command(args, arm, port), stdout=file, stderr=subprocess.STDOUT, env=env, start_new_session=True
        )
    server = Server(arm.name, f"http://127.0.0.1:{port}", process, log)
    try:
        deadline = time.monotonic() + args.start_timeout
        while not answers(server.url):
            if process.poll() is not None or time.monotonic() > deadline:
                tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
                state = (
                    f"ended with {process.poll()}" if process.poll() is not None else "did not answer in time"
                )
                raise SystemExit(f"the server of arm {arm.name} {state}; the end of {log}:\n{tail}")
            time.sleep(1)
        if arm.carry and "CARRYOVER IS OFF" in log.read_text(errors="replace"):
            raise SystemExit(f"arm {arm.name}: the plugin fell back to plain DFlash; see {log}")
        yield server
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(60)
        with suppress(ProcessLookupError):  # what is left of its processes
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def counters(url: str) -> dict[str, float]:
    """vLLM's counters of speculative decoding; per-position ones as ``num_accepted_tokens_per_pos/3``."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as reply:
        lines = reply.read().decode().splitlines()
    found: dict[str, float] = {}
    for line in lines:
        if not line.startswith("vllm:spec_decode_"):
            continue
        name, value = line.rsplit(" ", 1)
        short = name.split("{")[0].removeprefix("vllm:spec_decode_").removesuffix("_total")
        if short in COUNTERS:
            if "position=" in name:
                short += "/" + name.split('position="')[1].split('"')[0]
            found[short] = found.get(short, 0.0) + float(value)
    return found


def ask(
    url: str, prompt: list[int], args: argparse.Namespace, temperature: float, seed: int
) -> dict[str, Any]:
    """One streamed completion: its text, tokens, and the times of its first and last token."""
    body = {
        "model": "target",
        "prompt": prompt,
        "max_tokens": args.max_new_tokens,
        "temperature": temperature,
        "seed": seed,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": bool(args.forced_acceptance),
    }
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    start, first, last, text, tokens = time.perf_counter(), 0.0, 0.0, "", 0
    try:
        with urllib.request.urlopen(request, timeout=3600) as reply:
            for raw in reply:
                line = raw.decode().strip()
                if not line.startswith("data: ") or line.endswith("[DONE]"):
                    continue
                chunk = json.loads(line[6:])
                if chunk.get("choices"):
                    last = time.perf_counter()
                    first = first or last
                    text += chunk["choices"][0]["text"]
                if chunk.get("usage"):
                    tokens = chunk["usage"]["completion_tokens"]
    except urllib.error.HTTPError as e:
        raise SystemExit(f"{url} answered {e.code}: {e.read().decode(errors='replace')[:500]}") from None
    return {
        "text": text,
        "tokens": tokens,
        "ttft": first - start,
        "tpot": (last - first) / (tokens - 1) if tokens > 1 else None,
    }


def drive(
    server: Server,
    prompts: list[list[int]],
    args: argparse.Namespace,
    at_a_time: int,
    temperature: float,
    repetition: int,
) -> dict[str, Any]:
    """All prompts to one server, ``at_a_time`` of them under way: a record for the report. Each repetition
    samples with a seed of its own."""
    before = counters(server.url)
    with ThreadPoolExecutor(at_a_time) as pool:
        start = time.perf_counter()
        ask_one = partial(ask, server.url, args=args, temperature=temperature, seed=repetition)
        replies = list(pool.map(ask_one, prompts))
        seconds = time.perf_counter() - start
    after = counters(server.url)
    return {
        "arm": server.arm,
        "concurrency": at_a_time,
        "temperature": temperature,
        "repetition": repetition,
        "seconds": seconds,
        "replies": replies,
        "counters": {key: value - before.get(key, 0.0) for key, value in after.items()},
    }


def spread(prompts: list[bench.Prompt], limit: int) -> list[bench.Prompt]:
    """``limit`` prompts, one of each task in turn."""
    by_task: dict[str, list[bench.Prompt]] = {}
    for prompt in prompts:
        by_task.setdefault(prompt.task, []).append(prompt)
    rows = [
        task[i] for i in range(max(map(len, by_task.values()))) for task in by_task.values() if i < len(task)
    ]
    return rows[:limit]


@contextmanager
def warm(args: argparse.Namespace, arm: bench.Arm, prompt: list[int]) -> Iterator[Server]:
    print(f"starting {arm.name}", flush=True)
    with serving(args, arm) as server:
        drive(server, [prompt], args, 1, 0.0, 0)  # compilers and caches, once
        yield server


def rotated(parts: list[Any], turn: int) -> list[Any]:
    shift = turn % len(parts)
    return parts[shift:] + parts[:shift]


def measure(
    args: argparse.Namespace, arms: list[bench.Arm], prompts: list[list[int]]
) -> Iterator[dict[str, Any]]:
    """A record for each repetition, temperature, concurrency and arm; the order of the arms rotates."""
    cells = [(t, n) for t in numbers(args.temperature, float) for n in numbers(args.concurrency, int)]
    with ExitStack() as stack:
        servers = [stack.enter_context(warm(args, arm, prompts[0])) for arm in arms if args.resident]
        for repetition in range(args.repeat):
            for i, (temperature, level) in enumerate(cells if servers else ()):
                for server in rotated(servers, repetition * len(cells) + i):
                    yield drive(server, prompts, args, level, temperature, repetition)
            for arm in rotated(arms, repetition) if not servers else ():
                with warm(args, arm, prompts[0]) as server:
                    for temperature, level in cells:
                        yield drive(server, prompts, args, level, temperature, repetition)


def numbers(text: str, kind: type) -> list[Any]:
    try:
        found = [kind(part) for part in text.split(",") if part.strip()]
    except ValueError:
        found = []
    if not found:
        raise SystemExit(f"{text!r}: must be numbers, separated by commas")
    return found


def main() -> int:
    args = arguments()
    temperatures = numbers(args.temperature, float)
    args.out.mkdir(parents=True, exist_ok=True)
    try:
        arms = [bench.ARMS[name] for name in bench.parse_arms(args.arms)]
        prompts = spread(bench.read_prompts(args.prompts), args.limit)
        export_drafters(args, arms, max(temperatures) > 0)
    except bench.UserError as e:
        raise SystemExit(str(e)) from None
    tokenizer = load_tokenizer(args.target)
    ids = [encode_chat(tokenizer, [{"role": "user", "content": prompt.turns[0]}]) for prompt in prompts]
    ids = [tokens for tokens in ids if len(tokens) + args.max_new_tokens <= args.max_model_len]
    if not ids:
        raise SystemExit(
            f"--max-model-len {args.max_model_len}: no prompt fits with {args.max_new_tokens} new tokens"
        )
    if len(ids) < len(prompts):
        print(f"{len(prompts) - len(ids)} prompts are too long for --max-model-len and left out")
    records: list[dict[str, Any]] = []
    try:
        for record in measure(args, arms, ids):
            records.append(record)
            print(serve_report.line(record), flush=True)
    except KeyboardInterrupt:
        print("stopped: the tables hold what was measured so far")
    if not records:
        return 130
    settings = {key: value for key, value in vars(args).items() if key != "out"}
    settings |= {"arms": [arm.name for arm in arms], "asked": len(ids)}
    doc = serve_report.document(settings, environment() | {"vllm": vllm_version()}, records)
    for text in serve_report.tables(doc):
        print(text)
    written = serve_report.write(doc, args.out)
    print("Written: " + " and ".join(str(path) for path in written))
    return 0


def vllm_version() -> str:
    import importlib.metadata

    for name in ("vllm", "vllm-cpu"):
        try:
            return f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown"


if __name__ == "__main__":
    sys.exit(main())
