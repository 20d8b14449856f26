"""`carryover cells`: from recordings to checkpoints and a results page, killed and resumed on the way."""

from __future__ import annotations

import json
import os

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import save_target

from carryover_ext.cli import build_parser, main
from carryover_ext.training.cells import pack, plan, run_cells, unpack

SMALL = (
    "--start-steps 2 --arm-steps 2 --sequences 2 --anchors 4 --layers 1 --taps 1 --block 4 --markov-rank 4"
)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cells")
    save_target(folder / "target")
    (folder / "p.jsonl").write_text("".join(json.dumps({"prompt": f"n {i}"}) + "\n" for i in range(6)))
    for t in (0, 1):
        words = [
            "record",
            "--target",
            folder / "target",
            "--prompts",
            folder / "p.jsonl",
            "--max-new-tokens",
            12,
        ]
        assert not main([*map(str, words), f"--out={folder}/rec{t}", f"--temperature={t}"])
    line = f"cells --target {folder}/target={folder}/rec0,{folder}/rec1 {SMALL} --draft-vocab 0 --device cpu"
    return folder, [*line.split(), "--intermediate", "16", "--limit", "1"]


def parsed(words):
    return build_parser("cells").parse_args(words)


def test_the_plan_has_every_cell(world, tmp_path):
    parts = plan(parsed([*world[1], f"--out={tmp_path}"]))
    names = [part.out.name for part in parts]
    assert names == [
        *(
            "dflash-start",
            "dflash-shifted",
            "dflash-carryover",
            "target-dflash-t0.json",
            "target-dflash-t1.json",
        ),
        *(
            "markov-start",
            "markov-shifted",
            "markov-carryover",
            "target-markov-t0.json",
            "target-markov-t1.json",
        ),
    ]
    by_name = {part.out.name: part.words for part in parts}
    # the arms of a pair differ in nothing but the carried rows
    for kind in ("dflash", "markov"):
        one, other = by_name[f"{kind}-shifted"], by_name[f"{kind}-carryover"]
        assert [(a, b) for a, b in zip(one, other, strict=True) if a != b] == [
            (f"{tmp_path}/target/{kind}-shifted", f"{tmp_path}/target/{kind}-carryover"),
            ("shifted", "carryover"),
        ]
    assert f"{tmp_path}/target/dflash-start/checkpoint" in by_name["markov-start"]


def test_killed_and_resumed_it_makes_all_cells(world, tmp_path, capsys):
    words = [*world[1], f"--out={tmp_path}/out", f"--pack={tmp_path}/pack"]
    seen: list[str] = []

    def until_third(argv):
        seen.append(argv[1])
        if len(seen) == 3:
            raise KeyboardInterrupt
        return main(argv)

    with pytest.raises(KeyboardInterrupt):
        run_cells(parsed(words), until_third)
    assert seen == ["train"] * 3 and not (tmp_path / "out" / "results.md").exists()
    assert run_cells(parsed(words)) == 0
    output = capsys.readouterr().out
    assert "[3 of 10]" in output and "all 10 parts are done" in output
    page = (tmp_path / "out" / "results.md").read_text()
    for cell in ("DFlash, T = 0", "DFlash, T = 1", "Markov, T = 0", "Markov, T = 1"):
        assert f"target, {cell}" in page
    assert run_cells(parsed(words)) == 0
    assert "[1 of 10]" not in capsys.readouterr().out  # nothing is done twice
    names = {p.name for p in (tmp_path / "pack" / "target").iterdir()}
    assert names == {f"{k}-{a}" for k in ("dflash", "markov") for a in ("start", "shifted", "carryover")}
    carry = load_file(tmp_path / "pack" / "target" / "markov-carryover" / "model.safetensors")
    assert "carryover_embedding" in carry and "markov_head.markov_w1.weight" in carry


