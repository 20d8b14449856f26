"""The DFlash drafter against a plain recomputation; checkpoints, training path, compile and export."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tiny import (
    Steered,
    drafter_config,
    oracle_logits,
    plain,
    prompts,
    randomize,
    replay,
    tiny_drafter,
    tiny_target,
)
from torch import Tensor

from carryover_ext import ops
from carryover_ext.config import CarryoverConfig
from carryover_ext.drafters import DFlashDrafter
from carryover_ext.drafters.checkpoint import read_tensors
from carryover_ext.engine import generate
from carryover_ext.targets import TappedTarget


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def bound(dtype: torch.dtype = torch.float32, **changes) -> DFlashDrafter:
    target = tiny_target()
    drafter = tiny_drafter(target, **changes).to(dtype)
    drafter.bind(target.get_input_embeddings().weight, target.lm_head.weight)
    return drafter


VARIANTS: dict[str, dict] = {
    "base": {},
    "mha": {"num_key_value_heads": 4},
    "mqa": {"num_key_value_heads": 1},
    "wide-heads": {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32},
    "one-layer": {"num_hidden_layers": 1},
    "three-layers": {"num_hidden_layers": 3},
    "three-taps": {"target_layer_ids": [3, 0, 2]},
    "causal": {"causal": True},
    "window": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4},
    "window-open": {"layer_types": ["sliding_attention"] * 2, "sliding_window": 7, "causal": False},
    "half-rotary": {"partial_rotary_factor": 0.5},
    "theta": {"rope_theta": 100.0},
    "post-norm": {"carryover_config": CarryoverConfig(True, "post_norm")},
    "shifted": {"carryover_config": CarryoverConfig(True, "pre_norm", "shifted")},
    "shifted-post": {"carryover_config": CarryoverConfig(True, "post_norm", "shifted")},
    "no-carryover": {"carryover_config": None},
    "reduced-head": {"draft_vocab_size": 9},
    "mask-embedding": {"mask_embedding": True},
    "block-2": {"block_size": 2},
    "block-9": {"block_size": 9},
}


@pytest.mark.parametrize("variant", sorted(VARIANTS))
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("page", [None, 4])
def test_every_draft_equals_a_plain_recomputation(variant: str, batch: int, page: int | None) -> None:
    target, inputs = tiny_target(), prompts(*(3, 9, 14)[:batch])
    new = [15, 7, 19][:batch]
    truth = [plain(target, p, n + 10)[0] for p, n in zip(inputs, new, strict=True)]
    drafter = tiny_drafter(target, Steered, **VARIANTS[variant])
    block = drafter.config.block_size
    drafter.start(truth, [p.numel() for p in inputs], lambda i, r: (i + (3 if block > 3 else 1) * r) % block)
    with TappedTarget(target, drafter.config.target_layer_ids) as tapped:
        out = generate(tapped, drafter, inputs, max_new_tokens=new, page_size=page, stop_token_ids=[])
        equal, total, carried = replay(drafter, tapped)
    assert out.tokens == [t[:n] for t, n in zip(truth, new, strict=True)]
    assert equal == total > 5
    assert (carried > 0) == (variant != "no-carryover")
    assert len({m for r in out.rounds[1:] for m in r.num_accepted}) > (1 if block == 2 else 2)


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gemma3"])
def test_every_draft_equals_a_plain_recomputation_on_other_targets(family: str) -> None:
    target, inputs = tiny_target(family), prompts(4, 11)
    truth = [plain(target, p, 24)[0] for p in inputs]
    drafter = tiny_drafter(target, Steered).start(truth, [4, 11], lambda i, r: (i + r) % 5)
    with TappedTarget(target, drafter.config.target_layer_ids) as tapped:
        generate(tapped, drafter, inputs, max_new_tokens=14, stop_token_ids=[])
        equal, total, carried = replay(drafter, tapped)
    assert equal == total > 10 and carried > 0


def test_the_comparison_notices_a_missing_segment() -> None:
    """Negative control: the oracle with the segment disagrees with an engine that leaves it out."""
    target, inputs = tiny_target(), prompts(6)
    truth = [plain(target, inputs[0], 40)[0]]

    class Silent(Steered):
        def commit(self, cache, features, positions, row_start, num_accepted, carry=True):
            super().commit(cache, features, positions, row_start, num_accepted, carry)
            cache.segment_lens.zero_()

        def draft(self, cache, anchor, **options):
            lens = cache.segment_lens
            drafts = super().draft(cache, anchor, **options)
            rows = [e for k, e in self.log if k == "commit"][-1]
            kept = (rows[1].diff() - 1 - rows[2]).to(torch.int32)
            self.log[-1][1][3][1].copy_(kept if len(self.log) > 2 else lens)
            return drafts

    drafter = tiny_drafter(target, Silent).start(truth, [6], lambda i, r: r % 3)
    with TappedTarget(target, drafter.config.target_layer_ids) as tapped:
        generate(tapped, drafter, inputs, max_new_tokens=24, stop_token_ids=[])
        equal, total, _ = replay(drafter, tapped)
    assert equal < total


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=["f32", "bf16", "f64"])
@pytest.mark.parametrize("variant", ["base", "window", "post-norm", "half-rotary"])
def test_probabilities_are_close_to_float64(dtype: torch.dtype, variant: str) -> None:
    drafter = bound(dtype, **VARIANTS[variant])
    rows = torch.randn(12, 64, generator=torch.Generator().manual_seed(1))
    cache = drafter.new_cache(1, 30)
    drafter.commit(cache, rows[:7], None, int32(0, 7), int32(6))
    drafter.commit(cache, rows[7:], None, int32(0, 5), int32(1))
    got = drafter.draft(cache, torch.tensor([4]), temperature=1.0).probs[0]
    target = tiny_target()
    exact = DFlashDrafter(drafter.config).double()
    exact.load_state_dict({k: v.double() for k, v in drafter.state_dict().items()})
    head, embed = target.lm_head.weight.to(dtype), target.get_input_embeddings().weight.to(dtype)
    features = rows.to(dtype)
    logits = oracle_logits(exact, embed, head, features[:9], features[9:], 4, 4)
    bound_ = {torch.float32: 2e-4, torch.bfloat16: 0.12, torch.float64: 2e-6}[dtype]
    assert float((got.double() - logits.softmax(-1)).detach().abs().max()) < bound_


# -- checkpoints -------------------------------------------------------------------------------------

Z_LAB_NAMES = {
    "fc.weight",
    "hidden_norm.weight",
    "norm.weight",
    *(f"layers.{i}.{n}.weight" for i in range(2) for n in ("input_layernorm", "post_attention_layernorm")),
    *(
        f"layers.{i}.self_attn.{n}.weight"
        for i in range(2)
        for n in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
    ),
    *(f"layers.{i}.mlp.{n}.weight" for i in range(2) for n in ("gate_proj", "up_proj", "down_proj")),
}


@pytest.mark.parametrize("variant", ["base", "no-carryover", "reduced-head", "mask-embedding"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_save_and_load(tmp_path: Path, variant: str, dtype: torch.dtype) -> None:
    one = tiny_drafter(tiny_target(), **VARIANTS[variant]).to(dtype)
    one.save_pretrained(tmp_path)
    modes = {path.name: path.stat().st_mode for path in tmp_path.iterdir()}
    assert modes["model.safetensors"] == modes["config.json"]
    two = DFlashDrafter.from_pretrained(tmp_path, dtype)
    extra = {"base": {"carryover_embedding"}, "no-carryover": set()}
    extra["reduced-head"] = {"carryover_embedding", "d2t"}
    extra["mask-embedding"] = {"carryover_embedding", "mask_embedding"}
    assert set(two.state_dict()) == Z_LAB_NAMES | extra[variant]
    assert two.config == one.config and not two.training and two.dtype == dtype
    assert all(torch.equal(a, two.state_dict()[k]) for k, a in one.state_dict().items())
    assert not list(tmp_path.glob(".*"))


def _rewrite(folder: Path, change) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_load_accepts_copies_of_the_target_matrices_and_shards(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tiny_drafter(tiny_target()).save_pretrained(tmp_path)
    _rewrite(
        tmp_path, lambda t: t.update({"embed_tokens.weight": torch.zeros(2), "lm_head.weight": torch.ones(2)})
    )
    DFlashDrafter.from_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    names = sorted(tensors)
    (tmp_path / "model.safetensors").unlink()
    where = {}
    for i, part in enumerate((names[:5], names[5:])):
        save_file({n: tensors[n] for n in part}, tmp_path / f"part{i}.safetensors")
        where.update(dict.fromkeys(part, f"part{i}.safetensors"))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    DFlashDrafter.from_pretrained(tmp_path)
    (tmp_path / "part1.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"no part1\.safetensors"):
        DFlashDrafter.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (lambda p: (p / "model.safetensors").unlink(), FileNotFoundError, r"no model\.safetensors"),
        (lambda p: (p / "model.safetensors").write_bytes(b"nonsense"), ValueError, "corrupt or incomplete"),
        (
            lambda p: (p / "model.safetensors").write_bytes((p / "model.safetensors").read_bytes()[:-100]),
            ValueError,
            "corrupt or incomplete",
        ),
        (lambda p: (p / "config.json").unlink(), FileNotFoundError, r"no config\.json"),
        (lambda p: _rewrite(p, lambda t: t.pop("fc.weight")), ValueError, r"missing \['fc.weight'\]"),
        (
            lambda p: _rewrite(p, lambda t: t.pop("carryover_embedding")),
            ValueError,
            r"missing \['carryover_embedding'\]",
        ),
        (
            lambda p: _rewrite(p, lambda t: t.update({"extra.weight": torch.zeros(1)})),
            ValueError,
            r"unexpected \['extra.weight'\]",
        ),
        (
            lambda p: _rewrite(p, lambda t: t.update({"norm.weight": torch.zeros(7)})),
            ValueError,
            r"tensor norm.weight is \(7,\), config.json says \(32,\)",
        ),
    ],
)
def test_damaged_checkpoint(tmp_path: Path, damage, error, message: str) -> None:
    tiny_drafter(tiny_target()).save_pretrained(tmp_path)
    damage(tmp_path)
    with pytest.raises(error, match=message):
        DFlashDrafter.from_pretrained(tmp_path)


@pytest.mark.parametrize("ids", [[0, 0, 1], [2, 1, 3], [0, 5, 24], [-1, 2, 3]])
def test_bad_draft_vocabulary(tmp_path: Path, ids: list[int]) -> None:
    drafter = tiny_drafter(tiny_target(), draft_vocab_size=3)
    drafter.d2t.copy_(torch.tensor(ids))
    drafter.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="strictly"):
        DFlashDrafter.from_pretrained(tmp_path)


# -- binding -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"embed": torch.zeros(24, 16)},
            r"embed_tokens_weight is \(24, 16\): the drafter has target_hidden_size=32",
        ),
        ({"head": torch.zeros(24, 16)}, "lm_head_weight is"),
        ({"embed": torch.zeros(25, 32)}, "embed_tokens_weight has 25 rows: the drafter has vocab_size=24"),
        ({"head": torch.zeros(23, 32)}, "lm_head_weight has 23 rows"),
        ({"embed": torch.zeros(24)}, "embed_tokens_weight is"),
        ({"num_layers": 6}, "num_layers=6: the drafter was made for a target of num_target_layers=4"),
        ({"hidden_size": 64}, "hidden_size=64"),
        ({"tap_ids": [2, 1]}, r"tap_ids=\[2, 1\]: the drafter was trained on taps \[1, 2\]"),
    ],
)
def test_bind_refuses_another_target(options: dict, message: str) -> None:
    drafter = tiny_drafter(tiny_target())
    embed, head = (options.pop(n, torch.zeros(24, 32)) for n in ("embed", "head"))
    with pytest.raises(ValueError, match=message):
        drafter.bind(embed, head, **options)


def test_draft_needs_a_target() -> None:
    drafter = tiny_drafter(tiny_target())
    with pytest.raises(RuntimeError, match=r"call drafter\.bind"):
        drafter.draft(drafter.new_cache(1, 8), torch.tensor([0]))


@pytest.mark.parametrize("count", [0, 5, 9])
def test_block_longer_than_trained(count: int) -> None:
    drafter = bound()
    with pytest.raises(ValueError, match=rf"block_size={count + 1}: must be in 2\.\.5"):
        drafter.draft(drafter.new_cache(1, 20), torch.tensor([0]), num_drafts=count)


@pytest.mark.parametrize("width", [32, 65])
def test_features_of_another_width(width: int) -> None:
    drafter = bound()
    with pytest.raises(ValueError, match=r"must be \[rows, 64\]"):
        drafter.commit(drafter.new_cache(1, 8), torch.zeros(3, width), None, int32(0, 3), int32(2))


def test_reduced_head_proposes_only_its_tokens() -> None:
    drafter = bound(draft_vocab_size=6)
    cache = drafter.new_cache(4, 20)
    drafter.commit(cache, torch.randn(12, 64), None, int32(0, 3, 6, 9, 12), int32(2, 2, 2, 2))
    for temperature in (0.0, 1.0):
        drafts = drafter.draft(cache, torch.tensor([0, 1, 2, 3]), temperature=temperature)
        assert torch.isin(drafts.tokens, drafter.d2t).all()
    outside = torch.ones(24, dtype=torch.bool)
    outside[drafter.d2t] = False
    assert drafts.probs[..., outside].abs().max() == 0
    torch.testing.assert_close(drafts.probs.sum(-1), torch.ones(4, 4))


# -- packed weights and training ----------------------------------------------------------------------


def probabilities(drafter: DFlashDrafter) -> Tensor:
    cache = drafter.new_cache(1, 20)
    rows = torch.randn(8, 64, generator=torch.Generator().manual_seed(2)).to(drafter.dtype)
    drafter.commit(cache, rows[:3], None, int32(0, 3), int32(2))
    drafter.commit(cache, rows[3:], None, int32(0, 5), int32(1))
    return drafter.draft(cache, torch.tensor([2]), temperature=1.0).probs


@pytest.mark.parametrize(
    "name", [*sorted(Z_LAB_NAMES - {"layers.1.self_attn.q_norm.weight"}), "carryover_embedding"]
)
def test_packed_weights_follow_the_parameters(name: str) -> None:
    drafter = bound()
    with torch.no_grad():
        before = probabilities(drafter)
        assert torch.equal(before, probabilities(drafter))
        drafter.get_parameter(name).mul_(1.5).add_(0.05)
        after = probabilities(drafter)
    fresh = DFlashDrafter(drafter.config)
    fresh.load_state_dict(drafter.state_dict())
    fresh.bind(drafter._embed, drafter._head)
    assert not torch.equal(before, after)
    with torch.no_grad():
        assert torch.equal(after, probabilities(fresh))


def test_packed_weights_follow_loading_and_dtype() -> None:
    drafter = bound()
    before = probabilities(drafter)
    other = DFlashDrafter(drafter.config)
    randomize(other, 99)
    drafter.load_state_dict(other.state_dict())
    assert not torch.equal(before, probabilities(drafter))
    drafter.to(torch.bfloat16)
    drafter.bind(drafter._embed, drafter._head)
    assert probabilities(drafter).dtype == torch.float32 and drafter.pack().kv[0].dtype == torch.bfloat16


@pytest.mark.parametrize("at", ["pre_norm", "post_norm"])
@pytest.mark.parametrize("page", [4, None])
def test_training_forward_is_the_drafting_forward(at: str, page: int | None) -> None:
    drafter = bound(
        carryover_config=CarryoverConfig(True, at),
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=5,
    )
    rows = torch.randn(12, 64, generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        cache = drafter.new_cache(1, 12, page)
        drafter.commit(cache, rows[:7], None, int32(0, 7), int32(6))
        drafter.commit(cache, rows[7:], None, int32(0, 5), int32(1))
        expected = drafter.draft(cache, torch.tensor([2]), temperature=1.0).probs
    drafter.train()
    weights = drafter.kv_weights(drafter.rotary(32))
    k, v = ops.project_kv(rows[:9], torch.arange(9, dtype=torch.int32), *weights, eps=1e-5, carry_embed_at=at)
    carried = torch.ones(3, dtype=torch.bool)
    where = torch.arange(9, 12, dtype=torch.int32)
    ks, vs = ops.project_kv(rows[9:], where, *weights, carried, eps=1e-5, carry_embed_at=at)
    x = drafter.block_embeddings(torch.tensor([2]), 5)
    if page is None:
        k, v = k[:, None], v[:, None]
        table = None
    else:
        pad = (0, 0, 0, 0, 0, 3)
        k, v = (torch.nn.functional.pad(t, pad).unflatten(1, (3, 4)) for t in (k, v))
        table = int32(0, 1, 2)[None]
    hidden = drafter.hidden(x, k, v, int32(9), ks[:, None], vs[:, None], int32(3), block_table=table)
    probs = torch.softmax(hidden[:, 1:] @ drafter._head.T, -1)
    torch.testing.assert_close(probs, expected, rtol=1e-4, atol=1e-5)
    probs[..., 3].sum().backward()
    for name, p in drafter.named_parameters():
        assert p.grad is not None and float(p.grad.abs().max()) > 0, name


def test_decoding_leaves_the_drafter_trainable() -> None:
    """Tables made in inference mode must not end up in the graph."""
    target = tiny_target()
    drafter = tiny_drafter(target)
    generate(target, drafter, prompts(5), max_new_tokens=6, stop_token_ids=[])
    drafter.train()
    weights = drafter.kv_weights(drafter.rotary(16))
    k, v = ops.project_kv(torch.randn(4, 64), torch.arange(4, dtype=torch.int32), *weights, eps=1e-5)
    hidden = drafter.hidden(drafter.block_embeddings(torch.tensor([1]), 5), k[:, None], v[:, None], int32(4))
    (hidden @ drafter._head.T).sum().backward()
    assert drafter.fc.weight.grad is not None


def test_zero_embedding_makes_rejected_rows_plain_context() -> None:
    drafter = bound(num_hidden_layers=1, causal=False)
    with torch.no_grad():
        drafter.carryover_embedding.zero_()
    weights = drafter.kv_weights(drafter.rotary(16))
    rows, where = torch.randn(4, 64), torch.arange(4, dtype=torch.int32)
    plain_kv = ops.project_kv(rows, where, *weights, eps=1e-5)
    carried = ops.project_kv(rows, where, *weights, torch.ones(4, dtype=torch.bool), eps=1e-5)
    assert all(torch.equal(a, b) for a, b in zip(plain_kv, carried, strict=True))


# -- compile and export -------------------------------------------------------------------------------


class Step(torch.nn.Module):
    """Commit the rows of a round and draft the next block, on static shapes."""

    def __init__(self, drafter: DFlashDrafter, batch: int) -> None:
        super().__init__()
        self.drafter = drafter
        self.cache = drafter.new_cache(batch, 32)
        for name in ("k", "v", "k_segment", "v_segment", "lens", "segment_lens", "cos_sin"):
            self.register_buffer(name, getattr(self.cache, name))
        start = torch.arange(0, batch * 5 + 1, 5, dtype=torch.int32)
        self.register_buffer("row_start", start)

    def forward(self, features: Tensor, num_accepted: Tensor, anchor: Tensor) -> Tensor:
        for name in ("k", "v", "k_segment", "v_segment", "lens", "segment_lens", "cos_sin"):
            setattr(self.cache, name, getattr(self, name))
        self.drafter.commit(self.cache, features, None, self.row_start, num_accepted)
        return self.drafter.draft(self.cache, anchor).tokens


def steps(count: int = 3, batch: int = 2) -> list[tuple[Tensor, Tensor, Tensor]]:
    g = torch.Generator().manual_seed(4)
    return [
        (
            torch.randn(batch * 5, 64, generator=g),
            torch.randint(0, 5, (batch,), generator=g).to(torch.int32),
            torch.randint(0, 24, (batch,), generator=g),
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize("variant", ["base", "window", "shifted", "reduced-head"])
def test_compile_fullgraph(variant: str) -> None:
    drafter = bound(**VARIANTS[variant])
    drafter.requires_grad_(False)
    drafter.pack()
    with torch.no_grad():
        eager, traced = Step(drafter, 2), Step(drafter, 2)
        compiled = torch.compile(traced, fullgraph=True, backend="aot_eager")
        for inputs in steps():
            assert torch.equal(eager(*inputs), compiled(*inputs))
        assert torch.equal(eager.lens, traced.lens) and torch.equal(eager.segment_lens, traced.segment_lens)
        torch.testing.assert_close(eager.k, traced.k)


def test_compile_with_inductor() -> None:
    drafter = bound(num_hidden_layers=1)
    drafter.requires_grad_(False)
    drafter.pack()
    with torch.no_grad():
        eager, traced = Step(drafter, 1), Step(drafter, 1)
        compiled = torch.compile(traced, fullgraph=True)
        for inputs in steps(batch=1):
            assert torch.equal(eager(*inputs), compiled(*inputs))


@pytest.mark.parametrize("variant", ["base", "window", "shifted"])
def test_export(variant: str) -> None:
    drafter = bound(**VARIANTS[variant])
    drafter.requires_grad_(False)
    drafter.pack()
    with torch.no_grad():
        eager = Step(drafter, 2)
        program = torch.export.export(Step(drafter, 2), steps(1)[0])
        module = program.module()
        for inputs in steps():
            assert torch.equal(eager(*inputs), module(*inputs))


def test_config_helper_is_complete() -> None:
    assert drafter_config(tiny_target()).num_features == 64


@pytest.mark.parametrize("content", ["", "{", "{}", "[]", '{"weight_map": 3}'])
def test_a_damaged_index_of_shards_is_named(tmp_path, content):
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ValueError, match=r"index\.json: no weight_map in it .*; fetch the file again"):
        read_tensors(tmp_path)
