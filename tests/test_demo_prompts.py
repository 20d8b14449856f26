"""The prompts that the package carries: eight a task, well formed, different from one another."""

import json
from collections import Counter

import pytest

from carryover_ext.bench import DEMO_PROMPTS, read_prompts

TASKS = ["chat", "code", "math", "qa", "rag", "summarization", "translation", "tool_calling"]
ROWS = [json.loads(line) for line in DEMO_PROMPTS.read_text(encoding="utf-8").splitlines()]


def grams(text: str, n: int = 10) -> set[tuple[str, ...]]:
    words = text.lower().split()
    return {tuple(words[i : i + n]) for i in range(len(words) - n + 1)}


def test_eight_prompts_a_task():
    assert Counter(row["category"] for row in ROWS) == dict.fromkeys(TASKS, 8)
    assert len({row["id"] for row in ROWS}) == 64


@pytest.mark.parametrize("row", ROWS, ids=[row["id"] for row in ROWS])
def test_form(row):
    assert set(row) == {"id", "category", "turns"}
    assert row["id"].startswith(row["category"])
    [turn] = row["turns"]
    assert turn == turn.strip() and 30 < len(turn) < 2000


@pytest.mark.parametrize("task", ["rag", "summarization"])
def test_passages_have_the_length_of_a_paragraph(task):
    for row in ROWS:
        if row["category"] == task:
            passage = max(row["turns"][0].split("\n\n"), key=len)
            assert 60 <= len(passage.split()) <= 150, row["id"]


def test_no_prompt_repeats_ten_words_of_another():
    bodies = {}
    for row in ROWS:
        text = row["turns"][0]
        if row["category"] == "tool_calling":  # the frame around the tools is the same on purpose
            text = text.split("Request: ")[1].split("\n\n")[0]
        if row["category"] == "rag":
            text = text.split("Passage: ")[1]
        for gram in grams(text):
            assert bodies.setdefault(gram, row["id"]) == row["id"]


def test_tool_prompts_carry_valid_signatures():
    for row in ROWS:
        if row["category"] == "tool_calling":
            tools = json.loads(row["turns"][0].split("\n")[1])
            assert len(tools) >= 2
            for tool in tools:
                assert set(tool["parameters"]["required"]) <= set(tool["parameters"]["properties"])


def test_reader_takes_a_subset_in_order():
    prompts = read_prompts("demo", limit=3)
    assert [p.task for p in prompts] == [task for task in TASKS for _ in range(3)]
    assert prompts[0].id == "chat-1"
