"""The tolerance rule of every test, and helpers that poison memory.

An op passes when its largest error against the float64 reference is at most twice that of plain PyTorch (the
reference run in the op's dtype), plus one rounding of the largest value in that dtype. In float64, where
plain PyTorch is the reference itself, another order of summation is allowed: 1e-13 of the largest value.
"""

from __future__ import annotations

import torch
from torch import Tensor


def assert_close(actual: Tensor, plain: Tensor, exact: Tensor, name: str = "result") -> None:
    """`actual` from the op, `plain` from the reference in the same dtype, `exact` from it in float64."""
    assert actual.shape == exact.shape, f"{name}: shape {tuple(actual.shape)}, expected {tuple(exact.shape)}"
    assert actual.dtype == plain.dtype, f"{name}: dtype {actual.dtype}, expected {plain.dtype}"
    if exact.numel() == 0:
        return
    assert torch.isfinite(actual).all(), f"{name}: not finite at {first(~torch.isfinite(actual))}"
    error = (actual.double() - exact.double()).abs()
    allowed = 2 * (plain.double() - exact.double()).abs().max() + rounding(exact, actual.dtype)
    worst = error.max()
    assert worst <= allowed, (
        f"{name}: error {worst:.3e} at {first(error == worst)}, allowed {allowed:.3e} "
        f"(twice plain PyTorch's {(plain.double() - exact.double()).abs().max():.3e}, plus rounding)"
    )


def rounding(exact: Tensor, dtype: torch.dtype) -> float:
    """Half a unit in the last place of the largest value, for a value that is rounded to `dtype` once."""
    unit = 1e-13 if dtype == torch.float64 else torch.finfo(dtype).eps / 2
    return float(exact.double().abs().max()) * unit


def first(mask: Tensor) -> tuple[int, ...]:
    """Index of the first true element."""
    return tuple(mask.nonzero()[0].tolist())


def assert_equal(actual: Tensor, expected: Tensor, name: str = "result") -> None:
    """Same shape, dtype and bits (a NaN equals the same NaN)."""
    assert actual.shape == expected.shape and actual.dtype == expected.dtype, (
        f"{name}: {actual.dtype} {tuple(actual.shape)}, expected {expected.dtype} {tuple(expected.shape)}"
    )
    if actual.numel() == 0:
        return
    same = (actual == expected) | ((actual != actual) & (expected != expected))
    assert same.all(), f"{name}: {actual[~same][0]} at {first(~same)}, expected {expected[~same][0]}"


class Guarded:
    """A tensor filled with NaN (or `fill`) between two canaries; `check()` asserts that the canaries are
    alive."""

    PAD = 64

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, fill: float = float("nan")) -> None:
        size = 1
        for n in shape:
            size *= n
        self._whole = torch.full((size + 2 * self.PAD,), 7, dtype=dtype)
        self.tensor = self._whole[self.PAD : self.PAD + size].view(shape)
        self.tensor.fill_(fill)

    def check(self) -> None:
        assert (self._whole[: self.PAD] == 7).all(), "wrote before the tensor"
        assert (self._whole[-self.PAD :] == 7).all(), "wrote behind the tensor"


def chi_square(counts: Tensor, law: Tensor) -> float:
    """p-value of observed counts under a law; cells with an expectation under 5 are put together."""
    expected = law.double() * counts.sum()
    small = expected < 5
    observed = counts.double()
    cells_e, cells_o = expected[~small], observed[~small]
    if bool(small.any()) and float(expected[small].sum()) > 0:
        cells_e = torch.cat([cells_e, expected[small].sum()[None]])
        cells_o = torch.cat([cells_o, observed[small].sum()[None]])
    statistic = ((cells_o - cells_e) ** 2 / cells_e).sum()
    freedom = torch.tensor((cells_e.numel() - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))
