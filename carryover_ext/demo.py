"""``carryover demo``: one answer streamed so that the rounds can be seen, then the benchmark over the
prompts of the package."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from . import bench

# Neighbouring rounds differ in hue and stay readable on dark and on light terminals.
STYLES = ("bold cyan", "bold yellow", "bold green", "bold magenta", "bold blue")
SUBSCRIPTS = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")


class TextStream:
    """Turns tokens into text piece by piece; a character that is not complete yet waits for its other
    bytes."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.tokens: list[int] = []
        self.shown = 0

    def push(self, tokens: Iterable[int]) -> str:
        """The text that these tokens add."""
        self.tokens.extend(tokens)
        text = self.tokenizer.decode(self.tokens, skip_special_tokens=True)
        complete = text.rstrip("\ufffd")
        piece, self.shown = complete[self.shown :], max(self.shown, len(complete))
        return piece

    def close(self) -> str:
        """What was still waiting: bytes that never became a character."""
        return self.tokenizer.decode(self.tokens, skip_special_tokens=True)[self.shown :]


def carried_mark(count: int, unicode: bool) -> str:
    return str(count).translate(SUBSCRIPTS) if unicode else f"|{count}|"


def show_rounds(rounds: Iterable[Any], tokenizer: Any, console: Any) -> dict[str, int]:
    """Prints the answer of request 0 round by round; returns sums: tokens, rounds, committed, carried."""
    from rich.text import Text

    unicode = (console.encoding or "").lower().startswith("utf")
    stream = TextStream(tokenizer)
    sums = {"tokens": 0, "rounds": 0, "committed": 0, "carried": 0}
    for step in rounds:
        tokens = step.tokens[0]
        sums["tokens"] += len(tokens)
        piece = Text(
            stream.push(tokens), style="dim" if step.index == 0 else STYLES[step.index % len(STYLES)]
        )
        if step.index:
            sums["rounds"] += 1
            sums["committed"] += len(tokens)
            sums["carried"] += step.num_carried[0]
            piece.append(carried_mark(step.num_carried[0], unicode), style="not bold dim")
        console.print(piece, end="", soft_wrap=True)
    console.print(Text(stream.close()))
    return sums


def show_one(session: bench.Session, prompt: bench.Prompt, console: Any) -> None:
    """Streams the answer to a prompt with Carryover ON."""
    from .engine import stream

    arm = bench.ARMS["carryover"]
    console.rule(f"One answer, as the rounds make it ({prompt.task})", align="left")
    console.print(prompt.turns[0], style="italic", highlight=False, markup=False)
    console.print(
        "Each colour is one verification by the target. "
        "The small number after it: rejected rows that are carried into the next draft.\n",
        style="dim",
        highlight=False,
    )
    tokens = session.encode([{"role": "user", "content": prompt.turns[0]}])
    rounds = stream(session.model, session.drafters[arm.drafter], [tokens], **session.options(arm))
    sums = show_rounds(rounds, session.tokenizer, console)
    if sums["rounds"]:
        console.print(
            f"\n{sums['tokens']} tokens in {sums['rounds']} verifications after the prefill: "
            f"{sums['committed'] / sums['rounds']:.2f} tokens each; "
            f"{sums['carried'] / sums['rounds']:.1f} rows carried on average.\n",
            highlight=False,
        )


def run_demo(settings: bench.Settings, out: Path, console: Any) -> int:
    """The whole demo. Returns the exit status: 1 when a difference from plain decoding is not explained."""
    from .environment import environment

    console.print(environment()["summary"], style="dim", highlight=False, markup=False)
    prompts = bench.read_prompts(settings.prompts, settings.tasks, settings.limit)
    bench.check_out(out)
    with console.status("starting") as status:
        session = bench.Session(settings, lambda text: status.update(text), quick=True)
    if "carryover" in settings.arms:
        show_one(session, next((p for p in prompts if p.task == "code"), prompts[0]), console)
    console.rule(f"{len(prompts)} prompts, {len(settings.arms)} ways to decode them", align="left")
    doc = bench.measure(session, prompts, console)
    return bench.publish(doc, out, console, "demo")
