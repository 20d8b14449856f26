"""The Markov drafter: drafts against a plain recomputation, checkpoints, output that stays the target's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from compare import chi_square
from test_lossless import PLANS, SAMPLINGS, SMALL, joint_law, observed
from tiny import (
    SteeredMarkov,
    oracle_logits,
    plain,
    prompts,
    replay,
    tiny_drafter,
    tiny_target,
)

from carryover_ext.acceptance import Sampling, mask_logits
from carryover_ext.config import CarryoverConfig, DrafterConfig
from carryover_ext.drafters import DFlashDrafter, Drafts, MarkovDrafter, load_drafter
from carryover_ext.drafters.checkpoint import read_tensors
from carryover_ext.engine import generate
from carryover_ext.targets import TappedTarget

HEADS = ("vanilla", "gated", "rnn")
LAYOUTS = {"dflash": False, "anchor-first": True}


def markov(head: str = "vanilla", layout: str = "anchor-first", **changes) -> dict:
    """Changes of a tiny drafter's config."""
    values = {
        "markov_rank": 6,
        "markov_head_type": head,
        "sample_from_anchor": LAYOUTS[layout],
        "architectures": ["Qwen3DSparkModel"],
        "block_size": 4,
    }
    return {**values, **changes}


VARIANTS: dict[str, dict] = {
    **{f"{h}-{layout}": markov(h, layout) for h in HEADS for layout in LAYOUTS},
    "rank-1": markov(markov_rank=1),
    "reduced-head": markov(draft_vocab_size=9),
    "reduced-rnn": markov("rnn", "dflash", draft_vocab_size=9),
    "shifted-post": markov(carryover_config=CarryoverConfig(True, "post_norm", "shifted")),
    "no-carryover": markov(carryover_config=None),
    "mask-embedding": markov(mask_embedding=True),
    "confidence": markov(enable_confidence_head=True, confidence_head_with_markov=True),
    "block-1": markov(block_size=1),
}


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def bound(variant: str, dtype: torch.dtype = torch.float32) -> MarkovDrafter:
    target = tiny_target()
    drafter = tiny_drafter(target, MarkovDrafter, **VARIANTS[variant]).to(dtype)
    return drafter.bind(target.get_input_embeddings().weight, target.lm_head.weight)


@pytest.mark.parametrize("variant", sorted(VARIANTS))
@pytest.mark.parametrize("page", [None, 4])
def test_every_draft_is_the_oracles(variant: str, page: int | None) -> None:
    target, inputs = tiny_target(), prompts(3, 9, 14)
    truth = [plain(target, p, 24)[0] for p in inputs]
    drafter = tiny_drafter(target, SteeredMarkov, **VARIANTS[variant])
    drafter.start(truth, [p.numel() for p in inputs], PLANS["ragged"])
    out = generate(target, drafter, inputs, max_new_tokens=15, page_size=page, stop_token_ids=[])
    assert out.tokens == [t[:15] for t in truth]
    tapped = TappedTarget(target, drafter.config.target_layer_ids)
    equal, total, carried = replay(drafter, tapped)
    tapped.close()
    assert equal == total > 0 and (carried > 0) == drafter.config.carryover


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=["f32", "bf16", "f64"])
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("cut", [{}, {"top_k": 4}, {"top_p": 0.7}], ids=["whole", "top-k", "top-p"])
def test_the_q_returned_is_the_law_of_each_draft(head: str, cut: dict, dtype: torch.dtype) -> None:
    drafter = bound(f"{head}-dflash", dtype)
    rows = torch.randn(12, 64, generator=torch.Generator().manual_seed(1))
    cache = drafter.new_cache(1, 30)
    drafter.commit(cache, rows[:7], None, int32(0, 7), int32(6))
    drafter.commit(cache, rows[7:11], None, int32(0, 4), int32(1))
    sampling = Sampling(0.8, **cut)
    drafts = drafter.draft(
        cache, torch.tensor([4]), sampling=sampling, generator=torch.Generator().manual_seed(2)
    )
    exact = MarkovDrafter(drafter.config).double()
    exact.load_state_dict({k: v.double() for k, v in drafter.state_dict().items()})
    target = tiny_target()
    features, before = rows.to(dtype), [4, *drafts.tokens[0, :-1].tolist()]
    embed, weight = target.get_input_embeddings().weight.to(dtype), target.lm_head.weight.to(dtype)
    logits = oracle_logits(exact, embed, weight, features[:9], features[9:11], 4, 3, before=before)
    law = (mask_logits(logits, sampling) / 0.8).softmax(-1)
    assert drafts.probs is not None and (drafts.probs.gather(-1, drafts.tokens[..., None]) > 0).all()
    if cut and dtype == torch.bfloat16:
        return  # a rounded logit may fall on the other side of the cut
    allowed = {torch.float32: 2e-4, torch.bfloat16: 0.2, torch.float64: 2e-6}[dtype]
    assert float((drafts.probs[0].double() - law).detach().abs().max()) < allowed


