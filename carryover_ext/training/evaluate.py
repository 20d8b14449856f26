"""`carryover evaluate`: acceptance length on recordings that were not trained on, and why it is what it
is."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from carryover_ext import report
from carryover_ext.cli import positive
from carryover_ext.config import DrafterConfig
from carryover_ext.files import write_atomic
from carryover_ext.training.commands import (
    add_device,
    add_temperature,
    load_on,
    load_weights,
    make_features,
    open_store,
    progress_bar,
    recorded_temperature,
)
from carryover_ext.training.evaluation import Arm, Tally, as_compute, evaluate_arms
from carryover_ext.training.recordings import prompts
from carryover_ext.training.trainer import check_trainable

FORMAT = "carryover-evaluate/2"
PAIRS = (("carryover", "baseline"), ("carryover", "carryover-off"))


def add_evaluate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--recordings", type=Path, required=True)
    parser.add_argument("--features", type=Path)
    parser.add_argument("--drafter", type=Path, help="Carryover checkpoint (arms OFF and ON)")
    parser.add_argument("--baseline", type=Path, help="baseline checkpoint")
    parser.add_argument("--limit", type=positive, default=96, help="held-out recordings")
    parser.add_argument(
        "--all", action="store_true", help="every recording counts, because none was trained on"
    )
    parser.add_argument(
        "--trained-on",
        type=Path,
        nargs="+",
        default=[],
        metavar="RECORDINGS",
        help="other recordings that the drafters were trained on: prompts that are in there do not count",
    )
    parser.add_argument("--batch", type=positive, default=32)
    parser.add_argument("--threads", type=positive)
    parser.add_argument("--out", type=Path, help="JSON file, which `carryover results` reads")
    add_temperature(parser)
    add_device(parser)


def _check_replayable(option: str, folder: Path, config: DrafterConfig, names: Iterable[str]) -> None:
    """ValueError for a checkpoint that a replay would compute wrongly: it runs training's own forward."""
    # A confidence head has no part in what is drafted.
    plain = replace(config, enable_confidence_head=False, confidence_head_with_markov=False)
    try:
        check_trainable(plain, names)
    except ValueError as e:
        raise ValueError(f"{option} {folder}: {e} (evaluate computes what training does)") from e


def _load_arms(
    args: argparse.Namespace, dtype: torch.dtype, device: torch.device
) -> tuple[list[Arm], Tensor | None]:
    """The arms that the named checkpoints make, and their common draft vocabulary."""
    arms: list[Arm] = []
    vocab: Tensor | None = None
    for option, folder, names in (
        ("--baseline", args.baseline, ("baseline",)),
        ("--drafter", args.drafter, ("carryover-off", "carryover")),
    ):
        if folder is None:
            continue
        config = DrafterConfig.from_pretrained(folder)
        weights, own = load_weights(folder)
        _check_replayable(option, folder, config, weights)
        if arms and not config.carryover:
            raise ValueError(
                f"--drafter {folder} has no carryover embedding, so that it is a baseline like --baseline "
                f"{args.baseline}; evaluate them one by one"
            )
        if arms and config.verify_rows != arms[0].config.verify_rows:
            raise ValueError(
                f"--drafter {folder} drafts {config.num_drafts} tokens a round and --baseline "
                f"{args.baseline} {arms[0].config.num_drafts}; evaluate them one by one"
            )
        if arms and not (
            own is vocab is None or (own is not None and vocab is not None and torch.equal(own, vocab))
        ):
            raise ValueError(
                f"--drafter {folder} and --baseline {args.baseline} have different draft vocabularies"
            )
        if arms and config.target_layer_ids != arms[0].config.target_layer_ids:
            raise ValueError(
                f"--drafter {folder} taps layers {config.target_layer_ids} and --baseline {args.baseline} "
                f"{arms[0].config.target_layer_ids}; evaluate them one by one, each with its own --features"
            )
        vocab = own
        for name in names if config.carryover else ("baseline",):
            arms.append(Arm(name, as_compute(weights, dtype, device), config, name == "carryover"))
    return arms, vocab


