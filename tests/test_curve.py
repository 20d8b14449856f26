"""`carryover curve`: hours add up over runs, means are weighted by steps, and a wrong folder is named."""

from __future__ import annotations

import json

import pytest

from carryover_ext.cli import main
from carryover_ext.training import curve


def run(folder, rows):
    folder.mkdir()
    (folder / "curve.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return folder


def row(steps, seconds, al, **more):
    return {"step": 0.0, "steps": steps, "seconds": seconds, "al": al, "slot1": al / 4, **more}


@pytest.fixture
def chain(tmp_path):
    first = [row(2, 1800, 1.0), row(6, 1800, 2.0, held_out_al=1.5)]
    second = [row(4, 3600, 3.0), row(4, 3600, 3.2, held_out_al=1.7)]
    return run(tmp_path / "a", first), run(tmp_path / "b", second)


def test_a_chain_goes_on_where_the_run_before_ended(chain):
    found = curve.read(f"both={chain[0]},{chain[1]}")
    assert found.name == "both" and found.joints == [1.0]
    assert [r["hours"] for r in found.rows] == [0.5, 1.0, 2.0, 3.0]
    assert [p["al"] for p in found.means(9)] == [1.0, 2.0, 3.0, 3.2]
    assert [p["al"] for p in found.means(2)] == pytest.approx([1.75, 3.1])
    assert found.held_out() == [(1.0, 1.5), (3.0, 1.7)]


def test_table_and_plot(chain, tmp_path, capsys):
    out = tmp_path / "new" / "plot.png"
    assert not main(["curve", f"both={chain[0]},{chain[1]}", str(chain[0]), f"--out={out}"])
    text = capsys.readouterr().out
    assert "| 1.00 | 2.000 | 50.0% | 1.500 |" in text
    assert "| 3.00 | 3.200 | 80.0% | 1.700 |" in text
    assert text.count("| 0.50 | 1.000 | 25.0% | - |") == 2
    assert out.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "has no curve.jsonl, so that it is no run of `carryover train`"),
        ("", "is empty; the run has not come to the end of a cycle yet"),
        ('{"step": 1', "is damaged"),
        ("[]", "is damaged"),
        ("{}", "is damaged ('steps')"),
        ('{"steps": 0, "seconds": 1, "al": 1, "slot1": 0}', "a line without the figures of a cycle"),
    ],
)
def test_what_is_no_run_is_named(tmp_path, capsys, text, message):
    folder = tmp_path / "run"
    folder.mkdir()
    if text is not None:
        (folder / "curve.jsonl").write_text(text)
    assert main(["curve", str(folder), f"--out={tmp_path}/c.png"]) == 2
    error = capsys.readouterr().err
    assert message in error and str(folder) in error
    assert not (tmp_path / "c.png").exists()


def test_names_of_folders(chain, tmp_path, monkeypatch, capsys):
    odd = run(tmp_path / "lr=1e-3", [row(1, 1, 1.5)])
    assert curve.read(f"n={odd}").rows == curve.read(str(odd)).rows
    assert curve.read(str(odd)).name == "lr=1e-3" and curve.read(str(chain[0])).name == "a"
    monkeypatch.chdir(chain[1])
    assert curve.read(".").name == "b"
    assert main(["curve", f"x={chain[0]},"]) == 2
    assert "runs: an empty name of a folder; write NAME=FOLDER,FOLDER,..." in capsys.readouterr().err


def test_the_plot_is_a_png(chain, capsys):
    assert main(["curve", str(chain[0]), "--out=curve.svg"]) == 2
    assert "--out curve.svg: must be a .png file" in capsys.readouterr().err
