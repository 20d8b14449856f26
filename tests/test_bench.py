"""The decoding benchmark: prompts, arms, accounting, comparison with plain decoding; end to end."""

import json
from types import SimpleNamespace

import pytest
import tiny_models
import torch

from carryover_ext import bench, report
from carryover_ext.bench import Prompt, Settings, UserError
from carryover_ext.cli import main
from carryover_ext.engine import GenerateOutput, Round


def write(path, *rows):
    path.write_text(
        "".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows), encoding="utf-8"
    )
    return path


def row(name, task, *turns):
    return {"id": name, "category": task, "turns": list(turns)}


# ------------------------------------------------------------------------------------------------ prompts
# and arms


def test_reader_keeps_order_and_limits_each_task(tmp_path):
    path = write(
        tmp_path / "p.jsonl", row(1, "b", "x"), row(2, "a", "y", "y2"), "", row(3, "b", "z"), row(4, "b", "w")
    )
    assert [p.id for p in bench.read_prompts(path)] == ["1", "3", "4", "2"]
    assert [p.id for p in bench.read_prompts(path, limit=2)] == ["1", "3", "2"]
    assert bench.read_prompts(path, tasks=["a"]) == [Prompt("2", "a", ("y", "y2"))]


@pytest.mark.parametrize(
    "line, words",
    [
        ("{oops", ["line 2", "not JSON", "column 2"]),
        ('{"id": 1, "turns": ["x"]}', ["line 2", "no 'category'"]),
        ('{"id": 1, "category": "a"}', ["line 2", "no 'turns'"]),
        ('{"id": 1, "category": "all", "turns": ["x"]}', ["line 2", "'all' is the name of the average"]),
        ('{"id": 1, "category": "a", "turns": []}', ["line 2", "'turns' must be a list"]),
        ('{"id": 1, "category": "a", "turns": "x"}', ["line 2", "'turns' must be a list"]),
        ('{"id": 1, "category": "a", "turns": [3]}', ["line 2", "'turns' must be a list"]),
        ("[1, 2]", ["line 2", "expected"]),
        ("7", ["line 2", "expected"]),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, words):
    path = write(tmp_path / "p.jsonl", row(1, "a", "x"), line)
    with pytest.raises(UserError) as e:
        bench.read_prompts(path)
    assert all(word in str(e.value) for word in [*words, "p.jsonl"])


def test_missing_file_empty_file_and_unknown_task(tmp_path):
    with pytest.raises(UserError, match=r"nowhere\.jsonl: cannot be read"):
        bench.read_prompts(tmp_path / "nowhere.jsonl")
    with pytest.raises(UserError, match="no prompts"):
        bench.read_prompts(write(tmp_path / "empty.jsonl"))
    with pytest.raises(UserError, match="no task poetry; it has a"):
        bench.read_prompts(write(tmp_path / "p.jsonl", row(1, "a", "x")), tasks=["poetry"])


def test_arms_come_in_a_fixed_order():
    assert bench.parse_arms("carryover, plain") == ["plain", "carryover"]
    for text in ("plain,eagle", "", ","):
        with pytest.raises(UserError, match="choose from plain, baseline, carryover-off, carryover"):
            bench.parse_arms(text)


def test_groups_never_mix_tasks():
    prompts = [Prompt(str(i), task, ("x",)) for i, task in enumerate("aababb")]
    assert [[p.id for p in g] for g in bench.groups(prompts, 2)] == [["0", "1"], ["3"], ["2", "4"], ["5"]]


def test_a_target_without_drafters_says_what_to_do():
    settings = Settings(target="some-model", prompts="demo", arms=["carryover"])
    with pytest.raises(UserError, match=r"some-model.*--drafter"):
        bench.checkpoint_folder(settings, "carryover")
    settings.baseline = "no/such/folder"
    with pytest.raises(UserError, match=r"--baseline no/such/folder: no config.json"):
        bench.checkpoint_folder(settings, "baseline")


@pytest.mark.parametrize("kind", bench.KINDS)
def test_the_kind_decides_the_folder(kind):
    name = "smollm2-135m"
    other = {"markov": "dflash", "dflash": "markov"}[kind]
    settings = Settings(target=name, prompts="demo", arms=["baseline", "carryover"], kind=kind)
    for which in ("baseline", "carryover"):
        assert bench.checkpoint_folder(settings, which) == bench.CHECKPOINTS / name / kind / which
    # One folder named: the other is of its kind, whatever the default.
    for field, which in (("drafter", "baseline"), ("baseline", "carryover")):
        settings = Settings(target=name, prompts="demo", arms=["baseline", "carryover"])
        setattr(settings, field, str(bench.CHECKPOINTS / name / kind / field.replace("drafter", "carryover")))
        assert bench.kind_of(settings, other) == kind
        assert bench.checkpoint_folder(settings, which) == bench.CHECKPOINTS / name / kind / which
        settings.kind = other
        with pytest.raises(UserError, match=rf"--kind {other} is .*--{field} .* is .*: must be of one kind"):
            bench.checkpoint_folder(settings, which)


# ------------------------------------------------------------------------------------------------------
# accounting


def test_answers_count_only_verifications_a_request_took_part_in():
    rounds = [
        Round(0, [[5], [6]], [0, 0], [0, 0], [0, 0], [False, False]),
        Round(1, [[1, 2, 3], [4]], [2, 0], [5, 5], [3, 0], [False, True]),
        Round(2, [[7, 8], []], [1, -1], [5, 0], [4, 0], [True, True]),
    ]
    output = GenerateOutput([[5, 1, 2, 3, 7, 8], [6, 4]], ["length", "stop"], [9, 9], rounds, 2.0, 0.5)
    first, second = bench.answers_of(["a", "b"], output)
    assert (first["tokens"], first["committed"], first["rounds"], first["carried"]) == (6, 5, 2, 7)
    assert (second["tokens"], second["committed"], second["rounds"], second["drafted"]) == (2, 1, 1, 5)
    # micro-average: (5 + 1) tokens in (2 + 1) rounds, the same as the engine's own statistic
    record = {"task": "t", "arm": "baseline", "seconds": 2.0, "answers": [first, second]}
    assert report.cell([record])["al"] == pytest.approx(2.0) == output.acceptance_length


class Judge:
    """A referee that calls every difference explained."""

    def explain(self, prompt, plain, other):
        return (
            None
            if plain == other
            else {"index": 0, "gap": 0.0, "rounding": 1.0, "explained": True, "prompt": prompt}
        )


def test_compare_matches_answers_by_id_and_prompt():
    def record(arm, *tokens):
        return {
            "arm": arm,
            "answers": [{"id": f"p{i}", "token_ids": t, "equal": None} for i, t in enumerate(tokens)],
        }

    records = [record("carryover", [1, 2], [3]), record("plain", [1, 2], [4])]
    bench.compare(records, {"p0": [10], "p1": [11]}, Judge())
    assert [a["equal"] for a in records[0]["answers"]] == [True, False]
    assert records[0]["answers"][1]["difference"]["prompt"] == [11]
    assert [a["equal"] for a in records[1]["answers"]] == [None, None]


# ------------------------------------------------------------------------------------------------------
# end to end


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {
        "target": tiny_models.save_target(root / "target"),
        "drafter": tiny_models.save_drafter(root / "carryover", True),
        "baseline": tiny_models.save_drafter(root / "baseline", False),
        "root": root,
    }


def command(folders, out, *more, dtype="float32"):
    arms = next((option for option in more if option.startswith("--arms=")), "carryover,baseline")
    read = [
        "target",
        *(name for name, arm in (("drafter", "carryover"), ("baseline", "baseline")) if arm in arms),
    ]
    names = [f"--{name}={folders[name]}" for name in read]
    return ["bench", *names, f"--out={out}", f"--dtype={dtype}", "--max-new-tokens=12", *more]


@pytest.fixture(scope="module")
def prompts(folders):
    rows = [
        row(i, task, f"{task} number {i}, please", "and again") for i, task in enumerate(["qa", "math", "qa"])
    ]
    return write(folders["root"] / "prompts.jsonl", *rows)


def test_bench_end_to_end_in_float32(folders, prompts, tmp_path, capsys):
    assert main(command(folders, tmp_path, f"--prompts={prompts}")) == 0
    doc = json.loads((tmp_path / "bench.json").read_text(encoding="utf-8"))
    assert (tmp_path / "bench.png").read_bytes()[:4] == b"\x89PNG"
    text = capsys.readouterr().out
    assert "all (3)" in text and "bench.json" in text and "9 of 9" in text
    assert [r["task"] for r in doc["rows"]] == ["qa", "math", "all"]
    average = doc["rows"][-1]["arms"]
    for arm in ("baseline", "carryover-off", "carryover"):
        assert average[arm]["equal"] == average[arm]["compared"] == 3
        assert average[arm]["al"] >= 1.0
    drafted = {r["arm"]: sum(a["drafted"] for a in r["answers"]) for r in doc["records"]}
    assert drafted["plain"] == 0 and all(drafted[arm] > 0 for arm in drafted if arm != "plain")
    assert average["carryover"]["carried"] > 0
    assert average["carryover-off"]["carried"] == average["baseline"]["carried"] == 0
    assert average["plain"]["al"] == 1.0
    assert doc["settings"]["block"] == 6 and "torch" in doc["environment"]["summary"]
    assert len(doc["records"]) == 3 * 4


def test_order_of_arms_rotates(folders, prompts, tmp_path):
    main(command(folders, tmp_path, f"--prompts={prompts}", "--arms=plain,carryover"))
    records = json.loads((tmp_path / "bench.json").read_text(encoding="utf-8"))["records"]
    assert [r["arm"] for r in records] == ["plain", "carryover", "carryover", "plain", "plain", "carryover"]


def test_batches_turns_and_tasks(folders, prompts, tmp_path):
    more = ["--batch=2", "--turns=all", "--tasks=qa", "--arms=plain,carryover", f"--prompts={prompts}"]
    assert main(command(folders, tmp_path, *more)) == 0
    doc = json.loads((tmp_path / "bench.json").read_text(encoding="utf-8"))
    assert [[a["id"] for a in r["answers"]] for r in doc["records"][::2]] == [
        ["0", "2"],
        ["0/turn2", "2/turn2"],
    ]
    assert doc["rows"][-1]["arms"]["carryover"]["equal"] == 4


def test_later_turns_see_the_same_history_in_every_arm(folders, prompts):
    settings = Settings(
        str(folders["target"]), str(prompts), ["plain", "carryover"], turns="all", dtype="float32"
    )
    settings.drafter, settings.max_new_tokens = str(folders["drafter"]), 6
    session = bench.Session(settings)
    asked = []
    original = session.generate

    def generate(arm, tokens, **changes):
        if "max_new_tokens" not in changes:  # no warm-up
            asked.append((arm.name, session.tokenizer.decode(tokens[0])))
        return original(arm, tokens, **changes)

    session.generate = generate
    bench.run(session, bench.read_prompts(prompts, limit=1, tasks=["math"]))
    texts = {arm: [text for name, text in asked if name == arm] for arm in ("plain", "carryover")}
    assert texts["plain"] == texts["carryover"] and len(texts["plain"]) == 2
    assert texts["plain"][1].startswith(texts["plain"][0]) and "and again" in texts["plain"][1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_killed_run_keeps_its_records_and_goes_on(folders, prompts, tmp_path, monkeypatch, temperature):
    def argv(out):
        more = [
            f"--prompts={prompts}",
            "--arms=plain,carryover",
            "--turns=all",
            f"--temperature={temperature}",
        ]
        return command(folders, out, *more)

    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert main(argv(whole)) == 0 and not (whole / "bench.partial.json").exists()
    original, decoded = bench.Session.generate, []

    def generate(self, arm, tokens, **changes):
        if "max_new_tokens" not in changes:  # no warm-up
            decoded.append(arm.name)
            if len(decoded) == 6:
                raise KeyboardInterrupt
        return original(self, arm, tokens, **changes)

    monkeypatch.setattr(bench.Session, "generate", generate)
    assert main(argv(cut)) == 130
    doc = json.loads((cut / "bench.partial.json").read_text(encoding="utf-8"))
    assert len(doc["records"]) == 4 and doc["decodes"] == 12 and doc["rows"][-1]["prompts"] == 2
    assert not (cut / "bench.json").exists()
    assert main(argv(cut)) == 0 and not (cut / "bench.partial.json").exists()
    assert len(decoded) == 6 + 12 - 4

    def answers(folder):
        records = json.loads((folder / "bench.json").read_text(encoding="utf-8"))["records"]
        return [(r["task"], r["arm"], r["answers"]) for r in records]

    assert answers(cut) == answers(whole)


def test_a_killed_run_of_other_settings_prompts_or_drafters_is_not_taken(folders, prompts, tmp_path):
    settings = Settings(str(folders["target"]), str(prompts), ["carryover"], dtype="float32")
    settings.drafter = str(folders["drafter"])
    session, asked = bench.Session(settings), bench.read_prompts(prompts)
    made_by = bench.fingerprint(session, asked, {})
    path = tmp_path / "bench.partial.json"
    assert bench.read_partial(path, made_by) == []
    report.write_json(path, {"fingerprint": made_by, "records": [{"task": "qa"}]})
    assert bench.read_partial(path, made_by) == [{"task": "qa"}]
    assert bench.fingerprint(session, asked, {}) == made_by
    others = [bench.fingerprint(session, asked[1:], {}), bench.fingerprint(session, asked, {"threads": 2})]
    with torch.no_grad():
        session.drafters["carryover"].fc.weight[0, 0] += 1
    others.append(bench.fingerprint(session, asked, {}))
    settings.seed = 1
    others.append(bench.fingerprint(session, asked, {}))
    assert len({made_by, *others}) == 5
    assert all(bench.read_partial(path, other) == [] for other in others)
    path.write_text("{", encoding="utf-8")
    assert bench.read_partial(path, made_by) == []


def test_groups_and_turns_draw_with_seeds_of_their_own_and_arms_share_them(folders, prompts):
    settings = Settings(
        str(folders["target"]), str(prompts), ["plain", "carryover"], turns="all", dtype="float32"
    )
    settings.drafter, settings.max_new_tokens, settings.temperature = str(folders["drafter"]), 2, 1.0
    session = bench.Session(settings)
    asked = bench.read_prompts(prompts)
    original, seeds = session.generate, []

    def generate(arm, tokens, **changes):
        if "max_new_tokens" not in changes:  # no warm-up
            seeds.append((session.options(arm) | changes)["seed"])
        return original(arm, tokens, **changes)

    session.generate = generate
    bench.run(session, asked)
    assert len(seeds) == 12 and seeds[::2] == seeds[1::2] and len(set(seeds)) == 6
    assert not set(seeds) & {bench.group_seed(1, place, turn) for place in range(3) for turn in range(2)}


def test_sampling_compares_nothing(folders, prompts, tmp_path):
    assert main(command(folders, tmp_path, f"--prompts={prompts}", "--temperature=1", "--limit=1")) == 0
    doc = json.loads((tmp_path / "bench.json").read_text(encoding="utf-8"))
    assert all(a["equal"] is None for r in doc["records"] for a in r["answers"])


def test_an_unexplained_difference_fails_the_command(folders, prompts, tmp_path, monkeypatch):
    from carryover_ext import engine

    original = engine.generate

    def broken(target, drafter, ids, **options):
        output = original(target, drafter, ids, **options)
        if drafter is not None:
            output.tokens[0][3] = (output.tokens[0][3] + 7) % 256
        return output

    monkeypatch.setattr(engine, "generate", broken)
    assert main(command(folders, tmp_path, f"--prompts={prompts}", "--limit=1", dtype="bfloat16")) == 1
    doc = json.loads((tmp_path / "bench.json").read_text(encoding="utf-8"))
    assert report.unexplained(doc) > 0


def test_prompt_is_plain_text_without_a_chat_template(tmp_path):
    settings = Settings(
        str(tiny_models.save_target(tmp_path / "t", chat=False)), "demo", ["plain"], dtype="float32"
    )
    session = bench.Session(settings)
    assert session.tokenizer.decode(session.encode([{"role": "user", "content": "hello"}])) == "hello"
    assert settings.block is None


def test_rows_of_a_round_are_the_quick_ones_with_the_repository_s_drafters_only(folders, monkeypatch):
    def rows(quick, block=None, arms=("carryover",)):
        settings = Settings(
            str(folders["target"]),
            "demo",
            list(arms),
            dtype="float32",
            block=block,
            drafter=str(folders["drafter"]),
            baseline="not looked at" if "baseline" not in arms else str(folders["baseline"]),
        )
        bench.Session(settings, quick=quick)
        return settings.block

    monkeypatch.setattr(bench, "QUICK_BLOCK", 3)
    assert rows(quick=True) == rows(quick=False) == 6
    monkeypatch.setattr(bench, "CHECKPOINTS", folders["drafter"].parent)
    assert rows(quick=True) == 3 and rows(quick=False) == 6 and rows(quick=True, block=5) == 5
    assert rows(quick=True, arms=("plain", "baseline", "carryover")) == 3
    monkeypatch.setattr(bench, "QUICK_BLOCK", 9)
    assert rows(quick=True) == 6


def test_baseline_folder_given_as_carryover_is_refused(folders):
    settings = Settings(str(folders["target"]), "demo", ["carryover"], drafter=str(folders["baseline"]))
    with pytest.raises(UserError, match="trained without Carryover"):
        bench.Session(settings)


def test_drafter_of_another_target_is_refused(folders, prompts, tmp_path, capsys):
    other = tiny_models.save_drafter(tmp_path / "other", True, target_layer_ids=[0, 9], num_target_layers=12)
    status = main(command(folders | {"drafter": other}, tmp_path, f"--prompts={prompts}", "--arms=carryover"))
    assert status == 2
    error = capsys.readouterr().err
    assert "carryover bench:" in error and "Traceback" not in error


def test_threads_are_set(folders, prompts, tmp_path):
    before = torch.get_num_threads()
    try:
        main(command(folders, tmp_path, f"--prompts={prompts}", "--arms=plain", "--limit=1", "--threads=1"))
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_a_repeated_id_is_refused(tmp_path):
    path = write(tmp_path / "p.jsonl", row(1, "qa", "a"), row(2, "qa", "b"), row("1", "math", "c"))
    with pytest.raises(UserError, match="line 3 has the id '1' of line 1"):
        bench.read_prompts(path)


def test_a_prompt_too_long_for_the_target_is_named_before_anything_is_decoded(
    folders, tmp_path, capsys, monkeypatch
):
    path = write(tmp_path / "p.jsonl", row("short", "qa", "a"), row("long", "qa", "x" * 1100))
    monkeypatch.setattr(bench.Session, "generate", lambda *a, **k: pytest.fail("decoded"))
    assert main(command(folders, tmp_path, f"--prompts={path}")) == 2
    assert "prompt 'long' of task qa has" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_named_before_anything_is_loaded(
    folders, prompts, tmp_path, capsys, monkeypatch
):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(bench, "Session", lambda *a, **k: pytest.fail("loaded"))
    assert main(command(folders, tmp_path / "file" / "out", f"--prompts={prompts}")) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_every_turn_must_find_room():
    """Before anything is decoded: a conversation without room would end the run in the middle."""
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(max_position_embeddings=40))
    session = SimpleNamespace(
        model=SimpleNamespace(config=config),
        encode=lambda messages: [0] * sum(len(m["content"]) for m in messages),
        settings=Settings(target="t", prompts="p", arms=["plain"], turns="all", max_new_tokens=16),
    )
    bench.check_lengths(session, [Prompt("a", "t", ("x" * 10, "y" * 13))])
    talk = [Prompt("b", "t", ("x" * 10, "y" * 14))]
    with pytest.raises(UserError, match=r"'b' of task t has 24 tokens .* its 1 earlier answers up to 16; it"):
        bench.check_lengths(session, talk)
    session.settings.turns = "first"
    bench.check_lengths(session, talk)
