"""Drafter configuration in the config.json layouts of the z-lab DFlash and the DeepSpec DSpark checkpoints,
with one block added for Carryover.

The file on disk is flat (Hugging Face names) with two nested blocks::

    {"architectures": ["DFlashDraftModel"], "hidden_size": 576, ..., "block_size": 8, "num_target_layers": 30,
     "dflash_config": {"mask_token_id": 0, "target_layer_ids": [1, 8, 14, 20, 27]},
     "carryover_config": {"enabled": true, "carry_embed_at": "pre_norm", "carry_positions": "verify"}}

DSpark checkpoints (``Qwen3DSparkModel``) have ``mask_token_id`` and ``target_layer_ids`` at the top level,
beside ``markov_rank``, ``markov_head_type``, ``sample_from_anchor`` (true when absent) and the keys of the
confidence head.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CARRY_EMBED_AT = ("pre_norm", "post_norm")
CARRY_POSITIONS = ("verify", "shifted")
MARKOV_HEAD_TYPES = ("vanilla", "gated", "rnn")
DSPARK = "Qwen3DSparkModel"
DSPARK_KEYS = frozenset(
    [
        "sample_from_anchor",
        "markov_rank",
        "markov_head_type",
        "enable_confidence_head",
        "confidence_head_with_markov",
    ]
)
LAYER_TYPES = ("full_attention", "sliding_attention")

# Keys of Hugging Face configs that say nothing about how the drafter computes (max_window_layers and
# use_sliding_window: where layer_types is there). They are kept and written back.
IGNORED_KEYS = frozenset(
    [
        "_name_or_path",
        "attention_dropout",
        "auto_map",
        "bos_token_id",
        "chunk_size_feed_forward",
        "dtype",
        "eos_token_id",
        "id2label",
        "initializer_range",
        "is_decoder",
        "label2id",
        "max_window_layers",
        "name_or_path",
        "num_anchors",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "problem_type",
        "return_dict",
        "torch_dtype",
        "transformers_version",
        "use_cache",
        "use_sliding_window",
        "target_model_id",
        "quantization_config",
    ]
)
# Keys that would change the computation: only the value that the drafter implements is accepted.
FIXED_KEYS: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "hidden_act": ("silu",),
    "use_qk_norm": (True,),
}
DFLASH_KEYS = frozenset(
    [
        "mask_token_id",
        "target_layer_ids",
        "causal",
        "block_size",
        "input_embedding_scale",
        "final_logit_softcapping",
        "sample_from_anchor",
        "num_target_layers",
    ]
)


def default_target_layer_ids(num_taps: int, num_target_layers: int) -> list[int]:
    """Evenly spaced taps ``round(1 + i * (L - 4) / (n - 1))`` (DFlash, arXiv 2602.06036); one tap: the middle
    layer.
    """
    if num_taps < 1 or num_target_layers < 1:
        raise ValueError(f"num_taps={num_taps} and num_target_layers={num_target_layers} must be at least 1")
    if num_taps == 1:
        return [num_target_layers // 2]
    ids = [round(1 + i * (num_target_layers - 4) / (num_taps - 1)) for i in range(num_taps)]
    return [min(max(i, 0), num_target_layers - 1) for i in ids]


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return _is_int(value) or isinstance(value, float)


def _layer_types(values: dict[str, Any], source: str) -> list[str]:
    """As Transformers' Qwen configs fill them in: ``max_window_layers`` (28 when absent) full layers, then
    sliding ones."""
    full = values.get("max_window_layers", 28)
    if not _is_int(full) or full < 0:
        raise ValueError(f"{source}: max_window_layers={full!r}: must be a number of layers")
    count = values.get("num_hidden_layers")
    return [LAYER_TYPES[i >= full] for i in range(count if isinstance(count, int) else 0)]


@dataclass
class CarryoverConfig:
    """Switches of the temporary segment.

    ``carry_embed_at``: add the learned embedding after ``fc`` and before ``hidden_norm`` (``pre_norm``) or
    after it. ``carry_positions``: RoPE position of a carried row: where it was verified (``verify``), or one
    later, the position that its hidden state predicts (``shifted``).
    """

    enabled: bool = True
    carry_embed_at: str = "pre_norm"
    carry_positions: str = "verify"

    @classmethod
    def from_dict(cls, values: Any, source: str = "config") -> CarryoverConfig:
        """Of ``carryover_config`` in a config.json, which ``source`` names in errors.

        Raises ValueError for what is no such object, for an unknown key and for an unknown value.
        """
        known = sorted(f.name for f in dataclasses.fields(cls))
        if not isinstance(values, dict):
            raise ValueError(f"{source}: carryover_config={values!r}: must be an object with {known}")
        for key in values:
            if key not in known:
                raise ValueError(f"{source}: unknown key carryover_config.{key} (known: {', '.join(known)})")
        config = cls(**values)
        config.check()
        return config

    def check(self) -> None:
        """ValueError for a value that means nothing."""
        if not isinstance(self.enabled, bool):
            raise ValueError(f"enabled={self.enabled!r}: must be true or false")
        if self.carry_embed_at not in CARRY_EMBED_AT:
            raise ValueError(f"carry_embed_at={self.carry_embed_at!r}: must be one of {CARRY_EMBED_AT}")
        if self.carry_positions not in CARRY_POSITIONS:
            raise ValueError(f"carry_positions={self.carry_positions!r}: must be one of {CARRY_POSITIONS}")


@dataclass
class DrafterConfig:
    """Shapes and switches of a drafter. Field names are those of config.json; see the module docstring.

    ``block_size``: input rows of a block. ``sample_from_anchor``: False, DFlash's layout, in which mask rows
    predict their own position and the anchor's row nothing; True, the anchor-first layout of DSpark, in which
    row k predicts position ``anchor + k + 1``, so that a block has one more draft.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int
    num_target_layers: int
    target_layer_ids: list[int]
    mask_token_id: int
    head_dim: int | None = None
    block_size: int = 16
    target_hidden_size: int | None = None
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_parameters: dict[str, Any] | None = None
    partial_rotary_factor: float = 1.0
    max_position_embeddings: int = 8192
    layer_types: list[str] | None = None
    sliding_window: int | None = None
    tie_word_embeddings: bool = True
    causal: bool | None = None
    input_embedding_scale: float | None = None
    final_logit_softcapping: float | None = None
    draft_vocab_size: int | None = None
    sample_from_anchor: bool = False
    markov_rank: int = 0
    markov_head_type: str = "vanilla"
    enable_confidence_head: bool = False
    confidence_head_with_markov: bool = False
    carryover_config: CarryoverConfig | None = None
    architectures: list[str] = field(default_factory=lambda: ["DFlashDraftModel"])
    model_type: str = "qwen3"
    extra: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.target_hidden_size is None:
            self.target_hidden_size = self.hidden_size
        if self.layer_types is None:
            self.layer_types = ["full_attention"] * self.num_hidden_layers
        if isinstance(self.carryover_config, dict):
            self.carryover_config = CarryoverConfig(**self.carryover_config)
        self.target_layer_ids = list(self.target_layer_ids)
        self.validate()

    # -- derived -----------------------------------------------------------------------------------
    @property
    def carryover(self) -> bool:
        """Whether the checkpoint has a carryover embedding."""
        return self.carryover_config is not None and self.carryover_config.enabled

    @property
    def carry_embed_at(self) -> str:
        return self.carryover_config.carry_embed_at if self.carryover_config else "pre_norm"

    @property
    def carry_positions(self) -> str:
        return self.carryover_config.carry_positions if self.carryover_config else "verify"

    @property
    def num_features(self) -> int:
        """Width of a tapped row: number of taps times the target's hidden size."""
        return len(self.target_layer_ids) * int(self.target_hidden_size or 0)

    @property
    def own_vocabulary(self) -> bool:
        """Whether the checkpoint holds its own embedding and head, because the target's are of another
        width."""
        return self.hidden_size != self.target_hidden_size

    @property
    def first_slot(self) -> int:
        """The first row of a block that predicts a token."""
        return 0 if self.sample_from_anchor else 1

    @property
    def num_drafts(self) -> int:
        """Tokens that a whole block drafts."""
        return self.block_size - self.first_slot

    @property
    def verify_rows(self) -> int:
        """Rows that the target verifies for a whole block: the anchor and the drafts."""
        return self.num_drafts + 1

    @property
    def _rotary_factor(self) -> Any:
        return (self.rope_parameters or {}).get("partial_rotary_factor", self.partial_rotary_factor)

    @property
    def rotary_dim(self) -> int:
        """Rotated dimensions of a head (even, at most ``head_dim``)."""
        return int(int(self.head_dim or 0) * self._rotary_factor) // 2 * 2

    def layer_window(self, layer: int) -> int:
        """Sliding window of a layer in positions, 0 for full attention."""
        assert self.layer_types is not None
        return int(self.sliding_window or 0) if self.layer_types[layer] == "sliding_attention" else 0

    def layer_causal(self, layer: int) -> bool:
        """Whether a layer is causal inside the block. ``causal`` unset: sliding layers are, full ones are not
        (z-lab).
        """
        assert self.layer_types is not None
        return self.layer_types[layer] == "sliding_attention" if self.causal is None else bool(self.causal)

    # -- checks ------------------------------------------------------------------------------------
    def validate(self) -> None:
        """Raise ValueError naming the field, its value and what would be right."""
        for name in [
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "vocab_size",
            "num_target_layers",
            "target_hidden_size",
            "max_position_embeddings",
        ]:
            value = getattr(self, name)
            if not _is_int(value) or value < 1:
                raise ValueError(f"{name}={value!r}: must be a positive integer")
        if not isinstance(self.block_size, int) or self.num_drafts < 1:
            raise ValueError(
                f"block_size={self.block_size!r}: must be at least {1 + self.first_slot} "
                "(one drafted token" + (")" if self.sample_from_anchor else " and the anchor)")
            )
        self._validate_switches_and_numbers()
        self._validate_markov()
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads}: must be a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}"
            )
        if not self.target_layer_ids:
            raise ValueError("target_layer_ids=[]: at least one tapped layer is needed")
        for tap in self.target_layer_ids:
            if not _is_int(tap) or not 0 <= tap < self.num_target_layers:
                raise ValueError(
                    f"target_layer_ids={self.target_layer_ids}: {tap!r} is not a decoder layer of "
                    "the target, which has "
                    f"{self.num_target_layers} (ids 0..{self.num_target_layers - 1}; id k is the "
                    "output of layer k)"
                )
        if len(set(self.target_layer_ids)) != len(self.target_layer_ids):
            raise ValueError(f"target_layer_ids={self.target_layer_ids}: an id appears twice")
        if not isinstance(self.mask_token_id, int) or not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(
                f"mask_token_id={self.mask_token_id!r}: outside the target's vocabulary of "
                f"{self.vocab_size}; "
                "choose an id that has a row in the target's embedding"
            )
        assert self.layer_types is not None
        if len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"layer_types has {len(self.layer_types)} entries: must have "
                f"num_hidden_layers={self.num_hidden_layers}"
            )
        for kind in self.layer_types:
            if kind not in LAYER_TYPES:
                raise ValueError(f"layer_types has {kind!r}: must be one of {LAYER_TYPES}")
        window = self.sliding_window
        if window is not None and (not _is_int(window) or window < 0):
            raise ValueError(f"sliding_window={window!r}: must be a positive integer, or null for none")
        if "sliding_attention" in self.layer_types and not self.sliding_window:
            raise ValueError(
                f"sliding_window={self.sliding_window!r}: layer_types has sliding layers, so a size is needed"
            )
        if self.rotary_dim < 2 or self.rotary_dim > int(self.head_dim or 0):
            raise ValueError(
                f"partial_rotary_factor gives {self.rotary_dim} rotated dimensions of "
                f"head_dim={self.head_dim}"
            )
        if self.draft_vocab_size is not None and not 1 <= self.draft_vocab_size <= self.vocab_size:
            raise ValueError(
                f"draft_vocab_size={self.draft_vocab_size}: must be in 1..vocab_size={self.vocab_size}"
            )
        if self.carryover_config is not None:
            self.carryover_config.check()

    def _validate_switches_and_numbers(self) -> None:
        """A text in the place of a switch would count as true, in the place of a number fail in a kernel."""
        for name in (
            "causal",
            "tie_word_embeddings",
            "sample_from_anchor",
            "enable_confidence_head",
            "confidence_head_with_markov",
        ):
            value = getattr(self, name)
            if not isinstance(value, bool) and not (name == "causal" and value is None):
                raise ValueError(f"{name}={value!r}: must be true or false")
        for name in ("rms_norm_eps", "rope_theta", "input_embedding_scale", "final_logit_softcapping"):
            value, null = getattr(self, name), name in ("input_embedding_scale", "final_logit_softcapping")
            if null and value is None:
                continue
            no_cap = name == "final_logit_softcapping" and value == 0
            if not _is_number(value) or not (0 < value < float("inf") or no_cap):
                raise ValueError(f"{name}={value!r}: must be a positive number{' or null' * null}")
        factor = self._rotary_factor
        if not _is_number(factor) or not 0 <= factor < float("inf"):
            raise ValueError(f"partial_rotary_factor={factor!r}: must be a number in 0..1")

    def _validate_markov(self) -> None:
        rank = self.markov_rank
        if not _is_int(rank) or rank < 0:
            raise ValueError(f"markov_rank={rank!r}: must be a positive integer, or 0 for no Markov head")
        if self.markov_head_type not in MARKOV_HEAD_TYPES:
            raise ValueError(
                f"markov_head_type={self.markov_head_type!r}: must be one of {', '.join(MARKOV_HEAD_TYPES)}"
            )
        if self.enable_confidence_head and self.confidence_head_with_markov and rank == 0:
            raise ValueError("confidence_head_with_markov=True: needs a Markov head, but markov_rank=0")

    # -- files -------------------------------------------------------------------------------------
    @classmethod
    def from_dict(cls, values: dict[str, Any], source: str = "config") -> DrafterConfig:
        """Build from the layout of config.json. ``source`` names the file in errors.

        Raises ValueError for an unknown key, a missing key, or a value that the drafter does not implement.
        """
        values = dict(values)
        kwargs: dict[str, Any] = {}
        extra: dict[str, Any] = {}
        nested = values.pop("dflash_config", None) or {}
        for key, value in nested.items():
            if key not in DFLASH_KEYS:
                raise ValueError(
                    f"{source}: unknown key dflash_config.{key} (known: {', '.join(sorted(DFLASH_KEYS))})"
                )
            kwargs[key] = value
        carry = values.pop("carryover_config", None)
        if carry is not None:
            kwargs["carryover_config"] = CarryoverConfig.from_dict(carry, source)
        if values.get("rope_scaling"):
            scaling = dict(values["rope_scaling"])
            scaling.setdefault("rope_type", scaling.pop("type", "default"))
            values.setdefault("rope_parameters", {**scaling, "rope_theta": values.get("rope_theta", 10000.0)})
        values.pop("rope_scaling", None)
        if "is_causal" in values:
            kwargs.setdefault("causal", values.pop("is_causal"))
        fields = {f.name for f in dataclasses.fields(cls)} - {"extra", "carryover_config"}
        for key, value in values.items():
            if key in FIXED_KEYS:
                if value not in FIXED_KEYS[key]:
                    raise ValueError(
                        f"{source}: {key}={value!r} is not implemented: must be {FIXED_KEYS[key][0]!r}"
                    )
                extra[key] = value
            elif key in fields:
                kwargs.setdefault(key, value)
            elif key in IGNORED_KEYS:
                extra[key] = value
            else:
                raise ValueError(f"{source}: unknown key {key!r}; remove it, or correct its spelling")
        if DSPARK in kwargs.get("architectures", ()):
            kwargs.setdefault("sample_from_anchor", True)
        rope = kwargs.get("rope_parameters")
        if rope and "rope_theta" in rope:
            kwargs["rope_theta"] = float(rope["rope_theta"])
        if "layer_types" not in kwargs and values.get("use_sliding_window") and values.get("sliding_window"):
            kwargs["layer_types"] = _layer_types(values, source)
        missing = [
            f.name
            for f in dataclasses.fields(cls)
            if f.default is dataclasses.MISSING
            and f.default_factory is dataclasses.MISSING
            and f.name not in kwargs
        ]
        if missing:
            raise ValueError(f"{source}: missing {', '.join(missing)}")
        return cls(extra=extra, **kwargs)

    def to_dict(self) -> dict[str, Any]:
        """The layout of config.json: the inverse of :meth:`from_dict`."""
        dspark = DSPARK in self.architectures
        nested_names = {"causal", "input_embedding_scale", "final_logit_softcapping"}
        if not dspark:
            nested_names |= {"mask_token_id", "target_layer_ids", "sample_from_anchor"}
        out: dict[str, Any] = {}
        nested: dict[str, Any] = {}
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if f.name in ("extra", "carryover_config") or value is None:
                continue
            if f.name in DSPARK_KEYS and not dspark and value == f.default:
                continue  # says nothing in a DFlash config
            (nested if f.name in nested_names else out)[f.name] = value
        out.update(self.extra)
        if nested:
            out["dflash_config"] = nested
        if self.carryover_config is not None:
            out["carryover_config"] = dataclasses.asdict(self.carryover_config)
        return out

    @classmethod
    def from_pretrained(cls, directory: str | Path) -> DrafterConfig:
        """Read ``config.json`` of a checkpoint folder."""
        path = Path(directory) / "config.json"
        if not path.is_file():
            raise FileNotFoundError(
                f"directory={str(directory)!r}: no config.json in it; give a drafter checkpoint folder"
            )
        try:
            values = json.loads(path.read_text())
        except ValueError as error:
            raise ValueError(f"{path}: not valid JSON ({error}); fetch the file again") from error
        return cls.from_dict(values, str(path))

    def save_pretrained(self, directory: str | Path) -> None:
        """Write ``config.json`` into a folder, which is made when absent."""
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.to_dict(), indent=2) + "\n")
