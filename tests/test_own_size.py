"""Drafters of half of the target's hidden size, which have an embedding and a head of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_training import TAPS, drafter_config, llama, recorded  # noqa: F401
from tiny import Steered, SteeredMarkov, engine_rounds, plain, prompts, replay, tiny_drafter, tiny_target
from torch import Tensor
from transformers import LlamaForCausalLM

from carryover_ext import engine, ops
from carryover_ext.config import DSPARK, DrafterConfig
from carryover_ext.drafters import DFlashDrafter, MarkovDrafter, load_drafter
from carryover_ext.drafters.checkpoint import EMBED, HEAD
from carryover_ext.export import export_checkpoint
from carryover_ext.targets import TappedTarget
from carryover_ext.training import initial
from carryover_ext.training.commands import load_weights, save_checkpoint
from carryover_ext.training.draft_verify_draft import Head
from carryover_ext.training.drafting import MARKOV_W1
from carryover_ext.training.evaluation import Arm, evaluate_arms
from carryover_ext.training.features import FeatureStore
from carryover_ext.training.target_pass import TargetPass
from carryover_ext.training.trainer import Trainer, TrainSettings

WIDTH, V = 64, 60
HALF: dict[str, Any] = {"hidden_size": 32, "target_hidden_size": WIDTH, "tie_word_embeddings": False}
KINDS: dict[str, dict[str, Any]] = {
    "whole": {},
    "reduced": {"draft_vocab_size": 17},
    "markov": {"markov_rank": 4, "architectures": [DSPARK]},
    "markov-reduced": {"markov_rank": 4, "architectures": [DSPARK], "draft_vocab_size": 17},
}


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    """As in test_training, twice as wide."""
    model = llama(WIDTH, eos_token_id=None)
    for name, p in model.named_parameters():
        if name.endswith("norm.weight"):
            p.mul_(1 + 0.3 * torch.randn_like(p))
    return model


def drafter(kind: str, steered: bool = False, **changes: Any) -> Any:
    """A random drafter for ``tiny_target(hidden=64)``."""
    shape = KINDS[kind] | HALF | changes
    classes = (SteeredMarkov, Steered) if steered else (MarkovDrafter, DFlashDrafter)
    return tiny_drafter(tiny_target(hidden=WIDTH), classes["markov_rank" not in shape], **shape)


def own_weights(drafter: DFlashDrafter) -> tuple[Tensor, Tensor]:
    assert drafter.embed_tokens is not None and drafter.lm_head is not None
    return drafter.embed_tokens.weight, drafter.lm_head.weight


# -- checkpoints and decoding --------------------------------------------------------------------------
@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("bound", [False, True])
def test_a_checkpoint_comes_back(tmp_path: Path, kind: str, bound: bool) -> None:
    one, target = drafter(kind), tiny_target(hidden=WIDTH)
    if bound:
        one.bind(target.get_input_embeddings().weight, target.lm_head.weight)
    one.save_pretrained(tmp_path)
    two = load_drafter(tmp_path, torch.float32)
    assert two.config == one.config and two.config.own_vocabulary
    for name, tensor in one.state_dict().items():
        assert torch.equal(tensor, two.state_dict()[name]), name
    rows = one.config.draft_vocab_size or one.config.vocab_size
    assert [tuple(w.shape) for w in own_weights(two)] == [(24, 32), (rows, 32)]
    assert {EMBED, HEAD} <= load_file(tmp_path / "model.safetensors").keys()


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_draft_equals_a_plain_recomputation(kind: str) -> None:
    """And the output is the target's own, while rows are carried."""
    target, inputs, new = tiny_target(hidden=WIDTH), prompts(3, 9, 14), [15, 7, 19]
    truth = [plain(target, p, n + 10)[0] for p, n in zip(inputs, new, strict=True)]
    one = drafter(kind, steered=True).start(truth, [3, 9, 14], lambda i, r: (i + 3 * r) % 5)
    with TappedTarget(target, [1, 2]) as tapped:
        out = engine.generate(tapped, one, inputs, max_new_tokens=new, stop_token_ids=[])
        equal, total, carried = replay(one, tapped)
    assert out.tokens == [t[:n] for t, n in zip(truth, new, strict=True)]
    assert equal == total > 30 and carried == out.num_carried > 10


