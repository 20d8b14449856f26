"""``carryover demo | generate | bench | record | train | evaluate | cells | curve | results | export | env``.

Nothing heavy is imported before the arguments are understood: ``carryover --help`` answers at once.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from . import __version__, bench
from .named_targets import NAMES

TARGET = "smollm2-135m"
PER_TASK = 3
DTYPES = ("auto", "bfloat16", "float32")
# name: what it does, and the module of carryover_ext.training that does it
TRAINING = {
    "record": ("let the target answer prompts, for training", "record"),
    "answers": ("put recorded answers into one small file, without the prompts' text", "answer_files"),
    "train": ("train a drafter on recordings: baseline, then parallel draft-verify-draft", "commands"),
    "evaluate": ("acceptance length of drafters on held-out recordings", "evaluate"),
    "cells": ("train and evaluate every drafter of a results page, resumable", "cells"),
    "curve": ("acceptance length against hours of training: a table and a plot", "curve"),
    "results": ("a page and plots from what `evaluate` and `bench` wrote", "results"),
}


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def not_negative(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is negative")
    return value


def temperature(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is neither 0 (greedy) nor positive and finite")
    return value


def block(text: str) -> int:
    value = int(text)
    if value < 2:
        raise argparse.ArgumentTypeError(f"{text} is below 2 (the anchor and one draft)")
    return value


def add_model_arguments(parser: argparse.ArgumentParser, tokens: int) -> None:
    parser.add_argument("--target", default=TARGET, help=f"{TARGET}, a Hugging Face folder, or a hub id")
    parser.add_argument("--drafter", help="folder of the Carryover drafter (default: the repository's)")
    parser.add_argument(
        "--kind",
        choices=bench.KINDS,
        help="which of the repository's drafters (default: that of a folder that is named, else markov)",
    )
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        default="auto",
        help="auto (default): bfloat16, or float32 on a CPU without instructions for it",
    )
    parser.add_argument("--threads", type=positive, help="threads of PyTorch (default: its own choice)")
    parser.add_argument("--temperature", type=temperature, default=0.0, help="0 is greedy (default)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--block",
        type=block,
        help=f"rows verified a round (default: as the drafter was trained; demo and generate: "
        f"{bench.QUICK_BLOCK} with the repository's drafters)",
    )
    names = ("--max-new-tokens", "--tokens")
    parser.add_argument(
        *names, dest="max_new_tokens", type=positive, default=tokens, help=f"default {tokens}"
    )


def add_bench_arguments(parser: argparse.ArgumentParser, tokens: int, out: str) -> None:
    add_model_arguments(parser, tokens)
    parser.add_argument("--baseline", help="folder of the baseline drafter (default: the repository's)")
    parser.add_argument("--arms", default=",".join(bench.ARMS), help="comma-separated (default: %(default)s)")
    parser.add_argument("--tasks", help="comma-separated categories of the prompts (default: all)")
    parser.add_argument("--batch", type=positive, default=1, help="prompts decoded together (default 1)")
    parser.add_argument(
        "--out", type=Path, default=Path(out), help="folder of the JSON and the plot (default: %(default)s)"
    )


def demo_arguments(parser: argparse.ArgumentParser) -> None:
    add_bench_arguments(parser, 48, "runs/demo")
    group = parser.add_mutually_exclusive_group()
    # No default here: given as such, argparse would not see it beside --full.
    group.add_argument("--per-task", type=positive, help=f"prompts of each task (default {PER_TASK})")
    group.add_argument("--full", action="store_true", help="all 64 prompts")


def bench_arguments(parser: argparse.ArgumentParser) -> None:
    add_bench_arguments(parser, 128, "runs/bench")
    parser.add_argument(
        "--prompts",
        required=True,
        help="JSON lines in the Spec-Bench form, or 'demo' for those of the package",
    )
    parser.add_argument("--limit", type=positive, help="prompts of each task (default: all)")
    parser.add_argument(
        "--turns", choices=("first", "all"), default="first", help="turns of each conversation"
    )


def generate_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser, 256)
    parser.add_argument("prompt", help="the user's turn; '-' reads it from standard input")
    parser.add_argument("--arm", choices=tuple(bench.ARMS), default="carryover")
    parser.add_argument("--baseline", help="folder of the baseline drafter, for --arm baseline")
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--rounds", action="store_true", help="show which tokens came from one verification")


def env_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.add_argument("--fetch", choices=NAMES, help="fetch and convert a target first")


def export_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source", help="folder of a drafter: of this package, z-lab's, DeepSpec's, or exported"
    )
    parser.add_argument(
        "--to",
        required=True,
        choices=("vllm", "speculators", "zlab", "compact", "adapter"),
        help="who will read it (compact: this package, small; adapter: this package, as an update of --base)",
    )
    parser.add_argument("--base", type=Path, help="for --to adapter: the checkpoint that is updated")
    parser.add_argument("--rank", type=positive, default=32, help="for --to adapter (default 32)")
    parser.add_argument("--out", required=True, type=Path, help="folder to write")
    parser.add_argument("--target", help=f"{TARGET}, a folder, or a hub id: for the rows of its head")
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--warm-start", action="store_true", help="add a zero carryover embedding")
    group.add_argument("--plain", action="store_true", help="leave the carryover embedding out")
    parser.add_argument(
        "--drop-markov",
        action="store_true",
        help="leave the Markov head out: a DFlash drafter, for vLLM's V1 runner (on CPUs); it accepts less",
    )


def set_threads(count: int | None) -> None:
    if count:
        import torch

        torch.set_num_threads(count)


def check_used(args: argparse.Namespace, arms: Sequence[str]) -> None:
    """UserError for an option that none of the arms reads."""
    used = {bench.ARMS[arm].drafter for arm in arms} - {None}
    readers = {"drafter": {"carryover"}, "baseline": {"baseline"}}
    for option in ("drafter", "baseline", "kind", "block"):
        value, by = getattr(args, option), readers.get(option, {"carryover", "baseline"})
        if value is not None and not used & by:
            names = [arm.name for arm in bench.ARMS.values() if arm.drafter in by]
            raise bench.UserError(
                f"--{option} {value}: is not read by {', '.join(arms)}, only by {', '.join(names)}; leave it "
                "out, or choose such an arm"
            )


def settings_of(
    args: argparse.Namespace, prompts: str, limit: int | None, turns: str = "first"
) -> bench.Settings:
    arms, tasks = bench.parse_arms(args.arms), None
    check_used(args, arms)
    if args.tasks is not None:
        tasks = [task.strip() for task in args.tasks.split(",") if task.strip()]
        if not tasks:
            raise bench.UserError(f"--tasks {args.tasks!r}: names no task; leave it out for all of them")
    return bench.Settings(
        target=args.target,
        prompts=prompts,
        arms=arms,
        tasks=tasks,
        limit=limit,
        turns=turns,
        temperature=args.temperature,
        batch=args.batch,
        block=args.block,
        dtype=args.dtype,
        max_new_tokens=args.max_new_tokens,
        seed=args.seed,
        drafter=args.drafter,
        baseline=args.baseline,
        kind=args.kind,
    )


def run_demo(args: argparse.Namespace) -> int:
    from rich.console import Console

    from .demo import run_demo

    settings = settings_of(args, "demo", None if args.full else args.per_task or PER_TASK)
    set_threads(args.threads)
    return run_demo(settings, args.out, Console())


def run_bench(args: argparse.Namespace) -> int:
    from rich.console import Console

    settings = settings_of(args, args.prompts, args.limit, args.turns)
    # Before anything is loaded: a mistyped path should not cost a minute.
    prompts = bench.read_prompts(settings.prompts, settings.tasks, settings.limit)
    bench.check_out(args.out)
    set_threads(args.threads)
    console = Console()
    with console.status("starting") as status:
        session = bench.Session(settings, lambda text: status.update(text))
    partial = args.out / "bench.partial.json"
    status_code = bench.publish(bench.measure(session, prompts, console, partial), args.out, console, "bench")
    partial.unlink(missing_ok=True)
    return status_code


def run_generate(args: argparse.Namespace) -> int:
    from rich.console import Console

    from .demo import TextStream, show_rounds
    from .engine import stream

    args.arms, args.tasks, args.batch = args.arm, None, 1
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    if not prompt.strip():
        raise bench.UserError("prompt: is empty")
    settings = settings_of(args, "", None)
    set_threads(args.threads)
    session = bench.Session(settings, quick=True)
    [arm] = session.arms
    options = session.options(arm) | {"top_k": args.top_k, "top_p": args.top_p}
    tokens = session.encode([{"role": "user", "content": prompt}])
    rounds = stream(session.model, session.drafters[arm.drafter], [tokens], **options)
    if args.rounds:
        show_rounds(rounds, session.tokenizer, Console())
        return 0
    text = TextStream(session.tokenizer)
    for step in rounds:
        print(text.push(step.tokens[0]), end="", flush=True)
    print(text.close())
    return 0


def run_export(args: argparse.Namespace) -> int:
    from .export import export_checkpoint

    written = export_checkpoint(
        args.source,
        args.out,
        args.to,
        target=args.target,
        plain=args.plain,
        warm_start=args.warm_start,
        drop_markov=args.drop_markov,
        base=args.base,
        rank=args.rank,
    )
    print(f"{written.folder}: {', '.join(written.architectures)}")
    for note in written.notes:
        print(f"note: {note}")
    return 0


def run_env(args: argparse.Namespace) -> int:
    from .environment import cached_targets, carried_checkpoints, environment

    if args.fetch:
        from .pretrained import target_path

        target_path(args.fetch)
    found = environment()
    found |= {"drafters found": carried_checkpoints(), "targets cached": cached_targets()}
    if args.json:
        print(json.dumps(found, indent=1))
        return 0
    for key, value in found.items():
        if key != "summary":
            shown = (
                (", ".join(value) or "none")
                if isinstance(value, list)
                else ("none" if value is None else value)
            )
            print(f"{key:24} {shown}")
    return 0


COMMANDS: dict[
    str, tuple[str, Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], int]]
] = {
    "demo": ("see it work: one answer round by round, then a table by task", demo_arguments, run_demo),
    "generate": ("answer a prompt", generate_arguments, run_generate),
    "bench": ("compare ways to decode on prompts of your own", bench_arguments, run_bench),
    "export": ("write a drafter as vLLM, speculators or z-lab read it", export_arguments, run_export),
    "env": ("versions, machine, what is cached", env_arguments, run_env),
}


def build_parser(command: str | None = None) -> argparse.ArgumentParser:
    """The parser; arguments of a training command are added only when ``command`` is that one (they
    import PyTorch)."""
    parser = argparse.ArgumentParser(
        prog="carryover",
        description="Speculative decoding that recycles the hidden states of rejected draft tokens.",
    )
    parser.add_argument("--version", action="version", version=f"carryover_ext {__version__}")
    parser.add_argument("--traceback", action="store_true", help="show the whole traceback of an error")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, (text, add_arguments, run) in COMMANDS.items():
        one = commands.add_parser(name, help=text, description=text.capitalize() + ".")
        add_arguments(one)
        one.set_defaults(run=run)
    for name, (text, module) in TRAINING.items():
        one = commands.add_parser(name, help=text, description=text.capitalize() + ".")
        if name == command:
            training = importlib.import_module(f".training.{module}", __package__)
            getattr(training, f"add_{name}_arguments")(one)
            one.set_defaults(run=getattr(training, f"run_{name}"))
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. Returns 0, 1 for an unexplained difference in a benchmark, 2 for a mistake in what was
    typed or named."""
    argv = list(sys.argv[1:] if argv is None else argv)
    # Threads that spin while they wait slow each other down on a shared machine; must be set before
    # PyTorch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    args = build_parser(next((a for a in argv if not a.startswith("-")), None)).parse_args(argv)
    try:
        return args.run(args)
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 130
    except (bench.UserError, ValueError, OSError, RuntimeError, ImportError) as e:
        if args.traceback:
            raise
        print(f"carryover {args.command}: {e}", file=sys.stderr)
        if not isinstance(e, bench.UserError):
            print("(carryover --traceback ... shows where)", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
