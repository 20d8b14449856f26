"""DrafterConfig: the z-lab layout, its checks, and its errors."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
from transformers import Qwen3Config

from carryover_ext.config import CarryoverConfig, DrafterConfig, default_target_layer_ids

# The keys of a published DFlash checkpoint.
PUBLISHED = {
    "architectures": ["DFlashDraftModel"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "block_size": 16,
    "bos_token_id": 151643,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
    "dtype": "bfloat16",
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 12288,
    "layer_types": ["full_attention"] * 5,
    "max_position_embeddings": 40960,
    "max_window_layers": 5,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 5,
    "num_key_value_heads": 8,
    "num_target_layers": 36,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "transformers_version": "4.57.3",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def changed(**values) -> dict:
    out = copy.deepcopy(PUBLISHED)
    nested = {k: values.pop(k) for k in list(values) if k in ("mask_token_id", "target_layer_ids", "causal")}
    out.update(values)
    out["dflash_config"].update(nested)
    return out


def test_published_config_loads() -> None:
    c = DrafterConfig.from_dict(PUBLISHED)
    assert (c.hidden_size, c.num_hidden_layers, c.head_dim, c.block_size) == (4096, 5, 128, 16)
    assert c.target_layer_ids == [1, 9, 17, 25, 33] and c.mask_token_id == 151669
    assert c.num_features == 5 * 4096 and c.rotary_dim == 128 and c.rope_theta == 1e6
    assert not c.carryover and c.target_hidden_size == 4096
    assert [c.layer_window(i) for i in range(5)] == [0] * 5
    assert not any(c.layer_causal(i) for i in range(5))


@pytest.mark.parametrize("carry", [None, CarryoverConfig(), CarryoverConfig(True, "post_norm", "shifted")])
@pytest.mark.parametrize("vocab", [None, 8192])
def test_round_trip(tmp_path: Path, carry: CarryoverConfig | None, vocab: int | None) -> None:
    c = DrafterConfig.from_dict(changed(causal=False))
    c.carryover_config, c.draft_vocab_size = carry, vocab
    c.save_pretrained(tmp_path)
    again = DrafterConfig.from_pretrained(tmp_path)
    assert again == c and again.to_dict() == c.to_dict()
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["dflash_config"]["mask_token_id"] == 151669 and "extra" not in written
    assert written["auto_map"] == PUBLISHED["auto_map"]
    assert ("carryover_config" in written) == (carry is not None)


@pytest.mark.parametrize("key", sorted(set(PUBLISHED) - {"dflash_config"}))
def test_only_needed_keys_are_required(key: str) -> None:
    values = copy.deepcopy(PUBLISHED)
    del values[key]
    needed = (
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_hidden_layers",
        "num_key_value_heads",
        "num_target_layers",
        "vocab_size",
    )
    if key in needed:
        with pytest.raises(ValueError, match=f"missing {key}"):
            DrafterConfig.from_dict(values)
    elif key == "num_hidden_layers":
        pass
    else:
        DrafterConfig.from_dict(values)


@pytest.mark.parametrize("key", ["mask_token_id", "target_layer_ids"])
def test_missing_dflash_key(key: str) -> None:
    values = copy.deepcopy(PUBLISHED)
    del values["dflash_config"][key]
    with pytest.raises(ValueError, match=f"missing .*{key}"):
        DrafterConfig.from_dict(values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"hidden_sizes": 1}, "unknown key 'hidden_sizes'"),
        ({"carry_embed_at": "pre_norm"}, "unknown key 'carry_embed_at'"),
        ({"attention_bias": True}, "attention_bias=True is not implemented"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"hidden_size": 0}, "hidden_size=0"),
        ({"hidden_size": 4.5}, "hidden_size=4.5"),
        ({"vocab_size": -3}, "vocab_size=-3"),
        ({"num_key_value_heads": 5}, "num_attention_heads=32: must be a multiple of num_key_value_heads=5"),
        ({"block_size": 1}, "block_size=1"),
        ({"block_size": "8"}, "block_size='8'"),
        ({"mask_token_id": 151936}, "mask_token_id=151936: outside the target's vocabulary of 151936"),
        ({"mask_token_id": -1}, "mask_token_id=-1"),
        ({"target_layer_ids": []}, "at least one tapped layer"),
        ({"target_layer_ids": [1, 36]}, r"36 is not a decoder layer of the target, which has 36"),
        ({"target_layer_ids": [-1]}, "-1 is not a decoder layer"),
        ({"target_layer_ids": [3, 3]}, "an id appears twice"),
        ({"target_layer_ids": [1.0]}, "1.0 is not a decoder layer"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries"),
        ({"layer_types": ["chunked"] * 5}, "layer_types has 'chunked'"),
        ({"layer_types": ["sliding_attention"] * 5}, "sliding_window=None"),
        ({"partial_rotary_factor": 0.0}, "gives 0 rotated dimensions"),
        ({"partial_rotary_factor": 2.0}, "gives 256 rotated dimensions of head_dim=128"),
        ({"draft_vocab_size": 0}, "draft_vocab_size=0"),
        ({"draft_vocab_size": 200000}, "draft_vocab_size=200000"),
        ({"carryover_config": {"carry_embed_at": "before"}}, "carry_embed_at='before'"),
        ({"carryover_config": {"carry_positions": "next"}}, "carry_positions='next'"),
        ({"carryover_config": {"enable": True}}, "unknown key carryover_config.enable"),
        ({"max_position_embeddings": None}, "max_position_embeddings=None"),
        ({"causal": "false"}, "causal='false': must be true or false"),
        ({"causal": 0}, "causal=0: must be true or false"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings='no'"),
        ({"sliding_window": -4}, "sliding_window=-4: must be a positive integer"),
        ({"sliding_window": "64"}, "sliding_window='64'"),
        ({"layer_types": ["sliding_attention"] * 5, "sliding_window": -1}, "sliding_window=-1"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps='1e-6': must be a positive number"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps=0.0"),
        ({"rope_theta": "10000"}, "rope_theta='10000'"),
        (
            {"final_logit_softcapping": -30.0},
            "final_logit_softcapping=-30.0: must be a positive number or null",
        ),
        ({"input_embedding_scale": True}, "input_embedding_scale=True"),
        ({"partial_rotary_factor": "0.5"}, "partial_rotary_factor='0.5': must be a number in 0..1"),
        ({"rope_parameters": {"partial_rotary_factor": None}}, "partial_rotary_factor=None"),
    ],
)
def test_bad_value(tmp_path: Path, values: dict, message: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(changed(**values)))
    with pytest.raises(ValueError, match=message):
        DrafterConfig.from_pretrained(tmp_path)


def test_unknown_nested_key_names_the_file(tmp_path: Path) -> None:
    values = copy.deepcopy(PUBLISHED)
    values["dflash_config"]["mask_token"] = "<mask>"
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match=r"config.json: unknown key dflash_config.mask_token"):
        DrafterConfig.from_pretrained(tmp_path)


def test_anchor_layout() -> None:
    values = copy.deepcopy(PUBLISHED)
    values["dflash_config"]["sample_from_anchor"] = True
    config = DrafterConfig.from_dict(values)
    assert (config.num_drafts, config.verify_rows) == (16, 17)
    assert config.to_dict()["dflash_config"]["sample_from_anchor"] is True
    assert DrafterConfig.from_dict(PUBLISHED).verify_rows == 16


def test_missing_and_broken_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        DrafterConfig.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        DrafterConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("causal", "expected"), [(None, [True, False]), (True, [True, True]), (False, [False, False])]
)
def test_causal_inside_the_block(causal: bool | None, expected: list[bool]) -> None:
    kinds = ["sliding_attention", "full_attention"]
    c = DrafterConfig.from_dict(
        changed(num_hidden_layers=2, layer_types=kinds, sliding_window=64, causal=causal)
    )
    assert [c.layer_causal(i) for i in range(2)] == expected
    assert [c.layer_window(i) for i in range(2)] == [64, 0]


@pytest.mark.parametrize(
    ("values", "windows"),
    [
        ({"use_sliding_window": True, "max_window_layers": 3}, [0, 0, 0, 64, 64]),
        ({"use_sliding_window": True, "max_window_layers": 0}, [64] * 5),
        ({"use_sliding_window": True}, [0] * 5),  # 28 full layers
        ({"use_sliding_window": False, "max_window_layers": 3}, [0] * 5),
        (
            {"use_sliding_window": True, "max_window_layers": 3, "layer_types": ["full_attention"] * 5},
            [0] * 5,
        ),
    ],
)
def test_window_layers_without_layer_types_are_those_of_transformers(
    values: dict, windows: list[int]
) -> None:
    config = changed(sliding_window=64)
    del config["layer_types"], config["max_window_layers"], config["use_sliding_window"]
    config |= values
    c = DrafterConfig.from_dict(config)
    assert [c.layer_window(i) for i in range(5)] == windows
    names = ("num_hidden_layers", "sliding_window", *values)
    assert c.layer_types == Qwen3Config(**{name: config[name] for name in names}).layer_types
    assert DrafterConfig.from_dict(c.to_dict()) == c


def test_max_window_layers_must_be_a_number() -> None:
    config = changed(sliding_window=64, use_sliding_window=True, max_window_layers="3")
    del config["layer_types"]
    with pytest.raises(ValueError, match="max_window_layers='3': must be a number of layers"):
        DrafterConfig.from_dict(config)


def test_rope_forms() -> None:
    new = DrafterConfig.from_dict(
        changed(rope_parameters={"rope_theta": 5e5, "rope_type": "default", "partial_rotary_factor": 0.5})
    )
    assert new.rope_theta == 5e5 and new.rotary_dim == 64
    old = DrafterConfig.from_dict(changed(rope_scaling={"type": "linear", "factor": 4.0}))
    assert old.rope_parameters == {"rope_type": "linear", "factor": 4.0, "rope_theta": 1000000}


@pytest.mark.parametrize(
    ("taps", "layers", "expected"),
    [
        (5, 36, [1, 9, 17, 25, 33]),
        (5, 30, [1, 8, 14, 20, 27]),
        (1, 30, [15]),
        (3, 6, [1, 2, 3]),
        (2, 2, [1, 0]),
    ],
)
def test_default_taps(taps: int, layers: int, expected: list[int]) -> None:
    assert default_target_layer_ids(taps, layers) == expected


@pytest.mark.parametrize(("taps", "layers"), [(0, 4), (2, 0)])
def test_default_taps_need_layers(taps: int, layers: int) -> None:
    with pytest.raises(ValueError, match="must be at least 1"):
        default_target_layer_ids(taps, layers)
