"""Exported checkpoints: each reader's own rules, applied to what is written; warm start and back."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import HIDDEN, VOCAB, save_drafter, save_target
from torch import Tensor

from carryover_ext import export
from carryover_ext.cli import main
from carryover_ext.config import DSPARK, CarryoverConfig, DrafterConfig
from carryover_ext.drafters import DFlashDrafter, MarkovDrafter, load_drafter
from carryover_ext.export import export_checkpoint, target_weights
from carryover_ext.integrations.vllm import DFLASH_ARCHITECTURE, DSPARK_ARCHITECTURE

REDUCED = 40


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"))


def make(
    folder: Path, carryover: bool = True, markov: bool = False, reduced: bool = False, **changes
) -> Path:
    """A random drafter; ``reduced``: with a draft vocabulary of 40 tokens."""
    if reduced:
        changes["draft_vocab_size"] = REDUCED
    save_drafter(folder, carryover, **changes)
    if not (markov or reduced):
        return folder
    config = DrafterConfig.from_pretrained(folder)
    if markov:
        config.markov_rank, config.architectures = 8, [DSPARK]
    drafter = (MarkovDrafter if markov else DFlashDrafter)(config)
    for parameter in drafter.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    if reduced:
        drafter.d2t.copy_(torch.randperm(VOCAB)[:REDUCED].sort().values)
    drafter.save_pretrained(folder)
    return folder


def drafts(folder: Path, target: Path, carry: bool) -> Tensor:
    """Two rounds of one request with fixed features; the second draft sees rejected rows when ``carry``."""
    generator = torch.Generator().manual_seed(4)
    drafter = load_drafter(folder, torch.float32)
    drafter.bind(*(w.float() for w in target_weights(str(target))))
    cache = drafter.new_cache(1, 64)
    rows = drafter.config.verify_rows
    features = torch.randn(7 + rows, drafter.config.num_features, generator=generator)
    drafter.commit(cache, features[:7], None, torch.tensor([0, 7]).int(), torch.tensor([6]).int())
    first = drafter.draft(cache, torch.tensor([5])).tokens
    drafter.commit(
        cache, features[7:], None, torch.tensor([0, rows]).int(), torch.tensor([1]).int(), carry=carry
    )
    assert int(cache.segment_lens) == (rows - 2 if carry and drafter.config.carryover else 0)
    return torch.cat([first, drafter.draft(cache, torch.tensor([9])).tokens])


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def config_of(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("markov", [False, True], ids=["dflash", "markov"])
@pytest.mark.parametrize("reduced", [False, True], ids=["whole", "reduced"])
def test_vllm(tmp_path: Path, target: Path, markov: bool, reduced: bool) -> None:
    source = make(tmp_path / "own", markov=markov, reduced=reduced)
    written = export_checkpoint(source, tmp_path / "out", "vllm", target=str(target))
    tensors, config = tensors_of(tmp_path / "out"), config_of(tmp_path / "out")
    assert config["architectures"] == written.architectures
    assert written.architectures == ([DSPARK_ARCHITECTURE, DSPARK] if markov else [DFLASH_ARCHITECTURE])
    assert config["carryover_config"]["enabled"] and "carryover_embedding" in tensors
    if reduced:
        # vLLM's own reading: column c of the drafter's head is token c + d2t[c].
        own = load_drafter(source, torch.float32)
        tokens = tensors["d2t"] + torch.arange(REDUCED)
        assert torch.equal(tokens, own.d2t)
        head = target_weights(str(target))[1]
        assert torch.equal(
            tensors["lm_head.weight"].float(), head[tokens].to(tensors["fc.weight"].dtype).float()
        )
        assert config["draft_vocab_size"] == REDUCED
    else:
        assert not {"d2t", "lm_head.weight"} & set(tensors)
    # What was exported is a checkpoint of this package as well, and the same drafter.
    assert torch.equal(drafts(source, target, True), drafts(tmp_path / "out", target, True))
    again = export_checkpoint(tmp_path / "out", tmp_path / "again", "vllm", target=str(target))
    assert again.architectures == written.architectures
    for name, tensor in tensors_of(tmp_path / "again").items():
        assert torch.equal(tensor, tensors[name]), name


@pytest.mark.parametrize("markov", [False, True], ids=["dflash", "markov"])
@pytest.mark.parametrize("reduced", [False, True], ids=["whole", "reduced"])
def test_compact(tmp_path: Path, target: Path, markov: bool, reduced: bool) -> None:
    """Nothing that the target has is in it, whatever it came from; it drafts the same and can be exported."""
    source = make(tmp_path / "own", markov=markov, reduced=reduced)
    if markov and reduced:  # what the compact form leaves out
        tensors = tensors_of(source)
        outside = ~tensors["t2d"]
        tensors["markov_head.markov_w1.weight"][outside] = 0
        save_file(tensors, source / "model.safetensors")
    export_checkpoint(source, tmp_path / "vllm", "vllm", target=str(target))
    expected = drafts(source, target, True)
    for number, folder in enumerate((source, tmp_path / "vllm")):
        out = tmp_path / f"compact{number}"
        written = export_checkpoint(folder, out, "compact")
        assert written.architectures == [DSPARK if markov else "DFlashDraftModel"]
        tensors = tensors_of(out)
        assert not {"lm_head.weight", "embed_tokens.weight"} & set(tensors)
        # a reader of DSpark checkpoints takes d2t as distances, which t2d tells
        assert ("t2d" in tensors) == (markov and reduced)
        assert any("export to 'vllm'" in note for note in written.notes) == reduced
        assert torch.equal(drafts(out, target, True), expected)
        export_checkpoint(out, tmp_path / "again", "vllm", target=str(target))
        for name, tensor in tensors_of(tmp_path / "again").items():
            assert torch.equal(tensor, tensors_of(tmp_path / "vllm")[name]), name


@pytest.mark.parametrize("reduced", [False, True], ids=["whole", "reduced"])
@pytest.mark.parametrize("to", ["vllm", "compact"])
def test_without_its_markov_head_it_is_a_dflash_drafter(
    tmp_path: Path, target: Path, to: str, reduced: bool
) -> None:
    source = make(tmp_path / "own", markov=True, reduced=reduced)
    tensors = tensors_of(source)
    tensors["markov_head.markov_w2.weight"].zero_()  # a head that says nothing
    save_file(tensors, source / "model.safetensors")
    written = export_checkpoint(source, tmp_path / "out", to, target=str(target), drop_markov=True)
    assert written.architectures == [DFLASH_ARCHITECTURE if to == "vllm" else "DFlashDraftModel"]
    assert not any("markov" in name for name in tensors_of(tmp_path / "out"))
    drafter = load_drafter(tmp_path / "out")
    assert type(drafter) is DFlashDrafter and drafter.config.carryover
    assert torch.equal(drafts(source, target, True), drafts(tmp_path / "out", target, True))
    with pytest.raises(ValueError, match=r"drop_markov: source=.* has no Markov head; leave the option out"):
        export_checkpoint(tmp_path / "out", tmp_path / "again", to, target=str(target), drop_markov=True)


def test_vllm_reads_a_learned_mask_from_a_file(tmp_path: Path, target: Path) -> None:
    config = DrafterConfig.from_pretrained(save_drafter(tmp_path / "own", True))
    drafter = DFlashDrafter(config, mask_embedding=True)
    torch.nn.init.normal_(drafter.mask_embedding)
    drafter.save_pretrained(tmp_path / "own")
    export_checkpoint(tmp_path / "own", tmp_path / "out", "vllm")
    assert "mask_embedding" not in tensors_of(tmp_path / "out")
    state = torch.load(tmp_path / "out" / "mask_embedding.pt", weights_only=True)
    assert state["mask_token_id"] == config.mask_token_id
    assert torch.equal(state["embedding"], drafter.mask_embedding.detach())
    # It is still there when this package reads the folder, and gone with the drafter that it belongs to.
    assert torch.equal(drafts(tmp_path / "own", target, True), drafts(tmp_path / "out", target, True))
    export_checkpoint(tmp_path / "out", tmp_path / "zlab", "zlab")
    assert torch.equal(tensors_of(tmp_path / "zlab")["mask_embedding"], state["embedding"])
    export_checkpoint(save_drafter(tmp_path / "other", True), tmp_path / "out", "vllm")
    assert not (tmp_path / "out" / "mask_embedding.pt").exists()
    (tmp_path / "out" / "mask_embedding.pt").write_bytes(b"no")
    with pytest.raises(ValueError, match=r"mask_embedding.pt: corrupt"):
        load_drafter(tmp_path / "out")


@pytest.mark.parametrize("markov", [False, True], ids=["dflash", "markov"])
@pytest.mark.parametrize("reduced", [False, True], ids=["whole", "reduced"])
def test_speculators(tmp_path: Path, target: Path, markov: bool, reduced: bool) -> None:
    source = make(tmp_path / "own", markov=markov, reduced=reduced)
    export_checkpoint(source, tmp_path / "out", "speculators", target=str(target))
    tensors, config = tensors_of(tmp_path / "out"), config_of(tmp_path / "out")
    own = DrafterConfig.from_pretrained(source)
    assert config["speculators_model_type"] == ("dspark" if markov else "dflash")
    # Taps are counted from the embedding here, from the first layer there.
    assert [tap - 1 for tap in config["aux_hidden_state_layer_ids"]] == own.target_layer_ids
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == own.num_drafts
    assert config["speculators_config"]["verifier"]["name_or_path"] == str(target)
    assert config["sample_from_anchor"] == own.sample_from_anchor
    assert config["sliding_window_non_causal"] is True  # full attention over the block
    vocabulary = REDUCED if reduced else VOCAB
    assert config["draft_vocab_size"] == tensors["lm_head.weight"].shape[0] == vocabulary
    assert tensors["embed_tokens.weight"].shape == (VOCAB, HIDDEN)
    assert ("d2t" in tensors) == ("t2d" in tensors) == reduced
    if reduced:
        rows = torch.arange(REDUCED) + tensors["d2t"]
        assert torch.equal(tensors["t2d"].nonzero()[:, 0], rows)
    assert "model_type" not in config  # vLLM tells the layout by speculators_config, and only without it
    layer = config["transformer_layer_config"]
    assert layer["num_hidden_layers"] == own.num_hidden_layers and layer["model_type"] == "qwen3"
    assert "dflash_config" not in layer and "architectures" not in layer


@pytest.mark.parametrize("markov", [False, True], ids=["dflash", "markov"])
@pytest.mark.parametrize("reduced", [False, True], ids=["whole", "reduced"])
def test_zlab(tmp_path: Path, target: Path, markov: bool, reduced: bool) -> None:
    source = make(tmp_path / "own", markov=markov, reduced=reduced)
    written = export_checkpoint(source, tmp_path / "out", "zlab")
    tensors, config = tensors_of(tmp_path / "out"), config_of(tmp_path / "out")
    assert config["architectures"] == [DSPARK if markov else "DFlashDraftModel"]
    assert not {"d2t", "t2d", "carryover_embedding", "lm_head.weight"} & set(tensors)
    assert "carryover_config" not in config and "draft_vocab_size" not in config
    assert any("embedding is left out" in note for note in written.notes)
    assert any("vocabulary" in note for note in written.notes) == reduced
    if markov:
        assert tensors["markov_head.markov_w2.weight"].shape[0] == VOCAB
    if not reduced:
        assert torch.equal(drafts(source, target, False), drafts(tmp_path / "out", target, False))


@pytest.mark.parametrize("markov", [False, True], ids=["dflash", "markov"])
def test_warm_start_and_back(tmp_path: Path, target: Path, markov: bool) -> None:
    source = make(tmp_path / "own", carryover=False, markov=markov, reduced=True)
    warm = export_checkpoint(source, tmp_path / "warm", "vllm", target=str(target), warm_start=True)
    assert warm.architectures[0] in (DFLASH_ARCHITECTURE, DSPARK_ARCHITECTURE)
    added = tensors_of(tmp_path / "warm")["carryover_embedding"]
    assert added.shape == (HIDDEN,) and not added.any()
    # With nothing carried it is the original; with rows carried it sees them as context.
    assert torch.equal(drafts(source, target, False), drafts(tmp_path / "warm", target, False))
    assert load_drafter(tmp_path / "warm").config.carryover
    back = export_checkpoint(tmp_path / "warm", tmp_path / "back", "vllm", target=str(target), plain=True)
    assert back.architectures == [DSPARK if markov else "DFlashDraftModel"]
    plain = export_checkpoint(source, tmp_path / "plain", "vllm", target=str(target))
    assert plain.architectures == back.architectures
    assert config_of(tmp_path / "plain") == config_of(tmp_path / "back")
    expected, found = tensors_of(tmp_path / "plain"), tensors_of(tmp_path / "back")
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensor, found[name]), name


@pytest.mark.parametrize("to", ["vllm", "speculators", "zlab"])
@pytest.mark.parametrize("block", [True, False], ids=["disabled", "absent"])
def test_an_embedding_that_the_config_does_not_enable_is_left_out(tmp_path, target, to, block) -> None:
    """No reader builds a parameter for it: vLLM stopped at the tensor."""
    source = make(tmp_path / "own")
    config = config_of(source)
    if block:
        config["carryover_config"]["enabled"] = False
    else:
        del config["carryover_config"]
    (source / "config.json").write_text(json.dumps(config))
    written = export_checkpoint(source, tmp_path / "out", to, target=str(target))
    assert "carryover_embedding" not in tensors_of(tmp_path / "out")
    assert written.architectures == ["DFlashSpeculator" if to == "speculators" else "DFlashDraftModel"]
    assert any("carryover_config.enabled to true" in note for note in written.notes)
    if to != "speculators":
        assert not load_drafter(tmp_path / "out").config.carryover
    with pytest.raises(ValueError, match=r"warm_start: .*does not enable; set carryover_config.enabled"):
        export_checkpoint(source, tmp_path / "warm", "vllm", warm_start=True)
    plain = export_checkpoint(source, tmp_path / "plain", "vllm", plain=True)
    assert plain.architectures == ["DFlashDraftModel"] and not plain.notes


def test_a_window_survives_transformers_reading(tmp_path: Path) -> None:
    from transformers import AutoConfig

    layers = {"layer_types": ["sliding_attention"], "sliding_window": 16}
    export_checkpoint(make(tmp_path / "own", **layers), tmp_path / "out", "vllm")
    assert AutoConfig.from_pretrained(tmp_path / "out").sliding_window == 16


def test_errors(tmp_path: Path, target: Path) -> None:
    source = make(tmp_path / "own", reduced=True)
    with pytest.raises(ValueError, match=r"to='gguf': must be one of vllm, speculators, zlab"):
        export_checkpoint(source, tmp_path / "out", "gguf")
    with pytest.raises(ValueError, match=r"target is not given.*vocabulary of 40 tokens; name the target"):
        export_checkpoint(source, tmp_path / "out", "vllm")
    with pytest.raises(ValueError, match="target is not given: the speculators layout"):
        export_checkpoint(source, tmp_path / "out", "speculators")
    with pytest.raises(ValueError, match="has a carryover embedding already"):
        export_checkpoint(source, tmp_path / "out", "vllm", target=str(target), warm_start=True)
    with pytest.raises(ValueError, match="exclude each other"):
        export_checkpoint(source, tmp_path / "out", "vllm", plain=True, warm_start=True)
    with pytest.raises(ValueError, match="is the source folder"):
        export_checkpoint(source, source, "zlab")
    other = make(tmp_path / "wide", vocab_size=VOCAB + 8)
    with pytest.raises(ValueError, match=r"has 272 rows: the drafter has vocab_size=280"):
        export_checkpoint(other, tmp_path / "out", "speculators", target=str(target))
    deep = make(tmp_path / "deep", num_target_layers=9)
    with pytest.raises(ValueError, match=r"num_layers=4: .* made for a target of num_target_layers=9"):
        export_checkpoint(deep, tmp_path / "out", "speculators", target=str(target))
    anchor_first = make(tmp_path / "first", sample_from_anchor=True)
    with pytest.raises(ValueError, match="anchor-first layout for DSpark drafters only"):
        export_checkpoint(anchor_first, tmp_path / "out", "vllm")
    layers = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    mixed = make(tmp_path / "mixed", sliding_window=16, **layers)
    with pytest.raises(ValueError, match="one causality for all layers"):
        export_checkpoint(mixed, tmp_path / "out", "speculators", target=str(target))
    assert not (tmp_path / "out").exists()


def test_an_embedding_that_is_missing_is_named(tmp_path: Path) -> None:
    source = make(tmp_path / "own")
    tensors = tensors_of(source)
    del tensors["carryover_embedding"]
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(ValueError, match="no tensor 'carryover_embedding'"):
        export_checkpoint(source, tmp_path / "out", "zlab")


def test_a_short_name_of_the_target_is_spelt_out(tmp_path: Path, target: Path, monkeypatch) -> None:
    from carryover_ext import pretrained

    monkeypatch.setattr(pretrained, "target_path", {"short": str(target)}.get)
    export_checkpoint(make(tmp_path / "own"), tmp_path / "out", "speculators", target="short")
    verifier = config_of(tmp_path / "out")["speculators_config"]["verifier"]
    assert verifier["name_or_path"] == str(target)


def test_nothing_else_is_overwritten(tmp_path: Path) -> None:
    source, target = make(tmp_path / "own"), save_target(tmp_path / "target")
    before = {path.name: path.read_bytes() for path in target.iterdir()}
    with pytest.raises(ValueError, match=r"holds something else than a drafter .*LlamaForCausalLM"):
        export_checkpoint(source, target, "vllm", target=str(target))
    assert {path.name: path.read_bytes() for path in target.iterdir()} == before
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match="is a file; name a folder"):
        export_checkpoint(source, tmp_path / "file", "vllm")
    for _ in range(2):  # an earlier export is replaced
        export_checkpoint(source, tmp_path / "out", "vllm")


def test_an_export_that_is_killed_leaves_nothing_or_the_old_drafter(tmp_path: Path, monkeypatch) -> None:
    source, other, out = make(tmp_path / "own"), make(tmp_path / "other", False), tmp_path / "sub" / "out"
    write = export.write_tensors

    def killed(folder: Path, *rest) -> None:
        write(folder, *rest)
        raise KeyboardInterrupt

    monkeypatch.setattr(export, "write_tensors", killed)
    with pytest.raises(KeyboardInterrupt):
        export_checkpoint(source, out, "vllm")
    assert list(out.parent.iterdir()) == []
    monkeypatch.undo()
    export_checkpoint(source, out, "vllm")
    (out / "README.md").write_text("mine")
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    monkeypatch.setattr(export, "write_tensors", killed)
    with pytest.raises(KeyboardInterrupt):
        export_checkpoint(other, out, "vllm")
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    monkeypatch.undo()

    def moved(old: Path, new: Path) -> None:
        os.rename(old, new)
        raise KeyboardInterrupt

    monkeypatch.setattr(export, "os", SimpleNamespace(replace=moved, getpid=os.getpid))
    with pytest.raises(KeyboardInterrupt):
        export_checkpoint(other, out, "vllm")
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        load_drafter(out)
    assert sorted(path.name for path in out.iterdir()) == ["README.md", "model.safetensors"]


def test_an_export_leaves_no_file_of_the_drafter_before_it(tmp_path: Path) -> None:
    base, source = make(tmp_path / "base"), make(tmp_path / "own")
    export_checkpoint(source, tmp_path / "out", "adapter", base=base)
    export_checkpoint(source, tmp_path / "out", "compact")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]
    export_checkpoint(source, tmp_path / "out", "adapter", base=base)
    assert not (tmp_path / "out" / "model.safetensors").exists()
    load_drafter(tmp_path / "out")


def test_a_damaged_source_is_not_exported(tmp_path: Path) -> None:
    source = make(tmp_path / "own", carryover=False)
    tensors = tensors_of(source)
    del tensors["fc.weight"]
    save_file(tensors, source / "model.safetensors")
    for warm_start in (False, True):
        with pytest.raises(ValueError, match=r"missing \['fc.weight'\]"):
            export_checkpoint(source, tmp_path / "out", "vllm", warm_start=warm_start)
    assert not (tmp_path / "out").exists()


def test_what_the_reader_cannot_do_is_said(tmp_path: Path) -> None:
    source = make(tmp_path / "own", carryover=False)
    with pytest.raises(ValueError, match="the zlab layout has no carryover embedding"):
        export_checkpoint(source, tmp_path / "out", "zlab", warm_start=True)


@pytest.mark.parametrize("to", ["vllm", "speculators"])
def test_the_switches_travel(tmp_path: Path, target: Path, to: str) -> None:
    config = DrafterConfig.from_pretrained(make(tmp_path / "own"))
    config.carryover_config = CarryoverConfig(carry_embed_at="post_norm", carry_positions="shifted")
    config.save_pretrained(tmp_path / "own")
    export_checkpoint(tmp_path / "own", tmp_path / "out", to, target=str(target))
    switches = {"enabled": True, "carry_embed_at": "post_norm", "carry_positions": "shifted"}
    assert config_of(tmp_path / "out")["carryover_config"] == switches


def test_command(tmp_path: Path, target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = make(tmp_path / "own", reduced=True)
    arguments = ["export", str(source), "--to", "vllm", "--out", str(tmp_path / "out")]
    assert main(arguments) == 2
    assert "carryover export: target is not given" in capsys.readouterr().err
    assert main([*arguments, "--target", str(target)]) == 0
    assert DFLASH_ARCHITECTURE in capsys.readouterr().out
    assert load_drafter(tmp_path / "out").config.carryover_config == CarryoverConfig()
