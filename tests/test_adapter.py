"""Checkpoints that are an update of another: whether they are the drafter that they were made of, and what is
wrong with a folder that cannot be read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_export import drafts, make
from tiny_models import save_target
from torch import Tensor

from carryover_ext.cli import main
from carryover_ext.drafters import adapter, load_drafter
from carryover_ext.drafters.checkpoint import read_tensors
from carryover_ext.export import export_checkpoint

RANK = 3


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"))


def changed(source: Path, out: Path, rank: int = RANK) -> Path:
    """A copy with every matrix of the layers changed by something of that rank, and another embedding."""
    shutil.copytree(source, out)
    tensors = load_file(out / "model.safetensors")
    generator = torch.Generator().manual_seed(5)
    for name, value in tensors.items():
        if name.startswith("layers.") and value.dim() == 2:
            a = torch.randn(rank, value.shape[1], generator=generator)
            b = torch.randn(value.shape[0], rank, generator=generator)
            tensors[name] = (value.float() + 0.05 * b @ a).to(value.dtype)
    tensors["carryover_embedding"] = torch.randn(tensors["carryover_embedding"].shape, generator=generator)
    save_file(tensors, out / "model.safetensors")
    return out


@pytest.mark.parametrize("markov", [False, True], ids=["dflash", "markov"])
@pytest.mark.parametrize("reduced", [False, True], ids=["whole", "reduced"])
def test_an_update_is_the_drafter_that_it_was_made_of(
    tmp_path: Path, target: Path, markov: bool, reduced: bool
) -> None:
    base = make(tmp_path / "base", markov=markov, reduced=reduced)
    source = changed(base, tmp_path / "source")
    written = export_checkpoint(source, tmp_path / "to" / "small", "adapter", base=base, rank=RANK)
    assert not any("rank" in note for note in written.notes)  # nothing is lost
    small = tmp_path / "to" / "small"
    assert not (small / "model.safetensors").exists()
    update = load_file(small / adapter.WEIGHTS)
    assert all(max(min(v.shape), 1) <= RANK for k, v in update.items() if "lora" in k)
    assert {k for k in update if "lora" not in k} == {adapter.PREFIX + "carryover_embedding"}
    whole, merged = read_tensors(source), read_tensors(small)
    assert set(whole) == set(merged)
    for name, value in whole.items():
        torch.testing.assert_close(merged[name], value, atol=2e-5, rtol=1e-4)
    assert torch.equal(drafts(small, target, True), drafts(source, target, True))
    name = "layers.0.self_attn.q_proj.weight"
    assert (merged[name] - read_tensors(base)[name]).norm() > 0.05 * merged[name].norm()
    # what reads checkpoints reads it too: export for vLLM, and back to whole weights in the same folder
    export_checkpoint(small, tmp_path / "vllm", "vllm", target=str(target))
    assert torch.equal(drafts(tmp_path / "vllm", target, True), drafts(source, target, True))
    export_checkpoint(source, small, "compact")
    assert not adapter.is_adapter(small) and not (small / adapter.WEIGHTS).exists()


def test_peft_reads_the_same_numbers(tmp_path: Path) -> None:
    """Names and config follow PEFT's: W + lora_alpha / r * B A by module."""
    base = make(tmp_path / "base")
    export_checkpoint(changed(base, tmp_path / "source"), tmp_path / "small", "adapter", base=base, rank=RANK)
    config = json.loads((tmp_path / "small" / adapter.CONFIG).read_text())
    assert (config["peft_type"], config["base_model_name_or_path"]) == ("LORA", "../base")
    update, whole = load_file(tmp_path / "small" / adapter.WEIGHTS), read_tensors(base)
    for module in config["target_modules"]:
        a, b = (update[f"base_model.model.{module}.lora_{x}.weight"] for x in "AB")
        expected = whole[module + ".weight"] + config["lora_alpha"] / config["r"] * b @ a
        torch.testing.assert_close(read_tensors(tmp_path / "small")[module + ".weight"], expected)


def test_too_small_a_rank_says_what_it_keeps(tmp_path: Path) -> None:
    base = make(tmp_path / "base")
    source = changed(base, tmp_path / "source", rank=8)
    written = export_checkpoint(source, tmp_path / "small", "adapter", base=base, rank=2)
    assert any("rank 2 keeps" in note and "measure" in note for note in written.notes)
    before, after = read_tensors(base), read_tensors(source)
    name = "layers.0.mlp.up_proj.weight"
    whole = (after[name] - before[name]).norm()
    assert 0.1 * whole < (after[name] - read_tensors(tmp_path / "small")[name]).norm() < 0.95 * whole


