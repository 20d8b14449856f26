"""`carryover cells`: from recordings to checkpoints and a results page, killed and resumed on the way."""

from __future__ import annotations

import json
import os
import shutil
from itertools import pairwise

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import save_target

from carryover_ext.cli import build_parser, main
from carryover_ext.training.cells import Part, pack, plan, run_cells, unpack
from carryover_ext.training.evaluate import FORMAT

SMALL = (
    "--short-steps 2 --short-block 3 --start-steps 2 --arm-steps 2 --sequences 2 --anchors 4 --layers 1 "
    "--taps 1 --block 4 --markov-rank 4"
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
            "dflash-short",
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
    # only the very first steps have short blocks, and only where they would be shorter
    assert {name for name, words in by_name.items() if "--block=3" in _joined(words)} == {"dflash-short"}
    assert {name for name, words in by_name.items() if "--block=4" in _joined(words)} == {"dflash-start"}
    for words in (["--short-steps", "0"], ["--short-block", "4"]):
        names = [part.out.name for part in plan(parsed([*world[1], f"--out={tmp_path}", *words]))]
        assert names[0] == "dflash-start" and "markov-short" not in names
    alone = plan(parsed([*world[1], f"--out={tmp_path}", "--kinds", "markov"]))
    assert [part.out.name for part in alone][:2] == ["markov-short", "markov-start"]
    assert "--drafter=markov" in _joined(alone[0].words)


def _joined(words):
    """Options with their values."""
    return {f"{a}={b}" for a, b in pairwise(words)}


def test_killed_and_resumed_it_makes_all_cells(world, tmp_path, capsys):
    words = [*world[1], f"--out={tmp_path}/out", f"--pack={tmp_path}/pack"]
    seen: list[str] = []

    def until_fourth(argv):
        seen.append(argv[1])
        if len(seen) == 4:
            raise KeyboardInterrupt
        return main(argv)

    with pytest.raises(KeyboardInterrupt):
        run_cells(parsed(words), until_fourth)
    assert seen == ["train"] * 4 and not (tmp_path / "out" / "results.md").exists()
    assert run_cells(parsed(words)) == 0
    output = capsys.readouterr().out
    assert "[4 of 11]" in output and "all 11 parts are done" in output
    page = (tmp_path / "out" / "results.md").read_text()
    for cell in ("DFlash, T = 0", "DFlash, T = 1", "Markov, T = 0", "Markov, T = 1"):
        assert f"target, {cell}" in page
    assert run_cells(parsed(words)) == 0
    assert "[1 of 11]" not in capsys.readouterr().out  # nothing is done twice
    names = {p.name for p in (tmp_path / "pack" / "target").iterdir()}
    assert names == {f"{k}-{a}" for k in ("dflash", "markov") for a in ("start", "shifted", "carryover")}
    carry = load_file(tmp_path / "pack" / "target" / "markov-carryover" / "model.safetensors")
    assert "carryover_embedding" in carry and "markov_head.markov_w1.weight" in carry


def test_what_older_versions_made_stays_done(world, tmp_path):
    """A start without short blocks goes on as it is, options may have moved, and an evaluation whose format
    the results page no longer reads is made again."""
    words = [*world[1], f"--out={tmp_path}", "--kinds", "dflash"]
    old = plan(parsed([*words, "--short-steps", "0"]))
    for part in old:
        part.out.parent.mkdir(parents=True, exist_ok=True)
        if part.words[0] == "evaluate":
            part.out.write_text(json.dumps({"format": FORMAT}))
        else:
            (part.out / "checkpoint").mkdir(parents=True)
        Part([part.words[0], *part.words[-2:], *part.words[1:-2]], part.out).set_done()
    parts = plan(parsed(words))
    assert [part.out for part in parts] == [part.out for part in old] and all(p.is_done() for p in parts)
    parts[-1].out.write_text(json.dumps({"format": "carryover-evaluate/0"}))
    assert [part.is_done() for part in parts[-2:]] == [True, False]
    assert not Part([*parts[0].words, "--seed", "2"], parts[0].out).is_done()


def test_kinds_in_any_order(world, tmp_path):
    names = [
        [part.out.name for part in plan(parsed([*world[1], f"--out={tmp_path}", "--kinds", *kinds]))]
        for kinds in (("dflash", "markov"), ("markov", "dflash", "dflash"))
    ]
    assert names[0] == names[1]


def test_the_time_limit_ends_between_parts(world, tmp_path, capsys):
    words = [*world[1], f"--out={tmp_path}", "--minutes", "1e-9"]
    assert run_cells(parsed(words)) == 0
    assert "0 of 11 parts are done; run the same line again" in capsys.readouterr().out


def test_two_cells_in_one_place_are_refused(world, tmp_path):
    folder = world[0]
    (tmp_path / "target").symlink_to(folder / "target")
    for words in (
        [f"--target={folder}/target={folder}/rec0", f"--target={tmp_path}/target={folder}/rec0"],
        [f"--target={folder}/target={folder}/rec0,{folder}/rec0"],
    ):
        with pytest.raises(ValueError, match="--target: two of them would write"):
            main(["--traceback", "cells", *words])


def test_a_part_whose_output_is_gone_is_done_again(tmp_path):
    part = Part(["evaluate"], tmp_path / "x.json")
    part.set_done()
    assert not part.is_done()
    part.out.write_text(json.dumps({"format": FORMAT}))
    assert part.is_done() and not Part(["evaluate", "--all"], part.out).is_done()


def test_a_new_start_voids_what_was_made_from_the_old_one(world, tmp_path):
    words = [*world[1], f"--out={tmp_path}", "--kinds", "dflash"]
    assert run_cells(parsed(words)) == 0
    parts = plan(parsed(words))
    assert all(part.is_done() for part in parts)
    root = tmp_path / "target"
    weights = root / "dflash-start" / "checkpoint" / "model.safetensors"
    tensors = load_file(weights)
    save_file({k: v + 1 for k, v in tensors.items()}, weights)
    assert [part.is_done() for part in parts] == [True, True, False, False, True, True]
    with pytest.raises(ValueError, match=r"--init .* was begun from other weights; use a new folder"):
        run_cells(parsed(words))
    for arm in ("dflash-shifted", "dflash-carryover"):
        shutil.rmtree(root / arm)
    redone: list[str] = []
    run_cells(parsed(words), lambda argv: redone.append(argv[1]) or main(argv))
    assert redone == ["train", "train", "evaluate", "evaluate", "results"]


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
    last = out / "model.safetensors.part-00003"
    kept = last.read_bytes()
    last.write_bytes(kept[:-1])
    with pytest.raises(ValueError, match="a piece of 4 is missing or damaged"):
        unpack(out)
    assert not (out / "model.safetensors").exists()
    last.write_bytes(kept)
    assert main(["cells", f"--unpack={tmp_path}"]) == 0
    assert (out / "model.safetensors").read_bytes() == content
    assert sorted(p.name for p in out.iterdir()) == ["config.json", "model.safetensors"]
    with pytest.raises(ValueError, match="nothing to join there"):
        main(["--traceback", "cells", f"--unpack={tmp_path}"])
    for size, limit in ((1500, 10), (900, 300), (100, 300)):  # over 100 pieces; over an older, larger one
        (checkpoint / "model.safetensors").write_bytes(content := os.urandom(size))
        pack(checkpoint, out, limit=limit)
        unpack(out)
        assert (out / "model.safetensors").read_bytes() == content
        pack(checkpoint, out, limit=limit)


def test_the_mask_is_a_token_that_no_text_has(world):
    from carryover_ext.pretrained import load_tokenizer
    from carryover_ext.training.shapes import default_mask_token

    tokenizer = load_tokenizer(world[0] / "target")
    assert tokenizer.convert_ids_to_tokens(default_mask_token(tokenizer, 272)) == "<spare>"
    for size, stop in ((272, [258]), (258, [])):
        with pytest.raises(ValueError, match="no spare special token"):
            default_mask_token(tokenizer, size, stop)
    tokenizer.eos_token = "<spare>"
    tokenizer.bos_token = "</s>"
    tokenizer.pad_token = "<s>"
    with pytest.raises(ValueError, match="--mask-token: the target's tokenizer has no spare special token"):
        default_mask_token(tokenizer, 272)
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


def test_resuming_after_the_first_folder_grew_begins_a_new_epoch(world, tmp_path):
    """The saved order holds numbers that mean other recordings then."""
    from carryover_ext.training.features import JoinedStore
    from carryover_ext.training.trainer import Trainer, TrainSettings

    class Some:
        def __init__(self, count: int, temperature: float) -> None:
            self.count, self.drawn = count, temperature

        sizes = property(lambda self: [self.count])

        def __len__(self) -> int:
            return self.count

        def temperature(self, index: int) -> float:
            return self.drawn

    def trainer(first: int) -> Trainer:
        made = Trainer.__new__(Trainer)
        made.store, made.settings = JoinedStore([Some(first, 0.0), Some(4, 1.0)]), TrainSettings(sequences=2)
        made.generator, made.step, made.order = torch.Generator().manual_seed(0), 3, [0, 1, 6, 7]
        made.master = {"w": torch.zeros(2, requires_grad=True)}
        made.optimizer = torch.optim.AdamW(made.master.values())
        return made

    trainer(4).save_state(tmp_path / "state.pt")
    for first, order in ((4, [0, 1, 6, 7]), (6, [])):
        resumed = trainer(first)
        resumed.order = [9]
        resumed.load_state(tmp_path / "state.pt")
        assert (resumed.step, resumed.order) == (3, order)
