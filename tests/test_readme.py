"""The README: its Python runs as printed, its commands and files exist."""

import re
import shlex
from pathlib import Path

import pytest
import tiny_models
import torch

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
PYTHON = re.findall(r"```python\n(.*?)```", TEXT, re.S)
SHELL = [line for block in re.findall(r"```sh\n(.*?)```", TEXT, re.S) for line in block.splitlines()]


def test_the_operator_example_is_ten_lines_and_runs_as_printed():
    code = PYTHON[0]
    assert len(code.splitlines()) == 10 and max(map(len, code.splitlines())) <= 120
    names = {}
    exec(compile(code, "README.md", "exec"), names)
    assert names["seg_lens"].tolist() == [5, 0]
    assert names["out"].shape == (2, 8, 4, 32) and torch.isfinite(names["out"]).all()
    # three rows of the first request are committed and nothing behind them
    written = names["k_cache"].abs().sum((0, 3, 4)) > 0
    assert written.sum(1).tolist() == [3, 8] and written[0, :3].all()


def test_the_operator_example_agrees_with_the_reference():
    from carryover_ext import reference

    names: dict = {}
    torch.manual_seed(0)
    exec(PYTHON[0], names)
    n = names
    k_cache, v_cache = torch.zeros_like(n["k_cache"]), torch.zeros_like(n["v_cache"])
    k_seg, v_seg, lens = torch.zeros_like(n["k_seg"]), torch.zeros_like(n["v_seg"]), torch.zeros(2).int()
    slots = n["pos"] + n["request"] * n["page"]
    reference.commit_and_carry(
        n["x"], n["pos"], n["rows"], n["m"], slots, k_cache, v_cache, k_seg, v_seg, lens, *n["weights"]
    )
    torch.testing.assert_close(n["k_seg"], k_seg, rtol=1e-4, atol=1e-4)
    args = (n["q"], k_cache[0], v_cache[0], n["m"] + 1, k_seg[0], v_seg[0], lens, n["k"], n["v"])
    torch.testing.assert_close(n["out"], reference.segment_attention(*args), rtol=1e-3, atol=1e-3)


def test_the_model_example_runs_with_small_folders(tmp_path, capsys):
    code = PYTHON[1]
    target = tiny_models.save_target(tmp_path / "target")
    drafter = tiny_models.save_drafter(tmp_path / "drafter", True)
    assert '"smollm2-135m"' in code
    shipped = re.search(r'load_drafter\("(.*?)"\)', code).group(1)
    code = code.replace('"smollm2-135m"', repr(str(target))).replace(f'"{shipped}"', repr(str(drafter)))
    exec(compile(code, "README.md", "exec"), {})
    assert float(capsys.readouterr().out.split()[-1]) >= 1.0


@pytest.mark.parametrize("line", [line for line in SHELL if line.startswith("carryover ")])
def test_commands_parse(line):
    from carryover_ext.cli import build_parser

    words = shlex.split(line, comments=True)[1:]
    assert build_parser(words[0]).parse_args(words).command == words[0]


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in set(re.findall(r"\bmake ([a-z][a-z-]*)", TEXT)):
        assert re.search(rf"^{target}:", makefile, re.M), target


def test_pictures_and_links_exist():
    for link in re.findall(r"\]\((?!http)([^)]+)\)", TEXT):
        path, _, anchor = link.partition("#")
        assert (ROOT / path).exists(), link
        if anchor:  # as GitHub makes them of headings
            headings = re.findall(r"^#+ (.+)$", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE)
            made = {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings}
            assert anchor in made, link


def test_no_line_is_unreadably_long():
    assert max(map(len, TEXT.splitlines())) <= 160
