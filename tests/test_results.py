"""`carryover results`: what the page says is what the files hold."""

from __future__ import annotations

import json

import pytest

from carryover_ext import report
from carryover_ext.cli import main
from carryover_ext.training.evaluate import FORMAT, document, gain
from carryover_ext.training.evaluation import COUNTS, Replayed, Tally
from carryover_ext.training.results import correlation, page, percent, points, read


def tally(rounds: dict[str, list[int]], **counts: float) -> Tally:
    """Recordings of 60 tokens with the given rounds, by category."""
    rest = dict.fromkeys(COUNTS, 0.0) | counts
    return Tally([Replayed(c, 60, rest | {"rounds": float(n)}) for c, ns in rounds.items() for n in ns])


def example() -> dict:
    arms = {
        "baseline": tally({"chat": [40, 30], "code": [20, 24]}),
        "carryover-off": tally({"chat": [40, 30], "code": [22, 24]}),
        "carryover": tally(
            {"chat": [36, 28], "code": [20, 21]},
            slots=100,
            recall1=40,
            off_recall1=38,
            recall16=70,
            off_recall16=69,
            refused=50,
            reconverged=6,
            carried_rounds=20,
            carried_rows=80,
            carried_mass=3,
        ),
    }
    settings = {"target": "tiny", "drafter": "markov", "temperature": 0.0, "block": 8}
    return json.loads(json.dumps(document(settings, arms)))


def test_document_holds_rates_and_gains():
    doc = example()
    assert doc["format"] == FORMAT and doc["settings"]["recordings"] == 4
    assert doc["tasks"] == ["chat", "code", "all"]
    assert doc["arms"]["carryover"]["all"]["al"] == pytest.approx(240 / 105)
    assert doc["arms"]["carryover"]["chat"]["al"] == pytest.approx(120 / 64)
    assert doc["gains"]["carryover/baseline"]["all"]["gain"] == pytest.approx(114 / 105 - 1)
    assert doc["gains"]["carryover/carryover-off"]["code"]["gain"] == pytest.approx(46 / 41 - 1)
    on = doc["arms"]["carryover"]["all"]
    assert (on["recall1"], on["off_recall1"], on["reconvergence"]) == (0.4, 0.38, 0.12)
    assert (on["carried_rows"], on["attention_mass"]) == (4.0, 0.15)


def test_gain_needs_the_same_recordings():
    with pytest.raises(ValueError, match="zip"):
        gain(tally({"chat": [3]}), tally({"chat": [3, 4]}))


def test_page_and_plots(tmp_path, capsys):
    path = tmp_path / "a.json"
    path.write_text(json.dumps(example()))
    assert not main(["results", str(path), "--out", str(tmp_path / "docs" / "r.md")])
    text = (tmp_path / "docs" / "r.md").read_text()
    assert "tiny, Markov, T = 0" in text and "| 2.286 |" in text and "+8.6 %" in text
    assert "38.0 % -> 40.0 %" in text and "15.0 %" in text and "12.0 %" in text
    for name in ("r-gain.png", "r-why.png"):
        assert (tmp_path / "docs" / name).read_bytes().startswith(b"\x89PNG") and f"({name})" in text
    assert "written" in capsys.readouterr().out


def test_decoded_documents_are_shown():
    records = [
        {"task": "chat", "arm": arm, "seconds": s, "prefill_seconds": 0.1, "answers": [answer]}
        for arm, s, answer in (
            (
                "plain",
                4.0,
                {"id": "1", "tokens": 40, "committed": 0, "rounds": 0, "carried": 0, "equal": None},
            ),
            (
                "carryover",
                2.0,
                {"id": "1", "tokens": 40, "committed": 39, "rounds": 20, "carried": 90, "equal": True},
            ),
        )
    ]
    settings = {"arms": ["plain", "carryover"], "target": "t", "dtype": "float32", "temperature": 0.0}
    doc = report.document(settings | {"batch": 1, "block": None, "max_new_tokens": 40}, {}, records)
    text = page([], [doc], [])
    assert "t, float32, T = 0, batch 1" in text and "2.00x" in text and "| 1.95 |" in text
    assert "replayed" not in text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[1, 2]", "not a JSON object"),
        ("{", "not a JSON object"),
        ('{"format": "other"}', "format 'other'; expected 'carryover-evaluate/2' or 'carryover-bench/2'"),
        ('{"format": "carryover-evaluate/2"}', "lacks settings, tasks, arms, gains; make it again"),
        ('{"format": "carryover-bench/2"}', "lacks settings, rows, al_gain; make it again"),
        (
            '{"format": "carryover-evaluate/2", "settings": {}, "tasks": [], "gains": {}, '
            '"arms": {"baseline": 1}}',
            "no Carryover arm, only baseline",
        ),
    ],
)
def test_other_files_are_refused(tmp_path, capsys, content, message):
    path = tmp_path / "x.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        read(path)
    assert main(["results", str(path), f"--out={tmp_path}/r.md"]) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "r.md").exists()


def test_correlation():
    assert correlation([(0, 1), (1, 3), (2, 5)]) == pytest.approx(1)
    assert correlation([(0, 1), (1, 3), (2, 0), (3, 4)]) == pytest.approx(0.4242640687)
    assert correlation([(0, 1), (1, 3)]) is None and correlation([(0, 1), (1, 1), (2, 1)]) is None
    assert len(points([example()])) == 2


def test_the_page_takes_no_place_that_is_taken(tmp_path, capsys):
    path = tmp_path / "a.json"
    path.write_text(json.dumps(example()))
    assert main(["results", str(path), f"--out={path}"]) == 2
    assert "is one of the files to read" in capsys.readouterr().err
    (tmp_path / "folder").mkdir()
    assert main(["results", str(path), f"--out={tmp_path}/folder"]) == 2
    assert "is a folder" in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.json", "folder"]
    assert json.loads(path.read_text()) == example()


def test_a_task_without_refused_drafts_is_no_point():
    doc = example()
    doc["arms"]["carryover"]["chat"]["reconvergence"] = None
    assert [p[2] for p in points([doc])] == ["code"]


def test_missing_figures_are_dashes():
    assert percent(None) == "-"
    doc = example()
    doc["arms"]["carryover"]["all"]["attention_mass"] = None
    assert "None" not in page([doc], [], [])


def test_a_bar_in_a_name_is_no_column():
    text = report.markdown((["a", "b"], [["x|y", "1"]]))
    assert text.splitlines()[2] == "| x\\|y | 1 |"
