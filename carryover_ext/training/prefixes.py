"""Cache on disk of the target's K/V of recordings, against which drafted blocks are verified.

A recording is verified against many times, its K/V are always the same. They are large (SmolLM2-135M: 21.5 KB
a token, Qwen2.5-Coder-0.5B: 11 KB) and take one read of some MB a batch instead of a forward pass over the
prefixes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from carryover_ext.training.features import all_ids, build_cache, fingerprint, length_batches
from carryover_ext.training.recordings import Recording, load_saved
from carryover_ext.training.target_pass import Prefix, TargetPass


@torch.inference_mode()
def _extract(target: TargetPass, rows: list[Recording], batch_tokens: int) -> dict[str, Tensor]:
    """The file of a shard, see :func:`shard_prefixes`."""
    kv: list[Tensor] = [torch.empty(0)] * len(rows)
    for picked, ids in length_batches(rows, batch_tokens):
        prefix = target.prefix_kv(ids.to(target.device))
        both = torch.stack([torch.stack(prefix.keys, 2), torch.stack(prefix.values, 2)], 3)
        for j, i in enumerate(picked):
            kv[i] = both[j, : len(rows[i].ids)].cpu()
    return shard_prefixes([r.ids for r in rows], kv)


def shard_prefixes(ids: Sequence[list[int]], kv: list[Tensor]) -> dict[str, Tensor]:
    """The file of a shard: ``offsets [R+1]``, ``kv [tokens, layers, 2, nkv, d]`` (one piece of memory a
    recording) and ``ids [tokens]``, of the K/V of each recording."""
    return {
        "offsets": torch.tensor([0, *map(len, ids)]).cumsum(0),
        "kv": torch.cat(kv),
        "ids": all_ids(ids),
    }


def prefixes_folder(features: Path) -> Path:
    """Where the prefixes of a recording lie, beside its features."""
    return features.with_name(features.name + "-prefixes")


def prefixes_meta(tap_ids: Sequence[int], embed: Tensor, head: Tensor) -> dict[str, Any]:
    """What decides the content of a folder of prefixes."""
    return {"layers": max(tap_ids) + 1, "target": fingerprint(embed, head)}


def build_prefixes(
    recordings: Path,
    out: Path,
    target: TargetPass,
    *,
    batch_tokens: int = 4096,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Computes the K/V of every shard that has none yet (a killed run continues with the next shard).

    Raises:
        ValueError: ``out`` was made with another target or another last tap, or is damaged.
    """
    meta = prefixes_meta(target.tap_ids, target.embed, target.head)
    build_cache(
        "prefixes", recordings, out, meta, lambda rows: _extract(target, rows, batch_tokens), progress
    )


class PrefixStore:
    """K/V of recordings by shard and number in it (memory-mapped)."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._maps: dict[str, dict[str, Tensor]] = {}

    def __call__(self, shard: str, number: int, ids: list[int]) -> Tensor:
        """``[T, layers, 2, nkv, d]`` of recording ``number``, with these T ``ids``, of a shard (its stem).

        Raises:
            ValueError: the file was made from other recordings.
        """
        if shard not in self._maps:
            self._maps[shard] = load_saved(self._folder / f"{shard}.pt", mmap=True)
        data = self._maps[shard]
        start, end = data["offsets"][number : number + 2].tolist()
        if data["ids"][start:end].tolist() != ids:
            raise ValueError(
                f"prefixes: {self._folder / shard}.pt was made from other recordings; "
                f"delete {self._folder} to have it made again"
            )
        return data["kv"][start:end]


def stack_prefixes(parts: Sequence[Tensor], width: int, like: Tensor) -> Prefix:
    """K/V of sequences ``[T_i, layers, 2, nkv, d]`` side by side, padded on the right to ``width``; dtype and
    device are those of ``like``."""
    layers = parts[0].shape[1]
    kv = torch.zeros(layers, 2, len(parts), width, *parts[0].shape[3:], dtype=parts[0].dtype)
    for i, part in enumerate(parts):
        kv[:, :, i, : len(part)] = part.permute(1, 2, 0, 3, 4)
    kv = kv.to(like.device, like.dtype)
    return Prefix([kv[layer, 0] for layer in range(layers)], [kv[layer, 1] for layer in range(layers)])
