"""The simulator finds what it is there for: one kernel, sound and with planted faults (simt/faults.cu).

A detector that finds nothing is worth nothing. Each fault names the detectors that must find it: `result`
(wrong numbers, NaN poison, or canaries, in one of the schedules), `fault` (the simulator stops the kernel),
`asan`, `tsan`.
"""

from __future__ import annotations

import re

import pytest
import torch
from compare import Guarded
from simt import SCHEDULES, KernelFault, Schedule, call, unavailable

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))

M, N, K = 27, 150, 136  # ragged in every dimension

FAULTS = {  # in the order of the enum: what finds it, and what the report says
    "kNone": {},
    "kNoBarrierBeforeUse": {"result": "", "tsan": "data race"},
    "kNoBarrierAfterUse": {"result": "", "tsan": "data race"},
    "kNoAsyncWait": {"result": ""},
    "kShortAsyncWait": {"result": ""},
    "kNoBarrierInReduction": {"result": "", "tsan": "data race"},
    "kNoSyncWarp": {"result": "", "tsan": "data race"},
    "kNoFence": {"tsan": "data race"},
    "kDivergentBarrier": {"fault": "deadlock|different barriers"},
    "kDifferentBarriers": {"fault": "different barriers"},
    "kMissingLane": {"fault": "deadlock|different collectives"},
    "kRowBoundOfLoad": {"asan": "heap-buffer-overflow"},
    "kRowBoundOfStore": {"result": "", "asan": "heap-buffer-overflow"},
    "kSharedOverrun": {"asan": "heap-buffer-overflow"},
    "kUnwrittenOutput": {"result": ""},
    "kUnwrittenShared": {"result": ""},
    "kWrongFragment": {"result": ""},
    "kWrongRow": {"result": ""},
    "kMisalignedCopy": {"fault": "cp.async: global address is not a multiple of 16"},
    "kUndefinedShift": {"asan": "shift exponent"},
    "kSameRowTwice": {"result": "", "tsan": "data race"},
}
NAMES = list(FAULTS)
SEEDS = range(3)


class Wide(Guarded):
    """Canaries that a whole tile of rows behind the tensor fits into: this process must survive the fault."""

    PAD = 16 * N


class Case:
    def __init__(self) -> None:
        self.a, self.b = torch.randn(M, K).bfloat16(), torch.randn(N, K).bfloat16()
        self.exact = self.a.double() @ self.b.double().T

    def run(self, name: str, **options) -> str:
        """Runs once; says what is wrong with the result, empty if nothing."""
        c, top = Wide((M, N), torch.float32), Guarded((M,), torch.float32)
        partial, finished = torch.full((3, M), float("nan")), torch.zeros(2, dtype=torch.int32)
        call("faults", self.a, self.b, c.tensor, partial, top.tensor, finished, NAMES.index(name), **options)
        try:
            c.check()
            top.check()
        except AssertionError as error:
            return str(error)
        for found, wanted in ((c.tensor, self.exact), (top.tensor, self.exact.amax(1))):
            if not torch.isfinite(found).all():
                return "not finite"
            if (found.double() - wanted).abs().max() > 1e-4:
                return "wrong"
        return ""


def schedules():
    return [Schedule(s.order, s.eager, seed) for s in SCHEDULES for seed in SEEDS]


def test_names_are_those_of_the_enum() -> None:
    from simt.build import HERE

    text = (HERE / "faults.cu").read_text()
    body = re.search(r"enum Fault : int \{(.*?)kCount", text, re.S).group(1)
    assert re.findall(r"^\s*(k\w+),", body, re.M) == NAMES


@pytest.mark.parametrize("kind", ["plain", "asan", "tsan"])
def test_the_sound_kernel_is_clean(kind: str) -> None:
    case = Case()
    for schedule in schedules() if kind == "plain" else SCHEDULES:
        assert case.run("kNone", kind=kind, schedule=schedule) == "", schedule


def planted(detector: str) -> list[str]:
    return [name for name, found in FAULTS.items() if detector in found]


@pytest.mark.parametrize("name", planted("result"))
def test_a_wrong_result_gives_it_away(name: str) -> None:
    case = Case()
    assert any(case.run(name, schedule=schedule) for schedule in schedules())


@pytest.mark.parametrize("name", planted("fault"))
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_the_simulator_stops_it(name: str, schedule: Schedule) -> None:
    with pytest.raises(KernelFault, match=FAULTS[name]["fault"]):
        Case().run(name, schedule=schedule)


@pytest.mark.parametrize("kind,name", [(kind, name) for kind in ("asan", "tsan") for name in planted(kind)])
def test_a_sanitizer_stops_it(name: str, kind: str) -> None:
    case = Case()
    with pytest.raises(KernelFault, match=FAULTS[name][kind]):
        for schedule in SCHEDULES:
            case.run(name, kind=kind, schedule=schedule)


def test_every_fault_has_a_detector() -> None:
    assert all(found for name, found in FAULTS.items() if name != "kNone")
