"""Reading, writing and checking the tensors of a drafter, with errors that name the file and the value."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..config import DrafterConfig
from . import adapter
from .adapter import MARKOV_W1, widen

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
MASK_FILE = "mask_embedding.pt"  # where vLLM looks for a learned mask embedding
EMBED, HEAD = "embed_tokens.weight", "lm_head.weight"  # [V, H] and [Vd, H], where the target's do not fit


def _load(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise FileNotFoundError(
            f"directory={str(path.parent)!r}: no {path.name} in it; a drafter folder holds config.json "
            f"and {path.name}"
        )
    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise ValueError(f"{path}: corrupt or incomplete ({error}); fetch the file again") from error


def read_tensors(directory: str | Path) -> dict[str, Tensor]:
    """All tensors of ``model.safetensors``, or of the shards that ``model.safetensors.index.json`` lists; see
    :func:`reduced_vocabulary` for ``d2t``. ``mask_embedding`` may lie in a file of its own, as vLLM wants it.
    A folder with an ``adapter_config.json`` holds an update of another checkpoint
    (:mod:`carryover_ext.drafters.adapter`); what the two make together is returned.
    """
    folder = Path(directory)
    if adapter.is_adapter(folder):
        base = read_tensors(adapter.base_folder(folder))
        return adapter.merge(folder, base, _load(folder / adapter.WEIGHTS))
    names = [WEIGHTS]
    if not (folder / WEIGHTS).is_file() and (folder / INDEX).is_file():
        try:
            names = sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{folder / INDEX}: no weight_map in it ({error}); fetch the file again"
            ) from error
    tensors: dict[str, Tensor] = {}
    for name in names:
        tensors.update(_load(folder / name))
    if "mask_embedding" not in tensors and (folder / MASK_FILE).is_file():
        try:
            tensors["mask_embedding"] = torch.load(folder / MASK_FILE, weights_only=True)["embedding"]
        except (RuntimeError, EOFError, pickle.UnpicklingError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{folder / MASK_FILE}: corrupt or incomplete; fetch the file again") from error
    mask = tensors.pop("t2d", None)
    if mask is not None and "d2t" in tensors:
        tensors["d2t"] = tensors["d2t"] + torch.arange(tensors["d2t"].numel())
        if not torch.equal(tensors["d2t"], mask.nonzero()[:, 0]):
            raise ValueError(f"directory={str(folder)!r}: d2t and t2d list different tokens; fetch it again")
        if MARKOV_W1 in tensors:
            tensors[MARKOV_W1] = widen(tensors[MARKOV_W1], tensors["d2t"], mask.numel())
    return tensors


def reduced_vocabulary(ids: Tensor, vocab_size: int, head: Tensor | None) -> dict[str, Tensor]:
    """Tensors of a reduced draft vocabulary in the form of EAGLE-3, which vLLM reads for DSpark: ``d2t [Vd]``
    holds target id minus row, ``t2d [V]`` marks the tokens, and ``lm_head.weight [Vd, H]`` repeats their rows
    of the target's head. Without a ``t2d`` beside it, ``d2t`` holds target ids.
    """
    mask = torch.zeros(vocab_size, dtype=torch.bool, device=ids.device)
    mask[ids] = True
    tensors = {"d2t": ids - torch.arange(ids.numel(), device=ids.device), "t2d": mask}
    return tensors if head is None else tensors | {HEAD: head}


def write_tensors(directory: str | Path, tensors: dict[str, Tensor], file: str = WEIGHTS) -> None:
    """Write ``model.safetensors`` (or ``file``) whole or not at all."""
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".{file}.{os.getpid()}"
    save_file(
        {k: v.detach().cpu().contiguous() for k, v in tensors.items()}, temporary, metadata={"format": "pt"}
    )
    umask = os.umask(0)
    os.umask(umask)
    temporary.chmod(0o666 & ~umask)  # safetensors lets nobody but the owner read what it writes
    os.replace(temporary, folder / file)


def check_tensors(tensors: dict[str, Tensor], expected: dict[str, Tensor], directory: str | Path) -> None:
    """ValueError unless ``tensors`` has the names and shapes that the config asks for.

    Copies of the target's embedding and head, which some exports carry, are taken out of ``tensors``.
    """
    for name in {EMBED, HEAD} - set(expected):
        tensors.pop(name, None)
    missing, unexpected = sorted(set(expected) - set(tensors)), sorted(set(tensors) - set(expected))
    if missing or unexpected:
        raise ValueError(
            f"directory={str(directory)!r}: the weights do not fit config.json; "
            f"missing {missing[:8] or 'none'}, unexpected {unexpected[:8] or 'none'}"
        )
    for name, value in tensors.items():
        if value.shape != expected[name].shape:
            raise ValueError(
                f"directory={str(directory)!r}: tensor {name} is {tuple(value.shape)}, "
                f"config.json says {tuple(expected[name].shape)}"
            )


def check_draft_vocabulary(ids: Tensor | None, vocab_size: int) -> None:
    """ValueError unless ``ids`` (None: all tokens) are int64 target ids in strictly rising order."""
    if ids is None:
        return
    rising = ids.dtype == torch.int64 and not bool((ids[1:] <= ids[:-1]).any())
    if not rising or int(ids[0]) < 0 or int(ids[-1]) >= vocab_size:
        raise ValueError(
            f"d2t ({ids.dtype}, first {ids[:4].tolist()}, last {ids[-1:].tolist()}): must be int64 target "
            f"token ids, strictly increasing, below vocab_size={vocab_size}"
        )


def check_target(
    config: DrafterConfig,
    embed: Tensor,
    head: Tensor,
    num_layers: int | None,
    hidden_size: int | None,
    tap_ids: list[int] | tuple[int, ...] | None,
) -> None:
    """ValueError when the target is not the one that the drafter was made for; None is not checked."""
    for name, weight in (("embed_tokens_weight", embed), ("lm_head_weight", head)):
        if weight.dim() != 2 or weight.shape[1] != config.target_hidden_size:
            raise ValueError(
                f"{name} is {tuple(weight.shape)}: the drafter has target_hidden_size="
                f"{config.target_hidden_size}, so it belongs to another target"
            )
        if weight.shape[0] != config.vocab_size:
            raise ValueError(
                f"{name} has {weight.shape[0]} rows: the drafter has vocab_size={config.vocab_size}, "
                "another vocabulary"
            )
    made_for = f"num_target_layers={config.num_target_layers}"
    if num_layers is not None and num_layers != config.num_target_layers:
        raise ValueError(f"num_layers={num_layers}: the drafter was made for a target of {made_for}")
    if hidden_size is not None and hidden_size != config.target_hidden_size:
        made_for = f"target_hidden_size={config.target_hidden_size}"
        raise ValueError(f"hidden_size={hidden_size}: the drafter was made for {made_for}")
    if tap_ids is not None and list(tap_ids) != config.target_layer_ids:
        trained = f"{config.target_layer_ids}, in this order"
        raise ValueError(f"tap_ids={list(tap_ids)}: the drafter was trained on taps {trained}")
