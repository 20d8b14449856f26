"""The decoding benchmark behind ``carryover bench`` and ``carryover demo``.

Every arm decodes the same prompts with the same target in the same process; the order of the arms rotates
from group to group, so that a slow minute of the machine falls on all of them. A record is one group of
prompts (``batch`` of one task) and one arm; :mod:`carryover_ext.report` turns records into tables, JSON
and plots.
"""

from __future__ import annotations

import hashlib
import json
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from . import report

DEMO_PROMPTS = Path(__file__).with_name("demo_prompts.jsonl")
CHECKPOINTS = Path(__file__).with_name("checkpoints")  # TARGET/KIND/{baseline,carryover}
KINDS = ("markov", "dflash")
# The repository's drafters were trained with 8 rows. At their acceptance the last ones are hardly ever
# reached, and on a CPU core they cost more than they bring (docs/experiments.md, "How many rows to verify").
QUICK_BLOCK = 5


@dataclass(frozen=True)
class Arm:
    """A way to decode: ``drafter`` names the checkpoint (None: plain decoding), ``carry`` whether
    rejected rows are carried."""

    name: str
    drafter: str | None
    carry: bool


ARMS = {
    arm.name: arm
    for arm in (
        Arm("plain", None, False),
        Arm("baseline", "baseline", False),
        Arm("carryover-off", "carryover", False),
        Arm("carryover", "carryover", True),
    )
}


@dataclass(frozen=True)
class Prompt:
    """One conversation: the user's turns, in order."""

    id: str
    task: str
    turns: tuple[str, ...]


@dataclass
class Settings:
    """What decides the outcome of a benchmark; stored in its JSON. ``block`` None: the length the drafter
    was trained with; ``dtype`` "auto": the one that this CPU is fast with (both are replaced by what they
    stand for), and so is ``kind`` None, see :func:`kind_of`."""

    target: str
    prompts: str
    arms: list[str]
    tasks: list[str] | None = None
    limit: int | None = None
    turns: str = "first"
    temperature: float = 0.0
    batch: int = 1
    block: int | None = None
    dtype: str = "auto"
    max_new_tokens: int = 128
    seed: int = 0
    drafter: str | None = None
    baseline: str | None = None
    kind: str | None = None


class UserError(Exception):
    """A mistake in what the user typed or in a file that they named; shown without a traceback."""


