"""Faults put into the source of segment_attention's kernels are found by its tests: a test that cannot fail
is none."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
import torch
from attention_cases import Case
from simt import SCHEDULES, KernelFault, Schedule, unavailable
from test_simt_segment_attention import check

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(unavailable() is not None, reason=str(unavailable())),
]

WAIT, BARRIER = "ptx::cp_async_wait<0>();", "__syncthreads();"
MMA = "ptx::mma_m16n8k16<T>(o[c], a, "
# Name: text of the kernel's source, and what takes its place.
FAULTS = {
    "none": ("", ""),
    "no-barrier-before-the-first-tile": (f"{WAIT}\n    {BARRIER}", WAIT),
    "no-barrier-between-tiles": (f"{WAIT}\n      {BARRIER}", WAIT),
    "no-wait-between-tiles": (f"{WAIT}\n      {BARRIER}", BARRIER),
    "late-wait": (f"{WAIT}\n      {BARRIER}", f"ptx::cp_async_wait<1>();\n      {BARRIER}"),
    "no-barrier-in-the-merge": (f"{BARRIER}\n    if (key_warp > 0)", "if (key_warp > 0)"),
    "same-stage": ("load(next, stage ^ 1);", "load(next, stage);"),
    "swapped-fragments": (f"{MMA}{{b[0], b[1]}});", f"{MMA}{{b[1], b[0]}});"),
    "keys-behind-the-end": ("key >= stop ? INT32_MIN : p.window > 0", "p.window > 0"),
    "rows-of-q-that-are-none": ("t < keys.live && chunk", "t < p.rows && chunk"),
    "no-shrinking": ("*= shrink, o[c][2 * half + 1] *= shrink;", "*= shrink;"),
    "window-off-by-one": ("position + p.window : INT32_MAX", "position + p.window + 1 : INT32_MAX"),
    "causal-off-by-one": ("t1 < low", "t1 + 1 < low"),
    "page-of-another-request": ("p.block_table[int64_t(request) *", "p.block_table[int64_t(0) *"),
    "segment-as-context": ("if (row >= s.context) return", "if (row > s.context) return"),
    "one-piece-less": ("(t < keys.live ? keys.pieces : 0)", "keys.pieces - 1"),
    "no-sink": ("if (p.sinks == nullptr)", "if (p.sinks == nullptr || p.plan.pieces > 1)"),
}
CASES = (
    (Case(batch=2, rows=8, group=2, context=200, d=64, window=150, causal=True, sinks=True, sink_level=5), 2),
    (Case(batch=3, rows=16, group=4, context=150, d=64, segment=15, ragged_block=True), 1),
)
ORDERS = (*SCHEDULES, *(Schedule("random", seed=seed) for seed in (1, 2)))


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(Path(__file__).resolve().parents[1] / "csrc", tmp_path / "csrc")
    kernel, launch = (tmp_path / "csrc" / "cuda" / f"segment_attention.{end}" for end in ("cuh", "cu"))
    before, after = FAULTS[fault]
    text = kernel.read_text()
    assert before == "" or text.count(before) == 1, "the source has changed: put the fault in again"
    kernel.write_text(text.replace(before, after) if before else text)
    text = launch.read_text()  # one head size and dtype are enough, and compile quickly
    for other in ("launch_head<T, 96>", "launch_head<T, 128>", "launch_head<T, 256>", "launch_dtype<fp16>"):
        assert text.count(f"{other}(p, stream)") == 1
        text = text.replace(f"{other}(p, stream)", "cudaErrorInvalidValue")
    launch.write_text(text)
    builder = sys.modules["simt.build"]
    monkeypatch.setattr(builder, "ROOT", tmp_path)
    monkeypatch.setattr(builder, "CACHE", tmp_path / "build")

    found = []
    for case, pieces in CASES:
        for schedule in ORDERS:
            torch.manual_seed(1)
            variant = (f"FAULT_{list(FAULTS).index(fault)}",)  # a module of its own
            try:
                check(case, torch.bfloat16, pieces, schedule=schedule, defines=variant)
            except (AssertionError, KernelFault) as error:
                found.append(f"{schedule}: {error}")
    assert (found == []) == (fault == "none"), found[:1]
