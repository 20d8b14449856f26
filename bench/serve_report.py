"""Tables, JSON and plot of bench/serve.py: pure functions over its records."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

from carryover_ext.report import COLOURS, LABELS, markdown, number

FORMAT = "carryover-serve/2"
Record = dict[str, Any]


def acceptance_length(counters: dict[str, float]) -> float | None:
    """1 + accepted / drafting rounds: tokens a verification, the bonus token included."""
    rounds = counters.get("num_drafts", 0.0)
    return 1 + counters.get("num_accepted_tokens", 0.0) / rounds if rounds else None


def per_position(counters: dict[str, float]) -> list[float]:
    """Share of the rounds in which the draft at each position held."""
    rounds = counters.get("num_drafts", 0.0)
    found = {
        int(k.split("/")[1]): v for k, v in counters.items() if k.startswith("num_accepted_tokens_per_pos/")
    }
    return [found[i] / rounds for i in sorted(found)] if rounds else []


def percentile(values: list[float], p: float) -> float | None:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(p / 100 * (len(ordered) - 1)))] if ordered else None


def rate(record: Record) -> float:
    return sum(reply["tokens"] for reply in record["replies"]) / record["seconds"]


def line(record: Record) -> str:
    """One record, for the log of a running benchmark."""
    length = acceptance_length(record["counters"])
    return (
        f"T={record['temperature']:g} x{record['concurrency']:<3} {LABELS[record['arm']]:<7} "
        f"{rate(record):7.1f} tok/s  AL {number(length)}"
    )


def paired(records: list[Record], arm: str, over: str) -> float | None:
    """Median over the repetitions of tokens/s of one arm over another's in the same repetition."""
    by: dict[int, dict[str, Record]] = {}
    for record in records:
        by.setdefault(record["repetition"], {})[record["arm"]] = record
    ratios = [rate(r[arm]) / rate(r[over]) for r in by.values() if arm in r and over in r]
    return median(ratios) if ratios else None


def equal_to_plain(records: list[Record], arm: str) -> tuple[int, int]:
    """Answers whose text is plain decoding's in the same cell and repetition, and how many were compared."""
    plain = {r["repetition"]: r["replies"] for r in records if r["arm"] == "plain"}
    equal = total = 0
    for record in records:
        if record["arm"] == arm and record["repetition"] in plain:
            for reply, expected in zip(record["replies"], plain[record["repetition"]], strict=True):
                equal += reply["text"] == expected["text"]
                total += 1
    return equal, total


def row(records: list[Record], arm: str, forced: bool) -> dict[str, Any]:
    """Numbers of one arm in one cell (a temperature and a concurrency), all repetitions together."""
    mine = [record for record in records if record["arm"] == arm]
    sums: dict[str, float] = {}
    for record in mine:
        for key, value in record["counters"].items():
            sums[key] = sums.get(key, 0.0) + value
    replies = [reply for record in mine for reply in record["replies"]]
    tpot = [reply["tpot"] for reply in replies if reply["tpot"] is not None]
    equal, compared = equal_to_plain(records, arm) if arm != "plain" and not forced else (0, 0)
    return {
        "arm": arm,
        "al": acceptance_length(sums),
        "per_position": per_position(sums),
        "tokens_per_second": median(rate(record) for record in mine),
        "tpot_p50": percentile(tpot, 50),
        "tpot_p99": percentile(tpot, 99),
        "ttft_p50": percentile([reply["ttft"] for reply in replies], 50),
        "to_plain": paired(records, arm, "plain"),
        "to_baseline": paired(records, arm, "baseline"),
        "to_off": paired(records, arm, "carryover-off"),
        "equal": equal,
        "compared": compared,
        "counters": sums,
    }


