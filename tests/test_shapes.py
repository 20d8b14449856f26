"""The shape of a drafter that `carryover train` begins with: defaults from the target, what does not fit it,
and what contradicts ``--init``."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny_models

from carryover_ext.cli import build_parser, main
from carryover_ext.config import DSPARK, DrafterConfig
from carryover_ext.drafters import MarkovDrafter, load_drafter
from carryover_ext.training.cells import plan
from carryover_ext.training.shapes import start_config


def parsed(*words: str) -> argparse.Namespace:
    base = ["train", "--recordings=rec", "--out=out", "--mask-token=3"]
    return build_parser("train").parse_args([*base, *words])


def target(**changes: int) -> SimpleNamespace:
    shape = {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192,
    }
    return SimpleNamespace(config=SimpleNamespace(**(shape | changes)))


def shape(config: DrafterConfig) -> tuple[int | None, ...]:
    heads = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    return (config.hidden_size, *heads, config.intermediate_size)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], (576, 9, 3, 64, 1536)),
        (["--hidden-size=576"], (576, 9, 3, 64, 1536)),
        (["--hidden-size=384"], (384, 6, 2, 64, 1024)),
        (["--hidden-size=200"], (200, 3, 1, 64, 536)),
        (["--hidden-size=8"], (8, 3, 1, 64, 24)),
        (["--hidden-size=384", "--heads=4"], (384, 4, 2, 64, 1024)),
        (["--hidden-size=384", "--kv-heads=1"], (384, 3, 1, 64, 1024)),
        (["--hidden-size=384", "--heads=2", "--kv-heads=2", "--intermediate=64"], (384, 2, 2, 64, 64)),
        (["--heads=6", "--kv-heads=3"], (576, 6, 3, 64, 1536)),
    ],
)
def test_sizes_come_from_the_target(words: list[str], expected: tuple[int, ...]) -> None:
    config = start_config(parsed(*words), target(), None)
    assert shape(config) == expected and config.target_hidden_size == 576
    assert config.own_vocabulary == (expected[0] != 576) != config.tie_word_embeddings
    assert (config.num_hidden_layers, config.block_size, config.draft_vocab_size) == (2, 8, 8192)
    assert config.target_layer_ids == [1, 8, 14, 20, 27] and config.markov_rank == 0


def test_a_small_vocabulary_is_taken_whole() -> None:
    assert start_config(parsed(), target(vocab_size=300), None).draft_vocab_size is None
    assert start_config(parsed("--draft-vocab=300"), target(vocab_size=300), None).draft_vocab_size == 300


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--hidden-size=577"], "--hidden-size 577: must be at most 576, the width of the target"),
        (["--kv-heads=4"], "--kv-heads 4: must be at most 3, the KV heads of the target"),
        (["--heads=8", "--kv-heads=4"], "--kv-heads 4: must be at most 3, the KV heads of the target"),
        (["--heads=5", "--kv-heads=2"], "--heads 5: must be --kv-heads 2 times a number up to 3, since the"),
        (["--heads=8", "--kv-heads=2"], "--heads 8: .* since the target has 3 query heads for each KV head"),
        (["--heads=7"], "--heads 7: must be a number of KV heads up to 3 times a number up to 3"),
        (["--intermediate=1537"], "--intermediate 1537: must be at most 1536, the MLP channels of the"),
        (["--layers=31"], "--layers 31: must be at most 30, the layers of the target"),
        (["--taps=29"], "--taps 29: the target's 30 layers are too few"),
        (["--mask-token=49152"], "--mask-token 49152: must be a token id of the target, 0 to 49151"),
        (["--draft-vocab=49153"], r"--draft-vocab 49153: must be 0 \(the whole vocabulary\) or at most"),
        (["--draft-vocab=-1"], "--draft-vocab -1: must be 0"),
        (["--markov-rank=8"], "--markov-rank 8: the drafter has no Markov head; add --drafter markov"),
        (["--block=1"], "block_size=1: must be at least 2"),
    ],
)
def test_what_does_not_fit_the_target(words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        start_config(parsed(*words), target(), None)


@pytest.mark.parametrize("option", ["layers", "hidden-size", "heads", "kv-heads", "taps", "block"])
def test_no_size_is_zero(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed(f"--{option}=0")
    assert f"--{option}: 0 is not a positive number" in capsys.readouterr().err


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``dflash``: one layer, taps 1 and 2, block 6, all of 272 tokens. ``markov``: with a head of rank 4."""
    folder = tmp_path_factory.mktemp("checkpoints")
    tiny_models.save_drafter(folder / "dflash", True)
    config = DrafterConfig.from_pretrained(folder / "dflash")
    config.markov_rank, config.architectures = 4, [DSPARK]
    MarkovDrafter(config).save_pretrained(folder / "markov")
    return folder


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--layers=2"], "--layers 2: --init .*dflash has 1, which its weights keep; leave the option out"),
        (["--hidden-size=32"], "--hidden-size 32: --init .* has 64"),
        (["--heads=1"], "--heads 1: --init .* has 2"),
        (["--kv-heads=2"], "--kv-heads 2: --init .* has 1"),
        (["--intermediate=48"], "--intermediate 48: --init .* has 96"),
        (["--taps=1"], "--taps 1: --init .* has 2"),
        (["--mask-token=4"], "--mask-token 4: --init .* has 271"),
        (["--draft-vocab=40"], "--draft-vocab 40: --init .* has 0"),
        (["--markov-rank=8"], "--markov-rank 8: the drafter has no Markov head"),
        (["--layout=anchor-first"], "--layout anchor-first: --init"),
        (["--block=1"], "block_size=1: must be at least 2"),
    ],
)
def test_what_contradicts_a_checkpoint(checkpoints: Path, words: list[str], message: str) -> None:
    base = ["--mask-token=271", f"--init={checkpoints}/dflash"]
    with pytest.raises(ValueError, match=message):
        start_config(parsed(*base, *words), None, None)


