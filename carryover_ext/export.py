"""Checkpoints in the layouts that other programs read: vLLM with this package's plugin, the speculators
library, and z-lab's and DeepSpec's own code; and the smallest form for this package.

The differences that matter: names of the architectures; whether a reduced draft vocabulary is there, and as
what (``d2t`` as target ids or as distances to the row, with the head's rows beside it); how taps are counted;
where a learned mask embedding lives; and whether the reader knows the carryover embedding.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .config import DSPARK, CarryoverConfig, DrafterConfig
from .drafters import adapter, check_checkpoint
from .drafters.adapter import MARKOV_W1
from .drafters.checkpoint import (
    EMBED,
    HEAD,
    MASK_FILE,
    WEIGHTS,
    check_draft_vocabulary,
    check_target,
    read_tensors,
    reduced_vocabulary,
    write_tensors,
)
from .integrations.vllm import DFLASH_ARCHITECTURE, DSPARK_ARCHITECTURE

EMBEDDING = "carryover_embedding"
FORMATS = ("vllm", "speculators", "zlab", "compact", "adapter")
WRITTEN = frozenset(  # architectures of what this module writes, which it may write again
    {
        DFLASH_ARCHITECTURE,
        DSPARK_ARCHITECTURE,
        DSPARK,
        "DFlashDraftModel",
        "DFlashSpeculator",
        "DSparkSpeculator",
    }
)


@dataclass
class Written:
    """What :func:`export_checkpoint` wrote: the folder, its architectures, and remarks for the user."""

    folder: Path
    architectures: list[str]
    notes: list[str]


@dataclass
class _Checkpoint:
    config: DrafterConfig
    tensors: dict[str, Tensor]
    head: Tensor | None  # the target's, [V, H]
    embed: Tensor | None
    target: str | None
    notes: list[str]

    @property
    def markov(self) -> bool:
        return self.config.markov_rank > 0


def export_checkpoint(
    source: str | Path,
    out: str | Path,
    to: str,
    *,
    target: str | None = None,
    plain: bool = False,
    warm_start: bool = False,
    drop_markov: bool = False,
    base: str | Path | None = None,
    rank: int = 32,
) -> Written:
    """Write the drafter in ``source`` to the folder ``out`` in the layout of ``to``.

    Args:
        source: a folder that this package loads: its own, z-lab's DFlash, DeepSpec's DSpark, or one that was
            exported for vLLM.
        to: ``vllm``, ``speculators``, ``zlab``, or for this package alone ``compact`` (without the head's
            rows of a reduced draft vocabulary, which the target has as well, and without the Markov head's
            rows of tokens that are not in it) and ``adapter`` (a low-rank update of ``base``).
        target: the target's folder, hub id or name. Needed where its head's rows are written: for a reduced
            draft vocabulary (``vllm``, unless the drafter has its own head) and always for ``speculators``.
        plain: leave the carryover embedding out: the result is a plain DFlash or DSpark checkpoint.
        warm_start: add a zero carryover embedding to a checkpoint that has none. It drafts like the original
            as long as nothing is carried, and is where Carryover training starts.
        drop_markov: leave the Markov head out: the result is a DFlash drafter, which accepts less and which
            vLLM's V1 runner, the only one on its CPU backend, can serve.

    A drafter that lies in ``out`` is replaced; any other content is not touched.

    Raises ValueError for a combination that the reader could not use, for a source that does not fit its
    config and for a folder ``out`` that holds something else, FileNotFoundError for a missing folder.
    """
    if to not in FORMATS:
        raise ValueError(f"to={to!r}: must be one of {', '.join(FORMATS)}")
    if to == "zlab" and warm_start:
        raise ValueError("warm_start: the zlab layout has no carryover embedding; export to 'vllm'")
    if plain and warm_start:
        raise ValueError(
            "plain and warm_start exclude each other: one drops the embedding, the other adds it"
        )
    if (to == "adapter") != (base is not None):
        raise ValueError(
            f"base={base!r}: an adapter needs the checkpoint that it changes, and only an adapter does"
        )
    if rank < 1:
        raise ValueError(f"rank={rank}: must be at least 1")
    if base is not None and Path(out).resolve() == Path(base).resolve():
        raise ValueError(f"out={str(out)!r} is the base's folder: choose another")
    if Path(out).resolve() == Path(source).resolve():
        raise ValueError(
            f"out={str(out)!r} is the source folder: choose another, nothing is overwritten in place"
        )
    base_of_source = adapter.base_folder(Path(source)) if adapter.is_adapter(Path(source)) else None
    if base_of_source is not None and Path(out).resolve() == base_of_source.resolve():
        raise ValueError(f"out={str(out)!r} is the base of the source, which would change with it")
    _check_out(Path(out))
    config, tensors = DrafterConfig.from_pretrained(source), read_tensors(source)
    check_checkpoint(config, tensors, source)  # drops copies of the target's embedding and head
    check_draft_vocabulary(tensors.get("d2t"), config.vocab_size)
    notes: list[str] = []
    if drop_markov:
        config = _without_markov(config, tensors, str(source))
    config = _with_embedding(config, tensors, plain, warm_start, str(source), notes)
    embed, head = (None, None) if target is None else target_weights(target)
    if embed is not None and head is not None:
        check_target(config, embed, head, _target_layers(str(target)), None, None)
    checkpoint = _Checkpoint(config, tensors, head, embed, target, notes)
    writer: dict[str, Callable[[_Checkpoint], dict[str, Any]]] = {
        "vllm": _to_vllm,
        "speculators": _to_speculators,
        "zlab": _to_zlab,
        "compact": _to_compact,
        "adapter": _own_form,
    }
    folder = Path(out)
    if "sliding_attention" in (config.layer_types or ()):
        config.extra["use_sliding_window"] = True  # without it Transformers' Qwen3Config drops the window
    update = None if base is None else _update(checkpoint, Path(base), folder, rank)
    values = writer[to](checkpoint)
    mask = checkpoint.tensors.pop("mask_embedding", None) if to == "vllm" else None
    with _replacing(folder) as new:
        if mask is not None:
            torch.save({"mask_token_id": config.mask_token_id, "embedding": mask}, new / MASK_FILE)
        if update is None:
            write_tensors(new, checkpoint.tensors)
        else:
            write_tensors(new, update[0], adapter.WEIGHTS)
            (new / adapter.CONFIG).write_text(json.dumps(update[1], indent=2) + "\n")
        (new / "config.json").write_text(json.dumps(values, indent=2) + "\n")
    return Written(folder, values["architectures"], notes)


@contextmanager
def _replacing(out: Path) -> Iterator[Path]:
    """A folder to write a drafter to, which then takes the place of the one in ``out``. Whenever the program
    is killed, ``out`` holds the old drafter, the new one, or no ``config.json``, without which none loads."""
    out = out.resolve()
    there = out.exists()  # perhaps a mount, or with other files: it stays, and what lies in it
    parent = out if there else out.parent
    parent.mkdir(parents=True, exist_ok=True)
    new = parent / f".{out.name}.{os.getpid()}"
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir()
    try:
        yield new
        if not there:
            os.rename(new, out)
            return
        (out / "config.json").unlink(missing_ok=True)
        for name in (MASK_FILE, WEIGHTS, adapter.CONFIG, adapter.WEIGHTS, "config.json"):
            if (new / name).exists():
                os.replace(new / name, out / name)
            else:
                (out / name).unlink(missing_ok=True)  # of the drafter that lay here before
    finally:
        shutil.rmtree(new, ignore_errors=True)


def _update(c: _Checkpoint, base: Path, out: Path, rank: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The checkpoint as an update of ``base``: tensors and ``adapter_config.json``."""
    whole = DrafterConfig.from_pretrained(base)
    if adapter.is_adapter(base):
        raise ValueError(f"base={str(base)!r}: is an adapter itself; name the checkpoint that it changes")
    tensors = read_tensors(base)
    origin = {
        "base_model_name_or_path": os.path.relpath(base.resolve(), out.resolve()),
        "base_digest": adapter.digest(tensors),
    }
    check_checkpoint(whole, tensors, base)
    mine, other = c.tensors.get("d2t"), tensors.get("d2t")
    if not (mine is other is None or (mine is not None and other is not None and torch.equal(mine, other))):
        raise ValueError(f"base={str(base)!r}: has another draft vocabulary than the source")
    for name in (tensors.keys() & c.tensors.keys()) - {"d2t"}:
        found, wanted = tuple(tensors[name].shape), tuple(c.tensors[name].shape)
        if found != wanted and not name.startswith(adapter.HEADS):  # a head may be of another rank
            raise ValueError(
                f"base={str(base)!r}: {name} is {found} there and {wanted} in the source; name a drafter of "
                "the same size"
            )
    update, settings, kept = adapter.factor(tensors, c.tensors, rank)
    if kept < 0.99:
        c.notes.append(
            f"rank {rank} keeps {kept:.0%} of what changed in the matrix that loses most; measure the "
            "result, or train with --rank"
        )
    return update, origin | settings