# -- output ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", [f"{h}-{layout}" for h in HEADS for layout in LAYOUTS])
@pytest.mark.parametrize("plan", sorted(PLANS))
@pytest.mark.parametrize("carry", [True, False], ids=["on", "off"])
def test_greedy_equals_plain(variant: str, plan: str, carry: bool) -> None:
    target, inputs = tiny_target("qwen3"), prompts(3, 9, 14)
    new = [13, 6, 17]
    truth = [plain(target, p, n + 8)[0] for p, n in zip(inputs, new, strict=True)]
    drafter = tiny_drafter(target, SteeredMarkov, **VARIANTS[variant])
    drafter.start(truth, [p.numel() for p in inputs], PLANS[plan])
    out = generate(target, drafter, inputs, max_new_tokens=new, carry=carry, stop_token_ids=[])
    assert out.tokens == [t[:n] for t, n in zip(truth, new, strict=True)]
    assert out.num_drafted > 0 and (out.num_carried > 0) == (carry and plan != "all")
    if plan == "all":
        assert out.num_accepted == out.num_drafted


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_a_whole_block_drafts_as_many_as_trained(layout: str) -> None:
    """Anchor-first: n input rows give n drafts and n + 1 verified rows; the segment has room for all."""
    drafter = bound(f"vanilla-{layout}")
    drafts = 4 if LAYOUTS[layout] else 3
    cache = drafter.new_cache(2, 20)
    assert cache.segment_rows == drafts and drafter.check_block(None) == drafts + 1
    drafter.commit(cache, torch.randn(6, 64), None, int32(0, 3, 6), int32(2, 2))
    assert drafter.draft(cache, torch.tensor([1, 2])).tokens.shape == (2, drafts)
    drafter.commit(
        cache, torch.randn(2 * drafts + 2, 64), None, int32(0, drafts + 1, 2 * drafts + 2), int32(0, 1)
    )
    assert cache.segment_lens.tolist() == [drafts, drafts - 1]
    with pytest.raises(ValueError, match=rf"block_size={drafts + 2}: must be in 2\.\.{drafts + 1}"):
        drafter.draft(cache, torch.tensor([1, 2]), num_drafts=drafts + 1)


KINDS = {
    "off": {},
    "on": {},
    "dflash-layout": {"sample_from_anchor": False, "block_size": 4},
    "reduced-head": {"draft_vocab_size": 3},
    "gated": {"markov_head_type": "gated"},
    "rnn": {"markov_head_type": "rnn"},
}


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *(("on", name) for name in sorted(SAMPLINGS)),
        *((kind, name) for kind in sorted(set(KINDS) - {"on"}) for name in ("t0.7", "top-k")),
        ("reduced-head", "greedy-drafts"),
        ("off", "cold-drafts"),
    ],
)
def test_sampled_output_has_the_target_law(kind: str, name: str) -> None:
    target = tiny_target(vocab=SMALL, layers=2, hidden=16)
    changes = {"target_layer_ids": [0, 1], "head_dim": 8, "block_size": 3, **KINDS[kind]}
    drafter = tiny_drafter(target, MarkovDrafter, **{**markov(), **changes})
    options = dict(SAMPLINGS[name], carry=kind != "off")
    prompt, count = prompts(4, vocab=SMALL)[0], 4
    counts, out = observed(target, drafter, prompt, count, options)
    sampling = Sampling(options["temperature"], options.get("top_k", 0), options.get("top_p", 1.0))
    law = joint_law(target, prompt, count, sampling)
    assert counts[law == 0].sum() == 0 and chi_square(counts, law) > 1e-4
    assert 0 < out.num_accepted < out.num_drafted
    assert (out.num_carried > 0) == (kind != "off")


class Liar(MarkovDrafter):
    """Reports the law of the base logits alone: the negative control."""

    def _propose(self, hidden, anchor, sampling, generator) -> Drafts:
        drafts = super()._propose(hidden, anchor, sampling, generator)
        independent = DFlashDrafter._propose(self, hidden, anchor, sampling, generator)
        return Drafts(drafts.tokens, independent.probs)


def test_chi_square_notices_a_q_without_the_bias() -> None:
    target = tiny_target(vocab=SMALL, layers=2, hidden=16)
    changes = {"target_layer_ids": [0, 1], "head_dim": 8, "block_size": 3}
    drafter = tiny_drafter(target, Liar, **{**markov(), **changes})
    prompt = prompts(4, vocab=SMALL)[0]
    counts, _ = observed(target, drafter, prompt, 4, {"temperature": 1.0})
    assert chi_square(counts, joint_law(target, prompt, 4, Sampling(1.0))) < 1e-8


# -- checkpoints -------------------------------------------------------------------------------------

