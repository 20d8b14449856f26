"""`carryover answers`: recorded answers in one small file, without the prompts' text.

The file (NumPy's .npz, compressed) can be kept beside the weights that were trained on
it, where the prompts have licences of their own. `carryover record --answers` makes a recording of it and of
the prompts again, without the target's decoding.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tokenize import TokenError  # NumPy's, of a damaged header

import numpy as np

from carryover_ext.files import replacing
from carryover_ext.training.recordings import PromptIds, load_shard, recorded_settings, shards

BROKEN = (zipfile.BadZipFile, zlib.error, NotImplementedError)
SETTINGS = ("target", "temperature")  # the same in all sources of a file


def add_answers_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("sources", nargs="+", type=Path, help="folders of recordings, or files made before")
    parser.add_argument("--out", type=Path, required=True, help="the file, NAME.npz")


def run_answers(args: argparse.Namespace) -> int:
    if args.out.suffix != ".npz" or args.out.is_dir():
        raise ValueError(f"--out {args.out}: must be a file NAME.npz")
    whole = Answers()
    for source in args.sources:
        whole.add(Answers.load(source) if source.is_file() else Answers.of_recording(source), source)
    whole.save(args.out)
    tokens = sum(len(ids) for ids, _ in whole.answers.values())
    print(
        f"{args.out}: {len(whole.answers):,} answers of {tokens:,} tokens, {args.out.stat().st_size:,} bytes"
    )
    return 0


def prompt_key(ids: Sequence[int]) -> int:
    """The first 64 bits of a hash of a prompt's token ids."""
    return int.from_bytes(hashlib.sha256(json.dumps(list(ids)).encode()).digest()[:8], "little")


@dataclass
class Answers:
    """Answers by :func:`prompt_key`, token ids and finish reason, as backends give them; ``settings`` of the
    manifest that say where they come from (empty when there is nothing yet)."""

    settings: dict[str, object] = field(default_factory=dict)
    answers: dict[int, tuple[list[int], str]] = field(default_factory=dict)

    @classmethod
    def of_recording(cls, folder: Path) -> Answers:
        """Those of the complete shards of a folder.

        Raises:
            FileNotFoundError: there is none; ValueError: nor a manifest.
        """
        files, manifest = shards(folder), recorded_settings(folder)
        if not all(name in manifest for name in SETTINGS):
            raise ValueError(f"{folder}/manifest.json: must name {' and '.join(SETTINGS)}")
        found = cls({name: manifest[name] for name in SETTINGS})
        for row in (row for file in files for row in load_shard(file)):
            found.answers.setdefault(prompt_key(row.prompt_ids), (row.response_ids, row.finish))
        return found

    @classmethod
    def load(cls, path: Path) -> Answers:
        """A file that :meth:`save` wrote; ValueError when it is none."""
        try:
            with np.load(path, allow_pickle=False) as data:
                settings = json.loads(str(data["settings"]))
                ends = data["lengths"].astype(np.int64).cumsum()
                keys, stopped, tokens = data["keys"].tolist(), data["stopped"].tolist(), data["tokens"]
            if not len(keys) == len(stopped) == len(ends) or (ends[-1] if len(ends) else 0) != len(tokens):
                raise ValueError("its lengths contradict each other")
            if not all(name in settings for name in SETTINGS):
                raise ValueError(f"its settings must name {' and '.join(SETTINGS)}")
        except OSError as e:
            raise ValueError(f"{path}: cannot be read ({e.strerror})") from e
        except (ValueError, KeyError, TypeError, EOFError, SyntaxError, TokenError, *BROKEN) as e:
            raise ValueError(f"{path}: is not a whole file of `carryover answers` ({e})") from e
        parts = np.split(tokens, ends[:-1]) if keys else []
        answers = [(p.tolist(), "stop" if end else "length") for p, end in zip(parts, stopped, strict=True)]
        return cls(settings, dict(zip(keys, answers, strict=True)))

    def add(self, other: Answers, source: Path) -> None:
        """Takes in what ``other``, from ``source``, has of prompts without an answer.

        Raises:
            ValueError: it is of another target or temperature.
        """
        theirs = other.settings
        changed = {k: (v, theirs.get(k)) for k, v in self.settings.items() if theirs.get(k) != v}
        if changed:
            raise ValueError(f"{source}: other settings than those before {changed}; use a file of its own")
        self.settings = dict(theirs)
        self.answers = other.answers | self.answers

    def save(self, path: Path) -> None:
        """Writes under a temporary name, then renames."""
        keys = sorted(self.answers)
        answers, finish = [self.answers[key][0] for key in keys], [self.answers[key][1] for key in keys]
        tokens = np.fromiter((token for ids in answers for token in ids), np.uint32)
        if tokens.size and tokens.max() < 1 << 16:
            tokens = tokens.astype(np.uint16)
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary, open(temporary, "wb") as f:
            np.savez_compressed(
                f,
                settings=np.array(json.dumps(self.settings)),
                keys=np.array(keys, np.uint64),
                lengths=np.array([len(ids) for ids in answers], np.uint32),
                stopped=np.array([reason == "stop" for reason in finish], bool),
                tokens=tokens,
            )

    def digest(self) -> str:
        """Of all answers, to tell files apart."""
        return hashlib.sha256(json.dumps(sorted(self.answers.items())).encode()).hexdigest()

    def has(self, prompt: PromptIds) -> bool:
        return prompt_key(prompt.ids) in self.answers

    def __call__(self, prompts: Sequence[list[int]], first: int) -> list[tuple[list[int], str]]:
        """The answers to prompts that have one: a backend of
        :func:`carryover_ext.training.recordings.record`."""
        return [self.answers[prompt_key(ids)] for ids in prompts]