def document(settings: dict[str, Any], environment: dict[str, Any], records: list[Record]) -> dict[str, Any]:
    """The JSON: settings, machine, a cell for each temperature and concurrency, and every record."""
    cells = []
    for temperature in sorted({record["temperature"] for record in records}):
        for level in sorted({record["concurrency"] for record in records}):
            chosen = [r for r in records if (r["temperature"], r["concurrency"]) == (temperature, level)]
            forced = bool(settings.get("forced_acceptance"))
            rows = [
                row(chosen, arm, forced) for arm in settings["arms"] if any(r["arm"] == arm for r in chosen)
            ]
            if len(rows) == len(settings["arms"]):  # a run that was stopped may lack some
                cells.append({"temperature": temperature, "concurrency": level, "rows": rows})
    return {
        "format": FORMAT,
        "settings": settings,
        "environment": environment,
        "cells": cells,
        "records": records,
    }


def grid(cell: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    headings = ["arm", "AL", "accepted by position, %", "tok/s", "TPOT p50, ms", "TPOT p99, ms"]
    headings += ["to plain", "to base", "to OFF", "equal to plain"]
    greedy = cell["temperature"] == 0
    body = []
    for r in cell["rows"]:
        shares = " ".join(f"{100 * share:.0f}" for share in r["per_position"]) or "-"
        times = [number(None if r[k] is None else 1e3 * r[k], 1) for k in ("tpot_p50", "tpot_p99")]
        ratios = [number(r[k], 3, "x") for k in ("to_plain", "to_baseline", "to_off")]
        same = f"{r['equal']} of {r['compared']}" if greedy and r["compared"] else "-"
        body.append([LABELS[r["arm"]], number(r["al"]), shares, number(r["tokens_per_second"], 1)])
        body[-1] += [*times, *ratios, same]
    return headings, body


def tables(doc: dict[str, Any]) -> list[str]:
    """Markdown, one table a cell, with what to know about the run above them."""
    s, machine = doc["settings"], doc["environment"]
    forced = f", acceptance forced to AL {s['forced_acceptance']:g}" if s.get("forced_acceptance") else ""
    out = [
        f"{s['target']}, {s['dtype']}, {s['asked']} prompts of {Path(s['prompts']).name}, at most "
        f"{s['max_new_tokens']} new tokens, {s['repeat']} repetitions{forced}; {machine['vllm']}; "
        f"{machine['summary']}"
    ]
    for cell in doc["cells"]:
        out.append(
            f"\nT = {cell['temperature']:g}, {cell['concurrency']} at a time\n\n{markdown(grid(cell))}"
        )
    return out


def write(doc: dict[str, Any], out: Path) -> list[Path]:
    path = out / "serve.json"
    path.write_text(json.dumps(doc, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return [path, plot(doc, out / "serve.png")]


def plot(doc: dict[str, Any], path: Path) -> Path:
    """Tokens/s by concurrency, a panel for each temperature, and acceptance by position."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    temperatures = sorted({cell["temperature"] for cell in doc["cells"]})
    figure, axes = pyplot.subplots(2, len(temperatures), figsize=(6 * len(temperatures), 7), squeeze=False)
    for column, temperature in enumerate(temperatures):
        cells = [cell for cell in doc["cells"] if cell["temperature"] == temperature]
        top, bottom = axes[:, column]
        for arm in doc["settings"]["arms"]:
            rows = [next(r for r in cell["rows"] if r["arm"] == arm) for cell in cells]
            levels = [cell["concurrency"] for cell in cells]
            style = {"color": COLOURS[arm], "label": LABELS[arm], "marker": "o"}
            top.plot(levels, [r["tokens_per_second"] for r in rows], **style)
            if rows[0]["per_position"]:
                shares = rows[0]["per_position"]
                bottom.plot(range(1, len(shares) + 1), [100 * x for x in shares], **style)
        top.set(
            title=f"T = {temperature:g}",
            xlabel="requests at a time",
            ylabel="output tokens / s",
            ylim=(0, None),
        )
        top.set_xscale("log", base=2)
        top.set_xticks(levels, [str(level) for level in levels])
        top.legend(frameon=False)
        bottom.set(
            xlabel="position of the draft", ylabel=f"accepted, % (at {cells[0]['concurrency']} a time)"
        )
        bottom.set_ylim(0, 100)
        for axis in (top, bottom):
            axis.spines[["top", "right"]].set_visible(False)
    s = doc["settings"]
    figure.suptitle(f"{s['target']}, {s['dtype']}: {doc['environment']['summary']}", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return path
