"""The vLLM plugin without vLLM: where rows go, what is checked at start, and when it falls back."""

from __future__ import annotations

import importlib
import random
import subprocess
import sys
import types
from types import SimpleNamespace

import pytest
import torch

from carryover_ext.integrations import vllm as plugin
from carryover_ext.integrations.vllm import checks, compat, hooks
from carryover_ext.integrations.vllm.segment import (
    PAD_SLOT,
    carried_rows,
    find_rejected,
    query_slots,
    slots_of,
)

# -- where rows go -------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", range(20))
def test_layout_against_the_definition(case: int) -> None:
    """Row by row, in plain Python: who is carried, and which slot everything gets."""
    rng = random.Random(case)
    batch, block, pages, drafts = rng.randint(1, 5), rng.choice([4, 16]), 6, 4
    limit, query = block * pages - rng.choice([0, 3]), drafts + 1
    table = torch.zeros(batch, pages, dtype=torch.int32)
    lens, rejected, starts, positions = [], [], [0], []
    for i in range(batch):
        reject = rng.randint(0, drafts)
        length = rng.choice([rng.randint(1, limit - 1), limit - 1, limit - query, max(1, limit - query - 2)])
        rows = rng.randint(1, min(length, 9)) + reject
        lens.append(length)
        rejected.append(reject)
        starts.append(starts[-1] + rows)
        positions += range(length - rows + reject, length + reject)
        used = -(-min(length + reject + query, limit) // block)
        table[i, :used] = torch.tensor(rng.sample(range(1, 100), used))
    padded = starts[-1] + rng.randint(0, 3)  # a graph's padding
    window = rng.choice([0, 0, 20])
    first = torch.tensor(lens, dtype=torch.int32)
    carried = carried_rows(torch.tensor(rejected), first, query, limit, window)
    found = find_rejected(padded, torch.tensor(starts, dtype=torch.int32), torch.tensor(rejected), carried)
    own = slots_of(table, found.request[: starts[-1]], torch.tensor(positions), block, limit)
    slots = query_slots(table, first + carried, query, block, limit).view(batch, query)

    def slot(i: int, row: int) -> int:
        return int(table[i, row // block]) * block + row % block if row < limit else PAD_SLOT

    seen: set[int] = set()
    for i in range(batch):
        r = min(rejected[i], max(limit - lens[i] - query, 0))
        if window and lens[i] + query + r > window:
            r = 0
        assert int(carried[i]) == r
        for k, row in enumerate(range(starts[i], starts[i + 1])):
            number = k - (starts[i + 1] - starts[i] - rejected[i])
            assert bool(found.carried[row]) == (0 <= number < r)
            assert bool(found.dropped[row]) == (number >= r)
            if found.carried[row]:
                assert int(own[row]) == slot(i, lens[i] + number)
                seen.add(int(own[row]))
        for k in range(query):
            assert int(slots[i, k]) == slot(i, lens[i] + r + k)
            assert int(slots[i, k]) == PAD_SLOT or int(slots[i, k]) not in seen  # no two rows in one place
            seen.add(int(slots[i, k]))
    assert not found.carried[starts[-1] :].any() and not found.dropped[starts[-1] :].any()


def test_the_null_block_is_never_written() -> None:
    table = torch.tensor([[7, 0]], dtype=torch.int32)
    assert query_slots(table, torch.tensor([2]), 4, 4, 8).tolist() == [30, 31, PAD_SLOT, PAD_SLOT]


def test_nothing_is_carried_without_rejections() -> None:
    carried = carried_rows(torch.tensor([0, 0]), torch.tensor([5, 90]), 5, 256)
    assert carried.tolist() == [0, 0]
    found = find_rejected(9, torch.tensor([0, 5, 9]), torch.tensor([0, 0]), carried)
    assert not found.carried.any() and not found.dropped.any()


# -- what is checked at start --------------------------------------------------------------------------


def config(**changes) -> SimpleNamespace:
    """As much of a VllmConfig as the checks look at; ``draft__x=1`` sets x of the drafter's config."""
    draft = SimpleNamespace(
        num_target_layers=4,
        target_hidden_size=64,
        vocab_size=300,
        block_size=5,
        layer_types=["full_attention"] * 2,
        max_position_embeddings=512,
        carryover_config={"enabled": True, "carry_embed_at": "pre_norm", "carry_positions": "verify"},
    )
    model = SimpleNamespace(hf_config=draft, model="drafter", architectures=[plugin.DFLASH_ARCHITECTURE])
    target = SimpleNamespace(num_hidden_layers=4, hidden_size=64, vocab_size=300)
    parts = {
        "draft": draft,
        "model": model,
        "target": target,
        "speculative": SimpleNamespace(
            draft_model_config=model, num_speculative_tokens=4, kv_cache_dtype=None
        ),
        "cache": SimpleNamespace(cache_dtype="auto", enable_prefix_caching=False),
        "parallel": SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=1),
    }
    for key, value in changes.items():
        part, name = key.split("__")
        setattr(parts[part], name, value)
    return SimpleNamespace(
        speculative_config=parts["speculative"],
        model_config=SimpleNamespace(hf_text_config=target, max_model_len=256),
        cache_config=parts["cache"],
        parallel_config=parts["parallel"],
    )


def test_a_plan_that_carries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(compat.ENVIRONMENT, raising=False)
    assert checks.make_plan(config()) == checks.Plan(off=None, shifted=False, window=0, limit=512)
    sliding = {"draft__layer_types": ["sliding_attention", "full_attention"], "draft__sliding_window": 96}
    shifted = {"draft__carryover_config": {"carry_positions": "shifted"}}
    assert checks.make_plan(config(**sliding, **shifted)) == checks.Plan(None, True, 96, 512)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"target__num_hidden_layers": 6},
            r"num_target_layers=4, the target's decoder layers is 6.*Serve the",
        ),
        ({"target__hidden_size": 96}, r"target_hidden_size=64, the target's hidden size is 96"),
        (
            {"draft__target_hidden_size": None, "draft__hidden_size": 32},
            r"target_hidden_size=32, the target's hidden size is 64",
        ),
        ({"target__vocab_size": 301}, r"vocab_size=300, the target's vocabulary is 301"),
        ({"speculative__num_speculative_tokens": 5}, r"num_speculative_tokens=5: .* at most 4; set"),
        (
            {"draft__carryover_config": {"carry_embed_at": "inside"}},
            r"carry_embed_at='inside': must be one of",
        ),
    ],
)
def test_mistakes_are_errors(changes: dict, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(compat.ENVIRONMENT, raising=False)
    with pytest.raises(ValueError, match=message):
        checks.make_plan(config(**changes))


def test_anchor_first_drafts_one_more() -> None:
    dspark = {"model__architectures": [plugin.DSPARK_ARCHITECTURE, "Qwen3DSparkModel"]}
    five = {"speculative__num_speculative_tokens": 5}
    assert checks.make_plan(config(**dspark, **five, draft__sample_from_anchor=True)).off is None
    with pytest.raises(ValueError, match="at most 4"):
        checks.make_plan(config(**dspark, **five, draft__sample_from_anchor=False))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"cache__cache_dtype": "fp8"}, r"kv_cache_dtype='fp8' .*--kv-cache-dtype auto"),
        ({"speculative__kv_cache_dtype": "fp8_e5m2"}, r"kv_cache_dtype='fp8_e5m2'"),
        ({"parallel__decode_context_parallel_size": 2}, r"decode_context_parallel_size=2 .* set it to 1"),
        ({"speculative__disable_padded_drafter_batch": True}, r"disable_padded_drafter_batch .*unset it"),
    ],
)
def test_what_is_not_known_turns_carrying_off(changes: dict, reason: str, monkeypatch) -> None:
    import re

    monkeypatch.setenv(compat.ENVIRONMENT, "on")
    assert re.search(reason, checks.make_plan(config(**changes)).off or "")


