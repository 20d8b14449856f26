"""Near ties are told from faults: by hand-made logits, and on a tiny model in bf16."""

import pytest
import torch

from carryover_ext.referee import Referee, first_difference, judge, unit_in_last_place


@pytest.mark.parametrize(
    "value, ulp", [(1.0, 2**-7), (1.99, 2**-7), (2.0, 2**-6), (-20.0, 2**-3), (0.0, 0.0), (0.75, 2**-8)]
)
def test_unit_in_last_place_of_bf16(value, ulp):
    assert unit_in_last_place(value, torch.bfloat16) == ulp


@pytest.mark.parametrize(
    "one, other, index",
    [
        ([1, 2], [1, 2], None),
        ([1, 2], [1, 3], 1),
        ([1], [1, 2], 1),
        ([], [5], 0),
        ([], [], None),
        ([4], [5], 0),
    ],
)
def test_first_difference(one, other, index):
    assert first_difference(one, other) == index


def logits(**best):
    values = torch.full((50,), -5.0)
    for name, value in best.items():
        values[int(name[1:])] = value
    return values


def test_a_gap_of_one_unit_is_explained_and_a_wide_one_is_not():
    wide = logits(t3=20.0, t7=19.9, t9=15.0)
    assert judge(wide, wide, 3, 7, torch.bfloat16)[
        "explained"
    ]  # gap 0.1, one unit in the last place is 0.125
    verdict = judge(wide, wide, 3, 9, torch.bfloat16)
    assert (
        not verdict["explained"] and verdict["gap"] == 5.0 and verdict["rounding"] == verdict["ulp"] == 0.125
    )


def test_rounding_is_measured_where_it_is_larger_than_a_unit():
    wide = logits(t3=8.0, t7=7.7)
    narrow = wide.clone()
    narrow[7] += 0.2
    verdict = judge(narrow, wide, 3, 7, torch.bfloat16)
    assert verdict["rounding"] == pytest.approx(0.4, rel=1e-5) and verdict["explained"]


def test_a_token_that_is_not_among_the_best_is_never_explained():
    wide = torch.linspace(0, 0.01, 50)  # all within one unit of each other
    assert not judge(wide, wide + 1.0, 49, 0, torch.bfloat16)["explained"]


@pytest.fixture(scope="module")
def tiny():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=64, num_key_value_heads=1, max_position_embeddings=128, **shape)
    return LlamaForCausalLM(config).to(torch.bfloat16).eval()


def test_referee_on_a_model(tiny):
    prompt = [1, 2, 3]
    referee = Referee(tiny)
    assert referee.explain(prompt, [4, 5], [4, 5]) is None
    with torch.inference_mode():
        order = tiny(torch.tensor([[*prompt, 4]])).logits[0, -1].float().argsort(descending=True).tolist()
    wrong = referee.explain(prompt, [4, order[0]], [4, order[-1]])
    assert wrong["index"] == 1 and not wrong["explained"] and wrong["gap"] > wrong["rounding"]


def test_an_output_that_stops_early_is_not_explained(tiny):
    found = Referee(tiny).explain([1, 2], [3, 4, 5], [3, 4])
    assert found["index"] == 2 and found["gap"] is None and not found["explained"]
