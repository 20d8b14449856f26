"""The shape of the drafter that `carryover train` begins with: new, from the target and the options, or that
of ``--init``."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from typing import Any

from carryover_ext.cli import positive
from carryover_ext.config import DSPARK, CarryoverConfig, DrafterConfig, default_target_layer_ids

# Of a new drafter. None as an option's default says that it was not given, which --init needs to know.
LAYERS, TAPS, BLOCK, DRAFT_VOCAB, MARKOV_RANK = 2, 5, 8, 8192, 256
# What an option must agree with when a checkpoint is gone on from; the block may be another.
OF_CHECKPOINT: dict[str, Callable[[DrafterConfig], int]] = {
    "layers": lambda c: c.num_hidden_layers,
    "hidden_size": lambda c: c.hidden_size,
    "heads": lambda c: c.num_attention_heads,
    "kv_heads": lambda c: c.num_key_value_heads,
    "intermediate": lambda c: c.intermediate_size,
    "taps": lambda c: len(c.target_layer_ids),
    "mask_token": lambda c: c.mask_token_id,
    "draft_vocab": lambda c: c.draft_vocab_size or 0,
}


def add_shape_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--drafter", choices=("dflash", "markov"), help="kind of drafter (default: that of --init, or dflash)"
    )
    parser.add_argument(
        "--markov-rank", type=positive, help=f"rank of a new Markov head (default {MARKOV_RANK})"
    )
    parser.add_argument(
        "--layout",
        choices=("dflash", "anchor-first"),
        help="mask rows predict their own position, or every row the next one (default: that of --init, or "
        "dflash)",
    )
    shape = parser.add_argument_group(
        "shape", "of a new drafter; with --init they must be what the checkpoint has, but for --block"
    )
    shape.add_argument("--layers", type=positive, help=f"default {LAYERS}")
    shape.add_argument(
        "--hidden-size",
        type=positive,
        help="of the drafter, which then has an embedding and a head of its own (default: the target's)",
    )
    shape.add_argument(
        "--heads", type=positive, help="query heads (default: as many for each KV head as the target)"
    )
    shape.add_argument(
        "--kv-heads", type=positive, help="KV heads (default: the target's, in proportion to the hidden size)"
    )
    shape.add_argument(
        "--intermediate",
        type=positive,
        help="MLP channels (default: the target's, in proportion to the hidden size)",
    )
    shape.add_argument("--taps", type=positive, help=f"tapped layers of the target (default {TAPS})")
    shape.add_argument(
        "--block",
        type=positive,
        help=f"rows of a block (default: {BLOCK}, or those of --init, which goes on with longer or shorter "
        "ones too)",
    )
    shape.add_argument(
        "--mask-token", type=int, help="token id of the mask (default: the target's last special token)"
    )
    shape.add_argument(
        "--draft-vocab",
        type=int,
        help=f"0 = the target's whole vocabulary (default: {DRAFT_VOCAB}, where the target has more)",
    )


def default_mask_token(tokenizer: Any, vocab_size: int, stop_ids: Sequence[int] = ()) -> int:
    """The special token with the highest id that no answer holds: not bos, eos, pad or unk, nor one that ends
    answers (``stop_ids``), and within the model's ``vocab_size``.

    Raises:
        ValueError: there is none.
    """
    used = {
        getattr(tokenizer, f"{name}_token_id", None) for name in ("bos", "eos", "pad", "unk", "sep", "cls")
    }
    used |= set(stop_ids)
    special = [
        i
        for i, token in tokenizer.added_tokens_decoder.items()
        if token.special and i not in used and i < vocab_size
    ]
    if not special:
        raise ValueError("--mask-token: the target's tokenizer has no spare special token; name an unused id")
    return max(special)


def _mask_token(args: argparse.Namespace, model: Any, tokenizer: Any) -> int:
    from carryover_ext.pretrained import stop_token_ids

    vocab_size = model.config.vocab_size
    if args.mask_token is None:
        return default_mask_token(tokenizer, vocab_size, stop_token_ids(model))
    chosen = args.mask_token
    if not 0 <= chosen < vocab_size:
        raise ValueError(f"--mask-token {chosen}: must be a token id of the target, 0 to {vocab_size - 1}")
    return int(chosen)


def tap_ids(count: int, num_layers: int) -> list[int]:
    """``--taps COUNT`` of a target of that many layers."""
    taps = default_target_layer_ids(count, num_layers)
    if len(set(taps)) < len(taps):
        raise ValueError(
            f"--taps {count}: the target's {num_layers} layers are too few for that many different taps "
            f"(they would be {taps}); take fewer"
        )
    return taps


def _draft_vocab(given: int | None, vocab_size: int) -> int | None:
    if given is None:
        return DRAFT_VOCAB if vocab_size > DRAFT_VOCAB else None
    if not 0 <= given <= vocab_size:
        raise ValueError(
            f"--draft-vocab {given}: must be 0 (the whole vocabulary) or at most the target's {vocab_size}"
        )
    return given or None


def _at_most(option: str, value: int, limit: int, what: str) -> int:
    """``value``, or ValueError: a drafter starts from parts of the target, which has ``limit`` of them."""
    if value > limit:
        raise ValueError(f"{option} {value}: must be at most {limit}, {what} of the target to start from")
    return value


def _heads(args: argparse.Namespace, model_config: Any, hidden: int) -> tuple[int, int]:
    """Query and KV heads; the default keeps the target's ratio of the two, and of both to the hidden size."""
    all_kv = model_config.num_key_value_heads
    group = model_config.num_attention_heads // all_kv
    heads, kv = args.heads, args.kv_heads
    if heads is None:
        kv = kv or max(1, round(all_kv * hidden / model_config.hidden_size))
        return kv * group, _at_most("--kv-heads", kv, all_kv, "the KV heads")
    choices = [kv] if kv else range(1, all_kv + 1)
    fitting = [k for k in choices if heads % k == 0 and heads // k <= group]
    if not fitting:
        some = f"--kv-heads {kv}" if kv else f"a number of KV heads up to {all_kv}"
        raise ValueError(
            f"--heads {heads}: must be {some} times a number up to {group}, since the target has {group} "
            "query heads for each KV head to start from"
        )
    return heads, _at_most("--kv-heads", fitting[0], all_kv, "the KV heads")


def new_config(args: argparse.Namespace, model: Any, tokenizer: Any) -> DrafterConfig:
    """The config of a drafter that starts from the target.

    Raises:
        ValueError: an option that does not fit the target, by name and value.
    """
    c = model.config
    hidden = _at_most("--hidden-size", args.hidden_size or c.hidden_size, c.hidden_size, "the width")
    heads, kv_heads = _heads(args, c, hidden)
    channels = min(c.intermediate_size, math.ceil(c.intermediate_size * hidden / c.hidden_size / 8) * 8)
    rope = getattr(c, "rope_parameters", None) or {}
    return DrafterConfig(
        hidden_size=hidden,
        target_hidden_size=c.hidden_size,
        intermediate_size=_at_most(
            "--intermediate", args.intermediate or channels, c.intermediate_size, "the MLP channels"
        ),
        num_hidden_layers=_at_most("--layers", args.layers or LAYERS, c.num_hidden_layers, "the layers"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads,
        vocab_size=c.vocab_size,
        num_target_layers=c.num_hidden_layers,
        target_layer_ids=tap_ids(args.taps or TAPS, c.num_hidden_layers),
        mask_token_id=_mask_token(args, model, tokenizer),
        block_size=args.block or BLOCK,
        rope_theta=float(rope.get("rope_theta", 10000.0)),
        rms_norm_eps=c.rms_norm_eps,
        max_position_embeddings=c.max_position_embeddings,
        tie_word_embeddings=hidden == c.hidden_size,
        draft_vocab_size=_draft_vocab(args.draft_vocab, c.vocab_size),
        sample_from_anchor=args.layout == "anchor-first",
    )


def _from_checkpoint(args: argparse.Namespace) -> DrafterConfig:
    """The config of ``--init``, with the block of ``--block``: positions are rotary and mask rows are alike,
    so that no weight depends on its length."""
    config = DrafterConfig.from_pretrained(args.init)
    for name, of in OF_CHECKPOINT.items():
        given, there = getattr(args, name), of(config)
        if given is not None and given != there:
            raise ValueError(
                f"--{name.replace('_', '-')} {given}: --init {args.init} has {there}, which its weights "
                "keep; leave the option out"
            )
    if args.layout and config.sample_from_anchor != (args.layout == "anchor-first"):
        raise ValueError(
            f"--layout {args.layout}: --init {args.init} has the other layout, which its weights keep"
        )
    if args.drafter == "dflash" and config.markov_rank > 0:
        raise ValueError(f"--drafter dflash: --init {args.init} has a Markov head; leave --drafter out")
    if args.block is not None:
        config.block_size = args.block
        config.validate()
    return config


def start_config(args: argparse.Namespace, model: Any, tokenizer: Any) -> DrafterConfig:
    """The config to train with: a new one or that of ``--init``, with a Markov head and the carryover
    switches where they are asked for.

    Raises:
        ValueError: an option that does not fit the target, or contradicts ``--init``, by name and value.
    """
    config = new_config(args, model, tokenizer) if args.init is None else _from_checkpoint(args)
    rank = args.markov_rank
    if args.drafter == "markov" and config.markov_rank == 0:
        config.markov_rank, config.architectures = rank or MARKOV_RANK, [DSPARK]
    elif rank is not None and rank != config.markov_rank:
        why = "the drafter has no Markov head; add --drafter markov"
        if config.markov_rank:
            why = f"--init {args.init} has a head of rank {config.markov_rank}, which its weights keep"
        raise ValueError(f"--markov-rank {rank}: {why}, or leave the option out")
    if args.objective == "carryover":
        config.carryover_config = CarryoverConfig(True, args.carry_embed_at, args.carry_positions)
    return config
