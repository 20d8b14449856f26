"""`carryover cells`: every drafter of a results page, trained and evaluated in one resumable run.

For each target: a DFlash start, with short blocks first; from it the pair `carryover` and its control
`shifted`; a Markov start from the DFlash one; its pair. Both arms of a pair take the same steps on the same
recordings with the same seed. Every pair is replayed on the held-out answers of each recording, and the page
is made of all of them.

Each part is one of the other commands, printed as it would be typed, and each of them goes on where it was
killed: run the same line again until it says that all is done.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from carryover_ext.cli import not_negative, positive
from carryover_ext.drafters.checkpoint import WEIGHTS
from carryover_ext.files import write_atomic
from carryover_ext.training.commands import add_device, recorded_temperature
from carryover_ext.training.evaluate import FORMAT
from carryover_ext.training.shapes import BLOCK, DRAFT_VOCAB, LAYERS, TAPS

CARRY, CONTROL = "carryover", "shifted"
KINDS = ("dflash", "markov")
CHECKPOINTS = ("--init", "--baseline", "--drafter")  # options that name one
SIZES = ("hidden-size", "heads", "kv-heads", "intermediate")


def add_cells_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--target",
        action="append",
        default=[],
        metavar="TARGET=RECORDINGS[,RECORDINGS]",
        help="a target and its recordings, for example one at temperature 0 and one at 1; repeat for another",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/cells"), help="folder of all runs (resumed when it exists)"
    )
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument(
        "--short-steps",
        type=not_negative,
        default=4000,
        help="plain steps with short blocks before them (0: none): a young drafter learns faster",
    )
    parser.add_argument(
        "--short-block",
        type=positive,
        default=4,
        help="rows of a block in these (no such steps unless below --block)",
    )
    parser.add_argument(
        "--start-steps", type=positive, default=4000, help="plain steps of a start behind them"
    )
    parser.add_argument("--arm-steps", type=positive, default=1500, help="steps of each arm of a pair")
    parser.add_argument("--sequences", type=positive, default=4)
    parser.add_argument("--anchors", type=positive, default=32)
    parser.add_argument("--layers", type=positive, default=LAYERS)
    for name in SIZES:
        parser.add_argument(f"--{name}", type=positive, help="see `carryover train`")
    parser.add_argument("--taps", type=positive, default=TAPS)
    parser.add_argument("--block", type=positive, default=BLOCK)
    parser.add_argument("--draft-vocab", type=int, default=DRAFT_VOCAB)
    parser.add_argument("--markov-rank", type=positive, default=64)
    parser.add_argument("--lr", type=float, default=1.5e-3, help="of the starts")
    parser.add_argument("--arm-lr", type=float, default=3e-4)
    parser.add_argument("--gamma", type=float, default=3.0)
    parser.add_argument("--reuse", type=positive, default=3, help="steps on each batch of rejects")
    parser.add_argument("--keep-prefixes", action="store_true", help="see `carryover train`")
    parser.add_argument("--limit", type=positive, default=96, help="held-out recordings of an evaluation")
    parser.add_argument("--minutes", type=float, help="begin no further part after this time")
    parser.add_argument(
        "--pack", type=Path, help="also copy the checkpoints there, in files of at most 16 MiB"
    )
    parser.add_argument(
        "--unpack", type=Path, metavar="FOLDER", help="join what --pack cut into pieces, and do nothing else"
    )
    add_device(parser)
    parser.add_argument("--threads", type=positive)


@dataclass(frozen=True)
class Part:
    """One command and what it writes; that it is done is kept beside that, with the command's words."""

    words: list[str]
    out: Path

    @property
    def _mark(self) -> Path:
        return self.out.with_name(self.out.name + ".done")

    def is_done(self) -> bool:
        """Whether the same words have been carried out, what they wrote is there, and no checkpoint that they
        read has been written since."""
        if not (self._mark.exists() and self.out.exists()):
            return False
        done = self._mark.stat().st_mtime_ns
        for option, value in zip(self.words, self.words[1:], strict=False):
            read = Path(value) / WEIGHTS
            if option in CHECKPOINTS and read.exists() and read.stat().st_mtime_ns > done:
                return False
        words = shlex.split(self._mark.read_text(encoding="utf-8"))
        return _options(words) == _options(self.words) and self._is_of_today()

    def _is_of_today(self) -> bool:
        """Whether `results` can read what an evaluation wrote."""
        if self.words[0] != "evaluate":
            return True
        try:
            return json.loads(self.out.read_text(encoding="utf-8")).get("format") == FORMAT
        except ValueError:
            return False

    def set_done(self) -> None:
        write_atomic(self._mark, shlex.join(self.words))


