"""Cache on disk of what the frozen target says about recordings: tapped rows and top-k next-token
probabilities.

The drafter is trained over the same prefixes many times; the target's forward over a prefix is a thousand
times the cost of reading it back (SmolLM2-135M: 0.27 GFLOP against 5.8 KB a token). One file for each
recording shard, memory-mapped.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import mmap
import sys
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from carryover_ext.files import write_atomic
from carryover_ext.training.recordings import (
    Recording,
    load_saved,
    load_shard,
    read_object,
    save_atomic,
    shards,
)
from carryover_ext.training.target_pass import TargetPass


@dataclass
class Sequence:
    """One recording with its features.

    ids ``[T]`` int64, prompt_len, features ``[T, F]``; top_ids / top_probs ``[T, k]``: the target's k
    most probable next tokens after each position, next_probs ``[T]``: the probability of the recorded next
    token (all zero before the last prompt row; next_probs NaN in files of the first versions).
    """

    category: str
    ids: Tensor
    prompt_len: int
    features: Tensor
    top_ids: Tensor
    top_probs: Tensor
    next_probs: Tensor


def length_batches(rows: list[Recording], batch_tokens: int) -> Iterator[tuple[list[int], Tensor]]:
    """Batches of recordings of similar length: their numbers and ids ``[n, longest]`` padded on the right, of
    at most ``batch_tokens`` (or one recording)."""
    lengths = [len(r.ids) for r in rows]
    order = sorted(range(len(rows)), key=lengths.__getitem__)
    while order:
        n = 1
        while n < len(order) and (n + 1) * lengths[order[n]] <= batch_tokens:
            n += 1
        picked, order = order[:n], order[n:]
        ids = torch.zeros(n, lengths[picked[-1]], dtype=torch.int64)
        for j, i in enumerate(picked):
            ids[j, : lengths[i]] = torch.tensor(rows[i].ids)
        yield picked, ids


def read_ahead(rows: Tensor) -> None:
    """Asks the system to bring memory-mapped ``rows`` (contiguous) in from disk, without waiting for them.

    Their pages one by one, as they are touched, took ten times as long on a slow disk (10 against 108 MB/s).
    """
    if sys.platform != "linux" or rows.numel() == 0:
        return
    start = rows.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    length = rows.data_ptr() + rows.nbytes - start
    # only advice: an error changes nothing
    ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), mmap.MADV_WILLNEED)


def top_tokens(logits: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of ``logits [M, V]``: ids and probabilities of the k most probable tokens ``[M, k]``, and the logarithm
    of the sum of all exponentials ``[M, 1]``, float32."""
    logits = logits.float()
    best, ids = logits.topk(k, -1)
    norm = logits.logsumexp(-1, keepdim=True)
    return ids, (best - norm).exp(), norm


class ShardFeatures:
    """The tensors of a shard's file, filled recording by recording: ``offsets [R+1]``, ``taps [tokens, F]``,
    ``top_ids`` and ``top_probs [tokens, k]``, ``next_probs`` and ``ids [tokens]``."""

    def __init__(self, ids: SequenceOf[list[int]], width: int, dtype: torch.dtype, top_k: int) -> None:
        offsets = torch.tensor([0, *map(len, ids)]).cumsum(0)
        total = int(offsets[-1])
        self.tensors = {
            "offsets": offsets,
            "taps": torch.empty(total, width, dtype=dtype),
            "top_ids": torch.zeros(total, top_k, dtype=torch.int32),
            "top_probs": torch.zeros(total, top_k),
            "next_probs": torch.zeros(total),
            "ids": all_ids(ids),
        }

    def put(self, number: int, taps: Tensor, top_ids: Tensor, top_probs: Tensor, next_probs: Tensor) -> None:
        """A recording: ``taps`` of all its rows, the others from the prompt's last row on."""
        start, end = self.tensors["offsets"][number : number + 2].tolist()
        self.tensors["taps"][start:end] = taps.cpu()
        for name, value in (("top_ids", top_ids), ("top_probs", top_probs), ("next_probs", next_probs)):
            self.tensors[name][end - len(value) : end] = value.cpu()


