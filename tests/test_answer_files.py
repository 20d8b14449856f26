"""Answers in one file: a recording made again without the target, merging, and mistakes that are named."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import tiny_models

from carryover_ext.cli import main
from carryover_ext.named_targets import NAMES
from carryover_ext.training.answer_files import Answers, prompt_key
from carryover_ext.training.recordings import PromptIds, record

DATA = Path(__file__).parents[1] / "data"


def recording(
    folder: Path, numbers: range, target: str = "t", temperature: float = 0.0, big: int = 0
) -> Path:
    """Answers of different lengths, one of them empty."""

    def backend(prompts, first):
        return [([p[0] * 10 + big] * (p[0] % 4), "stop" if p[0] % 2 else "length") for p in prompts]

    prompts = [PromptIds("c", "s", [i, 7]) for i in numbers]
    record(prompts, backend, folder, settings={"target": target, "temperature": temperature}, shard_size=3)
    return folder


def test_a_recording_is_made_again_to_the_bit(tmp_path, capsys):
    target = tiny_models.save_target(tmp_path / "tiny")
    (tmp_path / "p.jsonl").write_text(
        "".join(json.dumps({"prompt": f"number {i}", "category": "ab"[i % 2]}) + "\n" for i in range(10))
    )
    common = ["record", f"--target={target}", f"--prompts={tmp_path}/p.jsonl", "--shard-size=4"]
    assert not main([*common, f"--out={tmp_path}/a", "--max-new-tokens=9", "--temperature=1", "--limit=8"])
    assert not main(["answers", f"{tmp_path}/a", f"--out={tmp_path}/deep/a.npz"])
    assert "8 answers of" in capsys.readouterr().out
    # Two prompts more than there are answers: they are left out.
    assert not main([*common, f"--out={tmp_path}/b", f"--answers={tmp_path}/deep/a.npz"])
    assert "8 of 10 prompts have an answer" in capsys.readouterr().out
    files = sorted(path.name for path in (tmp_path / "a").glob("shard-*"))
    assert len(files) == 2 and files == sorted(path.name for path in (tmp_path / "b").glob("shard-*"))
    for name in files:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    manifest = json.loads((tmp_path / "b" / "manifest.json").read_text())
    assert manifest["temperature"] == 1 and manifest["backend"] == "answers" and manifest["prompts"] == 8
    # Other answers to the same prompts do not mix with these.
    assert not main([*common, f"--out={tmp_path}/a2", "--max-new-tokens=5", "--temperature=1"])
    assert not main(["answers", f"{tmp_path}/a2", f"--out={tmp_path}/a2.npz"])
    assert main([*common, f"--out={tmp_path}/b", f"--answers={tmp_path}/a2.npz"]) == 2
    assert "was recorded with other settings" in capsys.readouterr().err
    # It trains as any other, at the temperature of its answers.
    train = [
        "train",
        f"--target={target}",
        f"--recordings={tmp_path}/b",
        f"--out={tmp_path}/run",
        "--steps=1",
    ]
    train += ["--taps=1", "--mask-token=271", "--layers=1", "--anchors=2", "--cycle=1", "--block=4"]
    assert not main(train)

    assert main([*common, "--features", f"--out={tmp_path}/c", f"--answers={tmp_path}/deep/a.npz"]) == 2
    assert "--answers: the target does not run" in capsys.readouterr().err
    for option in ("--temperature=0", "--seed=0", "--batch=4", "--max-new-tokens=9", "--backend=engine"):
        assert main([*common, option, f"--out={tmp_path}/c", f"--answers={tmp_path}/deep/a.npz"]) == 2
        assert f"leave {option.split('=')[0]} out" in capsys.readouterr().err
    other = tiny_models.save_target(tmp_path / "other")
    wrong = ["record", f"--target={other}", f"--prompts={tmp_path}/p.jsonl", f"--out={tmp_path}/c"]
    assert main([*wrong, f"--answers={tmp_path}/deep/a.npz"]) == 2
    assert f"are those of {target}, --target is {other}" in capsys.readouterr().err
    (tmp_path / "q.jsonl").write_text('{"prompt": "another"}\n')
    unknown = ["record", f"--target={target}", f"--prompts={tmp_path}/q.jsonl", f"--out={tmp_path}/c"]
    assert main([*unknown, f"--answers={tmp_path}/deep/a.npz"]) == 2
    assert (
        "has none to the 1 prompts of --prompts" in capsys.readouterr().err and not (tmp_path / "c").exists()
    )


def test_sources_are_merged_and_the_first_answer_stays(tmp_path):
    first = recording(tmp_path / "1", range(8))
    second = recording(tmp_path / "2", range(5, 12), big=1 << 17)
    out = tmp_path / "all.npz"
    assert not main(["answers", str(first), f"--out={out}"])
    small = Answers.load(out)
    assert np.load(out)["tokens"].dtype == np.uint16
    # What was made before may be a source, and the file itself be replaced.
    assert not main(["answers", str(out), str(second), f"--out={out}"])
    both = Answers.load(out)
    assert np.load(out)["tokens"].dtype == np.uint32 and len(both.answers) == 12
    assert both.settings == {"target": "t", "temperature": 0.0}
    for i in range(12):
        key = prompt_key([i, 7])
        tokens = [i * 10 + (i > 7) * (1 << 17)] * (i % 4)
        assert both.answers[key] == (tokens, "stop" if i % 2 else "length")
        assert i > 7 or small.answers[key] == both.answers[key]
    assert list(tmp_path.glob("*.tmp")) == []


def test_mistakes_are_named(tmp_path, capsys):
    first = recording(tmp_path / "1", range(3))
    out = f"--out={tmp_path}/x.npz"
    for source, message in [
        (recording(tmp_path / "2", range(3, 5), temperature=1.0), "other settings .*temperature.*0.0, 1.0"),
        (recording(tmp_path / "3", range(3, 5), target="u"), "other settings .*target.*'t', 'u'"),
    ]:
        assert main(["answers", str(first), str(source), out]) == 2
        assert re.search(f"{source}: {message}", capsys.readouterr().err)
    (tmp_path / "empty").mkdir()
    assert main(["answers", str(tmp_path / "empty"), out]) == 2
    assert "no shard-" in capsys.readouterr().err
    (first / "manifest.json").write_text("{}")
    assert main(["answers", str(first), out]) == 2
    assert "manifest.json: must name target and temperature" in capsys.readouterr().err
    assert main(["answers", str(first), f"--out={tmp_path}/x.json"]) == 2
    assert "must be a file NAME.npz" in capsys.readouterr().err
    assert not (tmp_path / "x.npz").exists()


@pytest.mark.parametrize("damage", ["cut", "text", "lengths", "missing", "settings", "flipped"])
def test_a_damaged_file_is_named(tmp_path, damage):
    path = tmp_path / "a.npz"
    assert not main(["answers", str(recording(tmp_path / "1", range(1, 4))), f"--out={path}"])
    data = dict(np.load(path))
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-30])
    elif damage == "text":
        path.write_text("no zip")
    elif damage == "settings":
        np.savez(path, **{**data, "settings": np.array("[1]")})
    elif damage == "flipped":
        raw = bytearray(path.read_bytes())
        for at in range(60, 120):
            raw[at] ^= 0x55
        path.write_bytes(bytes(raw))
    elif damage == "lengths":
        np.savez(path, **{**data, "tokens": data["tokens"][:-1]})
    else:
        np.savez(path, **{k: v for k, v in data.items() if k != "stopped"})
    with pytest.raises(ValueError, match=r"a\.npz: is not a whole file of `carryover answers`"):
        Answers.load(path)


@pytest.mark.parametrize("path", sorted(DATA.glob("*.npz")), ids=lambda path: path.stem)
def test_the_repositorys_answers(path):
    """They load, name a target that can be fetched, and stay within what they promise."""
    answers = Answers.load(path)
    assert path.stem == f"{answers.settings['target']}-t{answers.settings['temperature']:g}"
    assert answers.settings["target"] in NAMES and len(answers.answers) > 100
    assert max(len(ids) for ids, _ in answers.answers.values()) <= 256 and path.stat().st_size < 16 << 20
    # An answer that was not ended by the target is as long as it may be.
    assert {len(ids) for ids, finish in answers.answers.values() if finish == "length"} <= {256}
    assert f"| {path.name} |" in (DATA / "README.md").read_text(encoding="utf-8")
