"""Checkpoints that are a small update of another one: each changed matrix ``W`` is ``W_base + B A`` with thin
``A [r, in]`` and ``B [out, r]`` (LoRA, arXiv 2106.09685), in PEFT's files and names.

The drafters of a target share most of what they know, so that all of them are little larger than one.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
LORA_A, LORA_B = ".lora_A.weight", ".lora_B.weight"
# [V, r] and [Vd, r]; in the compact form both have the rows of the draft vocabulary
MARKOV_W1, MARKOV_W2 = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"
HEADS = ("markov_head.", "confidence_head.")


def is_adapter(folder: Path) -> bool:
    """Whether the folder holds an update instead of whole weights."""
    return (folder / CONFIG).is_file()


def base_folder(folder: Path) -> Path:
    """The checkpoint that the update in ``folder`` belongs to.

    Raises:
        ValueError: ``adapter_config.json`` names none, or one that is an update itself; FileNotFoundError: it
            is not there.
    """
    try:
        name = json.loads((folder / CONFIG).read_text(encoding="utf-8"))["base_model_name_or_path"]
        base = folder / name
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder / CONFIG}: no base_model_name_or_path in it ({error})") from error
    if not base.is_dir():
        raise FileNotFoundError(
            f"{folder / CONFIG}: base_model_name_or_path={name!r} is not there (looked for "
            f"{os.path.normpath(base)}); the two folders belong together"
        )
    if is_adapter(base):
        raise ValueError(
            f"{folder / CONFIG}: base_model_name_or_path={name!r} is an update itself; the base must hold "
            "whole weights"
        )
    return base


def widen(rows: Tensor, ids: Tensor, vocab_size: int) -> Tensor:
    """Rows of the tokens ``ids`` among zero rows of all tokens; other ``rows`` are returned as they are."""
    if rows.shape[0] != ids.numel() or ids.numel() == vocab_size:
        return rows
    return rows.new_zeros(vocab_size, *rows.shape[1:]).index_copy_(0, ids, rows)


def digest(tensors: dict[str, Tensor]) -> str:
    """SHA-256 of names, dtypes, shapes and numbers, which says whether a base is the one that an update was
    made for."""
    whole = hashlib.sha256()
    for name, value in sorted(tensors.items()):
        whole.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        whole.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return whole.hexdigest()


def _read_settings(path: Path) -> tuple[float, set[str], str | None]:
    """Factor on the updates, names of the base's tensors that are left out, and the base's digest (None: not
    written).

    Raises:
        ValueError: something that is not read here would change the numbers, or is no number.
    """
    settings = json.loads(path.read_text(encoding="utf-8"))
    if settings.get("peft_type", "LORA") != "LORA":
        raise ValueError(f"{path}: peft_type={settings['peft_type']!r}: only LORA is read")
    for key in ("use_rslora", "use_dora", "fan_in_fan_out", "alpha_pattern", "rank_pattern"):
        if settings.get(key):
            raise ValueError(f"{path}: {key}={settings[key]!r}: is not read here, and must be left out")
    rank, alpha = settings.get("r", 1), settings.get("lora_alpha", 1)
    if type(rank) is not int or rank < 1 or type(alpha) not in (int, float):
        raise ValueError(f"{path}: r={rank!r}, lora_alpha={alpha!r}: must be a positive integer and a number")
    dropped = settings.get("tensors_dropped", [])
    if not isinstance(dropped, list):
        raise ValueError(f"{path}: tensors_dropped={dropped!r}: must be a list of names")
    return alpha / rank, set(dropped), settings.get("base_digest")


def merge(folder: Path, base: dict[str, Tensor], update: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of the checkpoint ``folder``: those of ``base``, without what its config drops, with the
    update. Sums are made in float32 and kept in the base's dtype.

    Raises:
        ValueError: another base than the update was made for, an update of a tensor that it does not have, or
            of another shape.
    """
    scale, dropped, made_for = _read_settings(folder / CONFIG)
    if made_for is not None and digest(base) != made_for:
        raise ValueError(
            f"{folder / CONFIG}: base_model_name_or_path holds other weights than those that the update was "
            "made for (base_digest); put these back, or export the update anew"
        )
    merged = {name: value for name, value in base.items() if name not in dropped}
    named = {name.removeprefix(PREFIX): value for name, value in update.items()}
    for name, a in named.items():
        if name.endswith(LORA_B):
            if name.removesuffix(LORA_B) + LORA_A not in named:
                raise ValueError(f"{folder / WEIGHTS}: {name} has no {LORA_A.strip('.')} beside it")
            continue
        if not name.endswith(LORA_A):
            old = merged.get(name)
            if name == MARKOV_W1 and old is not None and "d2t" in merged and a.shape[0] < old.shape[0]:
                a = old.index_copy(0, merged["d2t"], a.to(old.dtype))  # rows of the draft vocabulary
            merged[name] = a
            continue
        matrix = name.removesuffix(LORA_A) + ".weight"
        b = named.get(name.removesuffix(LORA_A) + LORA_B)
        old = merged.get(matrix)
        if b is not None and old is not None and matrix == MARKOV_W1 and "d2t" in merged:
            b = widen(b, merged["d2t"], old.shape[0])
        if old is None or b is None or old.shape != (b.shape[0], a.shape[1]) or b.shape[1] != a.shape[0]:
            found = None if b is None else tuple(b.shape)
            raise ValueError(
                f"{folder / WEIGHTS}: {name} {tuple(a.shape)} with B {found} does not fit {matrix} of the "
                f"base, {None if old is None else tuple(old.shape)}"
            )
        merged[matrix] = (old.float() + scale * (b.float() @ a.float())).to(old.dtype)
    return merged


def factor(
    base: dict[str, Tensor], tensors: dict[str, Tensor], rank: int
) -> tuple[dict[str, Tensor], dict[str, Any], float]:
    """``tensors`` as an update of ``base``: for each matrix that differs the best one of that rank (Eckart
    and Young), by singular values; all else that differs is kept whole. Of a Markov head the rows of the
    reduced draft vocabulary alone are looked at.

    Returns:
        the update's tensors in PEFT's names, its config without the base's name, and the share of the
        differences' squared norm that the update keeps, of the matrix that loses most (1.0: nothing is lost).
    """
    update: dict[str, Tensor] = {}
    kept, modules, whole = 1.0, [], []
    for name, value in tensors.items():
        old = base.get(name)
        if name == MARKOV_W1 and old is not None and "d2t" in tensors:
            value, old = value[tensors["d2t"]], old[tensors["d2t"]]
        if old is not None and old.shape == value.shape and torch.equal(old, value):
            continue
        module = name.removesuffix(".weight")
        thin = rank * sum(value.shape) < value.numel() and value.dim() == 2 and module != name
        if old is None or old.shape != value.shape or not thin:
            update[PREFIX + name] = value
            whole.append(module)
            continue
        u, s, v = torch.linalg.svd(value.float() - old.float(), full_matrices=False)
        root = s[:rank].sqrt()
        update[PREFIX + module + LORA_A] = (root[:, None] * v[:rank]).to(value.dtype)
        update[PREFIX + module + LORA_B] = (u[:, :rank] * root).to(value.dtype)
        kept = min(kept, float(s[:rank].square().sum() / s.square().sum()))
        modules.append(module)
    settings = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": sorted(modules),
        "modules_to_save": sorted(whole),
        "tensors_dropped": sorted(set(base) - set(tensors)),
    }
    return update, settings, kept
