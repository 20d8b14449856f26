"""Tables, JSON and plots of a decoding benchmark: pure functions over plain dictionaries.

A *record* is one timed decode of one group of prompts (a batch) by one arm::

    {"task": "math", "arm": "carryover", "seconds": 1.9, "prefill_seconds": 0.2,
     "answers": [{"id": "math-1", "tokens": 48, "committed": 47, "rounds": 21, "carried": 250,
                  "equal": True, "difference": None}]}

``seconds`` is the time of the whole decode, prefill included. ``committed`` counts the tokens that the
verification rounds emitted, the bonus token included; the first token comes from the prefill and is in
``tokens`` alone.
``equal`` is None where nothing was compared. Every rate is a micro-average: sums first, then one division.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .files import write_atomic

if TYPE_CHECKING:
    from rich.table import Table

FORMAT = "carryover-bench/2"
LABELS = {"plain": "plain", "baseline": "base", "carryover-off": "OFF", "carryover": "ON"}
KINDS = {"dflash": "DFlash", "markov": "Markov"}
COLOURS = {"plain": "#9a9a9a", "baseline": "#4477aa", "carryover-off": "#e8c48a", "carryover": "#cc5a1e"}
ALL = "all"

Record = dict[str, Any]
Cell = dict[str, Any]
Row = dict[str, Any]


def ratio(numerator: float | None, denominator: float | None) -> float | None:
    """numerator / denominator, or None where either is missing or the denominator is zero."""
    if numerator is None or not denominator:
        return None
    return numerator / denominator


def cell(records: Iterable[Record]) -> Cell:
    """Sums and rates of one arm over some records: acceptance length ``al`` (committed tokens a round),
    ``tokens_per_second`` (of the whole decode), ``decode_tokens_per_second`` (prefill and its token left
    out), ``carried_per_round``, and how many answers were compared with plain decoding, are equal, or
    differ with and without an explanation."""
    records = list(records)
    answers = [answer for record in records for answer in record["answers"]]
    sums = {
        key: sum(answer[key] for answer in answers) for key in ("tokens", "committed", "rounds", "carried")
    }
    seconds = sum(record["seconds"] for record in records)
    prefill = sum(record.get("prefill_seconds", 0.0) for record in records)
    compared = [answer for answer in answers if answer["equal"] is not None]
    different = [answer for answer in compared if not answer["equal"]]
    explained = sum(bool((answer.get("difference") or {}).get("explained")) for answer in different)
    return {
        "prompts": len(answers),
        **sums,
        "seconds": seconds,
        "prefill_seconds": prefill,
        "al": ratio(sums["committed"], sums["rounds"]),
        "tokens_per_second": ratio(sums["tokens"], seconds),
        "decode_tokens_per_second": ratio(sums["committed"], seconds - prefill),
        "carried_per_round": ratio(sums["carried"], sums["rounds"]),
        "compared": len(compared),
        "equal": len(compared) - len(different),
        "explained": explained,
        "unexplained": len(different) - explained,
    }


def summarize(records: Sequence[Record], arms: Sequence[str]) -> list[Row]:
    """One row a task, in order of appearance, and a last row ``all``; each has a cell an arm.

    ``to_plain`` and ``to_baseline`` in a cell are ratios of tokens/s against the arms ``plain`` and
    ``baseline`` (None where that arm did not run)."""
    tasks = list(dict.fromkeys(record["task"] for record in records))
    rows = []
    for task in [*tasks, ALL]:
        chosen = [record for record in records if task in (ALL, record["task"])]
        cells = {arm: cell(record for record in chosen if record["arm"] == arm) for arm in arms}
        for one in cells.values():
            for key, reference in (("to_plain", "plain"), ("to_baseline", "baseline")):
                reference_rate = cells[reference]["tokens_per_second"] if reference in cells else None
                one[key] = ratio(one["tokens_per_second"], reference_rate)
        rows.append(
            {"task": task, "prompts": max((c["prompts"] for c in cells.values()), default=0), "arms": cells}
        )
    return rows


def al_gain(records: Sequence[Record], arm: str, over: str, resamples: int = 1000) -> dict[str, float] | None:
    """AL of ``arm`` over AL of ``over``, minus one, with a 95 % interval by bootstrap over the prompts.

    The same prompts are drawn for both arms, so the interval tells how much the gain depends on which
    prompts were asked. None where either arm has no rounds."""
    counts: dict[str, dict[str, list[int]]] = {}
    for record in records:
        for answer in record["answers"]:
            mine = counts.setdefault(answer["id"], {}).setdefault(record["arm"], [0, 0])
            mine[0] += answer["committed"]
            mine[1] += answer["rounds"]
    pairs = [
        (c[arm], c[over]) for c in counts.values() if arm in c and over in c and c[arm][1] and c[over][1]
    ]
    return paired_gain(pairs, resamples) if pairs else None


def paired_gain(
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]], resamples: int = 2000
) -> dict[str, float]:
    """Gain in AL of the first of each pair over the second, with a 95 % interval by bootstrap over the pairs.

    A pair holds ``(committed tokens, rounds)`` of one prompt in two arms."""

    def gain(sample: Sequence[tuple[Sequence[int], Sequence[int]]]) -> float:
        tokens_a, rounds_a = (sum(a[i] for a, _ in sample) for i in (0, 1))
        tokens_b, rounds_b = (sum(b[i] for _, b in sample) for i in (0, 1))
        return (tokens_a / rounds_a) / (tokens_b / rounds_b) - 1

    source = random.Random(0)
    drawn = sorted(gain(source.choices(pairs, k=len(pairs))) for _ in range(resamples))
    low, high = drawn[int(0.025 * resamples)], drawn[min(int(0.975 * resamples), resamples - 1)]
    return {"gain": gain(pairs), "low": low, "high": high, "prompts": len(pairs)}


def document(
    settings: dict[str, Any], environment: dict[str, Any], records: Sequence[Record]
) -> dict[str, Any]:
    """Everything that a benchmark leaves behind, ready for ``json.dump``: settings, machine, rows, gains,
    records."""
    arms = settings["arms"]
    gains = {
        f"{arm}/{over}": al_gain(records, arm, over)
        for arm, over in (("carryover", "baseline"), ("carryover", "carryover-off"))
        if arm in arms and over in arms
    }
    return {
        "format": FORMAT,
        "settings": settings,
        "environment": environment,
        "rows": summarize(records, arms),
        "al_gain": gains,
        "records": list(records),
    }


def write_json(path: str | Path, doc: dict[str, Any]) -> Path:
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, json.dumps(doc, indent=1, ensure_ascii=False) + "\n")
    return path


# ---------------------------------------------------------------------------------------------- text and
# tables


def number(value: float | None, digits: int = 2, suffix: str = "") -> str:
    return "-" if value is None else f"{value:.{digits}f}{suffix}"


def equal_text(cells: Iterable[Cell]) -> str:
    """``23 of 24 (1 near tie)``: equal answers, then the differences that are explained, then those that
    are not."""
    cells = list(cells)
    compared, equal, explained, unexplained = (
        sum(c[key] for c in cells) for key in ("compared", "equal", "explained", "unexplained")
    )
    if not compared:
        return "-"
    notes = [f"{explained} near tie{'s' * (explained != 1)}"] * bool(explained) + [
        f"{unexplained} UNEXPLAINED"
    ] * bool(unexplained)
    return f"{equal} of {compared}" + (f" ({', '.join(notes)})" if notes else "")


def equality_columns(cells: Sequence[Sequence[Cell]]) -> list[tuple[str, list[str]]]:
    """(heading, value a row): equal of those compared, and the kinds of difference that occur."""
    sums = [
        {k: sum(c[k] for c in row) for k in ("compared", "equal", "explained", "unexplained")}
        for row in cells
    ]
    columns = [
        ("equal to\nplain", [f"{s['equal']} of {s['compared']}" if s["compared"] else "-" for s in sums])
    ]
    for heading, key in (("near\nties", "explained"), ("NO\nREASON", "unexplained")):
        if any(s[key] for s in sums):
            columns.append((heading, [str(s[key]) for s in sums]))
    return columns


def task_columns(arms: Sequence[str]) -> list[tuple[str, str, str]]:
    """(heading, arm, key of the cell) of the numeric columns of the table by task."""
    drafted = [arm for arm in arms if arm != "plain"]
    columns = [(f"AL\n{LABELS[arm]}", arm, "al") for arm in drafted]
    columns += [(f"tok/s\n{LABELS[arm]}", arm, "tokens_per_second") for arm in arms]
    for over, key in (("plain", "to_plain"), ("baseline", "to_baseline")):
        if drafted and over in arms and drafted[-1] != over:
            columns.append((f"{LABELS[drafted[-1]]} /\n{LABELS[over]}", drafted[-1], key))
    return columns


FORMATS = {"al": (2, ""), "tokens_per_second": (1, ""), "to_plain": (2, "x"), "to_baseline": (2, "x")}


def task_grid(
    rows: Sequence[Row], arms: Sequence[str], part: str = "all"
) -> tuple[list[str], list[list[str]]]:
    """Headings and cells, as text, of the table by task; the last row is the micro-average.

    ``part`` "quality" keeps acceptance lengths and comparisons, "speed" the rest, for narrow terminals."""
    columns = [c for c in task_columns(arms) if part == "all" or (c[2] == "al") == (part == "quality")]
    headings = ["task", *(heading for heading, _, _ in columns)]
    body = [
        [f"{row['task']} ({row['prompts']})"]
        + [number(row["arms"][arm][key], *FORMATS[key]) for _, arm, key in columns]
        for row in rows
    ]
    if part != "speed" and "plain" in arms and len(arms) > 1:
        cells = [[c for arm, c in row["arms"].items() if arm != "plain"] for row in rows]
        for heading, values in equality_columns(cells):
            headings.append(heading)
            body = [[*line, value] for line, value in zip(body, values, strict=True)]
    return headings, body


def arm_grid(rows: Sequence[Row], arms: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """Headings and cells, as text, of the table by arm (all tasks together)."""
    cells = [rows[-1]["arms"][arm] for arm in arms]
    equality = equality_columns([[c] for c in cells])
    headings = ["arm", "AL", "carried\n/round", "tok/s", "to\nplain", "to\nbase", *(h for h, _ in equality)]
    body = []
    for index, (arm, c) in enumerate(zip(arms, cells, strict=True)):
        drafted = arm != "plain"
        numbers = [
            number(c["al"] if drafted else None),
            number(c["carried_per_round"] if drafted else None, 1),
            number(c["tokens_per_second"], 1),
            number(c["to_plain"], 2, "x"),
            number(c["to_baseline"], 2, "x"),
        ]
        body.append([arm, *numbers, *(values[index] if drafted else "-" for _, values in equality)])
    return headings, body


def rich_table(title: str, grid: tuple[list[str], list[list[str]]], average: bool = False) -> Table:
    """A grid as a rich table; with ``average`` the last row stands apart."""
    from rich import box
    from rich.table import Table

    headings, body = grid
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", padding=(0, 1, 0, 0))
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="right" if index else "left", no_wrap=index == 0)
    for index, line in enumerate(body):
        last = average and index == len(body) - 1
        table.add_row(*line, style="bold" if last else None, end_section=average and index == len(body) - 2)
    return table


def markdown(grid: tuple[list[str], list[list[str]]]) -> str:
    """A grid as a Markdown table, for a README."""
    headings, body = grid

    def line(cells: Iterable[str]) -> str:
        return "| " + " | ".join(cell.replace("\n", " ").replace("|", "\\|") for cell in cells) + " |"

    return "\n".join([line(headings), "|---|" + "---:|" * (len(headings) - 1), *map(line, body)])


def gain_text(arm: str, over: str, gain: dict[str, float], what: str = "prompts") -> str:
    """One sentence for people about a gain in AL and its interval."""
    names = {
        "carryover": "Carryover ON",
        "carryover-off": "Carryover OFF",
        "baseline": "the baseline drafter",
    }
    return (
        f"AL of {names[arm]} over {names[over]}: {gain['gain']:+.1%} "
        f"(95 % interval over {gain['prompts']} {what}: {gain['low']:+.1%} to {gain['high']:+.1%})"
    )


def gain_lines(doc: dict[str, Any]) -> list[str]:
    """One sentence a comparison."""
    pairs = ((*key.split("/"), gain) for key, gain in doc["al_gain"].items() if gain)
    return [gain_text(arm, over, gain) for arm, over, gain in pairs]


def equality_lines(doc: dict[str, Any]) -> list[str]:
    """What the comparison with plain decoding found, one line a difference."""
    cells = [c for arm, c in doc["rows"][-1]["arms"].items() if arm != "plain"]
    if not sum(c["compared"] for c in cells):
        return []
    lines = [f"Outputs equal to plain decoding: {equal_text(cells)}"]
    for record in doc["records"]:
        for answer in record["answers"]:
            d = answer.get("difference")
            if d:
                found = "explained" if d["explained"] else "NOT EXPLAINED"
                lines.append(
                    f"  {answer['id']}, {record['arm']}, token {d['index']}: "
                    f"top-2 logit gap {number(d['gap'], 4)}, "
                    f"{doc['settings']['dtype']} rounding there {number(d['rounding'], 4)}: {found}"
                )
    return lines


def unexplained(doc: dict[str, Any]) -> int:
    """How many outputs differ from plain decoding without an explanation."""
    return sum(c["unexplained"] for c in doc["rows"][-1]["arms"].values())


# -------------------------------------------------------------------------------------------------- plot


def settings_text(settings: dict[str, Any]) -> str:
    """Target, kind of the drafters, dtype, temperature, batch and block in one phrase."""
    block = "" if settings["block"] is None else f", block {settings['block']}"
    drafts = settings.get("kind") and settings["arms"] != ["plain"]
    kind = f"{KINDS[settings['kind']]}, " if drafts else ""
    what = f"{Path(settings['target']).name}, {kind}{settings['dtype']}, T = {settings['temperature']:g}"
    return f"{what}, batch {settings['batch']}{block}"


def headline(doc: dict[str, Any]) -> str:
    """The finding in one line, from the numbers themselves."""
    average = doc["rows"][-1]["arms"]
    on = average.get("carryover")
    if not on or on["al"] is None:
        return "Tokens a verification, and speed, by task"
    line = f"Carryover: {on['al']:.2f} tokens a verification"
    gain = doc["al_gain"].get("carryover/baseline")
    if gain:
        line += f" ({gain['gain']:+.1%} over the baseline drafter)"
    if on["to_plain"] is not None:
        line += f", {on['to_plain']:.2f}x the speed of plain decoding"
    return line


def plot(doc: dict[str, Any], path: str | Path) -> Path:
    """Two panels by task as PNG: acceptance length of the drafting arms, and tokens/s of every arm."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    rows, arms = doc["rows"], list(doc["settings"]["arms"])
    drafted = [arm for arm in arms if arm != "plain"]
    names = {"plain": "plain decoding", "baseline": "baseline drafter"}
    names |= {"carryover-off": "Carryover, carried rows left out (OFF)", "carryover": "Carryover (ON)"}
    panels = [("al", "tokens a verification (AL)", drafted), ("tokens_per_second", "tokens / s", arms)]
    panels = [panel for panel in panels if panel[2]]
    figure, axes = pyplot.subplots(len(panels), 1, figsize=(12, 3.3 * len(panels) + 0.6), squeeze=False)
    centres = [index + (0.35 if row["task"] == ALL else 0.0) for index, row in enumerate(rows)]
    for axis, (key, label, shown) in zip(axes[:, 0], panels, strict=True):
        width = 0.8 / len(shown)
        for place, arm in enumerate(shown):
            values = [row["arms"][arm][key] or 0.0 for row in rows]
            spots = [centre + (place - (len(shown) - 1) / 2) * width for centre in centres]
            bars = axis.bar(spots, values, width * 0.92, color=COLOURS[arm], label=names[arm])
            axis.bar_label(bars, fmt="%.2f" if key == "al" else "%.0f", fontsize=7, padding=1)
        axis.set_ylabel(label)
        axis.set_xticks(
            centres, ["all tasks" if row["task"] == ALL else row["task"].replace("_", "\n") for row in rows]
        )
        axis.spines[["top", "right"]].set_visible(False)
        axis.axvline((centres[-2] + centres[-1]) / 2 if len(rows) > 1 else -1, color="#cccccc", linewidth=1)
        axis.set_xlim(-0.55, centres[-1] + 0.55)
        axis.margins(y=0.12)
    handles, labels = axes[-1, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=len(labels), frameon=False, fontsize=9)
    settings = doc["settings"]
    figure.suptitle(headline(doc), fontsize=12, fontweight="bold")
    figure.text(
        0.5,
        0.925 if len(panels) > 1 else 0.88,
        f"{settings_text(settings)}, {rows[-1]['prompts']} prompts, {settings['max_new_tokens']} new tokens; "
        f"{doc['environment'].get('summary', '')}",
        ha="center",
        fontsize=8,
        color="#555555",
    )
    figure.tight_layout(rect=(0, 0.05, 1, 0.95))
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return path


def main(paths: Sequence[str]) -> None:
    """``python -m carryover_ext.report demo.json``: tables as Markdown, and the plot beside it."""
    for path in paths:
        doc = json.loads(Path(path).read_text(encoding="utf-8"))
        if doc.get("format") != FORMAT:
            raise SystemExit(f"{path}: has format {doc.get('format')!r}, expected {FORMAT!r}; make it again")
        arms = doc["settings"]["arms"]
        grids = [markdown(grid(doc["rows"], arms)) for grid in (task_grid, arm_grid)]
        print(*grids, *gain_lines(doc), *equality_lines(doc), sep="\n\n")
        print("\nWritten:", plot(doc, Path(path).with_suffix(".png")))


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