def test_what_a_checkpoint_may_be_given(checkpoints: Path) -> None:
    """What it has, another block, and a Markov head where it has none."""
    same = ["--layers=1", "--hidden-size=64", "--heads=2", "--kv-heads=1", "--intermediate=96", "--taps=2"]
    same += ["--mask-token=271", "--draft-vocab=0"]
    config = start_config(parsed(*same, f"--init={checkpoints}/dflash"), None, None)
    assert config == DrafterConfig.from_pretrained(checkpoints / "dflash")
    for block in (4, 9):
        args = parsed(*same, f"--init={checkpoints}/dflash", f"--block={block}")
        assert start_config(args, None, None).verify_rows == block
    head = ["--mask-token=271", "--drafter=markov"]
    for words, rank in (([], 256), (["--markov-rank=8"], 8)):
        args = parsed(*head, *words, f"--init={checkpoints}/dflash")
        assert start_config(args, None, None).markov_rank == rank
    args = parsed(*head, "--markov-rank=4", f"--init={checkpoints}/markov")
    assert start_config(args, None, None).markov_rank == 4
    args = parsed(*head, "--markov-rank=8", f"--init={checkpoints}/markov")
    with pytest.raises(ValueError, match=r"--markov-rank 8: --init .*markov has a head of rank 4, which"):
        start_config(args, None, None)


def test_cells_pass_the_sizes_to_new_drafters_only(tmp_path: Path) -> None:
    (tmp_path / "rec").mkdir()
    words = f"--target x={tmp_path}/rec --out {tmp_path} --hidden-size 32 --heads 2 --kv-heads 1".split()
    by_name = {
        part.out.name: part.words for part in plan(build_parser("cells").parse_args(["cells", *words]))
    }
    sizes = ["--hidden-size", "32", "--heads", "2", "--kv-heads", "1"]
    start = by_name["dflash-short"]
    assert start[start.index("--hidden-size") : start.index("--taps")] == sizes
    for name in ("dflash-start", "dflash-carryover", "dflash-shifted", "markov-start", "markov-carryover"):
        assert not {"--hidden-size", "--heads", "--layers", "--taps"} & set(by_name[name])


def test_train_evaluate_and_bench_at_half_the_size(tmp_path: Path) -> None:
    """From recordings to answers: a start, then Carryover training from it with a longer block."""
    folder = tiny_models.save_target(tmp_path / "target")
    (tmp_path / "p.jsonl").write_text("".join(json.dumps({"prompt": f"n {i}"}) + "\n" for i in range(12)))
    common = [f"--target={folder}"]
    record = [f"--prompts={tmp_path}/p.jsonl", f"--out={tmp_path}/rec", "--max-new-tokens=12"]
    assert not main(["record", *common, *record])
    train = ["train", *common, f"--recordings={tmp_path}/rec", "--anchors=4", "--cycle=1", "--steps=2"]
    new = ["--hidden-size=32", "--taps=1", "--block=4", "--layers=1", "--draft-vocab=100", "--mask-token=271"]
    assert not main(["--traceback", *train, *new, f"--out={tmp_path}/a"])
    small = load_drafter(tmp_path / "a" / "checkpoint")
    assert small.embed_tokens.weight.shape == (272, 32) and small.lm_head.weight.shape == (100, 32)
    init = [f"--init={tmp_path}/a/checkpoint", "--objective=carryover", "--block=6"]
    assert not main(["--traceback", *train, *init, f"--out={tmp_path}/b"])
    carry = load_drafter(tmp_path / "b" / "checkpoint")
    assert (carry.config.carryover, carry.config.block_size) == (True, 6)
    for name in ("embed_tokens", "lm_head"):
        assert getattr(carry, name).weight.equal(getattr(small, name).weight)
    run = ["evaluate", *common, f"--recordings={tmp_path}/rec", "--all", f"--out={tmp_path}/x.json"]
    assert not main(["--traceback", *run, f"--drafter={tmp_path}/b/checkpoint"])
    assert json.loads((tmp_path / "x.json").read_text())["tasks"][-1] == "all"
    (tmp_path / "q.jsonl").write_text(json.dumps({"id": 1, "category": "c", "turns": ["n 1"]}) + "\n")
    bench = ["bench", *common, f"--prompts={tmp_path}/q.jsonl", f"--out={tmp_path}/bench", "--tokens=20"]
    bench += [f"--drafter={tmp_path}/b/checkpoint", "--arms=plain,carryover-off,carryover"]
    assert not main(["--traceback", *bench, "--dtype=float32"])
    doc = json.loads((tmp_path / "bench" / "bench.json").read_text())
    answers = [a for row in doc["records"] for a in row["answers"] if row["arm"] != "plain"]
    assert answers and all(a["equal"] and a["drafted"] for a in answers)