def test_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(compat.ENVIRONMENT, "OFF")
    assert checks.make_plan(config()).off == "CARRYOVER=off is set"
    monkeypatch.setenv(compat.ENVIRONMENT, "0")
    with pytest.raises(ValueError, match="CARRYOVER='0': must be 'on' or 'off'"):
        checks.make_plan(config())


def test_backends() -> None:
    assert checks.backend_problem(["FLASH_ATTN", "CPU_ATTN"]) is None
    assert "FLASHINFER of the drafter" in str(checks.backend_problem(["FLASH_ATTN", "FLASHINFER"]))


def test_temperatures_are_expanded_as_vllm_means_it() -> None:
    """Each request's value once a token; 0 (greedy) becomes 1; a request without drafts gets none."""
    from carryover_ext.integrations.vllm.judge import expand

    out = expand(torch.tensor([0.75, 0.0, 3.0, 1.5]), torch.tensor([2, 3, 3, 5]), 5, 0, 1)
    assert out.tolist() == [0.75, 0.75, 1.0, 1.5, 1.5]
    assert expand(torch.tensor([7, 9]), torch.tensor([1, 3]), 3).tolist() == [7, 9, 9]


# -- which vLLM ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["0.29.0", "0.32.0", "0.33.1+cpu"])
def test_known_versions(version: str) -> None:
    assert compat.version_problem(version) is None