def _check_out(out: Path) -> None:
    """ValueError unless ``out`` is free or holds a drafter: a target's weights have the same name."""
    if not out.exists():
        return
    if not out.is_dir():
        raise ValueError(f"out={str(out)!r}: is a file; name a folder")
    if not any((out / name).exists() for name in ("config.json", WEIGHTS, adapter.CONFIG, adapter.WEIGHTS)):
        return
    try:
        found = json.loads((out / "config.json").read_text())["architectures"]
        drafter = not WRITTEN.isdisjoint(found)
    except (OSError, ValueError, KeyError, TypeError):
        found, drafter = "none readable", False
    if not drafter:
        raise ValueError(
            f"out={str(out)!r}: holds something else than a drafter (architectures: {found}), which would be "
            "overwritten; name another folder"
        )


def _with_embedding(
    config: DrafterConfig,
    tensors: dict[str, Tensor],
    plain: bool,
    warm_start: bool,
    source: str,
    notes: list[str],
) -> DrafterConfig:
    has = EMBEDDING in tensors
    if has and not config.carryover and not plain:
        if warm_start:
            raise ValueError(
                f"warm_start: source={source!r} has a carryover embedding, which its config.json does not "
                "enable; set carryover_config.enabled to true there and leave the option out"
            )
        # Readers build no parameter for it, so that it could not be loaded.
        del tensors[EMBEDDING]
        notes.append(
            "config.json does not enable carryover: the embedding that the source holds is left out; set "
            "carryover_config.enabled to true there to keep it"
        )
        return config
    if config.carryover and not has:
        raise ValueError(
            f"source={source!r}: config.json has carryover enabled, but there is no tensor {EMBEDDING!r}"
        )
    if warm_start:
        if has:
            raise ValueError(
                f"warm_start: source={source!r} has a carryover embedding already; leave the option out"
            )
        tensors[EMBEDDING] = torch.zeros(config.hidden_size, dtype=tensors["fc.weight"].dtype)
        return dataclasses.replace(config, carryover_config=CarryoverConfig())
    if plain and has:
        del tensors[EMBEDDING]
    if plain:
        return dataclasses.replace(config, carryover_config=None)
    return config


