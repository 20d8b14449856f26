"""The CUDA kernels of segment_attention, run on the CPU by the simulator: against the float64 reference, in
several orders of execution, and what they must never touch."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_cases import Call, Case, build, mixed
from cases import int32
from compare import Guarded, assert_close, assert_equal
from simt import SCHEDULES, KernelFault, Schedule, call, unavailable
from torch import Tensor

from carryover_ext import ops, reference

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "bench"))
import attention_model

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))

OP = "segment_attention"
DTYPES = (torch.bfloat16, torch.float16)
DTYPE_IDS = ("bf16", "f16")
LATE, EAGER = (Schedule("priority", eager=eager) for eager in (False, True))
MULTIPROCESSORS = 132


Plan = tuple[int, int, int]  # pieces, pieces that fill the chip, least keys of a piece


def plan_of(args: list[Tensor | None], multiprocessors: int = MULTIPROCESSORS) -> Plan:
    """What the host code would decide on such a GPU."""
    q, cache, table = args[0], args[1], args[9]
    assert q is not None and cache is not None
    capacity = cache.shape[1] * (1 if table is None else table.shape[1])
    batch, rows, heads, d = q.shape
    return call(OP, batch, rows, heads, cache.shape[2], d, capacity, multiprocessors, function="plan")


def run(args: list[Tensor | None], options: dict[str, Any], plan: int | Plan = 1, **how: Any) -> Tensor:
    """Calls the kernels with NaN in output and workspace; checks the canaries and that inputs stay as they
    are. A number stands for that many pieces of at least 128 keys."""
    pieces, fill, least = (plan, plan, 128) if isinstance(plan, int) else plan
    q = args[0]
    assert q is not None
    batch, rows, heads, d = q.shape
    out = Guarded((batch, rows, heads, d), q.dtype)
    floats = call(OP, batch, rows, heads, d, pieces, function="workspace")
    assert (floats == 0) == (pieces == 1 or q.numel() == 0)
    workspace = Guarded((floats,), torch.float32)
    before = [None if x is None else x.clone() for x in args]
    call(
        OP,
        *args,
        options.get("sinks"),
        options.get("block_lens"),
        options.get("scale") or d**-0.5,
        options.get("causal", False),
        options.get("window", 0),
        options.get("soft_cap", 0.0),
        q.dtype == torch.bfloat16,
        (pieces, fill, least),
        workspace.tensor if pieces > 1 else None,
        out.tensor,
        **how,
    )
    out.check()
    workspace.check()
    for x, y in zip(args, before, strict=True):
        if x is not None and y is not None:
            assert_equal(x, y, "an input")
    return out.tensor


def compare(out: Tensor, made: Call, dtype: torch.dtype, options: dict[str, Any] | None = None) -> None:
    options = options or made.options
    plain = reference.segment_attention(*made.args(dtype), **options)
    assert_close(out, plain, reference.segment_attention(*made.exact(dtype), **options))


def check(case: Case, dtype: torch.dtype, plan: int | Plan = 1, **how: Any) -> None:
    made = build(case)
    compare(run(made.args(dtype), made.options, plan, **how), made, dtype)


def check_mixed(index: int, case: Case, dtype: torch.dtype) -> None:
    """Both modes of cp.async give the same bits, close to the reference."""
    made, pieces = build(case), (1, 2, 3, 5)[index % 4]
    late = run(made.args(dtype), made.options, pieces, schedule=LATE)
    compare(late, made, dtype)
    eager = run(made.args(dtype), made.options, pieces, schedule=EAGER)
    assert_equal(eager, late, "cp.async at once")


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("index,case", [*enumerate(mixed(24))], ids=str)
def test_mixed(index: int, case: Case, dtype: torch.dtype) -> None:
    check_mixed(index, case, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("index,case", [*enumerate(mixed(320))][24:], ids=str)
def test_mixed_all(index: int, case: Case, dtype: torch.dtype) -> None:
    check_mixed(index, case, dtype)


@pytest.mark.parametrize("d", (8, 32, 40, 64, 72, 80, 96, 104, 128, 192, 256))
def test_head_sizes(d: int) -> None:
    case = Case(rows=8, group=3, d=d, context=150, causal=True, soft_cap=8.0, sinks=True)
    for dtype in DTYPES:
        check(case, dtype, 2)


# Tiles of 16, 32, 64 and 128 rows, full and not, and more than one of them.
TILES = [(1, 1), (1, 16), (3, 8), (2, 16), (3, 16), (4, 16), (5, 16), (7, 16), (8, 16), (7, 3), (5, 37)]


@pytest.mark.parametrize("d", (64, 96, 128, 256))
@pytest.mark.parametrize("group,rows", TILES)
def test_tiles(group: int, rows: int, d: int) -> None:
    case = Case(batch=1, rows=rows, kv_heads=1, group=group, d=d, context=70, window=50, causal=rows > 16)
    check(case, torch.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("d", (64, 80, 128, 256))
@pytest.mark.parametrize("group", range(1, 9))
@pytest.mark.parametrize("causal", (False, True))
def test_groups(group: int, d: int, causal: bool, dtype: torch.dtype) -> None:
    for rows in (1, 8, 16):
        check(Case(rows=rows, group=group, d=d, context=130, causal=causal), dtype, 2)


@pytest.mark.parametrize("page", (None, 16), ids=("contiguous", "paged"))
@pytest.mark.parametrize("context", (0, 1, 63, 64, 65, 128, 300))
@pytest.mark.parametrize("segment", (None, 0, 15))
def test_lengths(context: int, segment: int | None, page: int | None) -> None:
    check(Case(batch=3, rows=8, context=context, segment=segment, page=page), torch.bfloat16, 2)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("page", (None, 1, 16), ids=("contiguous", "page1", "page16"))
@pytest.mark.parametrize("context", (0, 1, 7, 8, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 300))
def test_lengths_all(context: int, page: int | None, dtype: torch.dtype) -> None:
    for segment in (None, *range(16)):
        case = Case(batch=2, rows=8, context=context, segment=segment, page=page, d=64)
        check(case, dtype, 3)


@pytest.mark.parametrize("pieces", (1, 2, 7, 64))
@pytest.mark.parametrize("window", (0, 5, 600))
@pytest.mark.parametrize("context", (300, 511, 1300))
def test_pieces(context: int, window: int, pieces: int) -> None:
    case = Case(
        batch=3, rows=5, kv_heads=1, group=3, context=context, window=window, sinks=True, sink_level=5
    )
    check(case, torch.bfloat16, pieces)


def test_more_pieces_than_fill_the_chip() -> None:
    """Only a long request is cut further: the longest of these into two pieces, the others not at all."""
    case = Case(batch=3, rows=3, kv_heads=1, group=1, d=32, context=9000, page=None)
    made = build(case)
    made.positional[3] = int32(9000, 5000, 8)
    made.positional[1:3] = [torch.randn_like(made.positional[1]) for _ in "kv"]  # rows that exist now
    for plan in ((3, 1, 128), (3, 1, 256), (2, 1, 128)):
        compare(run(made.args(torch.bfloat16), made.options, plan), made, torch.bfloat16)
    args = made.args(torch.bfloat16)
    one = [x if n in (1, 2) or x is None else x[1:2] for n, x in enumerate(args)]
    one[1:3] = [c[1:2] for c in args[1:3]]
    whole = run(args, made.options, (3, 1, 128))
    assert_equal(whole[1:2], run(one, made.options, 1), "a request below the target length")


@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("window", (0, 1, 3, 11, 64))
@pytest.mark.parametrize("soft_cap", (0.0, 2.0, 50.0))
@pytest.mark.parametrize("sinks", (False, True))
def test_switches(causal: bool, window: int, soft_cap: float, sinks: bool) -> None:
    case = Case(
        batch=3, rows=8, causal=causal, window=window, soft_cap=soft_cap, sinks=sinks, ragged_block=True
    )
    for dtype in DTYPES:
        check(case, dtype)


@pytest.mark.parametrize("scale", (1e-3, 0.2, 3.0))
@pytest.mark.parametrize("pieces", (1, 2))
def test_scale(scale: float, pieces: int) -> None:
    made = build(Case(rows=4, context=200))
    options = {**made.options, "scale": scale}
    for dtype in DTYPES:
        compare(run(made.args(dtype), options, pieces), made, dtype, options)


@pytest.mark.parametrize("batch,rows", [(0, 4), (3, 0), (0, 0)])
def test_empty(batch: int, rows: int) -> None:
    made = build(replace(Case(), batch=batch, rows=rows, page=None))
    for pieces in (1, 4):
        assert run(made.args(torch.bfloat16), made.options, pieces).numel() == 0


@pytest.mark.parametrize("pieces", (1, 3))
@pytest.mark.parametrize("page", (None, 16))
def test_inactive_requests_and_rows_are_zero(page: int | None, pieces: int) -> None:
    made = build(Case(batch=4, rows=4, context=300, page=page, ragged_block=True, sinks=True))
    made.positional[3] = int32(300, -1, 17, 40)
    made.options["block_lens"] = int32(2, 4, 0, 4)
    filled = [1 if x is None else x for x in made.positional]
    for n in (0, 7, 8):  # rows that exist now
        made.positional[n] = torch.randn_like(filled[n])
    made.positional[0][0, 2:] = made.positional[0][2] = float("nan")
    made = replace(made, positional=[*made.positional[:3], int32(300, -1, 0, 0), *made.positional[4:]])
    for dtype in DTYPES:
        out = run(made.args(dtype), made.options, pieces)
        assert (out[1] == 0).all() and (out[0, 2:] == 0).all() and (out[2] == 0).all()
        compare(out, made, dtype)


@pytest.mark.parametrize("pieces", (1, 3))
@pytest.mark.parametrize("causal", (False, True))
def test_an_empty_segment_is_no_segment(causal: bool, pieces: int) -> None:
    made = build(Case(batch=3, rows=8, context=300, segment=15, causal=causal))
    args = made.args(torch.bfloat16)
    args[6] = int32(0, 0, 0)
    without = [*args[:4], None, None, None, *args[7:]]
    assert plan_of(args) == plan_of(without)
    assert_equal(run(args, made.options, pieces), run(without, made.options, pieces), "empty segment")


@pytest.mark.parametrize("pieces", (1, 3))
def test_a_request_does_not_depend_on_its_batch(pieces: int) -> None:
    made = build(Case(batch=4, rows=8, group=3, d=64, context=300))
    args = made.args(torch.bfloat16)
    whole = run(args, made.options, pieces)
    for i in range(4):
        one = [x if n in (1, 2) or x is None else x[i : i + 1] for n, x in enumerate(args)]
        assert_equal(run(one, made.options, pieces), whole[i : i + 1], f"request {i} alone")


@pytest.mark.parametrize("pieces", (1, 3))
def test_paged_equals_contiguous(pieces: int) -> None:
    made = build(Case(batch=3, rows=8, context=300, page=None))
    args = made.args(torch.bfloat16)
    plain = run(args, made.options, pieces)
    rows = args[1].shape[1]  # a page for each row, in reverse order
    args[1:3] = [c.flatten(0, 1).flip(0)[:, None].contiguous() for c in args[1:3]]
    args[9] = (3 * rows - 1 - torch.arange(3 * rows).view(3, rows)).int()
    assert_equal(run(args, made.options, pieces), plain, "paged")


def test_strided_arguments() -> None:
    """Views of a fused projection, and one layer of a stacked cache."""
    made = build(Case(batch=2, rows=6, kv_heads=2, group=3, d=32))
    args = made.args(torch.bfloat16)
    expected = run(args, made.options)
    fused = torch.cat([args[0], args[7], args[8]], 2)
    args[0], args[7], args[8] = fused[:, :, :6], fused[:, :, 6:8], fused[:, :, 8:]
    args[1] = torch.stack([args[1] * float("nan"), args[1]], 2)[:, :, 1]
    args[4] = args[4].transpose(0, 1).contiguous().transpose(0, 1)
    assert not args[0].is_contiguous() and not args[1].is_contiguous()
    assert_equal(run(args, made.options), expected, "strided")


@pytest.mark.parametrize("pieces", (1, 2))
def test_rows_behind_the_window_are_never_read(pieces: int) -> None:
    made = build(Case(batch=2, rows=8, kv_heads=1, context=300, window=140, page=16))
    args = made.args(torch.bfloat16)
    expected = run(args, made.options, pieces)
    table, lens = args[9].clone(), args[3].tolist()
    for i, n in enumerate(lens):
        first = max(0, n - 140 + 1)
        for row in range(first):
            for cache in args[1:3]:
                cache[table[i, row // 16], row % 16] = float("nan")
        args[9][i, : first // 16] = 1 << 30  # an engine may have given these pages back
    assert_equal(run(args, made.options, pieces), expected, "freed rows")


def test_order_of_execution_changes_nothing() -> None:
    made = build(Case(batch=2, rows=16, group=2, d=128, context=300, sinks=True, causal=True))
    args = made.args(torch.bfloat16)
    orders = [*SCHEDULES, *(Schedule("random", eager=seed % 2 == 0, seed=seed) for seed in range(6))]
    results = [run(args, made.options, 2, schedule=order) for order in orders]
    for order, result in zip(orders, results, strict=True):
        assert_equal(result, results[0], str(order))


def test_small_integers_are_exact() -> None:
    """Equal keys weigh the same: with a power of two of them the output is an exact mean."""
    for dtype in DTYPES:
        v = torch.randint(-8, 9, (1, 256, 2, 32)).to(dtype)
        q, k = torch.ones(1, 4, 4, 32, dtype=dtype), torch.ones(1, 256, 2, 32, dtype=dtype)
        v[:, 16:] = 0
        args = [q, k, v, int32(252), None, None, None, k[:, :4], v[:, 252:], None]
        mean = v.float().mean(1)[:, None].repeat_interleave(2, 2).expand(1, 4, 4, 32).to(dtype)
        for pieces in (1, 2):
            assert_equal(run(args, {}, pieces), mean.contiguous())
        if dtype == torch.bfloat16:
            assert_equal(ops.segment_attention(*args), mean.contiguous(), "the CPU op")


def test_agrees_with_the_cpu_op() -> None:
    for case in mixed(12):
        made = build(case)
        args = made.args(torch.bfloat16)
        plain = reference.segment_attention(*args, **made.options)
        cpu = ops.segment_attention(*args, **made.options)
        assert_close(run(args, made.options, plan_of(args)), plain, cpu.double(), str(case))


def test_pages_outside_the_cache_are_never_read() -> None:
    """A wrong table spoils its own request only."""
    made = build(Case(batch=3, rows=4, context=60, page=16))
    args = made.args(torch.bfloat16)
    expected = run(args, made.options)
    for wrong in (-1, args[1].shape[0], 1 << 30):
        broken = [*args[:9], args[9].clone()]
        broken[9][0, 1] = wrong
        out = run(broken, made.options)
        assert torch.isfinite(out).all()
        assert_equal(out[1:], expected[1:], "other requests")


def test_lengths_beyond_their_capacity_are_clamped() -> None:
    made = build(Case(batch=1, rows=4, context=31, segment=7, page=None))
    args = made.args(torch.bfloat16)  # the cache has room for 32 rows
    args[1:3] = [c.nan_to_num(0.5) for c in args[1:3]]
    args[3] = int32(32)
    expected = run(args, made.options)
    wrong = [*args[:3], int32(1 << 30), *args[4:6], int32(1 << 20), *args[7:]]
    assert_equal(run(wrong, {**made.options, "block_lens": int32(99)}), expected, "clamped")


@pytest.mark.slow  # a build of its own
def test_bad_lengths_and_pages_trap_in_a_debug_build() -> None:
    made = build(Case(batch=1, rows=4, context=60, segment=7, page=16, ragged_block=True))
    args = made.args(torch.bfloat16)
    debug: dict[str, Any] = {"defines": ("CARRYOVER_DEBUG",)}
    compare(run(args, made.options, **debug), made, torch.bfloat16)
    for n, wrong in ((3, int32(81)), (3, int32(-2)), (6, int32(8)), (9, int32(-1, 0, 1, 2, 3)[None])):
        broken = [wrong if i == n else x for i, x in enumerate(args)]
        with pytest.raises(KernelFault, match="__trap"):
            run(broken, made.options, **debug)
    with pytest.raises(KernelFault, match="__trap"):
        run(args, {**made.options, "block_lens": int32(5)}, **debug)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["asan", "tsan"])
@pytest.mark.parametrize(
    "case",
    [
        Case(rows=8, group=2, context=70, d=64),
        Case(rows=5, group=3, context=130, d=80, page=None, causal=True, sinks=True),
        Case(rows=16, group=4, context=65, d=128, segment=15, window=30, ragged_block=True),
        Case(batch=1, rows=16, group=8, context=40, d=96, kv_heads=1),
        Case(batch=1, rows=16, group=1, context=100, d=256, segment=None, soft_cap=3.0),
        Case(batch=1, rows=16, group=4, context=100, d=256, segment=None, kv_heads=1),
        Case(batch=0),
    ],
    ids=str,
)
def test_sanitizers(case: Case, kind: str) -> None:
    for schedule in (LATE, EAGER):
        check(case, torch.bfloat16, 2, kind=kind, schedule=schedule)
        check(case, torch.bfloat16, 1, kind=kind, schedule=schedule)


@pytest.mark.parametrize("head", (64, 96, 128, 256))
def test_shared_memory_has_no_bank_conflicts(head: int) -> None:
    """Eight rows that ldmatrix reads at a time, and eight chunks that cp.async writes, take all 32 banks."""
    chunks = head // 8
    where = torch.tensor(
        [[call(OP, head, row, chunk, function="swizzle") for chunk in range(chunks)] for row in range(64)]
    )
    assert where.flatten().sort().values.tolist() == [8 * i for i in range(64 * chunks)]
    banks = where // 8 % 8  # groups of four banks
    for first in range(0, 64, 8):
        assert (banks[first : first + 8].sort(0).values == torch.arange(8)[:, None]).all()
    written = banks.flatten().view(-1, 8)
    assert (written.sort(1).values == torch.arange(8)).all()


def test_base_2_exponential() -> None:
    for x in (-200.0, -126.0, -125.5, -1.0, -0.3, 0.0, 0.5, 1.0, 30.25):
        wanted = 2.0**x if x >= -126 else 0.0  # subnormal numbers are flushed
        assert call(OP, x, function="exp2") == pytest.approx(wanted, rel=2**-22, abs=0)
    assert call(OP, float("-inf"), function="exp2") == 0.0
    assert call(OP, 200.0, function="exp2") == float("inf")
    assert math.isnan(call(OP, float("nan"), function="exp2"))


def test_plan() -> None:
    def plan(batch: int, capacity: int, group: int = 4) -> Plan:
        return call(OP, batch, 16, 8 * group, 8, 128, capacity, MULTIPROCESSORS, function="plan")

    assert plan(1, 200) == (1, 1, 128)  # too short for a combine
    assert plan(1, 32768) == (33, 33, 128)  # 8 KV heads fill 2 blocks on each of 132 multiprocessors
    assert plan(1, 32768, group=8) == (33, 33, 256)  # 128 rows of partial results cost more
    assert plan(64, 4096) == (1, 1, 128)  # filled by the batch alone
    assert plan(16, 32768) == (5, 2, 128)  # but no piece is longer than 8192 keys
    assert plan(64, 32768) == (3, 1, 128)  # unless the workspace would be larger than 64 MiB
    assert plan(1, 1 << 30) == (64, 33, 128)
    assert plan(0, 4096) == (1, 1, 128)


def test_the_model_of_the_kernels_has_their_tiles_and_plans() -> None:
    for d in (8, 64, 80, 96, 128, 136, 256):
        for group_rows in (1, 16, 17, 48, 64, 100, 128, 129, 1000):
            tile = attention_model.tile_of(group_rows, d)
            found = call(OP, group_rows, d, function="tile")
            assert found == (tile.head, tile.rows, tile.keys, tile.threads, tile.smem)
    for gpu in attention_model.GPUS:
        for work in attention_model.WORKLOADS.values():
            sizes = (work.batch, work.rows, work.heads, work.kv_heads, work.d, work.capacity)
            assert call(OP, *sizes, gpu.multiprocessors, function="plan") == work.plan(gpu)
            assert attention_model.predict(work, gpu).smem <= gpu.smem_block
    assert max(tile.smem for tile in attention_model.TILES) <= 99 << 10  # of sm_120