def parse_arms(text: str) -> list[str]:
    """``"plain,baseline"`` as a list of known arms, in the order of :data:`ARMS`."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in ARMS]
    if unknown or not names:
        raise UserError(
            f"--arms {text!r}: unknown arm {', '.join(unknown) or '(none)'}; choose from {', '.join(ARMS)}"
        )
    return [name for name in ARMS if name in names]


def read_prompts(
    path: str | Path, tasks: Sequence[str] | None = None, limit: int | None = None
) -> list[Prompt]:
    """Reads ``{"id", "category", "turns": [...]}`` lines (the Spec-Bench form); ``limit`` is a number per
    task.

    ``path`` "demo" is the file that the package carries. Raises UserError for a missing file, for a line
    that is not of that form or repeats an id (with its number), and for a task that it lacks."""
    path = DEMO_PROMPTS if str(path) == "demo" else Path(path)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(f"--prompts {path}: cannot be read ({getattr(e, 'strerror', None) or e})") from e
    found: dict[str, list[Prompt]] = {}
    seen: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            turns = tuple(row["turns"])
            if not turns or isinstance(row["turns"], str) or not all(isinstance(turn, str) for turn in turns):
                raise ValueError("'turns' must be a list of texts")
            if not isinstance(row["category"], str):
                raise ValueError("'category' must be a text")
            if row["category"] == report.ALL:
                raise ValueError(f"category {report.ALL!r} is the name of the average; take another")
            prompt = Prompt(str(row.get("id", row.get("question_id", number))), row["category"], turns)
        except json.JSONDecodeError as e:
            raise UserError(f"--prompts {path}: line {number} is not JSON ({e.msg}, column {e.colno})") from e
        except (KeyError, TypeError, ValueError, AttributeError) as e:
            what = f"no {e}" if isinstance(e, KeyError) else str(e)
            raise UserError(
                f"--prompts {path}: line {number}: {what}; "
                'expected {"id": ..., "category": "...", "turns": ["..."]}'
            ) from e
        if prompt.id in seen:
            raise UserError(
                f"--prompts {path}: line {number} has the id {prompt.id!r} of line {seen[prompt.id]}; "
                "answers are compared by id, so give each prompt its own"
            )
        seen[prompt.id] = number
        found.setdefault(prompt.task, []).append(prompt)
    missing = [task for task in tasks or [] if task not in found]
    if missing:
        raise UserError(
            f"--tasks: {path} has no task {', '.join(missing)}; it has {', '.join(found) or 'none'}"
        )
    if not found:
        raise UserError(f"--prompts {path}: no prompts in it")
    chosen = [task for task in found if not tasks or task in tasks]
    return [prompt for task in chosen for prompt in found[task][:limit]]


def groups(prompts: Sequence[Prompt], batch: int) -> Iterator[list[Prompt]]:
    """Prompts of one task, ``batch`` at a time."""
    for task in dict.fromkeys(prompt.task for prompt in prompts):
        mine = [prompt for prompt in prompts if prompt.task == task]
        for start in range(0, len(mine), batch):
            yield mine[start : start + batch]


def kind_of(settings: Settings, default: str = KINDS[0]) -> str:
    """Kind of a benchmark's drafters: the one asked for, that of a folder that is named, or the default.

    Raises UserError where these disagree: one kind over another is not what Carryover gains."""
    from .config import DrafterConfig

    kinds = {f"--kind {settings.kind}": settings.kind} if settings.kind else {}
    for option, folder in (("--drafter", settings.drafter), ("--baseline", settings.baseline)):
        if folder and (Path(folder) / "config.json").is_file():
            markov = DrafterConfig.from_pretrained(folder).markov_rank > 0
            kinds[f"{option} {folder}"] = "markov" if markov else "dflash"
    if len(set(kinds.values())) > 1:
        found = ", ".join(f"{what} is {report.KINDS[kind]}" for what, kind in kinds.items())
        raise UserError(f"{found}: must be of one kind")
    return next(iter(kinds.values()), default)


def checkpoint_folder(settings: Settings, which: str) -> Path:
    """The folder of the ``carryover`` or ``baseline`` checkpoint: the one named, or the one that the
    repository carries for the target (wheels carry none)."""
    given, option = (
        (settings.drafter, "--drafter") if which == "carryover" else (settings.baseline, "--baseline")
    )
    if given:
        folder = Path(given)
        if not (folder / "config.json").is_file():
            raise UserError(
                f"{option} {given}: no config.json there; a drafter is a folder with config.json and weights"
            )
        return folder
    kind = kind_of(settings)
    folder = CHECKPOINTS / settings.target / kind / which
    if not (folder / "config.json").is_file():
        known = [f"{p.parent.name} ({p.name})" for p in sorted(CHECKPOINTS.glob("*/*")) if p.is_dir()]
        where = (
            f"the repository carries drafters only for: {', '.join(known)}"
            if known
            else "a wheel carries none; a checkout of the repository does (carryover_ext/checkpoints)"
        )
        raise UserError(
            f"--target {settings.target}: no {kind} {which} drafter for it is here; {where}; "
            f"name a folder with {option}, or train one: carryover record, then carryover train"
        )
    return folder


class Session:
    """Target, tokenizer and drafters of one benchmark, loaded once.

    ``on_step`` is called with a text before each slow step. ``quick``: where no block length is asked for
    and all drafters are the repository's, take at most ``QUICK_BLOCK`` rows."""

    def __init__(
        self, settings: Settings, on_step: Callable[[str], None] = lambda text: None, *, quick: bool = False
    ) -> None:
        import torch
        from transformers.utils import logging

        from .drafters import load_drafter
        from .environment import cached_targets
        from .named_targets import NAMES
        from .packing import dtype_name
        from .pretrained import load_target

        self.settings = settings
        self.arms = [ARMS[name] for name in settings.arms]
        if any(arm.drafter for arm in self.arms):
            settings.kind = kind_of(settings)
        folders = {arm.drafter: checkpoint_folder(settings, arm.drafter) for arm in self.arms if arm.drafter}
        settings.dtype = dtype_name(settings.dtype, "cpu")
        self.dtype: torch.dtype = getattr(torch, settings.dtype)
        logging.disable_progress_bar()
        absent = settings.target in NAMES and settings.target not in cached_targets()
        on_step(f"{'fetching and converting (once)' if absent else 'loading'} {settings.target}")
        self.model, self.tokenizer = load_target(settings.target, self.dtype)
        on_step("loading the drafters")
        self.drafters: dict[str | None, Any] = {None: None}
        for which, folder in folders.items():
            self.drafters[which] = load_drafter(folder, dtype=self.dtype)
        carryover = self.drafters.get("carryover")
        if carryover is not None and not carryover.config.carryover:
            raise UserError(
                f"--drafter {folders['carryover']}: trained without Carryover; name it with --baseline"
            )
        baseline = self.drafters.get("baseline")
        if baseline is not None and baseline.config.carryover:
            raise UserError(
                f"--baseline {folders['baseline']}: trained with Carryover; name it with --drafter, and "
                "compare with the arm carryover-off"
            )
        trained = [d.config.verify_rows for d in self.drafters.values() if d is not None]
        if settings.block is None and trained:
            shipped = all(f.resolve().is_relative_to(CHECKPOINTS.resolve()) for f in folders.values())
            settings.block = min([*trained, QUICK_BLOCK] if quick and shipped else trained)

    def encode(self, messages: list[dict[str, str]]) -> list[int]:
        """Token ids of a conversation; see :func:`carryover_ext.pretrained.encode_chat`."""
        from .pretrained import encode_chat

        return encode_chat(self.tokenizer, messages)

    def options(self, arm: Arm) -> dict[str, Any]:
        """Keyword arguments of the engine for an arm."""
        s = self.settings
        options = {
            "max_new_tokens": s.max_new_tokens,
            "temperature": s.temperature,
            "seed": s.seed,
            "carry": arm.carry,
        }
        return options if arm.drafter is None else options | {"block_size": s.block}

    def generate(self, arm: Arm, prompts: list[list[int]], **changes: Any) -> Any:
        from .engine import generate

        return generate(self.model, self.drafters[arm.drafter], prompts, **(self.options(arm) | changes))

    def warm_up(self, prompt: list[int]) -> None:
        """One short decode an arm, so that packing of weights and first-call costs fall outside the
        measurement."""
        for arm in self.arms:
            self.generate(
                arm, [prompt] * self.settings.batch, max_new_tokens=min(12, self.settings.max_new_tokens)
            )


