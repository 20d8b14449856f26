"""`carryover results`: one page and two plots from the JSON files that `carryover evaluate` and `carryover
bench`
wrote. Every number on the page comes from a file; nothing is typed in."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from carryover_ext import report
from carryover_ext.files import write_atomic
from carryover_ext.training.evaluate import FORMAT

Document = dict[str, Any]
BASELINE, OFF = "carryover/baseline", "carryover/carryover-off"


def add_results_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", type=Path, help="JSON files of `evaluate` and `bench`")
    parser.add_argument("--out", type=Path, default=Path("results.md"), help="page to write, plots beside it")


def run_results(args: argparse.Namespace) -> int:
    if args.out.is_dir():
        raise ValueError(f"--out {args.out}: is a folder; name a Markdown file")
    if args.out.resolve() in [path.resolve() for path in args.files]:
        raise ValueError(f"--out {args.out}: is one of the files to read; name another")
    documents = [read(path) for path in args.files]
    evaluated = [d for d in documents if d["format"] == FORMAT]
    decoded = [d for d in documents if d["format"] == report.FORMAT]
    folder: Path = args.out.parent
    folder.mkdir(parents=True, exist_ok=True)
    plots = []
    if evaluated:
        plots = [gain_plot(evaluated, folder / f"{args.out.stem}-gain.png")]
        plots.append(why_plot(evaluated, folder / f"{args.out.stem}-why.png"))
    write_atomic(args.out, page(evaluated, decoded, [p.name for p in plots]))
    for path in (args.out, *plots):
        print(f"written: {path}")
    return 0


def read(path: Path) -> Document:
    """A document of `evaluate` (with a Carryover arm) or `bench`; ValueError for anything else."""
    try:
        # files of the first versions have NaN where there was nothing to count
        text = path.read_text(encoding="utf-8")
        doc: Document = json.loads(text, parse_constant=lambda name: None)
        found = doc.get("format")
    except (ValueError, AttributeError) as e:
        raise ValueError(f"files: {path} is not a JSON object ({e})") from e
    if found not in (FORMAT, report.FORMAT):
        raise ValueError(
            f"files: {path} has format {found!r}; expected {FORMAT!r} or {report.FORMAT!r}; make it again"
        )
    needed = ("settings", "tasks", "arms", "gains") if found == FORMAT else ("settings", "rows", "al_gain")
    missing = [key for key in needed if key not in doc]
    if missing:
        raise ValueError(f"files: {path} lacks {', '.join(missing)}; make it again")
    if found == FORMAT and OFF not in doc["gains"]:
        raise ValueError(
            f"files: {path} has no Carryover arm, only {', '.join(doc['arms'])}; name a --drafter"
        )
    return doc


def title(doc: Document) -> str:
    s = doc["settings"]
    return f"{s['target']}, {report.KINDS[s['drafter']]}, T = {s['temperature']:g}"


def percent(gain: dict[str, float] | None) -> str:
    """``+1.2 % (+0.3 to +2.0)``: a gain and its 95 % interval."""
    if gain is None:
        return "-"
    return f"{gain['gain']:+.1%} ({gain['low']:+.1%} to {gain['high']:+.1%})".replace("%", " %")


def share(value: float | None, digits: int = 1) -> str:
    """A share as a percentage; a dash where there was nothing to count."""
    return "-" if value is None else f"{100 * value:.{digits}f} %"


def gains_of(doc: Document, pair: str, task: str) -> dict[str, float] | None:
    gains = doc["gains"].get(pair)
    return None if gains is None else gains[task]


def row(doc: Document, task: str) -> list[str]:
    """Cells of one task: AL of the arms, gains, and what the carried rows did."""
    arms, on = doc["arms"], doc["arms"]["carryover"][task]
    lengths = [
        f"{arms[a][task]['al']:.3f}" if a in arms else "-" for a in ("baseline", "carryover-off", "carryover")
    ]
    recalls = [f"{share(on[f'off_recall{k}'])} -> {share(on[f'recall{k}'])}" for k in (1, 16)]
    gains = [percent(gains_of(doc, pair, task)) for pair in (BASELINE, OFF)]
    return [*lengths, *gains, *recalls, share(on["attention_mass"]), share(on["reconvergence"])]


HEADINGS = [
    *("AL baseline", "AL OFF", "AL ON", "ON over baseline", "ON over OFF"),
    *("recall@1 OFF -> ON", "recall@16 OFF -> ON", "attention on carried rows", "re-convergence"),
]


def points(documents: Sequence[Document]) -> list[tuple[float, float, str, Document]]:
    """(re-convergence, gain of ON over OFF, task, document) of every task of every cell; a task in which no
    draft was refused has no re-convergence and is left out."""
    found = [
        (doc["arms"]["carryover"][task]["reconvergence"], doc["gains"][OFF][task]["gain"], task, doc)
        for doc in documents
        for task in doc["tasks"]
        if task != report.ALL
    ]
    return [p for p in found if p[0] is not None]


def correlation(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Pearson's; None with fewer than three points or without variation."""
    if len(pairs) < 3:
        return None
    mean = [sum(column) / len(pairs) for column in zip(*pairs, strict=True)]
    moved = [(x - mean[0], y - mean[1]) for x, y in pairs]
    xx, yy, xy = (sum(a[i] * a[j] for a in moved) for i, j in ((0, 0), (1, 1), (0, 1)))
    return xy / (xx * yy) ** 0.5 if xx > 0 and yy > 0 else None


