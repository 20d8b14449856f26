"""`carryover curve`: acceptance length against hours of training, for runs that went on from one another."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from carryover_ext import report

POINTS = 12  # of a table; a plot has four times as many


@dataclass
class Curve:
    """A chain of runs: rows of their ``curve.jsonl``, each with the hours that it ended at, and the hours at
    which one run ended and the next began. AL is the trainer's: the best token of each slot against the
    recorded one; in the runs of a pair at the anchors where the first draft left off."""

    name: str
    rows: list[dict[str, float]]
    joints: list[float]

    def means(self, points: int) -> list[dict[str, float]]:
        """``hours`` (ends), ``al`` and ``slot1`` of so many equal parts of the rows, weighted by steps."""
        count = min(points, len(self.rows))
        parts = [
            self.rows[i * len(self.rows) // count : (i + 1) * len(self.rows) // count] for i in range(count)
        ]
        return [
            {"hours": part[-1]["hours"]}
            | {
                k: sum(r[k] * r["steps"] for r in part) / sum(r["steps"] for r in part)
                for k in ("al", "slot1")
            }
            for part in parts
        ]

    def held_out(self) -> list[tuple[float, float]]:
        """Hours and AL of the looks at held-out recordings."""
        return [(r["hours"], r["held_out_al"]) for r in self.rows if "held_out_al" in r]


def add_curve_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs",
        nargs="+",
        help="folders of `carryover train`; NAME=FOLDER,FOLDER,... for runs that went on from one another",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("curve.png"), help="plot to write (default: %(default)s)"
    )


def run_curve(args: argparse.Namespace) -> int:
    if args.out.suffix != ".png":
        raise ValueError(f"--out {args.out}: must be a .png file")
    curves = [read(text) for text in args.runs]
    for curve in curves:
        print(f"{curve.name}\n\n{table(curve)}\n")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    plot(curves, args.out)
    print(f"written: {args.out}")
    return 0


def read(text: str) -> Curve:
    """The curve of ``FOLDER`` or ``NAME=FOLDER,FOLDER,...``; ValueError where there is none."""
    named = "=" in text and not Path(text).is_dir()
    name, joined = text.split("=", 1) if named else ("", text)
    folders = joined.split(",")
    rows: list[dict[str, float]] = []
    joints = []
    seconds = 0.0
    for folder in folders:
        for row in _rows(folder):
            seconds += row["seconds"]
            rows.append(row | {"hours": seconds / 3600})
        joints.append(seconds / 3600)
    return Curve(name or Path(folders[-1]).resolve().name, rows, joints[:-1])


def _rows(folder: str) -> list[dict[str, float]]:
    if not folder:
        raise ValueError("runs: an empty name of a folder; write NAME=FOLDER,FOLDER,...")
    file = Path(folder, "curve.jsonl")
    try:
        found = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        if any(row["steps"] <= 0 or row["seconds"] < 0 or not {"al", "slot1"} <= row.keys() for row in found):
            raise ValueError("a line without the figures of a cycle")
    except FileNotFoundError:
        raise ValueError(
            f"runs: {folder} has no curve.jsonl, so that it is no run of `carryover train`"
        ) from None
    except (ValueError, TypeError, KeyError, AttributeError) as e:
        raise ValueError(f"runs: {file} is damaged ({e}); resume its run, which mends it") from e
    if not found:
        raise ValueError(f"runs: {file} is empty; the run has not come to the end of a cycle yet")
    return found


def table(curve: Curve) -> str:
    """Markdown: hours, AL and share of right first drafts in training, AL on held-out recordings."""
    held = curve.held_out()
    body = []
    since = 0.0
    for point in curve.means(POINTS):
        seen = [al for hours, al in held if since < hours <= point["hours"]]
        body.append(
            [
                f"{point['hours']:.2f}",
                f"{point['al']:.3f}",
                f"{point['slot1']:.1%}",
                f"{seen[-1]:.3f}" if seen else "-",
            ]
        )
        since = point["hours"]
    return report.markdown((["hours", "AL in training", "slot 1 right", "AL held out"], body))


def plot(curves: Sequence[Curve], path: Path) -> None:
    """AL against hours: lines for training batches, points for held-out recordings."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(8, 4.5))
    for curve in curves:
        points = curve.means(4 * POINTS)
        (line,) = axis.plot([p["hours"] for p in points], [p["al"] for p in points], label=curve.name)
        held = curve.held_out()
        if held:
            axis.plot(*zip(*held, strict=True), "o", markersize=3, color=line.get_color(), alpha=0.7)
        for hours in curve.joints:
            axis.axvline(hours, color=line.get_color(), linewidth=0.6, linestyle=":")
    axis.set_xlabel("hours of training")
    axis.set_ylabel("acceptance length")
    axis.set_title("line: training batches; points: held-out recordings; dotted: a run went on", fontsize=9)
    axis.legend(frameon=False, fontsize=8)
    axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