def test_the_differentiable_forward_is_the_drafting_forward() -> None:
    """With carried rows. Embedding and head take no gradient."""
    one, target = drafter("reduced"), tiny_target(hidden=WIDTH)
    one.bind(target.get_input_embeddings().weight, target.lm_head.weight)
    rows = torch.randn(12, 2 * WIDTH, generator=torch.Generator().manual_seed(2))
    ends, m = (torch.tensor(x, dtype=torch.int32) for x in ([[0, 7], [0, 5]], [[6], [1]]))
    with torch.inference_mode():
        cache = one.new_cache(1, 12)
        one.commit(cache, rows[:7], None, ends[0], m[0])
        one.commit(cache, rows[7:], None, ends[1], m[1])
        expected = one.draft(cache, torch.tensor([2]), temperature=1.0).probs
    weights = one.kv_weights(one.rotary(32))
    where = torch.arange(12, dtype=torch.int32)
    k, v = ops.project_kv(rows[:9], where[:9], *weights, eps=1e-5)
    ks, vs = ops.project_kv(rows[9:], where[9:], *weights, torch.ones(3, dtype=torch.bool), eps=1e-5)
    lens = torch.tensor([[9], [3]], dtype=torch.int32)
    x = one.block_embeddings(torch.tensor([2]), 5)
    hidden = one.hidden(x, k[:, None], v[:, None], lens[0], ks[:, None], vs[:, None], lens[1])
    probs = torch.softmax(hidden[:, 1:] @ own_weights(one)[1].T, -1)
    torch.testing.assert_close(probs, expected[..., one.d2t], rtol=1e-4, atol=1e-5)
    probs[..., 3].sum().backward()
    for name, p in one.named_parameters():
        has = p.grad is not None and float(p.grad.abs().max()) > 0
        assert has == (name not in (EMBED, HEAD)), name


def test_bfloat16_drafts() -> None:
    """In the precision that is decoded with, where a CPU packs the head."""
    one, target = drafter("reduced").bfloat16(), tiny_target(hidden=WIDTH)
    wide = drafter("reduced")
    tables = target.get_input_embeddings().weight, target.lm_head.weight
    probs = []
    for some in (one, wide):
        some.bind(*(w.to(some.dtype) for w in tables))
        cache, ends = some.new_cache(1, 20), torch.tensor([0, 3], dtype=torch.int32)
        rows = torch.randn(3, 2 * WIDTH, generator=torch.Generator().manual_seed(3))
        some.commit(cache, rows, None, ends, torch.tensor([2], dtype=torch.int32))
        probs.append(some.draft(cache, torch.tensor([0]), temperature=1.0).probs)
    assert probs[0].abs().max() > 0.2
    torch.testing.assert_close(probs[0], probs[1], atol=0.1, rtol=0)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["reduced", "markov-reduced"])
def test_only_tokens_of_the_draft_vocabulary_are_drafted(kind: str, temperature: float) -> None:
    one, target = drafter(kind), tiny_target(hidden=WIDTH)
    one.bind(target.get_input_embeddings().weight, target.lm_head.weight)
    cache, ends = one.new_cache(2, 20), torch.tensor([0, 3, 6], dtype=torch.int32)
    one.commit(cache, torch.randn(6, 2 * WIDTH), None, ends, torch.tensor([2, 2], dtype=torch.int32))
    drafts = one.draft(cache, torch.tensor([0, 1]), temperature=temperature)
    assert torch.isin(drafts.tokens, one.d2t).all()
    if temperature:
        assert drafts.probs.shape == (2, 4, 24)
        torch.testing.assert_close(drafts.probs[..., one.d2t].sum(-1), torch.ones(2, 4))


def test_weights_that_change_are_seen() -> None:
    one, target = drafter("whole"), tiny_target(hidden=WIDTH)
    tables = target.get_input_embeddings().weight, target.lm_head.weight
    one.bind(*tables)
    before = one._logits(torch.ones(1, 32))
    with torch.no_grad():
        own_weights(one)[1].mul_(2)
    one.bind(*tables)
    torch.testing.assert_close(one._logits(torch.ones(1, 32)), 2 * before)


def test_the_scale_of_the_targets_embedding_is_not_applied() -> None:
    one = drafter("whole")
    tables = torch.zeros(24, WIDTH), torch.zeros(24, WIDTH)
    one.bind(*tables, embed_scale=8.0)
    x = one.block_embeddings(torch.tensor([5]), 3)
    embed = own_weights(one)[0]
    assert torch.equal(x, embed[[5, one.config.mask_token_id, one.config.mask_token_id]][None])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"embed": torch.zeros(24, 32)}, r"embed_tokens_weight is \(24, 32\): .* target_hidden_size=64"),
        ({"head": torch.zeros(24, 32)}, r"lm_head_weight is \(24, 32\)"),
        ({"head": torch.zeros(23, WIDTH)}, "lm_head_weight has 23 rows"),
        ({"hidden_size": 32}, "hidden_size=32: the drafter was made for target_hidden_size=64"),
    ],
)
def test_bind_refuses_another_target(options: dict[str, Any], message: str) -> None:
    embed, head = (options.get(n, torch.zeros(24, WIDTH)) for n in ("embed", "head"))
    rest = {k: v for k, v in options.items() if k not in ("embed", "head")}
    with pytest.raises(ValueError, match=message):
        drafter("whole").bind(embed, head, **rest)


