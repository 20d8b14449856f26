"""Tables, intervals and files of a benchmark, from records made by hand."""

import json

import pytest

from carryover_ext import report

ARMS = ["plain", "baseline", "carryover-off", "carryover"]


def answer(name, tokens, rounds, carried=0, equal=None, difference=None):
    return {
        "id": name,
        "tokens": tokens + 1,
        "committed": tokens,
        "rounds": rounds,
        "carried": carried,
        "equal": equal,
        "difference": difference,
    }


def rec(task, arm, seconds, *answers, prefill=0.0):
    return {
        "task": task,
        "arm": arm,
        "seconds": seconds,
        "prefill_seconds": prefill,
        "answers": list(answers),
    }


def example():
    tie = {"index": 3, "gap": 0.1, "rounding": 0.2, "ulp": 0.1, "explained": True}
    bad = {"index": 5, "gap": 3.0, "rounding": 0.2, "ulp": 0.1, "explained": False}
    return [
        rec("math", "plain", 10.0, answer("m1", 99, 99, equal=None)),
        rec("math", "baseline", 5.0, answer("m1", 99, 45, equal=True)),
        rec("math", "carryover-off", 5.0, answer("m1", 99, 45, equal=True)),
        rec("math", "carryover", 4.0, answer("m1", 99, 33, carried=66, equal=False, difference=tie)),
        rec("qa", "plain", 2.0, answer("q1", 9, 9), prefill=1.0),
        rec("qa", "baseline", 2.0, answer("q1", 9, 9, equal=True), prefill=1.0),
        rec("qa", "carryover-off", 2.0, answer("q1", 9, 9, equal=True)),
        rec("qa", "carryover", 1.0, answer("q1", 9, 3, carried=10, equal=False, difference=bad)),
    ]


def doc(records=None):
    settings = {"arms": ARMS, "target": "t", "dtype": "bfloat16", "temperature": 0.0, "batch": 1, "block": 8}
    settings |= {"max_new_tokens": 100}
    return report.document(settings, {"summary": "here"}, example() if records is None else records)


def test_acceptance_length_is_micro_averaged():
    rows = report.summarize(example(), ARMS)
    assert [row["task"] for row in rows] == ["math", "qa", "all"]
    assert rows[0]["arms"]["carryover"]["al"] == pytest.approx(99 / 33)
    assert rows[1]["arms"]["carryover"]["al"] == pytest.approx(9 / 3)
    # (99 + 9) / (45 + 9) = 2.0, not the mean of 2.2 and 1.0
    assert rows[2]["arms"]["baseline"]["al"] == pytest.approx(2.0)
    assert rows[2]["prompts"] == 2


def test_rates_and_ratios():
    average = report.summarize(example(), ARMS)[-1]["arms"]
    # 100 + 10 tokens in 12 s, 7 s, 5 s
    assert average["plain"]["tokens_per_second"] == pytest.approx(110 / 12)
    assert average["carryover"]["to_plain"] == pytest.approx(12 / 5)
    assert average["carryover"]["to_baseline"] == pytest.approx(7 / 5)
    assert average["plain"]["to_plain"] == pytest.approx(1.0)
    # without prefill: 108 tokens in 11 s
    assert average["plain"]["decode_tokens_per_second"] == pytest.approx(108 / 11)
    assert average["carryover"]["carried_per_round"] == pytest.approx(76 / 36)


def test_differences_are_counted_by_kind():
    d = doc()
    average = d["rows"][-1]["arms"]
    assert (average["baseline"]["equal"], average["baseline"]["compared"]) == (2, 2)
    c = average["carryover"]
    assert (c["equal"], c["compared"], c["explained"], c["unexplained"]) == (0, 2, 1, 1)
    assert report.unexplained(d) == 1
    assert report.equal_text([c]) == "0 of 2 (1 near tie, 1 UNEXPLAINED)"
    assert average["plain"]["compared"] == 0 and report.equal_text([average["plain"]]) == "-"
    lines = report.equality_lines(d)
    assert "4 of 6" in lines[0]
    assert any("m1" in line and line.endswith(": explained") for line in lines)
    assert any("q1" in line and line.endswith("NOT EXPLAINED") for line in lines)


def test_a_difference_without_a_gap_can_be_printed():
    ended = {"index": 4, "gap": None, "rounding": None, "ulp": None, "explained": False}
    records = example()
    records[-1]["answers"][0]["difference"] = ended
    assert any("NOT EXPLAINED" in line for line in report.equality_lines(doc(records)))


