"""The CUDA kernel of gather_rejected, run on the CPU by the simulator."""

from __future__ import annotations

import pytest
import torch
from cases import RAGGED, int32
from compare import Guarded, assert_equal
from simt import SCHEDULES, Schedule, call, unavailable

from carryover_ext import reference

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def run(hidden, start, accepted, limit: int, **options) -> list[torch.Tensor]:
    batch = len(accepted)
    out = [
        Guarded((batch, limit, hidden.shape[1]), hidden.dtype),
        Guarded((batch, limit), torch.int32, fill=99),
        Guarded((batch,), torch.int32, fill=99),
    ]
    call("gather_rejected", hidden, start, accepted, limit, *(g.tensor for g in out), **options)
    for g in out:
        g.check()
    return [g.tensor for g in out]


def check(hidden, start, accepted, limit: int, **options) -> None:
    found = run(hidden, start, accepted, limit, **options)
    wanted = reference.gather_rejected(hidden.contiguous(), start, accepted, limit)
    for name, a, e in zip(("rows", "index", "lens"), found, wanted, strict=True):
        assert_equal(a, e, name)


@pytest.mark.parametrize("limit", [0, 1, 7, 15])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ragged", RAGGED, ids=lambda r: r.name)
def test_equals_reference(ragged, dtype: torch.dtype, limit: int) -> None:
    hidden = torch.randn(ragged.total, 33).to(dtype)
    check(hidden, ragged.row_start(), ragged.num_accepted(), limit)


@pytest.mark.parametrize("width", [0, 1, 2, 8, 72, 1032])
@pytest.mark.parametrize("gap", [0, 1, 8])
def test_widths_and_strides(width: int, gap: int) -> None:
    ragged = RAGGED[6]
    hidden = torch.randn(2 * ragged.total, width + gap).to(torch.bfloat16)[::2, :width]
    check(hidden, ragged.row_start(), ragged.num_accepted(), 9)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_schedules(schedule: Schedule) -> None:
    ragged = RAGGED[8]
    hidden = torch.randn(ragged.total, 40).to(torch.bfloat16)
    check(hidden, ragged.row_start(), ragged.num_accepted(), 15, schedule=schedule)


@pytest.mark.parametrize("kind", ["asan", "tsan"])
@pytest.mark.parametrize("ragged", RAGGED, ids=lambda r: r.name)
def test_sanitizers(ragged, kind: str) -> None:
    for width, limit in ((33, 7), (64, 15)):
        hidden = torch.randn(ragged.total, width).to(torch.bfloat16)
        check(hidden, ragged.row_start(), ragged.num_accepted(), limit, kind=kind)


@pytest.mark.parametrize("kind", [None, "asan"])
@pytest.mark.parametrize(
    ("start", "accepted", "lens"),
    [
        ([0, 4, 900], [1, 0], [2, 0]),  # ends behind the last row
        ([0, 4, 8], [1, 7], [2, 0]),  # accepted more than there is
        ([0, 4, 8], [1, 2**31 - 1], [2, 0]),
        ([0, 4, 8], [1, -2], [2, 0]),
        ([-900, 4, 8], [1, 0], [0, 3]),
        ([0, 6, 4], [1, 0], [4, 0]),  # falls
    ],
)
def test_requests_out_of_range_have_no_rejected_rows(start, accepted, lens, kind: str | None) -> None:
    hidden = torch.randn(8, 40).to(torch.bfloat16)
    options = {} if kind is None else {"kind": kind}
    rows, index, found = run(hidden, int32(*start), int32(*accepted), 7, **options)
    assert found.tolist() == lens
    for i, n in enumerate(lens):
        first = start[i] + accepted[i] + 1
        assert index[i].tolist() == [*range(first, first + n)] + [-1] * (7 - n)
        assert_equal(rows[i, :n], hidden[first : first + n] if n else hidden[:0])
        assert not rows[i, n:].any()
