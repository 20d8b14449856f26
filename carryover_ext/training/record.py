"""`carryover record`: the target answers prompts."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from carryover_ext.cli import positive, temperature
from carryover_ext.training.commands import add_device, features_folder, load_on, progress_bar
from carryover_ext.training.recordings import PromptIds
from carryover_ext.training.shapes import TAPS, tap_ids

# Of options that decide the answers: what holds where they are not given.
ANSWERING = {"max_new_tokens": 160, "temperature": 0.0, "backend": "engine", "batch": 32, "seed": 0}


def add_record_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--target", default="smollm2-135m", help="named target, Hugging Face folder or hub id"
    )
    parser.add_argument("--prompts", nargs="+", type=Path, required=True, help="JSON-lines files of prompts")
    parser.add_argument(
        "--out", type=Path, required=True, help="folder of the recording (resumed when it exists)"
    )
    parser.add_argument("--limit", type=positive, help="prompts of each file")
    parser.add_argument("--max-new-tokens", type=positive, help="default 160")
    parser.add_argument("--max-prompt-tokens", type=positive, default=288)
    parser.add_argument("--temperature", type=temperature, help="default 0: greedy")
    parser.add_argument(
        "--answers",
        type=Path,
        help="file of `carryover answers`: the answers, and their temperature, are taken from it; prompts "
        "without one are left out",
    )
    parser.add_argument("--backend", choices=("engine", "vllm"), help="default engine")
    parser.add_argument("--batch", type=positive, help="answers at a time (default 32)")
    parser.add_argument(
        "--features",
        action="store_true",
        help="keep the target's features beside the recording, which training would compute anew otherwise "
        "(backend engine)",
    )
    parser.add_argument(
        "--keep-prefixes",
        action="store_true",
        help="with --features: keep the target's K/V as well (gigabytes: 21.5 KB a token for SmolLM2-135M), "
        "which `train --keep-prefixes` would compute anew otherwise",
    )
    parser.add_argument("--taps", type=positive, default=TAPS, help="tapped layers of the features")
    add_device(parser)
    parser.add_argument(
        "--shard-size", type=positive, default=256, help="prompts a shard: what a killed run can lose"
    )
    parser.add_argument("--seed", type=int, help="default 0")


def run_record(args: argparse.Namespace) -> int:
    from carryover_ext.pretrained import load_tokenizer, stop_token_ids, target_path
    from carryover_ext.targets import TappedTarget
    from carryover_ext.training.answers import EngineBackend
    from carryover_ext.training.backends import vllm_backend
    from carryover_ext.training.features import claim_cache, features_meta
    from carryover_ext.training.prefixes import prefixes_folder, prefixes_meta
    from carryover_ext.training.recordings import Backend, load_prompts, record, save_atomic

    options = (*ANSWERING, "features", "keep_prefixes", "device")
    given = [name for name in options if (value := getattr(args, name)) is not None and value is not False]
    if args.answers and given:
        names = ", ".join("--" + name.replace("_", "-") for name in given)
        raise ValueError(f"--answers: the target does not run, the file has its answers; leave {names} out")
    for name, value in ANSWERING.items():
        setattr(args, name, value if getattr(args, name) is None else getattr(args, name))
    if args.features and args.backend != "engine":
        raise ValueError(f"--features: --backend {args.backend} does not give them; use --backend engine")
    if args.keep_prefixes and not args.features:
        raise ValueError("--keep-prefixes: only with --features; add it")
    tokenizer = load_tokenizer(args.target)
    prompts = load_prompts(
        args.prompts, tokenizer, max_prompt_tokens=args.max_prompt_tokens, limit=args.limit
    )
    if not prompts:
        raise ValueError(f"--prompts: nothing of at most {args.max_prompt_tokens} tokens in {args.prompts}")
    if args.answers:
        return _from_file(args, prompts)
    common = {"max_new_tokens": args.max_new_tokens, "temperature": args.temperature, "seed": args.seed}
    keep = None
    if args.backend == "vllm":
        if args.device:
            raise ValueError(f"--device {args.device}: vLLM chooses its own device; leave it out")
        backend: Backend = vllm_backend(
            target_path(args.target), max_prompt_tokens=args.max_prompt_tokens, batch=args.batch, **common
        )
    else:
        model, _ = load_on(args.device, args.target)
        taps = tap_ids(args.taps, model.config.num_hidden_layers) if args.features else []
        target = TappedTarget(model, taps)
        engine = EngineBackend(
            target,
            stop_token_ids=stop_token_ids(model),
            batch=args.batch,
            keep_kv=args.keep_prefixes,
            **common,
        )
        backend = engine
        if args.features:
            folder = features_folder(args.out)
            meta = features_meta(taps, engine.top_k, target.embed_weight, target.head_weight)
            claim_cache("features", folder, meta)

            kept = prefixes_folder(folder)
            if args.keep_prefixes:
                claim_cache("prefixes", kept, prefixes_meta(taps, target.embed_weight, target.head_weight))

            def keep(stem: str) -> None:
                if engine.prefixes is not None:
                    save_atomic(kept / f"{stem}.pt", engine.prefixes)
                save_atomic(folder / f"{stem}.pt", engine.features)

    settings = {"target": str(args.target), "backend": args.backend, "batch": args.batch, **common}
    with progress_bar("recording") as bar:
        task = bar.add_task("recording", total=len(prompts), note="")
        start = time.monotonic()

        def show(done: int, total: int, tokens: int) -> None:
            rate = tokens / max(1e-9, time.monotonic() - start)
            bar.update(task, completed=done, note=f"{tokens:,} response tokens, {rate:.0f} tokens/s")

        record(
            prompts,
            backend,
            args.out,
            settings=settings,
            shard_size=args.shard_size,
            progress=show,
            keep=keep,
        )
    print(f"recorded {len(prompts)} answers in {args.out}")
    return 0


def _from_file(args: argparse.Namespace, prompts: list[PromptIds]) -> int:
    """Those of the prompts that have an answer in ``--answers``, as a recording."""
    from carryover_ext.training.answer_files import Answers
    from carryover_ext.training.recordings import record

    answers = Answers.load(args.answers)
    made_by = str(answers.settings["target"])
    if Path(made_by).name != Path(args.target).name:
        raise ValueError(f"--answers {args.answers}: are those of {made_by}, --target is {args.target}")
    known = [prompt for prompt in prompts if answers.has(prompt)]
    if not known:
        raise ValueError(f"--answers {args.answers}: has none to the {len(prompts)} prompts of --prompts")
    settings = {**answers.settings, "target": str(args.target), "backend": "answers"}
    settings["answers_sha256"] = answers.digest()
    record(known, answers, args.out, settings=settings, shard_size=args.shard_size)
    print(f"{len(known)} of {len(prompts)} prompts have an answer in {args.answers}: {args.out}")
    return 0