def _without_markov(config: DrafterConfig, tensors: dict[str, Tensor], source: str) -> DrafterConfig:
    if config.markov_rank == 0:
        raise ValueError(f"drop_markov: source={source!r} has no Markov head; leave the option out")
    if config.sample_from_anchor:
        raise ValueError(
            f"drop_markov: source={source!r} has the anchor-first layout, which DFlash drafters do not have"
        )
    for name in [name for name in tensors if name.startswith(adapter.HEADS)]:
        del tensors[name]
    return dataclasses.replace(
        config,
        markov_rank=0,
        enable_confidence_head=False,
        confidence_head_with_markov=False,
        architectures=["DFlashDraftModel"],
    )


def target_weights(target: str) -> tuple[Tensor, Tensor]:
    """Embedding and head ``[V, H]`` of a Transformers model, in its dtype; the same tensor when they are
    tied."""
    from transformers import AutoModelForCausalLM

    from .pretrained import target_path

    model = AutoModelForCausalLM.from_pretrained(target_path(target), dtype="auto")
    return model.get_input_embeddings().weight.detach(), model.get_output_embeddings().weight.detach()


def _target_layers(target: str) -> int:
    from transformers import AutoConfig

    from .pretrained import target_path

    return int(AutoConfig.from_pretrained(target_path(target)).get_text_config().num_hidden_layers)


