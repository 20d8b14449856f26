"""Training against plain recomputation: attention, losses, block passes, draft-verify-draft, resume."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import tiny_models
import torch
import torch.nn.functional as F
from tiny import tiny_target
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from carryover_ext.cli import main
from carryover_ext.config import CarryoverConfig, DrafterConfig
from carryover_ext.drafters.dflash import DFlashDrafter
from carryover_ext.training import initial
from carryover_ext.training.anchors import load_batch
from carryover_ext.training.draft_verify_draft import Head, draft_and_verify
from carryover_ext.training.features import FeatureStore, build_features
from carryover_ext.training.forward import draft_hidden, encode_rows, shared_prefix_attention
from carryover_ext.training.losses import slot_weights, soft_cross_entropy
from carryover_ext.training.recordings import PromptIds, record, shards
from carryover_ext.training.target_pass import TargetPass
from carryover_ext.training.trainer import Trainer, TrainSettings, check_trainable, train

V, TAPS = 60, [0, 2]


def llama(hidden: int = 32, **ids: int | None) -> LlamaForCausalLM:
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=V,
        hidden_size=hidden,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        initializer_range=0.3,
        **ids,
    )
    return LlamaForCausalLM(config).eval().requires_grad_(False)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return llama(bos_token_id=1, eos_token_id=2, pad_token_id=2)


def drafter_config(**kw) -> DrafterConfig:
    base = {
        "hidden_size": 32,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": V,
        "num_target_layers": 4,
        "target_layer_ids": TAPS,
        "mask_token_id": 3,
        "block_size": 5,
        "rope_theta": 10000.0,
        "carryover_config": CarryoverConfig(),
    }
    return DrafterConfig(**{**base, **kw})


def greedy(model: LlamaForCausalLM, prompts, max_new_tokens=24):
    """Plain recomputation of greedy answers, the slow way."""
    answers = []
    for p in prompts:
        ids = list(p)
        while len(ids) < len(p) + max_new_tokens:
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        answers.append((ids[len(p) :], "length"))
    return answers


@pytest.fixture(scope="module")
def recorded(model, tmp_path_factory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("rec")
    g = torch.Generator().manual_seed(1)
    lengths = torch.randint(3, 14, (20,), generator=g).tolist()
    prompts = [
        PromptIds("ab"[i % 2], "made", torch.randint(4, V, (n,), generator=g).tolist())
        for i, n in enumerate(lengths)
    ]
    record(prompts, lambda p, first: greedy(model, p), folder / "rec", settings={"t": 0}, shard_size=8)
    build_features(folder / "rec", folder / "feat", TargetPass(model, TAPS), top_k=4, batch_tokens=64)
    return folder / "rec", folder / "feat"


def weights_for(config: DrafterConfig, model) -> dict[str, Tensor]:
    torch.manual_seed(7)
    w = initial.from_target(config, TargetPass(model, TAPS), torch.ones(config.num_features))
    w = {k: v + 0.1 * torch.randn_like(v) for k, v in w.items()}
    w["carryover_embedding"] = torch.randn(config.hidden_size)
    return w


# -- attention and losses ---
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("groups", [1, 3])
def test_shared_prefix_attention_is_masked_attention(seed, groups):
    g = torch.Generator().manual_seed(seed)
    s, n, b, nkv, d, t, o = 2, 3, 4, 2, 8, 9, 6

    def rand(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    q, ks, vs = rand(s, n, b, nkv * groups, d), rand(s, t, nkv, d), rand(s, t, nkv, d)
    ko, vo = rand(s, n, o, nkv, d), rand(s, n, o, nkv, d)
    prefix = torch.randint(0, t + 1, (s, n), generator=g)
    own = torch.rand(s, n, b, o, generator=g) < 0.7
    own[..., 0] = True
    out = shared_prefix_attention(q, ks, vs, prefix, ko, vo, own, 0.3)
    for i in range(s):
        for j in range(n):
            k = torch.cat([ks[i, : prefix[i, j]], ko[i, j]]).repeat_interleave(groups, 1)
            v = torch.cat([vs[i, : prefix[i, j]], vo[i, j]]).repeat_interleave(groups, 1)
            scores = torch.einsum("bhd,khd->hbk", q[i, j], k) * 0.3
            seen = torch.cat([torch.ones(b, int(prefix[i, j]), dtype=torch.bool), own[i, j]], 1)
            p = scores.masked_fill(~seen, float("-inf")).softmax(-1)
            # probabilities are rounded to float32 inside
            torch.testing.assert_close(out[i, j], torch.einsum("hbk,khd->bhd", p, v), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("chunk", [3, 1000])
@pytest.mark.parametrize("k", [1, 4])
def test_soft_cross_entropy_value_and_gradient(chunk, k):
    g = torch.Generator().manual_seed(k)
    hidden = torch.randn(10, 16, generator=g, requires_grad=True)
    head = torch.randn(20, 16, generator=g)
    ids = torch.stack([torch.randperm(20, generator=g)[:k] for _ in range(10)])
    probs = torch.rand(10, k, generator=g)
    weights = torch.rand(10, generator=g)
    loss, best = soft_cross_entropy(hidden, head, ids, probs, weights, chunk)
    loss.backward()
    other = hidden.detach().clone().requires_grad_()
    logp = F.log_softmax(other @ head.t(), -1)
    expected = -(weights[:, None] * probs * logp.gather(1, ids)).sum() / weights.sum()
    expected.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(hidden.grad, other.grad)
    assert torch.equal(best, (hidden @ head.t()).argmax(-1))


def test_slot_weights_follow_dflash():
    w = slot_weights(16)
    assert len(w) == 15 and w[0] == 1
    torch.testing.assert_close(w[7], torch.tensor(-1.0).exp())
    assert slot_weights(8)[4] == pytest.approx(float(torch.tensor(-1.0).exp()))


# -- the target over blocks ---
def test_blocks_equal_one_forward_each(model):
    g = torch.Generator().manual_seed(3)
    target = TargetPass(model, TAPS)
    ids = torch.randint(0, V, (2, 12), generator=g)
    anchors = torch.tensor([[3, 5, 5, 11], [1, 2, 9, 10]])
    tokens = torch.randint(0, V, (2, 4, 5), generator=g)
    layers = target.decoder.layers
    rows = target.blocks(tokens, anchors, target.prefix_kv(ids))
    assert target.decoder.layers is layers
    for i in range(2):
        for j in range(4):
            seq = torch.cat([ids[i, : anchors[i, j]], tokens[i, j]])
            states = model(seq[None], output_hidden_states=True).hidden_states
            expected = torch.cat([states[t + 1][0, -5:] for t in TAPS], -1)
            torch.testing.assert_close(rows[i, j], expected, atol=1e-4, rtol=1e-4)
    assert model.config._attn_implementation != "carryover_shared_prefix"


def test_tap_outside_the_target_is_an_error(model):
    with pytest.raises(ValueError, match=r"tap_ids: \[4\] are outside the target's layers 0..3"):
        TargetPass(model, [0, 4])


@pytest.mark.parametrize("family", ["gemma2", "gemma3"])
def test_a_target_with_scaled_embeddings_is_refused(family):
    with pytest.raises(ValueError, match=r"model: a gemma\w+ target scales its embeddings or soft-caps"):
        TargetPass(tiny_target(family), [0])


def test_features_are_the_outputs_of_the_tapped_layers(model, recorded):
    store = FeatureStore(*recorded)
    assert len(store) == 20
    for i in (0, 7, 19):
        row = store[i]
        out = model(row.ids[None], output_hidden_states=True)
        expected = torch.cat([out.hidden_states[t + 1][0] for t in TAPS], -1)
        torch.testing.assert_close(row.features, expected, atol=1e-4, rtol=1e-4)
        top = out.logits[0].softmax(-1).topk(4, -1)
        torch.testing.assert_close(
            row.top_probs[row.prompt_len - 1 :], top.values[row.prompt_len - 1 :], atol=1e-4, rtol=1e-3
        )
        assert torch.equal(row.top_ids[row.prompt_len - 1 :, 0].long(), top.indices[row.prompt_len - 1 :, 0])


# -- the drafter's forward ---
@pytest.mark.parametrize("embed_at", ["pre_norm", "post_norm"])
@pytest.mark.parametrize("positions", ["verify", "shifted"])
def test_training_forward_equals_the_decoding_drafter(model, recorded, embed_at, positions):
    """Rounds one and two of decoding (with carried rows) give the hidden states that training computes."""
    config = drafter_config(carryover_config=CarryoverConfig(True, embed_at, positions))
    weights = weights_for(config, model)
    drafter = DFlashDrafter(config).eval()
    drafter.load_state_dict(weights)
    target = TargetPass(model, TAPS)
    drafter.bind(target.embed, target.head)
    head = Head.make(target, None)
    batch = load_batch(FeatureStore(*recorded), [0, 3, 6], 4, torch.Generator().manual_seed(0))
    rejects = draft_and_verify(weights, config, head, batch, target, torch.ones(config.num_features))
    shift = 1 if positions == "shifted" else 0
    checked = 0
    for i in range(3):
        for j in range(4):
            if not (batch.valid[i, j] and rejects.valid[i, j]):
                continue
            a, m = int(batch.anchors[i, j]), int(rejects.accepted[i, j])
            cache = drafter.new_cache(1, 64)
            drafter.commit(
                cache,
                batch.features[i, :a],
                None,
                torch.tensor([0, a], dtype=torch.int32),
                torch.tensor([a - 1], dtype=torch.int32),
            )
            drafts = drafter.draft(cache, batch.ids[i, a : a + 1]).tokens[0]
            assert (
                m == int((drafts == batch.ids[i, a + 1 : a + 5][: len(drafts)]).int().cumprod(0).sum())
                if a + 5 <= len(batch.ids[i])
                else True
            )
            rows = target.blocks(
                torch.cat([batch.ids[i, a : a + 1], drafts])[None, None],
                batch.anchors[i : i + 1, j : j + 1],
                target.prefix_kv(batch.ids[i : i + 1]),
            )[0, 0]
            drafter.commit(
                cache,
                rows,
                None,
                torch.tensor([0, 5], dtype=torch.int32),
                torch.tensor([m], dtype=torch.int32),
            )
            nxt = int(rejects.anchors[i, j])
            assert int(cache.lens[0]) == nxt == a + m + 1
            assert int(cache.segment_lens[0]) == 4 - m == int(rejects.mask[i, j].sum())
            got = drafter.draft(cache, batch.ids[i, nxt : nxt + 1]).tokens[0]
            context = encode_rows(weights, config, batch.features[i : i + 1])
            carried = encode_rows(weights, config, rejects.features[i : i + 1, j : j + 1], carried=True)
            embeds = torch.cat(
                [head.embed[batch.ids[i, nxt]][None], head.embed[config.mask_token_id].expand(4, -1)]
            )[None, None]
            hidden = draft_hidden(
                weights,
                config,
                context,
                torch.tensor([[nxt]]),
                embeds,
                carried,
                rejects.positions[i : i + 1, j : j + 1] + shift,
                rejects.mask[i : i + 1, j : j + 1],
            )
            assert torch.equal(got, (hidden[0, 0, 1:] @ head.head.t()).argmax(-1))
            checked += 1
    assert checked >= 6


def test_both_arms_of_a_pair_see_the_same_batches(model, recorded):
    config, states = drafter_config(), []
    for objective in ("shifted", "carryover"):
        settings = TrainSettings(objective=objective, steps=6, sequences=2, anchors=3, cycle=2, reuse=1)
        target = TargetPass(model, TAPS)
        ones = torch.ones(config.num_features)
        trainer = Trainer(
            config,
            weights_for(config, model),
            ones,
            Head.make(target, None),
            FeatureStore(*recorded),
            settings,
            target,
        )
        trainer.run_cycle()
        trainer.run_cycle()
        states.append((trainer.generator.get_state(), trainer.order))
    assert torch.equal(states[0][0], states[1][0]) and states[0][1] == states[1][1]


def test_accepted_equals_the_targets_own_judgement(model, recorded):
    config = drafter_config()
    weights = weights_for(config, model)
    target = TargetPass(model, TAPS)
    batch = load_batch(FeatureStore(*recorded), [1, 2, 4, 5], 6, torch.Generator().manual_seed(2))
    head = Head.make(target, None)
    rejects = draft_and_verify(weights, config, head, batch, target, torch.ones(config.num_features))
    context = encode_rows(weights, config, batch.features)
    embeds = torch.cat(
        [
            head.embed[torch.gather(batch.ids, 1, batch.anchors)][:, :, None],
            head.embed[3].expand(4, 6, 4, -1),
        ],
        2,
    )
    drafts = (draft_hidden(weights, config, context, batch.anchors, embeds)[:, :, 1:] @ head.head.t()).argmax(
        -1
    )
    for i in range(4):
        for j in range(6):
            a = int(batch.anchors[i, j])
            block = torch.cat([batch.ids[i, : a + 1], drafts[i, j]])
            best = model(block[None]).logits[0, a:].argmax(-1)
            m = int((best[:-1] == drafts[i, j]).int().cumprod(0).sum())
            inside = int(batch.lengths[i]) - 1 - a
            assert int(rejects.accepted[i, j]) == min(m, inside)


def test_blocks_of_overlapping_anchors_never_see_each_other(model, recorded):
    config = drafter_config()
    weights = weights_for(config, model)
    head = Head.make(TargetPass(model, TAPS), None)
    batch = load_batch(FeatureStore(*recorded), [0], 4, torch.Generator().manual_seed(0))
    anchors = torch.tensor([[int(batch.prompt_lens[0]) + k for k in (0, 1, 1, 2)]])
    context = encode_rows(weights, config, batch.features)
    embeds = head.embed[torch.randint(0, V, (1, 4, 5))]
    carried, mask = torch.randn(1, 4, 4, 32), torch.ones(1, 4, 4, dtype=torch.bool)
    where = anchors[..., None] + torch.arange(4)
    together = draft_hidden(weights, config, context, anchors, embeds, carried, where, mask)
    for j in range(4):
        s = slice(j, j + 1)
        alone = draft_hidden(
            weights, config, context, anchors[:, s], embeds[:, s], carried[:, s], where[:, s], mask[:, s]
        )
        torch.testing.assert_close(together[:, s], alone, atol=1e-5, rtol=1e-5)


# -- runs ---
def make_trainer(model, recorded, objective, steps=8, warmup=4, rank=0):
    config = drafter_config()
    weights = weights_for(config, model)
    target = TargetPass(model, TAPS)
    settings = TrainSettings(
        objective, steps=steps, sequences=3, anchors=5, cycle=2, reuse=1, rank=rank, lr=3e-3, distill=0.3
    )
    settings.carry_warmup = warmup
    return Trainer(
        config,
        weights,
        torch.ones(config.num_features),
        Head.make(target, None),
        FeatureStore(*recorded),
        settings,
        target,
    )


@pytest.mark.parametrize(
    ("objective", "rank"), [("plain", 0), ("shifted", 0), ("carryover", 0), ("carryover", 4)]
)
def test_killed_run_resumes_to_the_same_curve(model, recorded, tmp_path, objective, rank):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    one = make_trainer(model, recorded, objective, rank=rank)
    train(one, whole, lambda r: None, lambda: None, save_every=0)

    class Killed(Exception):
        pass

    def kill(row):
        if row["step"] >= 6:
            raise Killed

    two = make_trainer(model, recorded, objective, rank=rank)
    with pytest.raises(Killed):
        train(two, broken, kill, lambda: None, save_every=0)
    three = make_trainer(model, recorded, objective, rank=rank)
    train(three, broken, lambda r: None, lambda: None, save_every=0)
    curves = [
        [json.loads(line) for line in (f / "curve.jsonl").read_text().splitlines()] for f in (whole, broken)
    ]
    assert [r["step"] for r in curves[1]] == [2, 4, 6, 8]
    assert [r["loss"] for r in curves[0]] == [r["loss"] for r in curves[1]]
    for k, v in one.master.items():
        assert torch.equal(v, three.master[k]), k


def test_state_of_other_settings_is_refused(model, recorded, tmp_path):
    train(make_trainer(model, recorded, "plain", 2), tmp_path, lambda r: None, lambda: None, 0)
    with pytest.raises(ValueError, match=r"steps.*new --out folder"):
        train(make_trainer(model, recorded, "plain", 4), tmp_path, lambda r: None, lambda: None, 0)


@pytest.mark.parametrize(
    ("objective", "steps", "alone"),
    [("carryover", 8, 4), ("carryover", 4, 2), ("shifted", 8, 4), ("plain", 8, 0)],
)
def test_at_first_the_embedding_is_trained_alone(model, recorded, objective, steps, alone):
    """For four steps, but at most half of all; the control rests meanwhile."""
    trainer = make_trainer(model, recorded, objective, steps=steps, warmup=4)
    start = {k: v.detach().clone() for k, v in trainer.master.items()}
    while trainer.step < steps:
        trainer.run_cycle()
        moved = {k for k, v in trainer.master.items() if not torch.equal(v, start[k])}
        carried = {"carryover_embedding"} if objective == "carryover" else set()
        rates = [group["lr"] for group in trainer.optimizer.param_groups]
        if trainer.step <= alone:
            assert rates == [0, 3e-3 * trainer.settings.carry_lr]
        assert moved == (
            carried if trainer.step <= alone else (set(start) - {"carryover_embedding"}) | carried
        )


def test_training_lowers_the_loss_and_moves_the_embedding(model, recorded):
    trainer = make_trainer(model, recorded, "carryover", 60)
    before = trainer.master["carryover_embedding"].detach().clone()
    rows = []
    while trainer.step < 60:
        rows.append(trainer.run_cycle())
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.3
    assert not torch.equal(before, trainer.master["carryover_embedding"])
    assert all(1 <= r["al"] <= 5 and 1 <= r["al_first"] <= 5 for r in rows)


def test_with_a_rank_only_low_rank_updates_are_trained(model, recorded):
    trainer = make_trainer(model, recorded, "carryover", 60, rank=4)
    start = trainer.export_weights()
    first = trainer.run_cycle()["loss"]
    while trainer.step < 60:
        last = trainer.run_cycle()["loss"]
    assert last < first - 0.3
    changed = set()
    for name, value in trainer.export_weights().items():
        if value.dim() == 2:
            assert 1 <= torch.linalg.matrix_rank(value - start[name], rtol=1e-4) <= 4, name
        elif not torch.equal(value, start[name]):
            changed.add(name)
    assert changed == {"carryover_embedding"}


def test_a_rank_that_saves_nothing_is_refused(model, recorded):
    with pytest.raises(ValueError, match=r"^rank=16: too many for .*weight \(\d+, \d+\)"):
        make_trainer(model, recorded, "plain", rank=16)
    with pytest.raises(ValueError, match=r"^rank=-1: must be"):
        TrainSettings(rank=-1)


def test_export_folds_the_feature_scale(model, recorded):
    trainer = make_trainer(model, recorded, "plain", 2)
    trainer.feature_scale = torch.rand(trainer.config.num_features) + 0.5
    x = torch.randn(4, trainer.config.num_features)
    weights = trainer.export_weights()
    inside = encode_rows(trainer.master, trainer.config, x * trainer.feature_scale)
    torch.testing.assert_close(encode_rows(weights, trainer.config, x), inside, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 8}, "sliding_window"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "rope_parameters"),
        ({}, "mask_embedding"),
    ],
)
def test_what_training_would_ignore_is_refused(change, name):
    with pytest.raises(ValueError, match=name):
        check_trainable(drafter_config(**change), ["mask_embedding"] if name == "mask_embedding" else [])


# -- what does not fit ---
def test_features_of_other_taps_are_refused(model, recorded):
    with pytest.raises(ValueError, match="use a new folder"):
        build_features(recorded[0], recorded[1], TargetPass(model, [1]), top_k=4)


@pytest.mark.parametrize("name", ["steps", "sequences", "anchors", "cycle", "reuse", "lr"])
def test_settings_that_never_end_are_refused(name):
    with pytest.raises(ValueError, match=f"^{name}=0: must be"):
        TrainSettings(**{name: 0})


def test_gamma_weighs_the_slots(model, recorded):
    trainer = make_trainer(model, recorded, "plain")
    batch = load_batch(trainer.store, [0, 1], 4, torch.Generator().manual_seed(0))
    b = trainer.config.block_size
    full = (batch.anchors + b <= batch.lengths[:, None]) & batch.valid
    for gamma, expected in ((0.0, slot_weights(b)), (2.0, slot_weights(b, 2.0))):
        trainer.settings.gamma = gamma
        weights = trainer._labels(batch, batch.anchors, batch.valid)[2]
        assert full.any() and torch.equal(weights[full], expected.expand_as(weights[full]))
    with pytest.raises(ValueError, match="gamma=-1"):
        TrainSettings(gamma=-1)


def test_too_few_recordings_for_a_step_are_refused(model, recorded):
    trainer = make_trainer(model, recorded, "plain")
    settings = TrainSettings(sequences=21)
    with pytest.raises(ValueError, match="sequences=21: there are only 20 recordings"):
        Trainer(trainer.config, trainer.master, trainer.feature_scale, trainer.head, trainer.store, settings)


def test_half_a_line_of_the_curve_and_a_lost_checkpoint_survive_a_kill(model, recorded, tmp_path):
    train(make_trainer(model, recorded, "plain", 4), tmp_path, lambda r: None, lambda: None, 0)
    with open(tmp_path / "curve.jsonl", "a") as f:
        f.write('{"step": 6.0, "lo')
    saved = []
    train(make_trainer(model, recorded, "plain", 4), tmp_path, lambda r: None, lambda: saved.append(1), 0)
    assert saved == [1]
    rows = [json.loads(line) for line in (tmp_path / "curve.jsonl").read_text().splitlines()]
    assert [r["step"] for r in rows] == [2, 4]


@pytest.mark.parametrize("content", [b"", b"garbage", b"PK\x03\x04half"])
def test_a_damaged_state_is_named(model, recorded, tmp_path, content):
    (tmp_path / "state.pt").write_bytes(content)
    with pytest.raises(ValueError, match=r"state\.pt: corrupt or incomplete"):
        train(make_trainer(model, recorded, "plain"), tmp_path, lambda r: None, lambda: None, 0)


@pytest.mark.parametrize("same_length", [True, False])
def test_features_of_other_recordings_are_refused(model, recorded, tmp_path, same_length):
    folder = tmp_path / "rec"
    shutil.copytree(recorded[0], folder)
    shard = shards(folder)[1]
    rows = [json.loads(line) for line in shard.read_text().splitlines()]
    answer = rows[2]["response_ids"]
    rows[2]["response_ids"] = [answer[0] ^ 1, *answer[1:]] if same_length else answer[:-1]
    shard.write_text("".join(json.dumps(r) + "\n" for r in rows))
    with pytest.raises(ValueError, match=r"shard-00001\.pt was made from other recordings"):
        FeatureStore(folder, recorded[1])


def test_train_command_refuses_another_target_and_a_changed_drafter(tmp_path, capsys):
    target = tiny_models.save_target(tmp_path / "target")
    (tmp_path / "p.jsonl").write_text(
        "".join(json.dumps({"prompt": f"number {i}"}) + "\n" for i in range(12))
    )
    common = [f"--target={target}"]
    assert not main(
        ["record", *common, f"--prompts={tmp_path}/p.jsonl", f"--out={tmp_path}/rec", "--max-new-tokens=12"]
    )
    command = ["train", *common, f"--recordings={tmp_path}/rec", "--steps=2", "--anchors=4", "--cycle=1"]
    other = tiny_models.save_drafter(tmp_path / "other", False, hidden_size=32)
    assert main([*command, f"--out={tmp_path}/a", f"--init={other}"]) == 2
    assert "belongs to another target" in capsys.readouterr().err
    command += ["--taps=1", "--mask-token=271", "--draft-vocab=0", "--layers=1"]
    assert not main([*command, f"--out={tmp_path}/b", "--block=4"])
    assert main([*command, f"--out={tmp_path}/b", "--block=6"]) == 2
    assert "'block_size': (4, 6)" in capsys.readouterr().err
