"""Packed weights: the same bits, undone without a trace, and only where they help."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from tiny import prompts, tiny_drafter, tiny_target
from torch import nn

from carryover_ext.engine import generate
from carryover_ext.packing import PackedWeight, can_pack, linear, pack, pack_linears
from carryover_ext.targets import TappedTarget

needs_bf16 = pytest.mark.skipif(
    not can_pack(torch.zeros(1, 1, dtype=torch.bfloat16)), reason="this CPU's oneDNN has no bfloat16"
)


@needs_bf16
@pytest.mark.parametrize("shape", [(8, 16), (33, 65), (576, 576), (1, 7)])
@pytest.mark.parametrize("rows", [(1,), (5,), (2, 3), (1, 1), (2, 0)])
def test_same_as_linear(shape: tuple[int, int], rows: tuple[int, ...]) -> None:
    weight = torch.randn(shape).to(torch.bfloat16)
    x = torch.randn(*rows, shape[1]).to(torch.bfloat16)
    packed = pack(weight)
    assert isinstance(packed, PackedWeight) and copy.deepcopy(packed) is packed
    got, plain = linear(x, packed), F.linear(x, weight)
    assert got.shape == plain.shape
    exact = x.double() @ weight.double().T
    # The tolerance of the project: at most twice the error of plain PyTorch, plus rounding.
    bound = 2 * (plain.double() - exact).abs() + exact.abs() * 2**-7 + 1e-6
    assert bool(((got.double() - exact).abs() <= bound).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_other_dtypes_stay_as_they_are(dtype: torch.dtype) -> None:
    weight = torch.randn(4, 3).to(dtype)
    assert pack(weight) is weight and not can_pack(weight)
    x = torch.randn(2, 3).to(dtype)
    assert torch.equal(linear(x, weight), F.linear(x, weight))


@needs_bf16
@pytest.mark.parametrize("bias", [True, False])
def test_undo_leaves_no_trace(bias: bool) -> None:
    root = nn.Sequential(nn.Linear(8, 4, bias=bias), nn.Linear(4, 4)).to(torch.bfloat16).requires_grad_(False)
    x = torch.randn(3, 8).to(torch.bfloat16)
    plain = root(x)
    undo = pack_linears([root])
    assert all("forward" in layer.__dict__ for layer in root)
    torch.testing.assert_close(root(x), plain, rtol=1e-2, atol=1e-2)
    undo()
    undo()
    assert not any("forward" in layer.__dict__ for layer in root)
    assert torch.equal(root(x), plain)
    with torch.no_grad():
        root[0].weight.mul_(2)
    again, expected = pack_linears([root]), root[0].weight.float() @ x.float().T
    got = root[0](x).float() - (root[0].bias.float() if bias else 0)
    torch.testing.assert_close(got, expected.T, rtol=2e-2, atol=2e-2)
    again()


@needs_bf16
@pytest.mark.parametrize("choice", [None, True, False])
def test_target_packs_on_demand(choice: bool | None) -> None:
    model = copy.deepcopy(tiny_target("qwen2")).to(torch.bfloat16)
    layer = model.model.layers[0].self_attn.q_proj
    with TappedTarget(model, pack_weights=choice) as target:
        assert ("forward" in layer.__dict__) == (choice is not False)
        target.prefill(target.new_cache(1, 8), prompts(5))
    assert "forward" not in layer.__dict__


@needs_bf16
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_bf16_decoding_runs_and_drafts(family: str) -> None:
    model = copy.deepcopy(tiny_target(family)).to(torch.bfloat16)
    drafter = tiny_drafter(model, draft_vocab_size=12).to(torch.bfloat16)
    out = generate(model, drafter, prompts(4, 9), max_new_tokens=12, stop_token_ids=[])
    assert [len(t) for t in out.tokens] == [12, 12] and out.num_drafted > 0 and out.num_carried > 0