def test_a_missing_arm_gives_no_ratio_and_no_crash():
    records = [r for r in example() if r["arm"] == "carryover"]
    rows = report.summarize(records, ["carryover"])
    assert rows[-1]["arms"]["carryover"]["to_plain"] is None
    headings, body = report.task_grid(rows, ["carryover"])
    assert headings == ["task", "AL\nON", "tok/s\nON"] and body[-1] == ["all (2)", "3.00", "22.0"]


def test_empty_records():
    rows = report.summarize([], ARMS)
    assert [row["task"] for row in rows] == ["all"]
    assert rows[0]["arms"]["carryover"]["al"] is None
    assert report.al_gain([], "carryover", "baseline") is None


def test_grid_has_one_value_a_heading():
    rows = report.summarize(example(), ARMS)
    for headings, body in (report.task_grid(rows, ARMS), report.arm_grid(rows, ARMS)):
        assert all(len(line) == len(headings) for line in body)
    headings, body = report.task_grid(rows, ARMS)
    assert body[-1][0] == "all (2)"
    assert dict(zip(headings, body[-1], strict=True))["ON /\nplain"] == "2.40x"
    assert "| all (2) | 2.00 |" in report.markdown((headings, body))


def test_gain_and_its_interval():
    gain = report.al_gain(example(), "carryover", "baseline")
    assert gain["gain"] == pytest.approx((108 / 36) / (108 / 54) - 1)  # +50 %
    # resampling two prompts gives one of three gains: only m1 (45/33), both, only q1 (9/3)
    assert gain["low"] == pytest.approx(45 / 33 - 1) and gain["high"] == pytest.approx(2.0)
    assert report.al_gain(example(), "carryover", "baseline") == gain  # seeded
    same = report.al_gain(example(), "carryover-off", "baseline")
    assert same["gain"] == same["low"] == same["high"] == 0.0


def test_document_survives_json(tmp_path):
    d = doc()
    path = report.write_json(tmp_path / "deep" / "result.json", d)
    again = json.loads(path.read_text(encoding="utf-8"))
    assert again["format"] == report.FORMAT
    assert report.summarize(again["records"], again["settings"]["arms"]) == again["rows"]
    assert set(again["al_gain"]) == {"carryover/baseline", "carryover/carryover-off"}


def test_headline_tells_the_numbers():
    assert report.headline(doc()) == (
        "Carryover: 3.00 tokens a verification (+50.0% over the baseline drafter), "
        "2.40x the speed of plain decoding"
    )


@pytest.mark.parametrize("arms", [ARMS, ["plain"], ["carryover"], ["baseline", "carryover"]])
def test_plot_is_a_png(tmp_path, arms):
    d = doc([r for r in example() if r["arm"] in arms])
    d["settings"]["arms"] = arms
    d["rows"] = report.summarize(d["records"], arms)
    path = report.plot(d, tmp_path / "plot.png")
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and path.stat().st_size > 5000


def test_differences_have_columns_of_their_own_only_when_there_are_some():
    rows = report.summarize(example(), ARMS)
    headings, body = report.task_grid(rows, ARMS)
    assert headings[-3:] == ["equal to\nplain", "near\nties", "NO\nREASON"]
    assert body[0][-3:] == ["2 of 3", "1", "0"] and body[-1][-3:] == ["4 of 6", "1", "1"]
    equal = [r for r in example() if r["arm"] != "carryover"]
    assert report.task_grid(report.summarize(equal, ARMS[:3]), ARMS[:3])[0][-1] == "equal to\nplain"


@pytest.mark.parametrize("width, parts", [(112, ["all"]), (80, ["quality", "speed"])])
def test_tables_fit_the_terminal(width, parts):
    from rich.console import Console

    long = [r | {"task": {"math": "summarization", "qa": "tool_calling"}[r["task"]]} for r in example()]
    rows = report.summarize(long, ARMS)
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    for part in parts:
        console.print(report.rich_table("by task", report.task_grid(rows, ARMS, part), average=True))
    console.print(report.rich_table("by arm", report.arm_grid(rows, ARMS)))
    text = console.export_text()
    assert "2.40x" in text and "all (2)" in text and max(map(len, text.splitlines())) <= width
    assert "…" not in text and "summarization (1)" in text


def test_a_written_result_can_be_shown_again(tmp_path, capsys):
    path = report.write_json(tmp_path / "demo.json", doc())
    report.main([str(path)])
    text = capsys.readouterr().out
    assert (
        "| task | AL base | AL OFF | AL ON |" in text
        and "| carryover | 3.00 | 2.1 | 22.0 | 2.40x | 1.40x | 0 of 2 | 1 | 1 |" in text
    )
    assert "+50.0%" in text and (tmp_path / "demo.png").exists()