NAMES = {
    "vanilla": {"markov_head.markov_w1.weight", "markov_head.markov_w2.weight"},
    "gated": {"markov_head.gate_proj.weight", "markov_head.gate_proj.bias"},
    "rnn": {"markov_head.joint_proj.weight", "markov_head.joint_proj.bias"},
}


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_save_and_load(tmp_path: Path, variant: str) -> None:
    one = bound(variant, torch.bfloat16)
    one.save_pretrained(tmp_path)
    names = set(read_tensors(tmp_path))
    assert NAMES["vanilla"] | NAMES[one.config.markov_head_type] <= names
    assert ({"confidence_head.proj.weight", "confidence_head.proj.bias"} <= names) == (
        variant == "confidence"
    )
    two = load_drafter(tmp_path)
    assert type(two) is MarkovDrafter and two.config == one.config
    assert all(torch.equal(a, two.state_dict()[k]) for k, a in one.state_dict().items())


def test_a_reduced_vocabulary_is_written_as_vllm_reads_it(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    drafter = bound("reduced-head")
    drafter.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    ids = tensors["d2t"] + torch.arange(9)  # vLLM: draft_ids + d2t[draft_ids]
    assert torch.equal(ids, drafter.d2t) and torch.equal(tensors["t2d"].nonzero()[:, 0], ids)
    assert torch.equal(tensors["lm_head.weight"], tiny_target().lm_head.weight[ids])
    save_file({k: v for k, v in tensors.items() if k != "t2d"} | {"d2t": ids}, path)
    assert torch.equal(load_drafter(tmp_path).d2t, ids)
    save_file(tensors | {"t2d": ~tensors["t2d"]}, path)
    with pytest.raises(ValueError, match="d2t and t2d list different tokens"):
        load_drafter(tmp_path)


def test_compiled_draft_equals_eager() -> None:
    drafter = bound("reduced-head")
    drafter.pack()
    cache = drafter.new_cache(2, 20)
    drafter.commit(cache, torch.randn(6, 64), None, int32(0, 3, 6), int32(2, 2))
    anchor = torch.tensor([1, 2])
    with torch.no_grad():
        compiled = torch.compile(drafter.draft, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(cache, anchor).tokens, drafter.draft(cache, anchor).tokens)


def test_the_class_follows_the_config(tmp_path: Path) -> None:
    tiny_drafter(tiny_target()).save_pretrained(tmp_path)
    assert type(load_drafter(tmp_path)) is DFlashDrafter
    with pytest.raises(ValueError, match=r"markov_rank=0: .*load_drafter"):
        MarkovDrafter.from_pretrained(tmp_path)
    bound("vanilla-dflash").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"markov_rank=6: .*load_drafter"):
        DFlashDrafter.from_pretrained(tmp_path)


# The keys that DeepSpec writes beside those of the target's config.
DEEPSPEC = {
    "architectures": ["Qwen3DSparkModel"],
    "block_size": 7,
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
    "markov_rank": 256,
    "markov_head_type": "vanilla",
    "mask_token_id": 151669,
    "target_layer_ids": [1, 9, 17, 25, 33],
    "num_anchors": 512,
    "num_target_layers": 36,
    "num_hidden_layers": 5,
    "layer_types": ["full_attention"] * 5,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
    "model_type": "qwen3",
    "attention_bias": False,
    "use_cache": True,
}


def test_deepspec_config_is_anchor_first(tmp_path: Path) -> None:
    config = DrafterConfig.from_dict(DEEPSPEC)
    assert config.sample_from_anchor and (config.num_drafts, config.verify_rows, config.first_slot) == (
        7,
        8,
        0,
    )
    assert config.markov_rank == 256 and config.mask_token_id == 151669
    config.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert all(written[k] == v for k, v in DEEPSPEC.items())
    assert written["sample_from_anchor"] is True and "dflash_config" not in written
    assert DrafterConfig.from_pretrained(tmp_path) == config


def test_both_layouts_are_written_and_read(tmp_path: Path) -> None:
    """vLLM reads ``sample_from_anchor`` at the top level of a DSpark config, true when it is absent."""
    config = DrafterConfig.from_dict({**DEEPSPEC, "sample_from_anchor": False})
    assert (config.num_drafts, config.verify_rows, config.first_slot) == (6, 7, 1)
    config.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["sample_from_anchor"] is False
    assert DrafterConfig.from_pretrained(tmp_path) == config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"markov_rank": -1}, "markov_rank=-1"),
        ({"markov_rank": 2.5}, r"markov_rank=2\.5"),
        ({"markov_head_type": "lstm"}, "markov_head_type='lstm': must be one of vanilla, gated, rnn"),
        ({"sample_from_anchor": "yes"}, "sample_from_anchor='yes': must be true or false"),
        ({"block_size": 0}, "block_size=0: must be at least 1"),
        ({"markov_rank": 0}, "confidence_head_with_markov=True: needs a Markov head"),
    ],
)
def test_bad_config(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DrafterConfig.from_dict({**DEEPSPEC, **change})