def _head_rows(c: _Checkpoint, to: str) -> Tensor:
    if c.head is None:
        raise ValueError(
            f"target is not given: the {to} layout holds rows of the target's head for the reduced draft "
            "vocabulary of "
            f"{c.config.draft_vocab_size} tokens; name the target (--target)"
        )
    ids = c.tensors.get("d2t")
    return (c.head if ids is None else c.head[ids]).to(c.tensors["fc.weight"].dtype).clone()


def _reduce(c: _Checkpoint, to: str) -> None:
    """The reduced vocabulary in the form of EAGLE-3, if there is one."""
    if "d2t" in c.tensors:
        rows = None if c.config.own_vocabulary else _head_rows(c, to)  # its own head is there already
        c.tensors |= reduced_vocabulary(c.tensors["d2t"], c.config.vocab_size, rows)


def _check_engine(c: _Checkpoint, to: str) -> None:
    """ValueError for what vLLM's DFlash and DSpark models would ignore or refuse."""
    config = c.config
    if config.sample_from_anchor and not c.markov:
        raise ValueError(
            f"sample_from_anchor=True: {to} reads the anchor-first layout for DSpark drafters only"
        )
    if c.markov and config.markov_head_type != "vanilla":
        raise ValueError(
            f"markov_head_type={config.markov_head_type!r}: {to} knows 'vanilla' only; other heads draft in "
            "this "
            "package's engine"
        )
    scale = config.input_embedding_scale
    if scale is not None and scale != 1:
        raise ValueError(f"input_embedding_scale={scale}: vLLM's DFlash does not scale its embeddings")


def _to_vllm(c: _Checkpoint) -> dict[str, Any]:
    _check_engine(c, "vllm")
    _reduce(c, "vllm")
    if c.config.carryover:
        architectures = [DSPARK_ARCHITECTURE, DSPARK] if c.markov else [DFLASH_ARCHITECTURE]
        c.notes.append("vLLM needs carryover_ext installed beside it to load this folder")
    else:
        architectures = [DSPARK] if c.markov else ["DFlashDraftModel"]
    return dataclasses.replace(c.config, architectures=architectures).to_dict()


def _to_compact(c: _Checkpoint) -> dict[str, Any]:
    values = _own_form(c)
    if c.markov and "d2t" in c.tensors:  # as distances, like everywhere in a DSpark checkpoint
        c.tensors[MARKOV_W1] = c.tensors[MARKOV_W1][c.tensors["d2t"]]
        c.notes.append("after a token outside the draft vocabulary the Markov head is silent")
        c.tensors |= reduced_vocabulary(c.tensors["d2t"], c.config.vocab_size, None)
    return values


def _own_form(c: _Checkpoint) -> dict[str, Any]:
    """``config.json`` as this package reads it, whole checkpoint or update."""
    if "d2t" in c.tensors:
        c.notes.append("other readers would misread the reduced draft vocabulary; export to 'vllm' for them")
    return dataclasses.replace(c.config, architectures=[DSPARK if c.markov else "DFlashDraftModel"]).to_dict()


