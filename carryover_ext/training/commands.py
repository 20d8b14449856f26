"""`carryover train`: arguments and what they run; what the other commands share with it."""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Callable, Container
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from carryover_ext.cli import not_negative, positive
from carryover_ext.config import DSPARK, DrafterConfig
from carryover_ext.training.recordings import is_held_out, load_saved, prompts, recorded_settings, save_atomic
from carryover_ext.training.shapes import add_shape_arguments, start_config
from carryover_ext.training.trainer import OBJECTIVES, Trainer, TrainSettings


def add_train_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--target", default="smollm2-135m", help="named target, Hugging Face folder or hub id"
    )
    parser.add_argument(
        "--recordings",
        type=Path,
        nargs="+",
        required=True,
        help="folders made by `carryover record`; several, for example, for temperatures 0 and 1",
    )
    parser.add_argument(
        "--features",
        type=Path,
        nargs="+",
        help="caches of target features, one for each (default: beside the recordings)",
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the run (resumed when it exists)")
    parser.add_argument(
        "--init", type=Path, help="checkpoint to start from (default: the target's own late layers)"
    )
    add_shape_arguments(parser)
    parser.add_argument(
        "--carry-init",
        type=Path,
        help="checkpoint whose carryover embedding to start with: that of a short run, say, in which another "
        "drafter learned to let the rows in (default: that of --init, or zero)",
    )
    parser.add_argument("--carry-embed-at", choices=("pre_norm", "post_norm"), default="pre_norm")
    parser.add_argument("--carry-positions", choices=("verify", "shifted"), default="verify")
    parser.add_argument("--threads", type=positive)
    add_device(parser)
    parser.add_argument(
        "--keep-prefixes",
        action="store_true",
        help="keep the target's K/V of all recordings on disk, for objective carryover: gigabytes (the "
        "prefixes folder beside each features folder) and a pass of the target over all of them before the "
        "first step, for half the time of a fresh batch; for long runs",
    )
    parser.add_argument("--save-every", type=float, default=60.0, help="seconds between saved states")
    parser.add_argument(
        "--validate-every",
        type=not_negative,
        default=200,
        help="steps between looks at held-out recordings (their AL beside that of training batches); 0: none",
    )
    for f in fields(TrainSettings):
        name = "--" + f.name.replace("_", "-")
        if f.name == "objective":
            parser.add_argument(name, choices=OBJECTIVES, default=f.default)
        else:
            parser.add_argument(name, type=type(f.default), default=f.default)
    add_temperature(parser)


def add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", help="cpu or cuda (default: cuda where there is a GPU)")


def training_device(name: str | None) -> torch.device:
    """The device of that name; by default a GPU where there is one."""
    there = torch.cuda.is_available()
    chosen = name or ("cuda" if there else "cpu")
    if chosen.split(":")[0] not in (("cpu", "cuda") if there else ("cpu",)):
        raise ValueError(f"--device {name}: this machine has {'cpu and cuda' if there else 'only cpu'}")
    return torch.device(chosen)


def load_on(device: str | None, target: str) -> tuple[Any, Any]:
    """Model, on the device of that name and in the dtype that it is fast with, and tokenizer of a target."""
    from carryover_ext.packing import fast_dtype
    from carryover_ext.pretrained import load_target

    chosen = training_device(device)
    model, tokenizer = load_target(target, fast_dtype(chosen))
    return model.to(chosen), tokenizer


def add_temperature(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--temperature",
        type=float,
        help="of the recordings, 0 or 1 (default: what their manifest says, or 0)",
    )


def recorded_temperature(recordings: Path, given: float | None) -> float:
    """What the recordings were drawn with, 0 or 1; ValueError where ``--temperature`` (``given``) contradicts
    their manifest."""
    recorded = recorded_settings(recordings).get("temperature")
    if None not in (given, recorded) and given != recorded:
        raise ValueError(f"--temperature {given}: {recordings} was recorded at {recorded}; leave it out")
    value = float((recorded if given is None else given) or 0)
    if value not in (0, 1):
        raise ValueError(f"temperature={value}: {recordings} must have been recorded at 0 or 1")
    return value


def progress_bar(title: str, console: Any = None) -> Any:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    return Progress(
        TextColumn(title),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
        console=console,
    )


def open_store(
    recordings: Path,
    features: Path,
    *,
    holdout: bool | None,
    temperature: float,
    prefixes: Path | None = None,
    without: Container[tuple[int, ...]] = (),
) -> Any:
    """Recordings with features (and prefixes): those held out (True), those to train on (False), or all
    (None); ``without`` those of some prompts."""
    from carryover_ext.training.features import FeatureStore
    from carryover_ext.training.prefixes import PrefixStore

    return FeatureStore(
        recordings,
        features,
        keep=lambda index, row: (
            (holdout is None or is_held_out(index) == holdout) and tuple(row.prompt_ids) not in without
        ),
        temperature=temperature,
        prefixes=PrefixStore(prefixes) if prefixes else None,
    )


def _build(name: str, build: Callable[..., None], recordings: Path, folder: Path, target: Any) -> Path:
    with progress_bar(f"target {name}") as bar:
        task = bar.add_task(name, total=None, note="shards")
        build(recordings, folder, target, progress=lambda done, n: bar.update(task, completed=done, total=n))
    return folder


def features_folder(recordings: Path) -> Path:
    """Where the features of a recording lie."""
    return recordings.with_name(recordings.name + "-features")


def make_features(recordings: Path, features: Path | None, target: Any) -> Path:
    """The folder of a recording's features, which are made where they are missing."""
    from carryover_ext.training.features import build_features

    folder = features or features_folder(recordings)
    return _build("features", build_features, recordings, folder, target)


def make_prefixes(recordings: Path, features: Path, target: Any) -> Path:
    """The folder of a recording's prefixes, beside its features; they are made where they are missing."""
    from carryover_ext.training.prefixes import build_prefixes, prefixes_folder

    folder = prefixes_folder(features)
    return _build("prefixes", build_prefixes, recordings, folder, target)


def _changes(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """What differs, as ``{key: (old, new)}``; keys that ``old`` does not have are not compared."""
    return {k: (v, new.get(k)) for k, v in old.items() if new.get(k) != v}


def _digest(checkpoint: Path) -> str:
    """Of the weights of a checkpoint."""
    from carryover_ext.drafters import adapter

    digest = hashlib.sha256()
    for folder in (
        (checkpoint, adapter.base_folder(checkpoint)) if adapter.is_adapter(checkpoint) else (checkpoint,)
    ):
        for file in sorted(folder.glob("*.safetensors")):
            digest.update(file.read_bytes())
    return digest.hexdigest()


def load_weights(folder: Path) -> tuple[dict[str, Tensor], Tensor | None]:
    """Checkpoint weights in float32 and the draft vocabulary (None = all tokens)."""
    from carryover_ext.drafters import check_checkpoint
    from carryover_ext.drafters.checkpoint import read_tensors

    tensors = read_tensors(folder)
    check_checkpoint(DrafterConfig.from_pretrained(folder), tensors, folder)
    vocab = tensors.pop("d2t", None)
    return {k: v.float() for k, v in tensors.items()}, vocab


def carry_embedding(folder: Path, config: DrafterConfig, objective: str) -> Tensor:
    """The carryover embedding of a checkpoint, for a drafter with ``config``, in float32.

    Raises:
        ValueError: the drafter has none, or the checkpoint none of its size or for its place.
    """
    name = "carryover_embedding"
    if objective != "carryover" or not config.carryover:
        raise ValueError(f"--carry-init {folder}: only with --objective carryover; leave it out")
    other, found = DrafterConfig.from_pretrained(folder), load_weights(folder)[0].get(name)
    if found is None:
        raise ValueError(f"--carry-init {folder}: has no {name}; name a checkpoint trained with Carryover")
    if len(found) != config.hidden_size or other.carry_embed_at != config.carry_embed_at:
        raise ValueError(
            f"--carry-init {folder}: its {name} is {len(found)} numbers added {other.carry_embed_at}; the "
            f"drafter needs {config.hidden_size}, {config.carry_embed_at}"
        )
    return found


def save_checkpoint(
    folder: Path, config: DrafterConfig, weights: dict[str, Tensor], vocab: Tensor | None, head: Tensor
) -> None:
    """Writes ``config.json`` and bf16 ``model.safetensors``; ``head [Vd, H]`` is what the drafter uses."""
    from carryover_ext.drafters.checkpoint import reduced_vocabulary, write_tensors

    tensors = {k: v.to(torch.bfloat16) for k, v in weights.items()}
    if vocab is not None and DSPARK in config.architectures:
        tensors |= reduced_vocabulary(vocab, config.vocab_size, head.to(torch.bfloat16))
    elif vocab is not None:
        tensors["d2t"] = vocab
    config.save_pretrained(folder)
    write_tensors(folder, tensors)


def run_train(args: argparse.Namespace) -> int:
    from rich.console import Console

    from carryover_ext.drafters.adapter import MARKOV_W1
    from carryover_ext.drafters.checkpoint import check_target
    from carryover_ext.training import cost, initial
    from carryover_ext.training.distributed import from_environment
    from carryover_ext.training.draft_verify_draft import Head
    from carryover_ext.training.features import JoinedStore
    from carryover_ext.training.target_pass import TargetPass
    from carryover_ext.training.trainer import train
    from carryover_ext.training.validation import Validation

    if args.threads:
        torch.set_num_threads(args.threads)
    temperatures = [recorded_temperature(folder, args.temperature) for folder in args.recordings]
    if args.features and len(args.features) != len(args.recordings):
        raise ValueError(f"--features: {len(args.features)} for {len(args.recordings)} --recordings")
    settings = TrainSettings(**{f.name: getattr(args, f.name) for f in fields(TrainSettings)})
    model, tokenizer = load_on(args.device, args.target)
    config = start_config(args, model, tokenizer)
    weights, vocab = load_weights(args.init) if args.init else ({}, None)
    embedding = carry_embedding(args.carry_init, config, args.objective) if args.carry_init else None
    target = TargetPass(model, config.target_layer_ids)
    hidden, layers = model.config.hidden_size, model.config.num_hidden_layers
    check_target(config, target.embed, target.head, layers, hidden, None)
    ranks = from_environment()
    if not ranks.first:
        ranks.barrier()  # the first process makes what the others read: features and the start
    stores, held_out = [], []
    # a prompt may be in several recordings: where one of them holds it out, none is trained on
    kept_apart = set().union(*(prompts(folder, held_out=True) for folder in args.recordings))
    for recordings, features, drawn_at in zip(
        args.recordings, args.features or [None] * len(args.recordings), temperatures, strict=True
    ):
        folder = make_features(recordings, features, target)
        keep = args.keep_prefixes and args.objective == "carryover"
        kept = make_prefixes(recordings, folder, target) if keep else None
        stores.append(
            open_store(
                recordings, folder, holdout=False, temperature=drawn_at, prefixes=kept, without=kept_apart
            )
        )
        if args.validate_every > 0:
            with suppress(FileNotFoundError):  # none that is long enough
                held_out.append(open_store(recordings, folder, holdout=True, temperature=drawn_at))
    store = stores[0] if len(stores) == 1 else JoinedStore(stores)
    start = args.out / "start.pt"
    origins = {"--init": args.init, "--carry-init": args.carry_init}
    source = {name: _digest(folder) for name, folder in origins.items() if folder}
    if start.exists():  # a resumed run keeps what it began with, also when recordings were added since
        begun = load_saved(start)
        changed = _changes(begun.get("config", {}), config.to_dict())
        if changed:
            raise ValueError(f"--out {args.out}: was begun with another drafter {changed}; use a new folder")
        begun_from = begun.get("source", {"--init": begun.get("init")})  # older runs have the latter
        for name, folder in origins.items():
            if begun_from.get(name) != source.get(name):
                raise ValueError(
                    f"{name} {folder}: --out {args.out} was begun from other weights; use a new folder, or "
                    "delete it to train anew"
                )
        weights, vocab, rms = begun["weights"], begun["vocab"], begun["rms"]
    else:
        rms = initial.tap_rms(store)
        if weights:
            weights["fc.weight"] = weights["fc.weight"] * rms
        else:
            if config.draft_vocab_size:
                vocab, covered = initial.draft_vocabulary(store, config.vocab_size, config.draft_vocab_size)
                print(
                    f"draft vocabulary: {config.draft_vocab_size} tokens cover {covered:.2%} of the responses"
                )
            weights = initial.from_target(config, target, rms, vocab)
        if config.markov_rank > 0 and MARKOV_W1 not in weights:
            if settings.rank:
                raise ValueError(
                    f"--rank {settings.rank}: a Markov head stays as it is then, and this one would be new; "
                    "train it with all weights (leave --rank out) and go on from that checkpoint (--init)"
                )
            weights |= initial.markov_head(config, store, vocab)
        if config.carryover:
            weights.setdefault("carryover_embedding", torch.zeros(config.hidden_size))
        if embedding is not None:
            weights["carryover_embedding"] = embedding
        args.out.mkdir(parents=True, exist_ok=True)
        begun = {"weights": weights, "vocab": vocab, "rms": rms, "config": config.to_dict(), "source": source}
        save_atomic(start, begun)
    if ranks.first:
        ranks.barrier()
    trainer = Trainer(config, weights, 1 / rms, Head.make(target, vocab), store, settings, target, ranks)
    validation = Validation(JoinedStore(held_out), trainer.head) if held_out else None
    length = sum(len(store.recording(i).ids) for i in range(len(store))) // len(store)
    operations = cost.step_operations(
        config,
        sequences=settings.sequences,
        length=length,
        anchors=settings.anchors,
        head_rows=trainer.head.head.shape[0],
        carried=settings.objective == "carryover",
    )
    ceiling = cost.matrix_rate(target.device, target.head.dtype)
    checkpoint = args.out / "checkpoint"
    console = Console(quiet=not ranks.first)
    console.print(
        f"{len(store)} recordings; a step: {operations / 1e9:.0f} GFLOP, ceiling of a process "
        f"{ceiling / 1e9:.0f} GFLOP/s"
    )
    with progress_bar("training", console) as bar:
        task = bar.add_task("training", total=settings.steps, note="")

        def show(row: dict[str, float]) -> None:
            steps = row["steps"]
            share = operations * steps / ranks.size / (row["seconds"] - row["verify_seconds"]) / ceiling
            first = (
                f"AL #1 {row['al_first']:.3f}, #2 {row['al']:.3f}"
                if "al_first" in row
                else f"AL {row['al']:.3f}"
            )
            if "held_out_al" in row:
                first += f" (held out {row['held_out_al']:.3f})"
            note = f"loss {row['loss']:.3f}, {first}, slot 1 {row['slot1']:.3f}, {share:.0%} of the ceiling"
            bar.update(task, completed=int(row["step"]), note=note)
            if not bar.console.is_terminal:
                bar.console.print(f"{int(row['step'])} {note}", soft_wrap=True)

        def save() -> None:
            nonlocal ceiling  # on a shared machine the first measurement can fall into a bad moment
            ceiling = max(ceiling, cost.matrix_rate(target.device, target.head.dtype))
            save_checkpoint(checkpoint, config, trainer.export_weights(), vocab, trainer.head.head)

        train(trainer, args.out, show, save, args.save_every, validation, args.validate_every)
    console.print(f"trained {settings.steps} steps; checkpoint in {checkpoint}", soft_wrap=True)
    ranks.close()
    return 0
