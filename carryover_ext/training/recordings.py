"""Recordings: prompts with the target's own answers, as token ids, in resumable shards.

Layout of a folder::

    manifest.json       what made it: target, temperature, max_new_tokens, seed, prompts (a hash), shard
    size shard-00000.jsonl   one recording a line: {"category", "source", "prompt_ids", "response_ids",
    "finish"}

A shard is written under a temporary name and renamed when complete, so a killed run loses at most the
shard at work.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import pickle
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from carryover_ext.files import replacing, write_atomic
from carryover_ext.pretrained import encode_chat
from carryover_ext.report import ALL


@dataclass
class Recording:
    """One answer of the target. ``finish`` is "stop" or "length"."""

    category: str
    source: str
    prompt_ids: list[int]
    response_ids: list[int]
    finish: str

    @property
    def ids(self) -> list[int]:
        return self.prompt_ids + self.response_ids


@dataclass
class PromptIds:
    """A prompt after the chat template."""

    category: str
    source: str
    ids: list[int]


# A backend turns prompt ids into (response ids, finish reason), in order. Its second argument is the place
# of the first prompt in the whole recording: what it draws depends on the place, not on where a killed run
# went on.
Backend = Callable[[Sequence[list[int]], int], list[tuple[list[int], str]]]


def shard_path(folder: Path, index: int) -> Path:
    return folder / f"shard-{index:05d}.jsonl"


def save_atomic(path: Path, content: Any) -> None:
    """``torch.save`` under a temporary name, then a rename: a kill leaves the old file or the new one."""
    with replacing(path) as temporary:
        torch.save(content, temporary)


def load_saved(path: Path, **options: Any) -> Any:
    """``torch.load`` of what :func:`save_atomic` wrote; ValueError when the file is damaged."""
    try:
        return torch.load(path, weights_only=True, **options)
    except (RuntimeError, EOFError, pickle.UnpicklingError, ValueError) as e:
        reason = str(e).split("\n")[0]
        raise ValueError(f"{path}: corrupt or incomplete ({reason}); delete it to begin it anew") from e


def load_prompts(
    paths: Iterable[Path], tokenizer: Any, *, max_prompt_tokens: int, limit: int | None = None
) -> list[PromptIds]:
    """Reads ``{"category", "source", "prompt"}`` or Spec-Bench ``{"category", "turns"}`` lines.

    Prompts longer than ``max_prompt_tokens`` after the chat template are left out; ``limit`` is a number
    per file.
    Categories are interleaved, so that any leading part of a recording is a fair sample.
    """
    by_file: list[list[PromptIds]] = []
    for path in paths:
        found: list[PromptIds] = []
        with open(path, encoding="utf-8") as f:
            for number, line in enumerate(f, 1):
                if limit is not None and len(found) >= limit:
                    break
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                    text = row["prompt"] if "prompt" in row else row["turns"][0]
                    if not isinstance(text, str) or isinstance(row.get("turns"), str):
                        raise TypeError("'prompt' must be a text, 'turns' a list of texts")
                    if row.get("category") == ALL:
                        raise ValueError(f"category {ALL!r} is the name of the average; take another")
                except (ValueError, KeyError, IndexError, TypeError, AttributeError) as e:
                    raise ValueError(
                        f"{path}: line {number} is not a prompt ({e}); expected a 'prompt' or 'turns'"
                    ) from e
                if len(text) > 8 * max_prompt_tokens:
                    continue
                ids = encode_chat(tokenizer, [{"role": "user", "content": text}])
                if len(ids) <= max_prompt_tokens:
                    found.append(PromptIds(row.get("category", path.stem), row.get("source", ""), ids))
        by_file.append(found)
    order = [(i / len(f), n, i) for n, f in enumerate(by_file) for i in range(len(f))]
    return [by_file[n][i] for _, n, i in sorted(order)]


def record(
    prompts: Sequence[PromptIds],
    backend: Backend,
    out: Path,
    *,
    settings: dict[str, Any],
    shard_size: int = 256,
    progress: Callable[[int, int, int], None] | None = None,
    keep: Callable[[str], None] | None = None,
) -> None:
    """Records answers to ``prompts`` into ``out``; complete shards of an earlier run are kept.

    Args:
        settings: what decides the answers (target, temperature, max_new_tokens, seed); stored in the
        manifest.
        progress: called with (prompts done, prompts in all, response tokens of this run).
        keep: called with the name (without suffix) of a shard that is about to be written, to save what else
        the backend has of it.

    Raises:
        ValueError: ``out`` holds recordings made with other settings or other prompts.
    """
    if shard_size < 1:
        raise ValueError(f"shard_size={shard_size}: must be at least 1")
    digest = hashlib.sha256(json.dumps([p.ids for p in prompts]).encode()).hexdigest()
    manifest = {**settings, "prompts": len(prompts), "prompts_sha256": digest, "shard_size": shard_size}
    out.mkdir(parents=True, exist_ok=True)
    path = out / "manifest.json"
    if path.exists():
        old = recorded_settings(out)
        changed = {k: (old.get(k), v) for k, v in manifest.items() if old.get(k) != v}
        if changed:
            raise ValueError(
                f"out: {out} was recorded with other settings {changed}; use the same ones or a new folder"
            )
    else:
        write_atomic(path, json.dumps(manifest, indent=1) + "\n")
    tokens = 0
    for start in range(0, len(prompts), shard_size):
        part = prompts[start : start + shard_size]
        file = shard_path(out, start // shard_size)
        if not file.exists():
            answers = backend([p.ids for p in part], start)
            rows = [
                Recording(p.category, p.source, p.ids, r, f) for p, (r, f) in zip(part, answers, strict=True)
            ]
            tokens += sum(len(r.response_ids) for r in rows)
            if keep:
                keep(file.stem)
            write_atomic(file, "".join(json.dumps(asdict(r)) + "\n" for r in rows))
        if progress:
            progress(start + len(part), len(prompts), tokens)


def read_object(path: Path, remedy: str) -> dict[str, Any]:
    """The JSON object of a file; ValueError with the ``remedy`` when it is damaged."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as e:
        raise ValueError(f"{path}: damaged ({e}); {remedy}") from e


def recorded_settings(folder: Path) -> dict[str, Any]:
    """The manifest of a recording; empty where there is none.

    Raises:
        ValueError: it is damaged.
    """
    path = folder / "manifest.json"
    if not path.exists():
        return {}
    return read_object(path, "restore it, or record into a new folder")


def load_shard(path: Path) -> list[Recording]:
    with open(path, encoding="utf-8") as f:
        return [Recording(**json.loads(line)) for line in f]


def is_held_out(number: int) -> bool:
    """Whether the recording ``number`` of a folder is never trained on; `evaluate` replays exactly those."""
    return number % 32 == 0


def prompts(folder: Path, *, held_out: bool) -> set[tuple[int, ...]]:
    """Token ids of the prompts of a recording that are held out (every 32nd), or of all others."""
    rows = itertools.chain.from_iterable(map(load_shard, shards(folder)))
    return {tuple(row.prompt_ids) for number, row in enumerate(rows) if is_held_out(number) == held_out}


def shards(folder: Path) -> list[Path]:
    """Complete shards of a folder, in order.

    Raises:
        FileNotFoundError: no shard there.
    """
    found = sorted(folder.glob("shard-*.jsonl"))
    if not found:
        raise FileNotFoundError(
            f"recordings: no shard-*.jsonl in {folder}; make some with `carryover record`"
        )
    return found
