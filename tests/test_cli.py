"""The command line: help, quick start, friendly errors, generate, demo and env; with a tiny model."""

import json
import subprocess
import sys

import pytest
import tiny_models
from rich.console import Console

from carryover_ext import __version__, demo
from carryover_ext.cli import TRAINING, build_parser, main
from carryover_ext.engine import Round


def read_by(arm, models):
    """Those of the options that an arm reads."""
    unread = {"plain": ("--drafter", "--baseline"), "baseline": ("--drafter",)}.get(arm, ("--baseline",))
    return [option for option in models if not option.startswith(unread)]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return [
        f"--target={tiny_models.save_target(root / 'target')}",
        f"--drafter={tiny_models.save_drafter(root / 'carryover', True)}",
        f"--baseline={tiny_models.save_drafter(root / 'baseline', False)}",
        "--dtype=float32",
    ]


def test_version(capsys):
    with pytest.raises(SystemExit) as e:
        main(["--version"])
    assert e.value.code == 0 and __version__ in capsys.readouterr().out


@pytest.mark.parametrize("command", ["demo", "generate", "bench", "env", "export", *TRAINING])
def test_every_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as e:
        main([command, "--help"])
    assert e.value.code == 0 and f"usage: carryover {command}" in capsys.readouterr().out


def test_importing_the_command_line_imports_nothing_heavy():
    code = "import sys, carryover_ext.cli as c; c.build_parser(); print([m for m in %r if m in sys.modules])"
    heavy = ["torch", "transformers", "matplotlib", "numpy", "rich"]
    done = subprocess.run([sys.executable, "-c", code % heavy], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_module_entry_point():
    done = subprocess.run(
        [sys.executable, "-m", "carryover_ext", "--version"], capture_output=True, text=True
    )
    assert done.returncode == 0 and __version__ in done.stdout


def test_defaults_of_the_demo():
    args = build_parser().parse_args(["demo"])
    assert (args.target, args.max_new_tokens, args.per_task, args.full) == ("smollm2-135m", 48, None, False)
    assert args.arms == "plain,baseline,carryover-off,carryover" and args.dtype == "auto"


@pytest.mark.parametrize(
    "argv, words",
    [
        (["bench", "--prompts=nowhere.jsonl"], "nowhere.jsonl: cannot be read"),
        (["bench", "--prompts=demo", "--arms=eagle"], "unknown arm eagle; choose from plain"),
        (["bench", "--prompts=demo", "--tasks=poetry"], "no task poetry; it has chat"),
        (["bench", "--prompts=demo", "--target=a-model", "--arms=baseline"], "--baseline"),
        (["generate", " "], "prompt: is empty"),
        (["bench", "--prompts=demo", "--tasks=,"], "--tasks ',': names no task"),
        (["demo", "--tasks="], "--tasks '': names no task"),
        (
            ["generate", "a", "--arm=plain", "--drafter=f"],
            "--drafter f: is not read by plain, only by carryo",
        ),
        (
            ["generate", "a", "--arm=carryover", "--baseline=f"],
            "--baseline f: is not read by carryover, only",
        ),
        (["generate", "a", "--arm=baseline", "--drafter=f"], "--drafter f: is not read by baseline"),
        (["bench", "--prompts=demo", "--arms=plain", "--kind=dflash"], "--kind dflash: is not read by plain"),
        (["demo", "--arms=plain", "--block=4"], "--block 4: is not read by plain"),
    ],
)
def test_mistakes_end_with_status_2_and_a_sentence(argv, words, capsys):
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert words in error and "Traceback" not in error


@pytest.mark.parametrize(
    "argv",
    [
        ["bench"],
        ["demo", "--tokens=0"],
        ["demo", "--block=1"],
        ["demo", "--temperature=-1"],
        ["demo", "--full", "--per-task=3"],
        ["dance"],
        [],
    ],
)
def test_wrong_arguments_end_with_status_2(argv, capsys):
    with pytest.raises(SystemExit) as e:
        main(argv)
    assert e.value.code == 2 and "usage: carryover" in capsys.readouterr().err


def test_traceback_on_demand():
    from carryover_ext.bench import UserError

    with pytest.raises(UserError):
        main(["--traceback", "bench", "--prompts=nowhere.jsonl"])


def test_env(capsys):
    assert main(["env", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (
        found["carryover_ext"] == __version__ and found["threads"] >= 1 and found["torch"] in found["summary"]
    )
    assert main(["env"]) == 0
    assert "targets cached" in capsys.readouterr().out


@pytest.mark.parametrize("arm", ["plain", "baseline", "carryover-off", "carryover"])
def test_generate_gives_the_same_text_with_every_arm(models, arm, capsys):
    assert main(["generate", "Hello there", *read_by(arm, models), f"--arm={arm}", "--tokens=16"]) == 0
    text = capsys.readouterr().out
    assert main(["generate", "Hello there", *read_by("plain", models), "--arm=plain", "--tokens=16"]) == 0
    assert text == capsys.readouterr().out and text.endswith("\n")


def test_a_baseline_has_no_carryover(models, capsys):
    target, drafter, _, dtype = models
    swapped = drafter.replace("--drafter", "--baseline")
    assert main(["generate", "hello", target, swapped, dtype, "--arm", "baseline"]) == 2
    assert "trained with Carryover; name it with --drafter" in capsys.readouterr().err


def test_generate_shows_rounds(models, capsys):
    assert main(["generate", "Hello", *read_by("carryover", models), "--rounds", "--tokens=8"]) == 0
    text = capsys.readouterr().out
    assert any(mark in text for mark in "₀₁₂₃₄₅|")


def test_demo_end_to_end(models, tmp_path, capsys):
    out = tmp_path / "deep" / "demo"
    argv = ["demo", *models, f"--out={out}", "--tokens=8", "--per-task=1", "--tasks=chat,code"]
    assert main(argv) == 0
    text = capsys.readouterr().out
    assert "round" in text and "all (2)" in text and "6 of 6" in text
    doc = json.loads((out / "demo.json").read_text(encoding="utf-8"))
    assert {r["arm"] for r in doc["records"]} == {"plain", "baseline", "carryover-off", "carryover"}
    assert (out / "demo.png").stat().st_size > 10_000


# -------------------------------------------------------------------------------------------------------
# streaming


class Bytes:
    """A tokenizer whose tokens are bytes."""

    def decode(self, tokens, skip_special_tokens=True):
        return bytes(tokens).decode("utf-8", errors="replace")


def test_text_stream_waits_for_whole_characters():
    stream = demo.TextStream(Bytes())
    tokens = "né €!".encode()
    assert [stream.push([t]) for t in tokens] == ["n", "", "é", " ", "", "", "€", "!"]
    assert stream.close() == ""


def test_text_stream_shows_what_never_became_a_character():
    stream = demo.TextStream(Bytes())
    assert stream.push([0x41, 0xE2]) == "A"
    assert stream.close() == "\ufffd"


def test_shown_rounds_add_up():
    def step(index, text, accepted, carried):
        return Round(index, [list(text.encode())], [accepted], [3], [carried], [False])

    console = Console(width=80, record=True, file=open("/dev/null", "w", encoding="utf-8"))  # noqa: SIM115
    rounds = [step(0, "A", 0, 0), step(1, "bcd", 2, 1), step(2, "e", 0, 3)]
    sums = demo.show_rounds(rounds, Bytes(), console)
    assert sums == {"tokens": 5, "rounds": 2, "committed": 4, "carried": 4}
    assert console.export_text(styles=False).strip() == "Abcd₁e₃"


def test_neighbouring_rounds_look_different():
    assert len(set(demo.STYLES)) == len(demo.STYLES) >= 2
    assert demo.carried_mark(12, True) == "₁₂" and demo.carried_mark(12, False) == "|12|"