INTRODUCTION = """\
Written by `carryover results` from the JSON files of `carryover evaluate` and `carryover bench`. AL is the
acceptance length: committed tokens / verification rounds, bonus included, micro-averaged. Baseline and
Carryover have the same start, recordings and number of steps; OFF has Carryover's weights without the
carried rows. Intervals are 95 %, by bootstrap over recordings (or prompts). Recall@k: the recorded token is
among the drafter's best k of a slot, in rounds with carried rows; OFF -> ON hides and shows the rows in the
same rounds. Re-convergence: share of refused drafts that are the right token in their place all the same."""


def page(evaluated: Sequence[Document], decoded: Sequence[Document], plots: Sequence[str]) -> str:
    """The page as Markdown."""
    parts = ["# Results", INTRODUCTION]
    if evaluated:
        cells = [[title(d), str(d["settings"]["recordings"]), *row(d, report.ALL)] for d in evaluated]
        parts += [
            "## Held-out recordings, replayed",
            report.markdown((["cell", "recordings", *HEADINGS], cells)),
        ]
        r = correlation([p[:2] for p in points(evaluated)])
        if r is not None:
            count = len(points(evaluated))
            parts.append(f"Correlation of re-convergence with ON over OFF, over {count} tasks: {r:+.2f}.")
        parts += [f"![{name}]({name})" for name in plots]
        for doc in evaluated:
            body = [[task, *row(doc, task)] for task in doc["tasks"]]
            parts += [f"### {title(doc)}", report.markdown((["task", *HEADINGS], body))]
    if decoded:
        parts += ["## Decoded by the engine", *(decoded_part(d) for d in decoded)]
    return "\n\n".join(parts) + "\n"


def decoded_part(doc: Document) -> str:
    arms = doc["settings"]["arms"]
    lines = [
        f"### {report.settings_text(doc['settings'])}",
        report.markdown(report.arm_grid(doc["rows"], arms)),
    ]
    lines += [report.markdown(report.task_grid(doc["rows"], arms)), *report.gain_lines(doc)]
    return "\n\n".join(lines)


def gain_plot(documents: Sequence[Document], path: Path) -> Path:
    """Gain of ON over OFF, and over the baseline, by task: one panel a cell, with 95 % intervals."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        len(documents), 1, figsize=(9, 2.6 * len(documents) + 0.8), squeeze=False, sharex=False
    )
    for axis, doc in zip(axes[:, 0], documents, strict=True):
        for place, (pair, label, colour) in enumerate(
            ((BASELINE, "ON over the baseline drafter", "#4477aa"), (OFF, "ON over OFF", "#cc5a1e"))
        ):
            if pair not in doc["gains"]:
                continue
            found = [doc["gains"][pair][task] for task in doc["tasks"]]
            middle = [100 * g["gain"] for g in found]
            reach = [
                [100 * (g["gain"] - g["low"]) for g in found],
                [100 * (g["high"] - g["gain"]) for g in found],
            ]
            spots = [i + (place - 0.5) * 0.2 for i in range(len(found))]
            axis.errorbar(spots, middle, yerr=reach, fmt="o", capsize=3, color=colour, label=label)
        axis.axhline(0, color="#999999", linewidth=1)
        axis.set_xticks(range(len(doc["tasks"])), doc["tasks"])
        axis.set_ylabel("gain in AL, %")
        axis.set_title(title(doc), fontsize=10, loc="left")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0, 0].legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return path


def why_plot(documents: Sequence[Document], path: Path) -> Path:
    """Re-convergence against the gain of ON over OFF, a point a task."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(7, 4.5))
    for doc in documents:
        found = [p for p in points(documents) if p[3] is doc]
        axis.scatter([100 * p[0] for p in found], [100 * p[1] for p in found], label=title(doc), s=24)
        for x, y, task, _ in found:
            axis.annotate(task, (100 * x, 100 * y), fontsize=7, xytext=(4, 3), textcoords="offset points")
    axis.axhline(0, color="#999999", linewidth=1)
    axis.set_xlabel("refused drafts that are right in their place, %")
    axis.set_ylabel("gain in AL, ON over OFF, %")
    axis.legend(frameon=False, fontsize=8)
    axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return path