def _to_zlab(c: _Checkpoint) -> dict[str, Any]:
    if c.config.own_vocabulary:
        raise ValueError(
            f"hidden_size={c.config.hidden_size}: the zlab layout is read with the target's, "
            f"{c.config.target_hidden_size}, and with its embedding and head; export to 'vllm'"
        )
    if c.tensors.pop(EMBEDDING, None) is not None:
        c.notes.append("the carryover embedding is left out: this layout's readers do not know it")
    ids = c.tensors.pop("d2t", None)
    if ids is not None:
        if c.markov:  # a token that was left out gets no bias
            narrow = c.tensors["markov_head.markov_w2.weight"]
            wide = narrow.new_zeros(c.config.vocab_size, narrow.shape[1])
            wide[ids] = narrow
            c.tensors["markov_head.markov_w2.weight"] = wide
        c.notes.append(
            f"the reduced draft vocabulary ({ids.numel()} tokens) is left out: this layout drafts from the "
            "whole head"
        )
    config = dataclasses.replace(
        c.config,
        draft_vocab_size=None,
        carryover_config=None,
        architectures=[DSPARK if c.markov else "DFlashDraftModel"],
    )
    return config.to_dict()


def _to_speculators(c: _Checkpoint) -> dict[str, Any]:
    from transformers import Qwen3Config

    from .pretrained import target_path

    _check_engine(c, "speculators")
    config = c.config
    if c.target is None or c.embed is None:
        raise ValueError(
            "target is not given: the speculators layout names the target and holds its head (--target)"
        )
    if config.own_vocabulary:
        raise ValueError(
            f"target_hidden_size={config.target_hidden_size}: speculators' DFlash needs the drafter's hidden "
            "size, "
            f"{config.hidden_size}"
        )
    if "mask_embedding" in c.tensors:
        raise ValueError("mask_embedding: the speculators layout has no learned mask embedding")
    causal = {config.layer_causal(i) for i in range(config.num_hidden_layers)}
    if len(causal) > 1:
        raise ValueError(
            "layer_types: the speculators layout has one causality for all layers, these are mixed"
        )
    rows = _head_rows(c, "speculators")
    _reduce(c, "speculators")
    c.tensors |= {HEAD: rows, EMBED: c.embed.to(rows.dtype).clone()}
    drafts = config.num_drafts
    layer = {
        key: value
        for key, value in config.to_dict().items()
        if key not in ("architectures", "dflash_config", "carryover_config", *_SPECULATORS_TOP)
    }
    # With Transformers' own keys and defaults: vLLM takes the layer's config as it stands.
    layer = Qwen3Config(**layer).to_diff_dict()
    values: dict[str, Any] = {
        "architectures": ["DSparkSpeculator" if c.markov else "DFlashSpeculator"],
        "speculators_model_type": "dspark" if c.markov else "dflash",
        # vLLM takes these from the layer config, speculators from the top level.
        "transformer_layer_config": layer
        | {"block_size": config.block_size, "num_target_layers": config.num_target_layers},
        "draft_vocab_size": config.draft_vocab_size or config.vocab_size,
        "block_size": config.block_size,
        "target_hidden_size": config.target_hidden_size,
        # Counted from the embedding: one more than the tapped layer.
        "aux_hidden_state_layer_ids": [tap + 1 for tap in config.target_layer_ids],
        "mask_token_id": config.mask_token_id,
        "sliding_window_non_causal": True not in causal,
        "sample_from_anchor": config.sample_from_anchor,
        "speculators_config": {
            "algorithm": "dspark" if c.markov else "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": drafts}],
            # A short name of this package says nothing to another reader.
            "verifier": {"name_or_path": target_path(c.target), "architectures": []},
        },
    }
    if c.markov:
        for key in (
            "markov_rank",
            "markov_head_type",
            "enable_confidence_head",
            "confidence_head_with_markov",
        ):
            values[key] = getattr(config, key)
    if config.carryover:
        values["carryover_config"] = dataclasses.asdict(config.carryover_config or CarryoverConfig())
        c.notes.append(
            "the carryover embedding is kept: vLLM with carryover_ext uses it, other readers must skip it"
        )
    return values


_SPECULATORS_TOP = frozenset(
    {
        "mask_token_id",
        "target_layer_ids",
        "draft_vocab_size",
        "block_size",
        "target_hidden_size",
        "sample_from_anchor",
        "markov_rank",
        "markov_head_type",
        "enable_confidence_head",
        "confidence_head_with_markov",
        "num_target_layers",
    }
)