def check_out(folder: Path) -> None:
    """Makes the folder of the results. UserError when it cannot be written: better now than after an hour."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as e:
        raise UserError(f"--out {folder}: cannot be written ({e.strerror}); name another folder") from e


def check_lengths(session: Session, prompts: Sequence[Prompt]) -> None:
    """UserError for a prompt that leaves the target no position for an answer to its last turn, should the
    answers before it be as long as they may: better now than when the others are done."""
    limit = session.model.config.get_text_config().max_position_embeddings
    for prompt in prompts:
        turns = prompt.turns[:1] if session.settings.turns == "first" else prompt.turns
        history: list[dict[str, str]] = []
        for turn in turns:
            history += [{"role": "user", "content": turn}, {"role": "assistant", "content": ""}]
        count = len(session.encode(history[:-1]))
        answers = (len(turns) - 1) * session.settings.max_new_tokens
        if not 0 < count < limit - answers:
            of_turns = f", and its {len(turns) - 1} earlier answers up to {answers}" if answers else ""
            raise UserError(
                f"--prompts: prompt {prompt.id!r} of task {prompt.task} has {count} tokens under the chat "
                f"template{of_turns}; it must have 1..{limit - 1} in all for this target, so shorten it or "
                "leave it out"
            )


def answers_of(ids: Sequence[str], output: Any) -> list[dict[str, Any]]:
    """One dictionary an answer (see :mod:`carryover_ext.report`) from an engine's output."""
    found = []
    for index, name in enumerate(ids):
        rounds = [r for r in output.rounds[1:] if r.num_accepted[index] >= 0]
        found.append(
            {
                "id": name,
                "tokens": len(output.tokens[index]),
                "committed": sum(len(r.tokens[index]) for r in rounds),
                "rounds": len(rounds),
                "drafted": sum(r.num_drafted[index] for r in rounds),
                "carried": sum(r.num_carried[index] for r in rounds),
                "finish": output.finish_reasons[index],
                "token_ids": list(output.tokens[index]),
                "equal": None,
                "difference": None,
            }
        )
    return found


