"""bench/gpu_check.py: what it runs, leaves out, remembers and reports."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "bench"))

import gpu_check
from crossover import crossing
from gpu_check import Part


def part(name: str, code: str, missing: str | None = None, limit: int = 60) -> Part:
    return Part(name, "a part", lambda: missing, lambda _: [sys.executable, "-c", code], limit)


@pytest.fixture
def check(monkeypatch, tmp_path):
    def run(parts: tuple[Part, ...], *arguments: str) -> tuple[int, dict]:
        monkeypatch.setattr(gpu_check, "PARTS", parts)
        code = gpu_check.main(["--out", str(tmp_path), *arguments])
        return code, json.loads((tmp_path / "report.json").read_text())["parts"]

    return run


FINE = part("fine", "print('all is well')")
ABSENT = part("absent", "raise SystemExit(1)", missing="no GPU")


def test_what_is_missing_is_left_out_and_said(check, capsys) -> None:
    code, parts = check((FINE, ABSENT))
    assert code == 0
    assert parts["fine"]["status"] == "passed" and parts["fine"]["reason"] == "all is well"
    assert parts["absent"]["status"] == "left out" and parts["absent"]["reason"] == "no GPU"
    assert "left out: absent" in capsys.readouterr().out


def test_a_failure_is_the_exit_status(check) -> None:
    code, parts = check((part("bad", "print('broken'); raise SystemExit(3)"), FINE))
    assert (
        code == 1 and parts["bad"]["status"] == "failed" and "exit status 3; broken" in parts["bad"]["reason"]
    )
    assert parts["fine"]["status"] == "passed"  # the rest still runs


def test_a_part_that_hangs_fails(check) -> None:
    code, parts = check((part("slow", "import time; time.sleep(60)", limit=1),))
    assert code == 1 and "longer than 1 s" in parts["slow"]["reason"]


def test_what_has_passed_is_not_run_again(check, tmp_path) -> None:
    counting = part("counting", f"open({str(tmp_path / 'runs')!r}, 'a').write('x')")
    for _ in range(2):
        assert check((counting,))[0] == 0
    assert (tmp_path / "runs").read_text() == "x"
    check((counting,), "--again")
    assert (tmp_path / "runs").read_text() == "xx"


def test_no_part_starts_late(check) -> None:
    code, parts = check((FINE, ABSENT), "--minutes", "0")
    assert code == 0 and parts["fine"]["reason"].startswith("the time is up")
    assert parts["absent"]["reason"] == "no GPU"


def test_an_unknown_part_is_refused(check, capsys) -> None:
    with pytest.raises(SystemExit):
        check((FINE,), "--parts", "fine,fast")
    assert "--parts fast: not one of fine" in capsys.readouterr().err


def test_the_crossing_is_where_the_library_first_wins() -> None:
    assert crossing({8: 2.0, 16: 1.5, 64: 1.0, 128: 0.9, 256: 1.1}) == 64
    assert crossing({64: 0.8, 8: 0.9}) == 0
    assert crossing({512: 1.2, 8: 3.0}) == 512