def test_a_dflash_drafter_can_be_an_update_of_a_markov_one(tmp_path: Path, target: Path) -> None:
    base = make(tmp_path / "base", markov=True, reduced=True)
    export_checkpoint(base, tmp_path / "dflash", "compact", drop_markov=True)
    source = changed(tmp_path / "dflash", tmp_path / "source")
    export_checkpoint(source, tmp_path / "small", "adapter", base=base, rank=RANK)
    assert torch.equal(drafts(tmp_path / "small", target, True), drafts(source, target, True))
    dropped = json.loads((tmp_path / "small" / adapter.CONFIG).read_text())["tensors_dropped"]
    assert dropped == ["markov_head.markov_w1.weight", "markov_head.markov_w2.weight"]


def test_a_compact_markov_head_has_the_rows_of_the_draft_vocabulary(tmp_path: Path) -> None:
    source = make(tmp_path / "own", markov=True, reduced=True)
    written = export_checkpoint(source, tmp_path / "compact", "compact")
    assert any("Markov head is silent" in note for note in written.notes)
    full, small = load_drafter(source), load_drafter(tmp_path / "compact")
    name = "markov_head.markov_w1.weight"
    assert load_file(tmp_path / "compact" / "model.safetensors")[name].shape[0] == full.d2t.numel()
    inside = torch.zeros(full.config.vocab_size, dtype=torch.bool)
    inside[full.d2t] = True
    rows = small.markov_head.markov_w1.weight
    assert torch.equal(rows[inside], full.markov_head.markov_w1.weight[inside])
    assert not rows[~inside].any()


def test_a_head_that_did_not_change_is_not_in_the_update(tmp_path: Path, target: Path) -> None:
    """Though a compact base has none of the rows outside the draft vocabulary."""
    own = make(tmp_path / "own", markov=True, reduced=True)
    base = export_checkpoint(own, tmp_path / "base", "compact").folder
    source = changed(own, tmp_path / "source")
    written = export_checkpoint(source, tmp_path / "small", "adapter", base=base, rank=RANK)
    assert not any("rank" in note for note in written.notes)
    assert not any("markov" in name for name in load_file(tmp_path / "small" / adapter.WEIGHTS))
    compact = export_checkpoint(source, tmp_path / "compact", "compact").folder
    assert torch.equal(drafts(tmp_path / "small", target, True), drafts(compact, target, True))


def damage(folder: Path, what: str) -> None:
    config = json.loads((folder / adapter.CONFIG).read_text())
    if what == "unnamed":
        del config["base_model_name_or_path"]
    elif what == "gone":
        config["base_model_name_or_path"] = "../nowhere"
    elif what == "replaced":
        shutil.copytree(folder.parent / "source", folder.parent / "base", dirs_exist_ok=True)
    elif what == "chain":
        config["base_model_name_or_path"] = "../small"
    (folder / adapter.CONFIG).write_text(json.dumps(config))
    weights = folder / adapter.WEIGHTS
    update: dict[str, Tensor] = load_file(weights)
    name = adapter.PREFIX + "layers.0.mlp.up_proj.lora_B.weight"
    if what == "no B":
        del update[name]
    elif what == "shape":
        update[name] = update[name][:-1].contiguous()
    save_file(update, weights)
    if what == "half":
        weights.write_bytes(weights.read_bytes()[:100])
    elif what == "absent":
        weights.unlink()


@pytest.mark.parametrize(
    ("what", "error", "message"),
    [
        ("unnamed", ValueError, "adapter_config.json: no base_model_name_or_path"),
        ("gone", FileNotFoundError, "'../nowhere' is not there"),
        ("chain", ValueError, "is an update itself"),
        ("replaced", ValueError, "holds other weights than those that the update was made for"),
        ("no B", ValueError, "with B None does not fit layers.0.mlp.up_proj.weight of the base"),
        ("shape", ValueError, "does not fit layers.0.mlp.up_proj.weight of the base"),
        ("half", ValueError, "adapter_model.safetensors: corrupt or incomplete"),
        ("absent", FileNotFoundError, "no adapter_model.safetensors in it"),
    ],
)
def test_a_damaged_update_is_named(tmp_path: Path, what: str, error: type[Exception], message: str) -> None:
    base = make(tmp_path / "base")
    export_checkpoint(changed(base, tmp_path / "source"), tmp_path / "small", "adapter", base=base, rank=RANK)
    damage(tmp_path / "small", what)
    with pytest.raises(error, match=message):
        load_drafter(tmp_path / "small")


