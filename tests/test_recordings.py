"""Recordings: shards that a kill leaves whole, prompts that are read, and mistakes that are named."""

from __future__ import annotations

import json

import pytest

from carryover_ext.training.recordings import PromptIds, load_prompts, record, shards


def test_killed_record_loses_no_complete_shard(tmp_path):
    prompts = [PromptIds("c", "s", [i, i + 1]) for i in range(10)]
    calls = []

    def backend(p, first):
        if len(calls) == 2:
            raise KeyboardInterrupt
        calls.append(len(p))
        return [([x[0] * 2], "stop") for x in p]

    with pytest.raises(KeyboardInterrupt):
        record(prompts, backend, tmp_path, settings={"seed": 1}, shard_size=4)
    assert [s.name for s in shards(tmp_path)] == ["shard-00000.jsonl", "shard-00001.jsonl"]
    redone = []

    def second(p, first):
        assert first == 8  # the place in the whole recording
        redone.extend(p)
        return [([x[0] * 2], "stop") for x in p]

    record(prompts, second, tmp_path, settings={"seed": 1}, shard_size=4)
    assert redone == [[8, 9], [9, 10]]
    rows = [json.loads(line) for s in shards(tmp_path) for line in s.read_text().splitlines()]
    assert [r["response_ids"] for r in rows] == [[2 * i] for i in range(10)]


@pytest.mark.parametrize("change", ["settings", "prompts", "shard"])
def test_recordings_of_other_settings_are_refused(tmp_path, change):
    def backend(p, first):
        return [([1], "stop") for _ in p]

    prompts = [PromptIds("c", "s", [i]) for i in range(3)]
    record(prompts, backend, tmp_path, settings={"temperature": 0.0}, shard_size=2)
    with pytest.raises(ValueError, match="recorded with other settings"):
        if change == "settings":
            record(prompts, backend, tmp_path, settings={"temperature": 1.0}, shard_size=2)
        elif change == "prompts":
            record(prompts[:2], backend, tmp_path, settings={"temperature": 0.0}, shard_size=2)
        else:
            record(prompts, backend, tmp_path, settings={"temperature": 0.0}, shard_size=3)


def test_damaged_manifest_names_its_file(tmp_path):
    (tmp_path / "manifest.json").write_text('{"tempera')
    with pytest.raises(ValueError, match=r"manifest\.json: damaged"):
        record([PromptIds("c", "s", [1])], lambda p, first: [([1], "stop")], tmp_path, settings={})


class Words:
    chat_template = None

    def __call__(self, text, **_):
        return type("E", (), {"input_ids": [len(w) for w in text.split()]})


def test_prompts_interleave_and_long_ones_are_left_out(tmp_path):
    a, b = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    a.write_text(
        "".join(
            json.dumps({"category": "a", "source": "x", "prompt": "w " * n}) + "\n" for n in (1, 2, 50, 3)
        )
    )
    b.write_text("".join(json.dumps({"category": "b", "turns": ["w w"]}) + "\n" for _ in range(3)))
    found = load_prompts([a, b], Words(), max_prompt_tokens=10)
    assert [p.category for p in found] == ["a", "b", "a", "b", "a", "b"]
    assert len(load_prompts([a, b], Words(), max_prompt_tokens=10, limit=1)) == 2


def test_bad_prompt_line_is_named(tmp_path):
    f = tmp_path / "p.jsonl"
    f.write_text('{"prompt": "x"}\n{"nothing": 1}\n')
    with pytest.raises(ValueError, match=r"p\.jsonl: line 2"):
        load_prompts([f], Words(), max_prompt_tokens=9)


def test_missing_recordings_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="carryover record"):
        shards(tmp_path)


@pytest.mark.parametrize(
    "row",
    [
        '{"prompt": 5}',
        '{"prompt": null}',
        '{"turns": "hello"}',
        "[]",
        "5",
        '{"category": "all", "prompt": "a"}',
    ],
)
def test_a_prompt_that_is_no_text_is_named(tmp_path, row):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a b"}\n\n' + row + "\n")
    with pytest.raises(ValueError, match=r"p\.jsonl: line 3 is not a prompt"):
        load_prompts([path], Words(), max_prompt_tokens=9)