@torch.inference_mode()
def _extract(target: TargetPass, rows: list[Recording], top_k: int, batch_tokens: int) -> dict[str, Tensor]:
    width = target.head.shape[1] * len(target.tap_ids)
    shard = ShardFeatures([r.ids for r in rows], width, target.head.dtype, top_k)
    for picked, ids in length_batches(rows, batch_tokens):
        features, hidden = target.features(ids.to(target.device))
        for j, i in enumerate(picked):
            first, length = len(rows[i].prompt_ids) - 1, len(rows[i].ids)
            logits = torch.mm(hidden[j, first:length], target.head.t()).float()
            best_ids, best_probs, norm = top_tokens(logits, top_k)
            chosen = ids[j, first + 1 : length, None].to(logits.device)
            following = (logits[:-1].gather(1, chosen) - norm[:-1])[:, 0].exp()
            shard.put(i, features[j, :length], best_ids, best_probs, F.pad(following, (0, 1)))
    return shard.tensors


def all_ids(ids: SequenceOf[list[int]]) -> Tensor:
    """Those of all recordings in one row, as the files hold them."""
    return torch.tensor([i for one in ids for i in one], dtype=torch.int32)


def _check_recordings(data: dict[str, Tensor], rows: list[Recording], file: Path, shard: Path) -> None:
    """ValueError when ``data`` was made from other recordings: its rows would be those of other tokens."""
    same = data["offsets"].diff().tolist() == [len(r.ids) for r in rows]
    if same and "ids" in data:  # files of the first versions hold the lengths alone
        same = torch.equal(data["ids"], all_ids([r.ids for r in rows]))
    if not same:
        raise ValueError(
            f"features: {file} was made from other recordings than {shard}; "
            f"delete the folder {file.parent} (and {file.parent.name}-prefixes, if there) to have it made "
            "again, or name another with --features"
        )


def fingerprint(embed: Tensor, head: Tensor) -> str:
    """Tells targets apart that have the same shapes, by the first rows of their embedding and head."""
    rows = [weight.detach()[:64].float().cpu().contiguous() for weight in (embed, head)]
    return hashlib.sha256(b"".join(x.numpy().tobytes() for x in rows)).hexdigest()[:16]


def features_meta(tap_ids: list[int], top_k: int, embed: Tensor, head: Tensor) -> dict[str, Any]:
    """What decides the content of a folder of features."""
    return {"tap_ids": tap_ids, "top_k": top_k, "target": fingerprint(embed, head)}