def compare(records: Sequence[report.Record], prompts: dict[str, list[int]], referee: Any) -> None:
    """Fills ``equal`` and ``difference`` of every drafted answer by its plain answer."""
    plain = {a["id"]: a["token_ids"] for r in records if r["arm"] == "plain" for a in r["answers"]}
    for record in records:
        for answer in record["answers"]:
            if record["arm"] != "plain" and answer["id"] in plain:
                answer["difference"] = referee.explain(
                    prompts[answer["id"]], plain[answer["id"]], answer["token_ids"]
                )
                answer["equal"] = answer["difference"] is None


def group_seed(seed: int, place: int, turn: int) -> int:
    """Seed of one turn of one group, the same for all arms. Groups that shared one would draw the same
    uniforms, and ``seed + place`` would repeat a part of the next seed's run."""
    return random.Random(f"{seed} {place} {turn}").getrandbits(48)


def run(
    session: Session,
    prompts: Sequence[Prompt],
    on_group: Callable[[str, str], None] = lambda task, arm: None,
    done: Sequence[report.Record] = (),
    keep: Callable[[list[report.Record]], None] = lambda records: None,
) -> list[report.Record]:
    """Decodes every prompt with every arm and compares greedy answers with plain decoding.

    ``on_group(task, arm)`` is called after each timed decode, ``keep`` with all records after those of all
    arms; what it was given last is ``done`` of a run that goes on. With ``turns="all"`` the history of a
    later turn holds the answers of the first arm, so that all arms are asked the same.
    """
    from .referee import Referee

    settings, records, warm = session.settings, list[report.Record](), False
    encoded: dict[str, list[int]] = {}
    for place, group in enumerate(groups(prompts, settings.batch)):
        histories: dict[str, list[dict[str, str]]] = {prompt.id: [] for prompt in group}
        for turn in range(max(len(prompt.turns) for prompt in group) if settings.turns == "all" else 1):
            asked = [prompt for prompt in group if turn < len(prompt.turns)]
            for prompt in asked:
                histories[prompt.id].append({"role": "user", "content": prompt.turns[turn]})
            ids = [prompt.id if turn == 0 else f"{prompt.id}/turn{turn + 1}" for prompt in asked]
            tokens = [session.encode(histories[prompt.id]) for prompt in asked]
            encoded.update(zip(ids, tokens, strict=True))
            asking = list(done[len(records) : len(records) + len(session.arms)])
            if not asking:
                if not warm:
                    session.warm_up(tokens[0])
                    warm = True
                shift, seed = (place + turn) % len(session.arms), group_seed(settings.seed, place, turn)
                for arm in [*session.arms[shift:], *session.arms[:shift]]:
                    start = time.perf_counter()
                    output = session.generate(arm, tokens, seed=seed)
                    asking.append(
                        {
                            "task": group[0].task,
                            "arm": arm.name,
                            "seconds": time.perf_counter() - start,
                            "prefill_seconds": output.prefill_seconds,
                            "answers": answers_of(ids, output),
                        }
                    )
                    on_group(group[0].task, arm.name)
                keep(records + asking)
            records += asking
            first = next(record for record in asking if record["arm"] == session.arms[0].name)
            for prompt, answer in zip(asked, first["answers"], strict=True):
                text = session.tokenizer.decode(answer["token_ids"], skip_special_tokens=True)
                histories[prompt.id].append({"role": "assistant", "content": text})
    if settings.temperature == 0:
        compare(records, encoded, Referee(session.model))
    return records