@pytest.mark.parametrize("name", [EMBED, HEAD])
def test_a_checkpoint_without_its_own_weights_is_refused(tmp_path: Path, name: str) -> None:
    drafter("reduced").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    weight = tensors.pop(name)
    for damaged in (tensors, tensors | {name: weight[:5].clone()}):
        save_file(damaged, tmp_path / "model.safetensors")
        message = f"missing .*{name}" if name not in damaged else rf"tensor {name} is \(5, 32\)"
        for load in (load_drafter, load_weights):
            with pytest.raises(ValueError, match=message):
                load(tmp_path)


# -- training ------------------------------------------------------------------------------------------
def start(kind: str, model: Any, heads: tuple[int, int] = (2, 1)) -> tuple[DrafterConfig, dict, Any]:
    """Config, the weights that training starts from, and the draft vocabulary."""
    nh, nkv = heads
    shape = {"num_attention_heads": nh, "num_key_value_heads": nkv, "intermediate_size": 24}
    config = drafter_config(**(HALF | KINDS[kind] | shape))
    size = config.draft_vocab_size
    vocab = None if size is None else torch.randperm(V, generator=torch.Generator().manual_seed(2))[:size]
    vocab = None if vocab is None else vocab.sort().values
    weights = initial.from_target(config, TargetPass(model, TAPS), torch.ones(2 * WIDTH), vocab)
    weights["carryover_embedding"] = torch.zeros(32)
    if config.markov_rank:
        weights[MARKOV_W1] = 0.1 * torch.randn(V, 4)
        weights["markov_head.markov_w2.weight"] = 0.1 * torch.randn(size or V, 4)
    return config, weights, vocab


def trainer(kind: str, model: Any, folders: tuple[Path, Path], objective: str, steps: int) -> Trainer:
    config, weights, vocab = start(kind, model)
    target = TargetPass(model, TAPS)
    settings = TrainSettings(
        objective, steps=steps, sequences=3, anchors=5, cycle=2, lr=3e-3, distill=0.3, carry_warmup=2
    )
    ones = torch.ones(config.num_features)
    return Trainer(config, weights, ones, Head.make(target, vocab), FeatureStore(*folders), settings, target)