def build_features(
    recordings: Path,
    out: Path,
    target: TargetPass,
    *,
    top_k: int = 8,
    batch_tokens: int = 4096,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Computes the features of every shard that has none yet (a killed run continues with the next shard).

    Raises:
        ValueError: ``out`` was made with another target, other taps or another k, or is damaged.
    """
    meta = features_meta(target.tap_ids, top_k, target.embed, target.head)
    build_cache(
        "features",
        recordings,
        out,
        meta,
        lambda rows: _extract(target, rows, top_k, batch_tokens),
        progress,
        assumed={"target": meta["target"]},  # folders of the first versions do not name theirs
    )


def build_cache(
    name: str,
    recordings: Path,
    out: Path,
    meta: dict[str, Any],
    extract: Callable[[list[Recording]], dict[str, Tensor]],
    progress: Callable[[int, int], None] | None,
    assumed: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Writes what ``extract`` makes of each shard that has no file in ``out`` yet. ``NAME.json`` there holds
    ``meta``, what decides the content; entries that are missing there are taken from ``assumed``.

    Raises:
        ValueError: ``out`` was made with another ``meta``, or is damaged.
    """
    files = shards(recordings)
    claim_cache(name, out, meta, assumed)
    for done, shard in enumerate(files, 1):
        file = out / (shard.stem + ".pt")
        if not file.exists():
            save_atomic(file, extract(load_shard(shard)))
        if progress:
            progress(done, len(files))


def claim_cache(
    name: str, out: Path, meta: dict[str, Any], assumed: Mapping[str, Any] = MappingProxyType({})
) -> None:
    """Makes the folder ``out`` with its ``NAME.json``, or checks that it was made with the same ``meta``; see
    :func:`build_cache`."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{name}.json"
    if not path.exists():
        write_atomic(path, json.dumps(meta) + "\n")
        return
    old = read_object(path, "delete the folder to have it made again")
    if {**assumed, **old} != meta:
        raise ValueError(f"out: {out} holds {name} made with {json.dumps(old)}, not {meta}; use a new folder")


class FeatureStore:
    """Random access to recordings with features (memory-mapped); ``keep`` selects by number of the
    recording and the recording, ``temperature`` is what they were drawn with, ``prefixes`` gives the
    target's K/V where those are kept, too."""

    def __init__(
        self,
        recordings: Path,
        features: Path,
        *,
        keep: Callable[[int, Recording], bool] | None = None,
        temperature: float = 0.0,
        prefixes: Callable[[str, int, list[int]], Tensor] | None = None,
    ) -> None:
        self._temperature, self._prefixes = temperature, prefixes
        self._stems: list[str] = []
        self._maps: list[dict[str, Tensor]] = []
        self._rows: list[tuple[int, int, Recording]] = []
        seen = 0
        for shard in shards(recordings):
            file = features / (shard.stem + ".pt")
            if not file.exists():
                break  # features are made in the order of the shards
            self._maps.append(load_saved(file, mmap=True))
            self._stems.append(shard.stem)
            rows = load_shard(shard)
            _check_recordings(self._maps[-1], rows, file, shard)
            for i, row in enumerate(rows):
                if len(row.response_ids) >= 4 and (keep is None or keep(seen + i, row)):
                    self._rows.append((len(self._maps) - 1, i, row))
            seen += i + 1
        if not self._rows:
            raise FileNotFoundError(
                f"features: no recording in {recordings} to use here (an answer of 4 tokens or more; every "
                "32nd is held out for `carryover evaluate`, also in the other folders); record more prompts"
            )

    def __len__(self) -> int:
        return len(self._rows)

    def recording(self, index: int) -> Recording:
        return self._rows[index][2]

    @property
    def sizes(self) -> list[int]:
        """Recordings of each store that this one joins."""
        return [len(self)]

    def temperature(self, index: int) -> float:
        """What the answer ``index`` was drawn with."""
        return self._temperature

    def prefix(self, index: int) -> Tensor | None:
        """The target's K/V of a recording (:mod:`carryover_ext.training.prefixes`); None where they are not
        kept."""
        shard, i, row = self._rows[index]
        return self._prefixes(self._stems[shard], i, row.ids) if self._prefixes else None

    def read_ahead(self, index: int) -> None:
        """Begins to read what :meth:`__getitem__` and :meth:`prefix` will give."""
        shard, i, _ = self._rows[index]
        data = self._maps[shard]
        read_ahead(data["taps"][int(data["offsets"][i]) : int(data["offsets"][i + 1])])
        prefix = self.prefix(index)
        if prefix is not None:
            read_ahead(prefix)

    def __getitem__(self, index: int) -> Sequence:
        shard, i, row = self._rows[index]
        data = self._maps[shard]
        a, b = int(data["offsets"][i]), int(data["offsets"][i + 1])
        return Sequence(
            row.category,
            torch.tensor(row.ids),
            len(row.prompt_ids),
            data["taps"][a:b],
            data["top_ids"][a:b],
            data["top_probs"][a:b],
            data["next_probs"][a:b] if "next_probs" in data else torch.full((b - a,), float("nan")),
        )


class JoinedStore(FeatureStore):
    """Several stores as one, for example answers at temperature 0 and at temperature 1."""

    def __init__(self, stores: SequenceOf[FeatureStore]) -> None:
        self._stores = stores
        self._places = [(store, i) for store in stores for i in range(len(store))]

    def __len__(self) -> int:
        return len(self._places)

    def recording(self, index: int) -> Recording:
        store, i = self._places[index]
        return store.recording(i)

    @property
    def sizes(self) -> list[int]:
        return [len(store) for store in self._stores]

    def temperature(self, index: int) -> float:
        store, i = self._places[index]
        return store.temperature(i)

    def prefix(self, index: int) -> Tensor | None:
        store, i = self._places[index]
        return store.prefix(i)

    def read_ahead(self, index: int) -> None:
        store, i = self._places[index]
        store.read_ahead(i)

    def __getitem__(self, index: int) -> Sequence:
        store, i = self._places[index]
        return store[i]