def test_the_time_limit_ends_between_parts(world, tmp_path, capsys):
    words = [*world[1], f"--out={tmp_path}", "--minutes", "1e-9"]
    assert run_cells(parsed(words)) == 0
    assert "0 of 10 parts are done; run the same line again" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["cells"], "--target: name at least one"),
        (["cells", "--target=x"], "--target x: must be TARGET=RECORDINGS"),
        (["cells", "--target=x=/no/such"], "/no/such is not a folder; `carryover record` makes it"),
    ],
)
def test_mistakes_are_named(words, message):
    with pytest.raises(ValueError, match=message):
        main(["--traceback", *words])


def test_pieces_of_a_checkpoint(tmp_path):
    checkpoint, out = tmp_path / "checkpoint", tmp_path / "out"
    checkpoint.mkdir()
    content = os.urandom(1000)
    (checkpoint / "model.safetensors").write_bytes(content)
    (checkpoint / "config.json").write_text("{}")
    pack(checkpoint, out, limit=300)
    assert max(p.stat().st_size for p in out.iterdir()) <= 300 and len(list(out.glob("*.part-*"))) == 4
    last = out / "model.safetensors.part-03"
    kept = last.read_bytes()
    last.write_bytes(kept[:-1])
    with pytest.raises(ValueError, match="a piece of 4 is missing or damaged"):
        unpack(out)
    assert not (out / "model.safetensors").exists()
    last.write_bytes(kept)
    assert main(["cells", f"--unpack={tmp_path}"]) == 0
    assert (out / "model.safetensors").read_bytes() == content
    assert sorted(p.name for p in out.iterdir()) == ["config.json", "model.safetensors"]


def test_the_mask_is_a_token_that_no_text_has(world):
    from carryover_ext.pretrained import load_tokenizer
    from carryover_ext.training.commands import default_mask_token

    tokenizer = load_tokenizer(world[0] / "target")
    assert tokenizer.convert_ids_to_tokens(default_mask_token(tokenizer)) == "<spare>"
    tokenizer.eos_token = "<spare>"
    tokenizer.bos_token = "</s>"
    tokenizer.pad_token = "<s>"
    with pytest.raises(ValueError, match="--mask-token: the target's tokenizer has no spare special token"):
        default_mask_token(tokenizer)
    words = ["train", f"--target={world[0]}/target", f"--recordings={world[0]}/rec0", "--out=/no/such"]
    with pytest.raises(ValueError, match="--mask-token 272: must be a token id of the target, 0 to 271"):
        main(["--traceback", *words, "--taps=1", "--mask-token=272"])


def test_both_temperatures_train_together(world, tmp_path):
    """A batch holds answers of one temperature; both are used."""
    from carryover_ext.training.anchors import load_batch
    from carryover_ext.training.features import FeatureStore, JoinedStore
    from carryover_ext.training.trainer import Trainer, TrainSettings

    folder, words = world
    if not (folder / "rec0-features").exists():
        assert run_cells(parsed([*words, f"--out={tmp_path}", "--kinds", "dflash"])) == 0
    stores = [FeatureStore(folder / f"rec{t}", folder / f"rec{t}-features", temperature=t) for t in (0, 1)]
    store = JoinedStore(stores)
    assert len(store) == len(stores[0]) + len(stores[1])
    assert store.recording(len(stores[0])) == stores[1].recording(0)
    assert torch.equal(store[len(store) - 1].ids, stores[1][len(stores[1]) - 1].ids)
    picker = Trainer.__new__(Trainer)
    picker.store, picker.settings, picker.order = store, TrainSettings(sequences=2), []
    picker.generator = torch.Generator().manual_seed(0)
    seen = []
    for _ in range(30):
        picks = picker._next_sequences()
        temperatures = {store.temperature(i) for i in picks}
        assert len(picks) == 2 and len(temperatures) == 1
        assert len(load_batch(store, picks, 2, picker.generator).lengths) == 2
        seen += temperatures
    assert set(seen) == {0, 1}