def test_the_start_keeps_what_the_directions_hold(model) -> None:
    """With rows that lie in the leading directions, the first layer and the head start as the target's."""
    target = TargetPass(model, TAPS)
    basis = initial.leading_directions(target, 32)
    torch.testing.assert_close(basis.T @ basis, torch.eye(32), atol=1e-5, rtol=0)
    scored = target.head * target.decoder.norm.weight
    s = torch.linalg.svdvals(scored.double())
    lost = (scored - scored @ basis @ basis.T).square().sum()  # the least that 32 directions can lose
    torch.testing.assert_close(lost.double(), s[32:].square().sum(), atol=1e-3, rtol=1e-4)

    config, weights, _ = start("whole", model, (4, 2))
    layer = target.decoder.layers[-2]
    inside = torch.randn(7, 32)
    x = inside @ basis.T  # [7, Ht], all of it in the directions
    eps = config.rms_norm_eps

    def unit(rows: Tensor) -> Tensor:
        return rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps)

    # 32 of 64 dimensions hold the whole length: the target's norm divides by less, by sqrt(2)
    h = unit(inside) * weights["layers.0.input_layernorm.weight"] * 2**0.5
    wide = unit(x) * layer.input_layernorm.weight
    for name in ("q_proj", "k_proj", "v_proj"):
        expected = getattr(layer.self_attn, name)(wide)
        got = h @ weights[f"layers.0.self_attn.{name}.weight"].T
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    scores = unit(inside) * weights["norm.weight"] * 2**0.5 @ weights[HEAD].T
    expected = unit(x) * target.decoder.norm.weight @ target.head.T
    torch.testing.assert_close(scores, expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(weights[EMBED], target.embed @ basis)


def test_the_strongest_heads_are_kept(model) -> None:
    """Two of four query heads and one of two KV heads: those of the group whose values and outputs are
    large."""
    target = TargetPass(model, TAPS)
    layer, d = target.decoder.layers[-1], 8
    saved = layer.self_attn.o_proj.weight.clone()
    try:
        layer.self_attn.o_proj.weight[:, 2 * d :] *= 100  # the query heads 2 and 3 of KV head 1
        weights = start("whole", model)[1]
        basis = initial.leading_directions(target, 32)
        before = layer.input_layernorm.weight
        for name, rows in (("q", slice(2 * d, 4 * d)), ("k", slice(d, 2 * d)), ("v", slice(d, 2 * d))):
            expected = getattr(layer.self_attn, f"{name}_proj").weight[rows] * before @ basis
            torch.testing.assert_close(weights[f"layers.1.self_attn.{name}_proj.weight"], expected)
        expected = basis.T @ layer.self_attn.o_proj.weight[:, 2 * d :]
        torch.testing.assert_close(weights["layers.1.self_attn.o_proj.weight"], expected)
    finally:
        layer.self_attn.o_proj.weight.copy_(saved)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_training_lowers_the_loss(model, recorded, kind) -> None:  # noqa: F811
    one = trainer(kind, model, recorded, "carryover", 40)
    before = {k: v.detach().clone() for k, v in one.master.items()}
    first = one.export_weights()
    rows = []
    while one.step < 40:
        rows.append(one.run_cycle())
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.2
    assert not any(torch.equal(before[k], v) for k, v in one.master.items())
    for name in (EMBED, HEAD):  # frozen
        assert name not in one.master and torch.equal(one.export_weights()[name], first[name])


@pytest.mark.parametrize("kind", ["whole", "markov-reduced"])
def test_a_replay_of_training_is_what_the_engine_decodes(model, recorded, tmp_path, kind) -> None:  # noqa: F811
    """Through the file: rounds that training's forward and the drafter count are the same."""
    one = trainer(kind, model, recorded, "plain", 40)
    while one.step < 40:
        one.run_cycle()
    with torch.no_grad():
        one.master["carryover_embedding"].normal_()
    vocab = start(kind, model)[2]
    save_checkpoint(tmp_path, one.config, one.export_weights(), vocab, one.head.head)
    weights, read = load_weights(tmp_path)
    assert (read is None) == (vocab is None) and (vocab is None or torch.equal(read, vocab))
    store, pass_ = FeatureStore(*recorded), TargetPass(model, TAPS)
    arms = [Arm("off", weights, one.config, False), Arm("on", weights, one.config, True)]
    tallies = evaluate_arms(arms, Head.make(pass_, vocab), store, pass_, limit=6, batch=4)
    decoding = load_drafter(tmp_path, torch.float32)
    with TappedTarget(model, TAPS) as target:
        for carry, name in ((False, "off"), (True, "on")):
            rounds = engine_rounds(target, decoding, store, 6, carry)
            assert rounds > 20 and tallies[name].total("rounds") == rounds
    assert sum(tally.total("first_held") for tally in tallies.values()) > 0
    assert tallies["on"].total("carried_rows") > 0


# -- export --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_vllm_gets_the_drafters_own_weights_without_the_target(tmp_path: Path, kind: str) -> None:
    one = drafter(kind)
    one.save_pretrained(tmp_path / "own")
    export_checkpoint(tmp_path / "own", tmp_path / "out", "vllm")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    for name, weight in zip((EMBED, HEAD), own_weights(one), strict=True):
        assert torch.equal(tensors[name], weight)
    config = DrafterConfig.from_pretrained(tmp_path / "out")
    assert (config.hidden_size, config.target_hidden_size) == (32, WIDTH)
    if one.d2t is not None:  # vLLM's own reading: row c of the head is token c + d2t[c]
        assert torch.equal(tensors["d2t"] + torch.arange(17), one.d2t)
    assert torch.equal(load_drafter(tmp_path / "out", torch.float32).lm_head.weight, own_weights(one)[1])


@pytest.mark.parametrize("kind", ["whole", "markov"])
@pytest.mark.parametrize("to", ["zlab", "speculators"])
def test_layouts_that_cannot_hold_it_say_so(tmp_path: Path, kind: str, to: str) -> None:
    drafter(kind).save_pretrained(tmp_path / "own")
    tiny_target(hidden=WIDTH).save_pretrained(tmp_path / "target")
    message = "hidden_size=32: the zlab layout" if to == "zlab" else "target_hidden_size=64: speculators"
    with pytest.raises(ValueError, match=message):
        export_checkpoint(tmp_path / "own", tmp_path / "out", to, target=str(tmp_path / "target"))
    assert not (tmp_path / "out").exists()
