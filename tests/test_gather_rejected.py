"""gather_rejected: packing, padding, gradients, errors."""

from __future__ import annotations

import pytest
import torch
from cases import DTYPE_IDS, DTYPES, RAGGED, int32
from compare import assert_equal

from carryover_ext import ops, reference


@pytest.mark.parametrize("limit", [0, 1, 7, 15])
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("ragged", RAGGED, ids=lambda r: r.name)
def test_equals_reference(ragged, dtype, limit):
    hidden = torch.randn(ragged.total, 33).to(dtype)
    args = (hidden, ragged.row_start(), ragged.num_accepted(), limit)
    actual = ops.gather_rejected(*args)
    for name, a, e in zip(("rows", "index", "lens"), actual, reference.gather_rejected(*args), strict=True):
        assert_equal(a, e, name)


@pytest.mark.parametrize("block", [2, 8, 16])
def test_every_acceptance_length(block):
    hidden = torch.arange(block * block * 3, dtype=torch.float32).view(block * block, 3)
    accepted = torch.arange(block, dtype=torch.int32)
    start = torch.arange(block + 1, dtype=torch.int32) * block
    rows, index, lens = ops.gather_rejected(hidden, start, accepted, block - 1)
    assert lens.tolist() == [block - 1 - m for m in range(block)]
    for m in range(block):
        n = block - 1 - m
        assert_equal(rows[m, :n], hidden[m * block + m + 1 : (m + 1) * block])
        assert (rows[m, n:] == 0).all() and (index[m, n:] == -1).all()


def test_rows_of_nan_do_not_leak_into_padding():
    hidden = torch.full((8, 5), float("nan"))
    rows, _, _ = ops.gather_rejected(hidden, int32(0, 4, 8), int32(3, -1), 3)
    assert (rows == 0).all()


@pytest.mark.parametrize("width", [0, 1, 16, 129, 4097])
def test_widths_and_strides(width):
    wide = torch.randn(12, width + 3)
    hidden = wide[::2, :width]  # rows two apart, dense inside
    args = (int32(0, 2, 6), int32(0, 1), 5)
    for a, e in zip(
        ops.gather_rejected(hidden, *args), reference.gather_rejected(hidden.contiguous(), *args), strict=True
    ):
        assert_equal(a, e)


@pytest.mark.parametrize("ragged", RAGGED, ids=lambda r: r.name)
def test_gradient(ragged):
    hidden = torch.randn(ragged.total, 3, dtype=torch.float64, requires_grad=True)
    start, accepted = ragged.row_start(), ragged.num_accepted()
    if ragged.rows:
        assert torch.autograd.gradcheck(lambda h: ops.gather_rejected(h, start, accepted, 5)[0], hidden)
    weight = torch.randn(len(ragged.rows), 5, 3, dtype=torch.float64)
    grads = [
        torch.autograd.grad((module.gather_rejected(hidden, start, accepted, 5)[0] * weight).sum(), hidden)[0]
        for module in (ops, reference)
    ]
    assert_equal(*grads, "gradient")


def _args(**change):
    args = {
        "hidden": torch.randn(6, 4),
        "row_start": int32(0, 3, 6),
        "num_accepted": int32(0, 1),
        "max_rejected": 2,
    }
    return args | change


ERRORS = {
    "int-hidden": (
        {"hidden": torch.zeros(6, 4, dtype=torch.int64)},
        r"hidden must be float32, bfloat16 or float64, got int64",
    ),
    "half": ({"hidden": torch.zeros(6, 4, dtype=torch.float16)}, r"hidden must be .* got float16; convert"),
    "rank": ({"hidden": torch.zeros(6)}, r"hidden must have shape \[T, F\], got \[6\]"),
    "transposed": ({"hidden": torch.zeros(4, 6).t()}, r"hidden must be contiguous in its last .* \[1, 6\]"),
    "start-int64": ({"row_start": torch.tensor([0, 3, 6])}, r"row_start must be int32, got int64"),
    "start-short": ({"row_start": int32(0, 6)}, r"row_start must have shape \[B \+ 1\] = \[3\], got \[2\]"),
    "start-first": ({"row_start": int32(1, 3, 6)}, r"row_start\[0\] must be 0, got 1"),
    "start-down": (
        {"row_start": int32(0, 7, 6)},
        r"row_start must not decrease, got row_start\[1\] = 7 and row_start\[2\] = 6",
    ),
    "start-end": (
        {"row_start": int32(0, 3, 5)},
        r"row_start must end at the number of rows, 6, got row_start\[2\] = 5",
    ),
    "accepted-high": (
        {"num_accepted": int32(0, 3)},
        r"num_accepted\[1\] = 3 is out of range: request 1 has 3 rows, .* -1 \(inactive\) or 0\.\.2",
    ),
    "accepted-low": ({"num_accepted": int32(-2, 0)}, r"num_accepted\[0\] = -2 is out of range"),
    "accepted-int64": ({"num_accepted": torch.tensor([0, 1])}, r"num_accepted must be int32, got int64"),
    "accepted-strided": ({"num_accepted": int32(0, 9, 1, 9)[::2]}, r"num_accepted must be contiguous"),
    "accepted-no-rows": (
        {"row_start": int32(0, 6, 6)},
        r"num_accepted\[1\] = 1 .* has 0 rows, so it must be -1 \(inactive\)$",
    ),
    "limit": ({"max_rejected": -1}, r"max_rejected must be >= 0, got -1"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case):
    change, message = ERRORS[case]
    with pytest.raises(RuntimeError, match="gather_rejected: " + message):
        ops.gather_rejected(**_args(**change))