def _options(words: Sequence[str]) -> list[tuple[str, ...]]:
    """The options with their values, in an order of their own."""
    starts = [i for i, word in enumerate(words) if word.startswith("--")]
    return sorted(tuple(words[a:b]) for a, b in zip([0, *starts], [*starts, len(words)], strict=True))


def parse_target(text: str) -> tuple[str, list[Path]]:
    """``TARGET=RECORDINGS[,RECORDINGS]``."""
    name, sign, folders = text.rpartition("=")
    if not sign or not name or not folders:
        raise ValueError(f"--target {text}: must be TARGET=RECORDINGS[,RECORDINGS]")
    return name, [Path(folder) for folder in folders.split(",")]


def label(folder: Path) -> str:
    """``t0`` or ``t1``, from the manifest of a recording."""
    return f"t{recorded_temperature(folder, None):g}"


def plan(args: argparse.Namespace) -> list[Part]:
    """All parts in order."""
    parts: list[Part] = []
    for text in args.target:
        target, folders = parse_target(text)
        for folder in folders:
            if not folder.is_dir():
                raise ValueError(f"--target {text}: {folder} is not a folder; `carryover record` makes it")
        parts += _target_parts(args, target, folders)
    places = [part.out for part in parts]
    twice = sorted({str(place) for place in places if places.count(place) > 1})
    if twice:
        raise ValueError(
            f"--target: two of them would write {twice[0]}; targets must differ in their last name, and the "
            "recordings of a target in their temperature"
        )
    return parts


def _target_parts(args: argparse.Namespace, target: str, folders: Sequence[Path]) -> list[Part]:
    root: Path = args.out / Path(target).name
    common = ["--target", target] + [
        word
        for name in ("device", "threads")
        if (value := getattr(args, name))
        for word in (f"--{name}", value)
    ]
    train = ["train", *common, "--recordings", *folders]
    for name in ("sequences", "anchors"):
        train += [f"--{name}", getattr(args, name)]
    parts = []

    def trained(name: str, steps: int, *words: object, gamma: float = args.gamma) -> Path:
        out = root / name
        line = [*train, "--out", out, "--steps", steps, "--gamma", gamma, *words]
        parts.append(Part([str(word) for word in line], out))
        return out / "checkpoint"

    for kind in sorted(set(args.kinds)):  # DFlash first: the Markov start goes on from it
        kind_words: list[object] = ["--drafter", kind]
        if kind == "markov":
            kind_words += ["--markov-rank", args.markov_rank]
        start_words: list[object] = [*kind_words, "--lr", args.lr, "--final-lr", 0.03]
        shape: list[object] = []
        for name in ("layers", *SIZES, "taps", "draft-vocab"):
            value = getattr(args, name.replace("-", "_"))
            shape += [] if value is None else [f"--{name}", value]
        if kind == "markov" and "dflash" in args.kinds:
            start_words += ["--init", root / "dflash-start" / "checkpoint"]
        elif args.short_steps and args.short_block < args.block and _can_begin_short(root, kind):
            short_words = [*kind_words, *shape, "--block", args.short_block, "--lr", 2 * args.lr]
            short = trained(f"{kind}-short", args.short_steps, *short_words, "--final-lr", 0.3, gamma=1.0)
            start_words += ["--init", short, "--block", args.block]
        else:
            start_words += [*shape, "--block", args.block]
        start = trained(f"{kind}-start", args.start_steps, *start_words)
        arms = {
            objective: trained(
                f"{kind}-{objective}",
                args.arm_steps,
                *("--init", start, "--objective", objective, "--lr", args.arm_lr),
                *("--cycle", 16, "--reuse", args.reuse, "--seed", 1),
                *(["--keep-prefixes"] if args.keep_prefixes else []),
            )
            for objective in (CONTROL, CARRY)
        }
        for folder in folders:
            out = args.out / "results" / f"{Path(target).name}-{kind}-{label(folder)}.json"
            line = ["evaluate", *common, "--recordings", folder, "--limit", args.limit, "--out", out]
            line += ["--baseline", arms[CONTROL], "--drafter", arms[CARRY]]
            parts.append(Part([str(word) for word in line], out))
    return parts


