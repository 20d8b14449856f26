"""Packed weights: the same results, undone without a trace, and only where they help."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from tiny import prompts, tiny_drafter, tiny_target
from torch import Tensor, nn

from carryover_ext.engine import generate
from carryover_ext.packing import PackedWeight, can_pack, fast_dtype, linear, pack, pack_linears
from carryover_ext.targets import TappedTarget


def packable(dtype: torch.dtype) -> pytest.MarkDecorator:
    there = can_pack(torch.ones(1, 1, dtype=dtype))
    return pytest.mark.skipif(not there, reason=f"nothing of this CPU's packs {dtype}")


needs_bf16 = packable(torch.bfloat16)
DTYPES = [pytest.param(dtype, marks=packable(dtype)) for dtype in (torch.bfloat16, torch.float32)]


def weights(*shape: int, dtype: torch.dtype) -> Tensor:
    """Of a bfloat16 checkpoint, read in ``dtype``."""
    return torch.randn(shape).to(torch.bfloat16).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(8, 16), (33, 65), (576, 576), (1, 7)])
@pytest.mark.parametrize("rows", [(1,), (5,), (2, 3), (1, 1), (2, 0), (70,)])
def test_same_as_linear(shape: tuple[int, int], rows: tuple[int, ...], dtype: torch.dtype) -> None:
    weight = weights(*shape, dtype=dtype)
    x = torch.randn(*rows, shape[1]).to(dtype)
    packed = pack(weight)
    assert isinstance(packed, PackedWeight) and copy.deepcopy(packed) is packed
    got, plain = linear(x, packed), F.linear(x, weight)
    assert got.shape == plain.shape and got.dtype == dtype
    exact = x.double() @ weight.double().T
    # The tolerance of the project: at most twice the error of plain PyTorch, plus rounding.
    unit = 2**-7 if dtype == torch.bfloat16 else 2**-21
    size = x.double().abs() @ weight.double().abs().T if dtype == torch.float32 else exact.abs()
    bound = 2 * (plain.double() - exact).abs() + size * unit + 1e-6
    assert bool(((got.double() - exact).abs() <= bound).all())


@packable(torch.float32)
def test_rows_that_are_not_contiguous() -> None:
    weight = weights(24, 16, dtype=torch.float32)
    x = torch.randn(5, 32)[:, ::2]
    torch.testing.assert_close(linear(x, pack(weight)), F.linear(x, weight))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_other_dtypes_stay_as_they_are(dtype: torch.dtype) -> None:
    weight = torch.randn(4, 3).to(dtype)
    assert pack(weight) is weight and not can_pack(weight)
    x = torch.randn(2, 3).to(dtype)
    assert torch.equal(linear(x, weight), F.linear(x, weight))


@pytest.mark.parametrize("value", [1 + 2**-12, 1e5, -1e30, float("inf"), float("nan"), 2**-13 * (1 + 2**-11)])
def test_what_float16_cannot_hold_stays_as_it_is(value: float) -> None:
    """Packing must not round a checkpoint that has float32's digits or bfloat16's range."""
    weight = weights(40, 64, dtype=torch.float32)
    weight[39, 63] = value
    x = torch.randn(2, 64)
    assert pack(weight) is weight
    assert torch.equal(linear(x, weight), F.linear(x, weight)) or value != value


@packable(torch.float32)
@pytest.mark.parametrize("value", [0.0, -65504.0, 2**-14 * (1 + 2**-7), 3e-8, 1e-30])
def test_what_float16_holds_but_for_next_to_nothing_is_packed(value: float) -> None:
    weight = torch.full((3, 5), 0.25)
    weight[1] = value
    packed = pack(weight)
    assert isinstance(packed, PackedWeight)
    torch.testing.assert_close(linear(torch.ones(1, 5), packed), weight.sum(1)[None], rtol=0, atol=5 * 2**-25)
    if 0 < value < 2**-16:  # not, where all of the weights are that small
        assert not can_pack(torch.full((3, 5), value))


def test_fast_dtype_is_one_that_is_packed() -> None:
    assert fast_dtype("cuda") == torch.bfloat16
    chosen = fast_dtype("cpu")
    assert fast_dtype() == (torch.bfloat16 if torch.cuda.is_available() else chosen)
    if can_pack(torch.ones(1, 1, dtype=torch.bfloat16)):
        assert chosen == torch.bfloat16
    else:
        assert chosen == torch.float32


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [True, False])
def test_undo_leaves_no_trace(bias: bool, dtype: torch.dtype) -> None:
    root = nn.Sequential(nn.Linear(8, 4, bias=bias), nn.Linear(4, 4)).to(torch.bfloat16).to(dtype)
    root.requires_grad_(False)
    x = torch.randn(3, 8).to(dtype)
    plain = root(x)
    undo = pack_linears([root])
    assert all("forward" in layer.__dict__ for layer in root)
    torch.testing.assert_close(root(x), plain, rtol=1e-2, atol=1e-2)
    undo()
    undo()
    assert not any("forward" in layer.__dict__ for layer in root)
    assert torch.equal(root(x), plain)
    # Written to in between: both the weight and the bias of the new pack are the new ones.
    root[0].weight.mul_(2)
    if bias:
        root[0].bias.add_(3)
    again, expected = pack_linears([root]), F.linear(x.float(), root[0].weight.float())
    got = root[0](x).float() - (root[0].bias.float() if bias else 0)
    torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)
    again()


def test_layers_that_cannot_be_packed_are_left_alone() -> None:
    layer = nn.Linear(8, 4)
    undo = pack_linears([nn.Sequential(layer)])
    assert "forward" not in layer.__dict__
    undo()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("choice", [None, True, False])
def test_target_packs_on_demand(choice: bool | None, dtype: torch.dtype) -> None:
    model = copy.deepcopy(tiny_target("qwen2")).to(torch.bfloat16).to(dtype)
    layer = model.model.layers[0].self_attn.q_proj
    with TappedTarget(model, pack_weights=choice) as target:
        assert ("forward" in layer.__dict__) == (choice is not False)
        target.prefill(target.new_cache(1, 8), prompts(5))
    assert "forward" not in layer.__dict__


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_packed_decoding_runs_and_drafts(family: str, dtype: torch.dtype) -> None:
    model = copy.deepcopy(tiny_target(family)).to(torch.bfloat16).to(dtype)
    drafter = tiny_drafter(model, draft_vocab_size=12).to(torch.bfloat16).to(dtype)
    options = {"max_new_tokens": 12, "stop_token_ids": []}
    out = generate(model, drafter, prompts(4, 9), **options)
    assert [len(t) for t in out.tokens] == [12, 12] and out.num_drafted > 0 and out.num_carried > 0
    if dtype == torch.float32:  # no ties to speak of
        assert out.tokens == generate(model, None, prompts(4, 9), **options).tokens


@pytest.mark.parametrize("dtype", DTYPES)
@torch.no_grad()
def test_writes_through_data_are_noticed(dtype: torch.dtype) -> None:
    """As merging an adapter or swapping averaged weights in does them; they raise no version."""
    root = nn.Sequential(nn.Linear(64, 48), nn.Linear(48, 64)).to(torch.bfloat16).to(dtype)
    x = torch.randn(3, 64).to(dtype)
    pack_linears([root])()
    root[0].weight.data.mul_(2)
    root[1].weight = None
    root[1].weight = nn.Parameter(weights(64, 48, dtype=dtype))  # often at the address of the old one
    plain = root(x)
    undo = pack_linears([root])
    torch.testing.assert_close(root(x), plain, rtol=2e-2, atol=2e-2)
    undo()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_changed_drafter_drafts_with_its_new_weights(dtype: torch.dtype) -> None:
    model = copy.deepcopy(tiny_target("llama")).to(torch.bfloat16).to(dtype)
    drafter = tiny_drafter(model).to(torch.bfloat16).to(dtype)
    options = {"max_new_tokens": 8, "stop_token_ids": []}
    before = generate(model, drafter, prompts(5), **options)
    old = drafter.pack()
    for parameter in drafter.parameters():
        parameter.data.mul_(-0.3)
    again = generate(model, drafter, prompts(5), **options)
    assert again.tokens == before.tokens and drafter.pack() is not old