def test_what_cannot_be_an_update_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    base, other = make(tmp_path / "base"), make(tmp_path / "other", reduced=True)
    with pytest.raises(ValueError, match="another draft vocabulary"):
        export_checkpoint(other, tmp_path / "out", "adapter", base=base)
    for options in ({"to": "adapter"}, {"to": "compact", "base": base}):
        with pytest.raises(ValueError, match=r"^base=.*an adapter needs"):
            export_checkpoint(base, tmp_path / "out", **options)
    with pytest.raises(ValueError, match=r"^rank=0: must be"):
        export_checkpoint(changed(base, tmp_path / "s"), tmp_path / "out", "adapter", base=base, rank=0)
    with pytest.raises(ValueError, match="is the base's folder: choose"):
        export_checkpoint(tmp_path / "s", base, "adapter", base=base)
    larger = make(tmp_path / "larger", intermediate_size=80)
    with pytest.raises(ValueError, match=r"^base=.*larger'.*_proj\.weight is \(.*in the source"):
        export_checkpoint(base, tmp_path / "out", "adapter", base=larger)
    assert not (tmp_path / "out").exists() and load_drafter(base)
    command = [
        "export",
        str(tmp_path / "s"),
        "--to",
        "adapter",
        "--out",
        str(tmp_path / "out"),
        "--rank",
        "3",
    ]
    assert main([*command, "--base", str(base)]) == 0
    small = export_checkpoint(tmp_path / "s", tmp_path / "t", "compact").folder
    assert main([*command[:-4], "--out", str(tmp_path / "u"), "--base", str(tmp_path / "out")]) != 0
    assert "is an adapter itself" in capsys.readouterr().err
    assert small.is_dir()


@pytest.mark.parametrize("rank", [4, 32])
def test_a_changed_head_of_a_reduced_vocabulary(tmp_path, rank):
    """Its rows of the draft vocabulary are kept thin or whole; either way the others are the base's."""
    base = make(tmp_path / "base", markov=True, reduced=True)
    source = tmp_path / "source"
    shutil.copytree(base, source)
    tensors = load_file(source / "model.safetensors")
    drafted = read_tensors(base)["d2t"]
    tensors[adapter.MARKOV_W1][drafted] += 0.1 * torch.randn(len(drafted), 1)
    save_file(tensors, source / "model.safetensors")
    export_checkpoint(source, tmp_path / "small", "adapter", base=base, rank=rank)
    assert load_drafter(tmp_path / "small")
    got, want = (read_tensors(folder)[adapter.MARKOV_W1].float() for folder in (tmp_path / "small", source))
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-3)


def test_what_lies_in_out_stays(tmp_path):
    base, source = make(tmp_path / "base"), tmp_path / "source"
    changed(base, source)
    export_checkpoint(source, tmp_path / "small", "adapter", base=base, rank=4)
    before = (base / "model.safetensors").read_bytes()
    with pytest.raises(ValueError, match="is the base of the source"):
        export_checkpoint(tmp_path / "small", base, "compact")
    assert (base / "model.safetensors").read_bytes() == before
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "other"}')
    (foreign / "adapter_model.safetensors").write_bytes(b"precious")
    for to, options in (("compact", {}), ("adapter", {"base": base})):
        with pytest.raises(ValueError, match="holds something else than a drafter"):
            export_checkpoint(source, foreign, to, **options)
    assert (foreign / "adapter_model.safetensors").read_bytes() == b"precious"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"peft_type": "LOHA"}, "peft_type='LOHA': only LORA"),
        ({"use_rslora": True}, "use_rslora=True: is not read"),
        ({"alpha_pattern": {"fc": 2}}, "alpha_pattern="),
        ({"r": 0}, "r=0, lora_alpha=4"),
        ({"lora_alpha": "4"}, "lora_alpha='4'"),
        ({"tensors_dropped": None}, "tensors_dropped=None: must be a list"),
    ],
)
def test_settings_that_are_not_read_are_refused(tmp_path, change, message):
    base, source = make(tmp_path / "base"), tmp_path / "source"
    changed(base, source)
    export_checkpoint(source, tmp_path / "small", "adapter", base=base, rank=4)
    path = tmp_path / "small" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=message):
        load_drafter(tmp_path / "small")


def test_half_of_an_update_is_refused(tmp_path):
    base, source = make(tmp_path / "base"), tmp_path / "source"
    changed(base, source)
    export_checkpoint(source, tmp_path / "small", "adapter", base=base, rank=4)
    path = tmp_path / "small" / "adapter_model.safetensors"
    tensors = load_file(path)
    del tensors[next(name for name in tensors if name.endswith("q_proj.lora_A.weight"))]
    save_file(tensors, path)
    with pytest.raises(ValueError, match=r"q_proj\.lora_B\.weight has no lora_A\.weight beside it"):
        load_drafter(tmp_path / "small")