def _can_begin_short(root: Path, kind: str) -> bool:
    """False where a start was begun without short blocks: it goes on as it is."""
    return (root / f"{kind}-short").exists() or not (root / f"{kind}-start").exists()


def run_cells(args: argparse.Namespace, command: Callable[[Sequence[str]], int] | None = None) -> int:
    from carryover_ext.cli import main

    run = command or main
    if args.unpack:
        folders = sorted({digest.parent for digest in args.unpack.rglob("*.sha256")})
        if not folders:
            raise ValueError(f"--unpack {args.unpack}: nothing to join there; name what --pack wrote")
        for folder in folders:
            unpack(folder)
            print(f"joined: {folder}")
        return 0
    begun, parts = time.monotonic(), plan(args)
    if not parts:
        raise ValueError("--target: name at least one, as TARGET=RECORDINGS[,RECORDINGS]")
    (args.out / "results").mkdir(parents=True, exist_ok=True)
    for number, part in enumerate(parts, 1):
        if part.is_done():
            continue
        if args.minutes and time.monotonic() - begun > 60 * args.minutes:
            print(f"{number - 1} of {len(parts)} parts are done; run the same line again to go on")
            return 0
        print(f"[{number} of {len(parts)}] carryover {shlex.join(part.words)}", flush=True)
        status = run(["--traceback", *part.words])
        if status:
            return status
        part.set_done()
    files = [str(part.out) for part in parts if part.words[0] == "evaluate"]
    status = run(["--traceback", "results", *files, "--out", str(args.out / "results.md")])
    if status:
        return status
    if args.pack:
        for checkpoint in sorted(args.out.glob("*/*/checkpoint")):
            if checkpoint.parent.name.endswith("-short"):
                continue  # the start that went on from it is there
            pack(checkpoint, args.pack / checkpoint.parent.relative_to(args.out))
        print(f"checkpoints in pieces: {args.pack}")
    print(f"all {len(parts)} parts are done")
    return 0


def pack(checkpoint: Path, out: Path, limit: int = 16 << 20) -> None:
    """Copies a checkpoint folder; a file above ``limit`` bytes goes in pieces ``NAME.part-00000`` and on,
    with ``NAME.sha256`` of the whole. :func:`unpack` joins them."""
    out.mkdir(parents=True, exist_ok=True)
    for file in sorted(checkpoint.iterdir()):
        for old in (out / file.name, out / f"{file.name}.sha256", *out.glob(f"{file.name}.part-*")):
            old.unlink(missing_ok=True)
        content = file.read_bytes()
        if len(content) <= limit:
            (out / file.name).write_bytes(content)
            continue
        for number, start in enumerate(range(0, len(content), limit)):
            (out / f"{file.name}.part-{number:05d}").write_bytes(content[start : start + limit])
        write_atomic(out / f"{file.name}.sha256", hashlib.sha256(content).hexdigest() + "\n")


def unpack(folder: Path) -> None:
    """Joins what :func:`pack` cut, in place.

    Raises:
        ValueError: a piece is missing or damaged; nothing is written or deleted.
    """
    for digest in sorted(folder.glob("*.sha256")):
        name = digest.name.removesuffix(".sha256")
        pieces = sorted(folder.glob(f"{name}.part-*"))
        content = b"".join(piece.read_bytes() for piece in pieces)
        if hashlib.sha256(content).hexdigest() != digest.read_text(encoding="utf-8").strip():
            raise ValueError(
                f"{folder / name}: a piece of {len(pieces)} is missing or damaged; copy them again"
            )
        temporary = folder / f"{name}.tmp"
        temporary.write_bytes(content)
        temporary.rename(folder / name)
        for file in (digest, *pieces):
            file.unlink()