def steps(prompts: Sequence[Prompt], settings: Settings) -> int:
    """How many timed decodes :func:`run` will make: the length of a progress bar."""
    turns = [
        1 if settings.turns == "first" else max(len(p.turns) for p in g)
        for g in groups(prompts, settings.batch)
    ]
    return sum(turns) * len(settings.arms)


def fingerprint(session: Session, prompts: Sequence[Prompt], environment: dict[str, Any]) -> str:
    """SHA-256 of what the records of a run depend on; a target counts by its name, drafters by their
    weights."""
    from .drafters import adapter

    drafters = {
        which: [drafter.config.to_dict(), adapter.digest(drafter.state_dict())]
        for which, drafter in session.drafters.items()
        if drafter is not None
    }
    what = [asdict(session.settings), environment, [asdict(prompt) for prompt in prompts], drafters]
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()


def read_partial(path: Path, made_by: str) -> list[report.Record]:
    """Records of a run with the fingerprint ``made_by`` that was stopped; none where there is no such."""
    try:
        doc = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    return doc["records"] if isinstance(doc, dict) and doc.get("fingerprint") == made_by else []


def measure(
    session: Session, prompts: Sequence[Prompt], console: Any, partial: Path | None = None
) -> dict[str, Any]:
    """:func:`run` behind a progress bar; returns the document of :func:`carryover_ext.report.document`.

    ``partial``: a file that holds rows and records so far after each group, where a run that was stopped goes
    on if nothing else has changed. Answers are compared with plain decoding at the end only."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    from .environment import environment

    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    check_lengths(session, prompts)
    settings, machine, total = asdict(session.settings), environment(), steps(prompts, session.settings)
    made_by = fingerprint(session, prompts, machine) if partial else ""
    done = read_partial(partial, made_by) if partial else []
    if done:
        console.print(
            f"{partial}: {len(done)} of {total} decodes are there; going on", highlight=False, markup=False
        )

    def keep(records: list[report.Record]) -> None:
        if partial:
            rows = report.summarize(records, settings["arms"])  # gains are for the end: a bootstrap
            doc = {"settings": settings, "environment": machine, "rows": rows, "records": records}
            report.write_json(partial, doc | {"decodes": total, "fingerprint": made_by})

    # Drawn between the timed decodes only: a bar that refreshes by itself would take time from them.
    with Progress(*columns, console=console, auto_refresh=False) as progress:
        bar = progress.add_task("warming up", total=total, completed=len(done))

        def advance(task: str, arm: str) -> None:
            progress.update(bar, advance=1, description=f"{task}, {arm}")
            progress.refresh()

        progress.refresh()
        records = run(session, prompts, advance, done, keep)
        progress.update(bar, description="done")
        progress.refresh()
    return report.document(settings, machine, records)


def publish(doc: dict[str, Any], out: Path, console: Any, name: str) -> int:
    """Prints the tables, writes ``NAME.json`` and ``NAME.png`` into ``out`` and says where.

    Returns the exit status: 1 when an output differs from plain decoding and rounding does not explain
    it, else 0."""
    arms, rows, settings = doc["settings"]["arms"], doc["rows"], doc["settings"]
    count = rows[-1]["prompts"]
    title = (
        f"{report.settings_text(settings)}, {count} answers of at most {settings['max_new_tokens']} tokens"
    )
    console.print(title, highlight=False, markup=False)
    parts = {"all": "By task"}
    if console.width < 112:
        parts = {"quality": "By task: tokens a verification (AL)", "speed": "By task: speed"}
    for part, heading in parts.items():
        console.print(report.rich_table(heading, report.task_grid(rows, arms, part), average=True))
    console.print(report.rich_table("All tasks, by arm", report.arm_grid(rows, arms)))
    for line in [*report.gain_lines(doc), *report.equality_lines(doc)]:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    written = [report.write_json(out / f"{name}.json", doc), report.plot(doc, out / f"{name}.png")]
    console.print(
        "Written: " + " and ".join(str(path) for path in written),
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    return 1 if report.unexplained(doc) else 0
