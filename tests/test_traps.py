"""Faults that users of DFlash-family drafters have met, each with the right value from plain computation."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from tiny import Steered, drafter_config, oracle_logits, plain, prompts, replay, tiny_drafter, tiny_target
from torch import Tensor

from carryover_ext.engine import generate
from carryover_ext.layers import apply_rotary, rotary_table
from carryover_ext.targets import TappedTarget


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


# -- tap ids and the last layer -------------------------------------------------------------------------


@pytest.mark.parametrize("tap", [0, 1, 2, 3])
@torch.no_grad()
def test_tap_k_is_the_output_of_layer_k(tap: int) -> None:
    model, ids = tiny_target(), prompts(8)[0]
    states = model(ids[None], output_hidden_states=True).hidden_states
    with TappedTarget(model, [tap]) as target:
        _, features, _ = target.prefill(target.new_cache(1, 8), [ids])
    if tap < 3:
        torch.testing.assert_close(features, states[tap + 1][0], rtol=1e-4, atol=1e-4)
        assert not torch.allclose(features, states[tap][0], atol=1e-2)
    else:
        # Transformers' last hidden state is normed; the tap is the residual before the norm.
        assert not torch.allclose(features, states[-1][0], atol=1e-2)
        torch.testing.assert_close(model.model.norm(features), states[-1][0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("taps", [[0, 1], [2, 3], [2, 1]])
def test_taps_one_layer_off_or_in_another_order_are_refused(taps: list[int]) -> None:
    model = tiny_target()
    with TappedTarget(model, taps) as target, pytest.raises(ValueError, match="was trained on taps"):
        target.bind(tiny_drafter(model))


# -- layout ---------------------------------------------------------------------------------------------


def test_slot_zero_is_not_a_prediction() -> None:
    """b rows give b - 1 drafts, and the first of them sits one after the anchor."""
    model, ids = tiny_target(), prompts(6)[0]
    drafter = tiny_drafter(model, Steered).start([plain(model, ids, 20)[0]], [6])
    with TappedTarget(model, [1, 2]) as target:
        generate(target, drafter, [ids], max_new_tokens=4, stop_token_ids=[])
        kind, (features, *_) = drafter.log[0]
        anchor, drafts, *_ = next(e for k, e in drafter.log if k == "draft")
        assert (
            kind == "commit" and drafts.tokens.shape[1] == 2
        )  # three tokens are left: an anchor and two drafts
        logits = oracle_logits(
            drafter, target.embed_weight, target.head_weight, features, None, int(anchor), 2
        )
    assert drafts.tokens[0].tolist() == logits.argmax(-1).tolist()


# -- mask token -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("token", [24, 1000, -1])
def test_mask_token_outside_the_vocabulary(token: int) -> None:
    with pytest.raises(ValueError, match=f"mask_token_id={token}: outside the target's vocabulary"):
        drafter_config(tiny_target(), mask_token_id=token)


@pytest.mark.parametrize("learned", [False, True])
def test_mask_rows_use_the_right_embedding(learned: bool) -> None:
    model = tiny_target()
    drafter = tiny_drafter(model, mask_embedding=learned)
    with TappedTarget(model) as target:
        target.bind(drafter)
    x = drafter.block_embeddings(torch.tensor([7, 3]), 5)
    expected = drafter.mask_embedding if learned else model.get_input_embeddings().weight[3]
    assert torch.equal(x[:, 1:], expected.expand(2, 4, -1))
    assert torch.equal(x[0, 0], model.get_input_embeddings().weight[7])


# -- RoPE -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rot", [16, 8, 4])
@pytest.mark.parametrize("theta", [100.0, 1e4])
def test_rope_is_neox_and_partial(rot: int, theta: float) -> None:
    config = drafter_config(tiny_target(), partial_rotary_factor=rot / 16, rope_theta=theta)
    x, where = torch.randn(5, 3, 16), torch.tensor([0, 1, 2, 30, 200])
    got = apply_rotary(x, rotary_table(config, 201)[where])
    for n, p in enumerate(where.tolist()):
        for i in range(rot // 2):
            angle = torch.tensor(p * theta ** (-2 * i / rot), dtype=torch.float64)
            a, b = x[n, :, i].double(), x[n, :, i + rot // 2].double()
            torch.testing.assert_close(
                got[n, :, i].double(), a * angle.cos() - b * angle.sin(), rtol=1e-4, atol=1e-5
            )
            torch.testing.assert_close(
                got[n, :, i + rot // 2].double(), b * angle.cos() + a * angle.sin(), rtol=1e-4, atol=1e-5
            )
    assert torch.equal(got[..., rot:], x[..., rot:])
    interleaved = torch.stack([x[1, :, 0], x[1, :, 1]])
    assert not torch.allclose(got[1, :, :2].T, interleaved, atol=1e-3)


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 4.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    ],
    ids=lambda s: s["rope_type"],
)
def test_rope_scaling_is_that_of_transformers(scaling: dict[str, Any]) -> None:
    from transformers import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    rope = {"rope_theta": 1e4, **scaling}
    config = drafter_config(tiny_target(), rope_parameters=rope)
    shim = Qwen3Config(
        hidden_size=32, num_attention_heads=4, head_dim=16, max_position_embeddings=256, rope_parameters=rope
    )
    where = torch.arange(256)
    cos, sin = Qwen3RotaryEmbedding(shim)(torch.zeros(1, 1), where[None])
    table = rotary_table(config, 256)
    torch.testing.assert_close(table[:, :8], cos[0, :, :8], rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(table[:, 8:], sin[0, :, :8], rtol=1e-4, atol=2e-5)


def test_unknown_rope_type() -> None:
    config = drafter_config(tiny_target(), rope_parameters={"rope_type": "spiral"})
    with pytest.raises(ValueError, match="rope_type='spiral'"):
        rotary_table(config, 4)


# -- windows --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [None, False])
def test_sliding_layers_slide(causal: bool | None) -> None:
    """A row out of the window of every query has no influence; one inside it has. Full layers see both."""
    model = tiny_target()
    for kinds, sees in ((["sliding_attention"] * 2, False), (["full_attention"] * 2, True)):
        drafter = tiny_drafter(model, layer_types=kinds, sliding_window=4, causal=causal)
        with TappedTarget(model) as target:
            target.bind(drafter)
        rows = torch.randn(12, 64)

        def draft(x: Tensor, drafter: Any = drafter) -> Tensor:
            cache = drafter.new_cache(1, 20)
            drafter.commit(cache, x, None, int32(0, 12), int32(11))
            return drafter.draft(cache, torch.tensor([1]), temperature=1.0).probs

        far, near = rows.clone(), rows.clone()
        far[:9] += 1.0  # query t at 12 sees keys above 12 - 4
        near[11] += 1.0
        assert torch.equal(draft(rows), draft(far)) != sees
        assert not torch.equal(draft(rows), draft(near))


# -- shapes ---------------------------------------------------------------------------------------------


def test_feature_width_may_differ_from_the_hidden_size() -> None:
    config = drafter_config(tiny_target(), target_hidden_size=48)
    assert config.num_features == 96 and config.hidden_size == 32


@pytest.mark.parametrize(("heads", "kv"), [(4, 1), (2, 2), (8, 2)])
def test_gqa_of_the_drafter_may_differ(heads: int, kv: int) -> None:
    model, ids = tiny_target(), prompts(7)
    changes = {"num_attention_heads": heads, "num_key_value_heads": kv, "head_dim": 8}
    drafter = tiny_drafter(model, Steered, **changes).start(
        [plain(model, ids[0], 30)[0]], [7], lambda i, r: r % 4
    )
    with TappedTarget(model, [1, 2]) as target:
        generate(target, drafter, ids, max_new_tokens=14, stop_token_ids=[])
        equal, total, _ = replay(drafter, target)
    assert equal == total > 0


# -- Gemma ----------------------------------------------------------------------------------------------


def test_gemma_scale_and_soft_cap_reach_the_drafter() -> None:
    model = tiny_target("gemma2")
    drafter = tiny_drafter(model)
    with TappedTarget(model) as target:
        target.bind(drafter)
        rows = torch.randn(6, 64)
        cache = drafter.new_cache(1, 20)
        drafter.commit(cache, rows, None, int32(0, 6), int32(5))
        got = drafter.draft(cache, torch.tensor([5]), temperature=1.0).probs[0].double()
        logits = oracle_logits(
            drafter, target.embed_weight, target.head_weight, rows, None, 5, 4, embed_scale=32**0.5
        )
    capped = 3.0 * torch.tanh(logits / 3.0)
    torch.testing.assert_close(got, capped.softmax(-1).detach(), rtol=1e-3, atol=1e-5)
    assert not torch.allclose(got, logits.softmax(-1), atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gemma_scale_is_rounded_as_the_model_rounds_it(dtype: torch.dtype) -> None:
    drafter = tiny_drafter(tiny_target()).to(dtype)
    table = torch.randn(24, 32).to(dtype)
    drafter.bind(table, table, embed_scale=32**0.5)
    expected = table[4] * torch.tensor(32**0.5).to(dtype)
    assert torch.equal(drafter.block_embeddings(torch.tensor([4]), 2)[0, 0], expected)


# -- fallback, padding, AL ------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafting_really_happens(temperature: float) -> None:
    model, ids = tiny_target(), prompts(5, 9)
    drafter = tiny_drafter(model)
    out = generate(model, drafter, ids, max_new_tokens=20, temperature=temperature, seed=1, stop_token_ids=[])
    left = [19, 19]
    for r in out.rounds[1:]:
        assert r.num_drafted == [max(min(5, n) - 1, 0) for n in left]
        left = [n - new for n, new in zip(left, r.committed, strict=True)]
    assert out.num_carried > 0


def test_acceptance_length_counts_the_bonus_and_is_micro_averaged() -> None:
    model, ids = tiny_target(), prompts(5, 9)
    truth = [plain(model, p, 40)[0] for p in ids]
    drafter = tiny_drafter(model, Steered).start(truth, [5, 9], lambda i, r: 4 if i == 0 else 0)
    out = generate(model, drafter, ids, max_new_tokens=[26, 11], stop_token_ids=[])
    # Request 0: 25 tokens in 5 rounds; request 1: 10 tokens in 10 rounds; the prefill's token is in neither.
    assert out.num_verifications == 15 and out.acceptance_length == 35 / 15


def test_padding_rows_of_a_ragged_prefill_never_reach_the_drafter() -> None:
    model = tiny_target()
    alone, together = prompts(4), [prompts(4)[0], *prompts(20, seed=8)]
    logs = []
    for inputs in (alone, together):
        drafter = tiny_drafter(model, Steered).start([[0] * 40] * 2, [4, 20])
        generate(model, drafter, inputs, max_new_tokens=5, stop_token_ids=[])
        features, start, _, _ = drafter.log[0][1]
        assert start.tolist() == torch.tensor([0, *(p.numel() for p in inputs)]).cumsum(0).tolist()
        logs.append(features[:4])
    torch.testing.assert_close(*logs, rtol=1e-4, atol=1e-4)


# -- the real model -------------------------------------------------------------------------------------


@functools.cache
def smollm2() -> Any:
    """SmolLM2 in float32 when its folder is in the cache: tests do not download."""
    from carryover_ext.pretrained import cache_home, load_target

    if not (cache_home() / "targets" / "smollm2-135m" / "config.json").is_file():
        pytest.skip("smollm2-135m is not in the cache; `carryover demo` fetches it")
    return load_target("smollm2-135m", torch.float32)


TEXTS = (
    "Write a Python function that reverses a string.",
    "Name three rivers in Europe and say where they flow.",
)


def smollm2_drafter(cls: type = Steered) -> Any:
    changes = {
        "hidden_size": 576,
        "target_layer_ids": [1, 8, 14, 20, 27],
        "num_target_layers": 30,
        "block_size": 8,
    }
    changes |= {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "draft_vocab_size": 4096}
    model, _ = smollm2()
    return tiny_drafter(model, cls, **changes)


@pytest.mark.parametrize("batch", [1, 2])
def test_smollm2_greedy_is_lossless(batch: int) -> None:
    model, tokenizer = smollm2()
    ids = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": t}], add_generation_prompt=True, return_dict=False
        )
        for t in TEXTS[:batch]
    ]
    base = generate(model, None, ids, max_new_tokens=24, stop_token_ids=[])
    stock = model.generate(torch.tensor(ids[:1]), max_new_tokens=16, do_sample=False, eos_token_id=None)
    assert base.tokens[0][:16] == stock[0, len(ids[0]) :].tolist()
    drafter = smollm2_drafter().start(base.tokens, [len(p) for p in ids], lambda i, r: (2 * i + 3 * r) % 8)
    with TappedTarget(model, drafter.config.target_layer_ids) as target:
        out = generate(target, drafter, ids, max_new_tokens=24, stop_token_ids=[])
        assert out.tokens == base.tokens and out.num_carried > 0 and out.acceptance_length > 2
        equal, total, carried = replay(drafter, target)
    assert equal == total > 0 and carried > 0