@pytest.mark.parametrize("version", ["0.28.9", "0.34.0", "1.0", "dev"])
def test_unknown_versions(version: str) -> None:
    assert f"knows vLLM 0.29 to 0.33, and this is {version}" in str(compat.version_problem(version))


MODEL = """
class DFlashQwen3Model:
    def _project_context_kv(self, context_states, num_ctx, num_layers, num_kv_heads, head_dim): pass

class DFlashQwen3ForCausalLM:
    def __init__(self, *, vllm_config, prefix=""): pass
    def load_weights(self, weights): pass
    def precompute_and_store_context_kv(
        self, context_states, context_positions, context_slot_mapping=None
    ): pass
"""


def stock(monkeypatch: pytest.MonkeyPatch, version: str = "0.32.0", extra: str = "") -> types.ModuleType:
    """A module that looks like vLLM's V1 proposer, in a vLLM of the given version."""
    name = "vllm.v1.spec_decode.dflash"
    source = f"""
class DFlashProposer:
    def __init__(self, vllm_config, device, runner=None): self.made = (vllm_config, device, runner)
    def set_inputs_first_pass(self, target_token_ids, next_token_ids, target_positions, target_hidden_states,
                              token_indices_to_sample, cad, num_rejected_tokens_gpu{extra}): pass
"""
    module = types.ModuleType(name)
    exec(source, module.__dict__)
    model = types.ModuleType("vllm.model_executor.models.qwen3_dflash")
    exec(MODEL, model.__dict__)
    monkeypatch.setitem(sys.modules, model.__name__, model)
    package = types.ModuleType("vllm")
    package.__version__ = version
    monkeypatch.setitem(sys.modules, "vllm", package)
    monkeypatch.setitem(sys.modules, name, module)
    compat.signatures_fit.cache_clear()
    return module


@pytest.mark.parametrize(
    ("version", "extra", "reason"),
    [
        ("0.32.0", "", None),
        ("0.40.0", "", "knows vLLM 0.29 to 0.33"),
        ("0.32.0", ", more=None", "takes self, target_token_ids"),
    ],
)
def test_the_stock_class_makes_ours_only_when_it_fits(monkeypatch, version, extra, reason) -> None:
    said: list[str] = []
    monkeypatch.setattr(compat, "plain", said.append)
    module = stock(monkeypatch, version, extra)
    ours = types.ModuleType("carryover_ext.integrations.vllm.v1")
    ours.CarryoverProposer = type("CarryoverProposer", (module.DFlashProposer,), {})
    monkeypatch.setitem(sys.modules, ours.__name__, ours)
    hooks._choose_class(module)
    hooks._choose_class(module)  # plugins may be loaded twice
    drafter = module.DFlashProposer(config(), "cpu", "runner")
    assert drafter.made[1:] == ("cpu", "runner")
    assert type(drafter).__name__ == ("CarryoverProposer" if reason is None else "DFlashProposer")
    assert len(said) == (reason is not None) and (reason is None or reason in said[0])
    # Any other checkpoint gets the stock class.
    plain = module.DFlashProposer(config(model__architectures=["DFlashDraftModel"]), "cpu")
    assert type(plain) is module.DFlashProposer
    assert len(said) == (reason is not None) + 1 and "none that carries" in said[-1]  # its config wants it
    off = {"model__architectures": ["DFlashDraftModel"], "draft__carryover_config": {"enabled": False}}
    for changes in (off, off | {"draft__carryover_config": None}):
        module.DFlashProposer(config(**changes), "cpu")
    assert len(said) == (reason is not None) + 1
    compat.signatures_fit.cache_clear()


