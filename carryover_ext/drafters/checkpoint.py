"""Reading and writing the safetensors of a drafter folder, with errors that name the file."""

from __future__ import annotations

import json
import os
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


def read_tensors(directory: str | Path) -> dict[str, Tensor]:
    """All tensors of ``model.safetensors``, or of the shards that ``model.safetensors.index.json`` lists."""
    folder = Path(directory)
    names = [WEIGHTS]
    if not (folder / WEIGHTS).is_file() and (folder / INDEX).is_file():
        names = sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
    tensors: dict[str, Tensor] = {}
    for name in names:
        path = folder / name
        if not path.is_file():
            raise FileNotFoundError(
                f"directory={str(folder)!r}: no {name} in it; a drafter folder holds config.json and {WEIGHTS}"
            )
        try:
            tensors.update(load_file(path))
        except (SafetensorError, OSError, ValueError) as error:
            raise ValueError(f"{path}: corrupt or incomplete ({error}); fetch the file again") from error
    return tensors


def write_tensors(directory: str | Path, tensors: dict[str, Tensor]) -> None:
    """Write ``model.safetensors`` whole or not at all."""
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".{WEIGHTS}.{os.getpid()}"
    save_file(
        {k: v.detach().cpu().contiguous() for k, v in tensors.items()}, temporary, metadata={"format": "pt"}
    )
    os.replace(temporary, folder / WEIGHTS)