def run_evaluate(args: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.table import Table

    from carryover_ext.bench import check_out
    from carryover_ext.drafters.checkpoint import check_target
    from carryover_ext.training.draft_verify_draft import Head
    from carryover_ext.training.target_pass import TargetPass

    if args.threads:
        torch.set_num_threads(args.threads)
    if args.drafter is None and args.baseline is None:
        raise ValueError("--drafter or --baseline: name at least one checkpoint")
    if args.out:
        check_out(args.out.parent)
        if args.out.is_dir():
            raise ValueError(f"--out {args.out}: is a folder; name a JSON file")
    temperature = recorded_temperature(args.recordings, args.temperature)
    model, _ = load_on(args.device, args.target)
    arms, vocab = _load_arms(args, model.dtype, model.device)
    target = TargetPass(model, arms[0].config.target_layer_ids)
    hidden, layers = model.config.hidden_size, model.config.num_hidden_layers
    for arm in arms:
        check_target(arm.config, target.embed, target.head, layers, hidden, None)
    features = make_features(args.recordings, args.features, target)
    holdout = None if args.all else True
    seen = set().union(*(prompts(folder, held_out=False) for folder in args.trained_on))
    store = open_store(args.recordings, features, holdout=holdout, temperature=temperature, without=seen)
    head = Head.make(target, vocab)
    with progress_bar("replaying") as bar:
        task = bar.add_task("replaying", total=min(args.limit, len(store)), note="")
        tallies = evaluate_arms(
            arms,
            head,
            store,
            target,
            limit=args.limit,
            batch=args.batch,
            progress=lambda done, n: bar.update(task, completed=done, total=n),
        )
    settings = {
        "target": Path(args.target).name,
        "drafter": "markov" if arms[-1].config.markov_rank else "dflash",
        "temperature": temperature,
        "block": arms[0].config.verify_rows,
    }
    doc = document(settings, tallies)
    console = Console()
    table = Table("task", *tallies, title="acceptance length on recordings that were not trained on")
    for name in doc["tasks"]:
        table.add_row(name, *(f"{doc['arms'][arm][name]['al']:.3f}" for arm in tallies))
    console.print(table)
    for pair, gains in doc["gains"].items():
        arm, over = pair.split("/")
        console.print(report.gain_text(arm, over, gains[report.ALL], "recordings"), soft_wrap=True)
    if "carryover" in tallies:
        console.print(_why(doc["arms"]["carryover"][report.ALL]), soft_wrap=True)
    if args.out:
        write_atomic(args.out, json.dumps(_without_nan(doc), indent=1, allow_nan=False) + "\n")
    return 0


def _without_nan(value: Any) -> Any:
    """The same with None where a figure is NaN, which JSON does not have."""
    if isinstance(value, dict):
        return {key: _without_nan(one) for key, one in value.items()}
    return None if isinstance(value, float) and math.isnan(value) else value


def document(settings: dict[str, Any], tallies: dict[str, Tally]) -> dict[str, Any]:
    """Everything that an evaluation leaves behind: figures by arm and task, gains
    by pair of arms and task; the task ``all`` is the micro-average."""
    categories = next(iter(tallies.values())).categories()
    names: dict[str, str | None] = {**{c: c for c in categories}, report.ALL: None}
    return {
        "format": FORMAT,
        "settings": settings | {"recordings": len(next(iter(tallies.values())).recordings)},
        "tasks": list(names),
        "arms": {arm: {n: tally.figures(c) for n, c in names.items()} for arm, tally in tallies.items()},
        "gains": {
            f"{arm}/{over}": {n: gain(tallies[arm], tallies[over], c) for n, c in names.items()}
            for arm, over in PAIRS
            if arm in tallies and over in tallies
        },
    }


def gain(mine: Tally, other: Tally, category: str | None = None) -> dict[str, float]:
    """Gain in AL with its 95 % interval over recordings (of a category)."""
    both = zip(mine.recordings, other.recordings, strict=True)
    chosen = [pair for pair in both if category in (None, pair[0].category)]
    pairs = [tuple((r.committed, int(r.counts["rounds"])) for r in pair) for pair in chosen]
    return report.paired_gain([(a, b) for a, b in pairs if a[1] and b[1]])


def _why(f: dict[str, float]) -> str:
    """What the carried rows did, in words for people."""
    return (
        f"carried rows: {f['carried_rows']:.1f} a round, {f['attention_mass']:.1%} of the attention; "
        f"recall@1 {f['off_recall1']:.1%} without them, {f['recall1']:.1%} with; "
        f"@16 {f['off_recall16']:.1%}, {f['recall16']:.1%}; "
        f"{f['reconvergence']:.1%} of the refused drafts are right in their place"
    )