@pytest.mark.parametrize("backend", ["CPU_ATTN", "STRANGE"])
def test_the_runner_pauses_at_the_limit_unless_rows_are_carried(monkeypatch, backend: str) -> None:
    """The stock proposer, which drafts when the backend is not known, has no slots past the limit."""
    module = stock(monkeypatch)
    buffers = ("_context_slot_mapping_buffer", "_context_positions_buffer", "_slot_mapping_buffer")
    module.DFlashProposer.__init__ = lambda self, *_: vars(self).update(dict.fromkeys(buffers), positions=0)
    module.DFlashProposer.num_speculative_tokens = 4
    group = SimpleNamespace(backend=SimpleNamespace(get_name=lambda: backend))
    module.DFlashProposer.draft_attn_groups = [group]
    module.DFlashProposer.initialize_attn_backend = lambda self, kv_cache_config: None
    module.DFlashProposer.vllm_config = config()
    module.DFlashProposer.device = torch.device("meta")
    logger = types.ModuleType("vllm.logger")
    nothing = SimpleNamespace(info=lambda *_: None, warning=lambda *_: None)
    logger.init_logger = lambda name: nothing
    monkeypatch.setitem(sys.modules, "vllm.logger", logger)
    monkeypatch.delenv(compat.ENVIRONMENT, raising=False)
    name = "carryover_ext.integrations.vllm.v1"
    monkeypatch.delitem(sys.modules, name, raising=False)
    v1 = importlib.import_module(name)
    monkeypatch.delitem(sys.modules, name)  # it holds the stub
    monkeypatch.delattr(plugin, "v1")
    runner = SimpleNamespace(_input_fits_in_drafter=lambda metadata: False)
    proposer = v1.CarryoverProposer(config(), torch.device("meta"), runner)
    proposer.initialize_attn_backend(SimpleNamespace())
    assert proposer.carrying == (backend == "CPU_ATTN") and proposer.watch is None
    assert runner._input_fits_in_drafter("near the limit") == proposer.carrying


def test_a_hook_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    module = stock(monkeypatch)
    del module.DFlashProposer.set_inputs_first_pass
    assert "set_inputs_first_pass is not there" in str(compat.signature_problem(module.__name__))


def test_the_speculators_reader_selects_our_architecture() -> None:
    module = types.ModuleType(hooks.FORMATS)

    def update(config_dict: dict, pre_trained_config: dict) -> None:
        pre_trained_config["architectures"] = ["DFlashDraftModel"]

    module.SUPPORTED_SPECULATORS_TYPES = {"dflash": update, "eagle3": update}
    hooks._read_speculators(module)
    hooks._read_speculators(module)
    types_ = module.SUPPORTED_SPECULATORS_TYPES
    assert types_["eagle3"] is update
    out: dict = {}
    types_["dflash"](config_dict={"carryover_config": {"enabled": True}}, pre_trained_config=out)
    assert out["architectures"] == [plugin.DFLASH_ARCHITECTURE] and out["carryover_config"]["enabled"]
    for plain in ({}, {"carryover_config": {"enabled": False}}):
        out = {}
        types_["dflash"](config_dict=plain, pre_trained_config=out)
        assert out == {"architectures": ["DFlashDraftModel"]}


def test_modules_are_patched_when_they_are_imported(tmp_path, monkeypatch) -> None:
    (tmp_path / "stand_in_for_vllm.py").write_text("VALUE = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setitem(hooks.PATCHES, "stand_in_for_vllm", lambda module: setattr(module, "VALUE", 2))
    hooks.install()
    hooks.install()
    import stand_in_for_vllm

    assert stand_in_for_vllm.VALUE == 2
    assert sum(isinstance(finder, hooks._Finder) for finder in sys.meta_path) == 1


def test_loading_the_plugin_is_cheap() -> None:
    """It runs in every process of vLLM; PyTorch must not be imported for it."""
    code = (
        "import sys, carryover_ext.integrations.vllm as p; assert p.register; print('torch' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"


def test_the_entry_point_is_the_plugin() -> None:
    from pathlib import Path

    text = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    heading = '[project.entry-points."vllm.general_plugins"]'
    assert f'{heading}\ncarryover = "carryover_ext.integrations.vllm:register"' in text
