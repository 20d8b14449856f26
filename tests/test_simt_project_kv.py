"""The CUDA kernels of project_kv and commit_and_carry, run on the CPU by the simulator: against the float64
reference, in several orders of execution, with and without splits, and what they must never touch."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest
import torch
from cases import RAGGED, SHAPES, CommitCase, Ragged, Shape, int32, weights
from compare import Guarded, assert_close, assert_equal
from projection_cases import SPLIT, TILE_SHAPES, commit_and_carry, plan, project_kv
from simt import SCHEDULES, KernelFault, Schedule, unavailable
from simt.build import cutlass_include
from torch import Tensor

from carryover_ext import ops, reference

sys.path.insert(0, str(Path(__file__).parent.parent / "bench"))
import projection_model

REASON = unavailable() or (None if cutlass_include() else "nvidia-cutlass (CuTe) is not installed")
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

DTYPES = (torch.bfloat16, torch.float16)
DTYPE_IDS = ("bf16", "f16")
EMBED_AT = ("pre_norm", "post_norm")
OUTPUTS = ("k_cache", "v_cache", "k_segment", "v_segment")
SMALL = Shape(24, 32, 2, 2, 32, 32)
LATE, EAGER = (Schedule("priority", eager=eager) for eager in (False, True))


def inputs(shape: Shape, dtype: torch.dtype, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    positions = torch.randint(0, 64, (rows,), dtype=torch.int32)
    positions[torch.rand(rows) < 0.1] = -1
    return torch.randn(rows, shape.features).to(dtype), positions, torch.rand(rows) < 0.5


def check_project(
    shape: Shape, dtype: torch.dtype, rows: int, at: str = "pre_norm", **how
) -> tuple[Tensor, ...]:
    """Against float64 by the tolerance rule, with canaries."""
    features, positions, carried = inputs(shape, dtype, rows)
    w = weights(shape, dtype)
    guarded = [Guarded((shape.layers, rows, shape.heads, shape.dim), dtype) for _ in range(2)]
    args = (features, positions, *w.args(), carried)
    actual = project_kv(*args, carry_embed_at=at, out=tuple(g.tensor for g in guarded), **how)
    for g in guarded:
        g.check()
    plain = reference.project_kv(*args, carry_embed_at=at)
    exact = reference.project_kv(
        features.double(), positions, *w.args(torch.float64), carried, carry_embed_at=at
    )
    for name, a, p, e in zip("kv", actual, plain, exact, strict=True):
        assert_close(a, p, e, name)
        assert (a[:, positions == -1] == 0).all()
    return actual


def check_commit(case: CommitCase, options: dict | None = None, **how) -> list[Tensor]:
    """Against float64 by the tolerance rule; untouched elements must still be NaN."""
    options = options or {}
    actual = case.run(commit_and_carry, **options, **how)
    plain = case.run(reference.commit_and_carry, **options)
    exact = case.run(reference.commit_and_carry, torch.float64, **options)
    assert_equal(actual[4], exact[4], "segment_lens")
    for name, a, p, e in zip(OUTPUTS, actual, plain, exact, strict=False):
        written = ~e.isnan()
        assert torch.equal(written, ~a.isnan()), f"{name}: other elements were written than expected"
        assert_close(a[written], p[written], e[written], name)
    return actual


def same(a: list[Tensor] | tuple[Tensor, ...], b: list[Tensor] | tuple[Tensor, ...]) -> None:
    for x, y in zip(a, b, strict=True):
        assert_equal(x, y)


@pytest.mark.parametrize("at", EMBED_AT)
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("shape", TILE_SHAPES, ids=str)
def test_shapes(shape, dtype, at):
    check_project(shape, dtype, 11, at, schedule=LATE)


@pytest.mark.parametrize("rows", [0, 1, 16, 17, 64, 65, 128, 130])
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_row_counts(rows, dtype):
    check_project(SMALL, dtype, rows)


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("ragged", RAGGED, ids=lambda r: r.name)
def test_ragged_batches(ragged, dtype):
    check_commit(CommitCase(SMALL, ragged, dtype))


@pytest.mark.parametrize("library", [False, True], ids=["tiles", "library"])
@pytest.mark.parametrize("at", EMBED_AT)
@pytest.mark.parametrize("carry", [True, False], ids=["on", "off"])
@pytest.mark.parametrize("room", [0, 4, 15])
def test_segment_room(room, carry, at, library):
    case = CommitCase(SMALL, RAGGED[6], torch.bfloat16, room=room)
    check_commit(case, {"carry": carry, "carry_embed_at": at}, library=library)


@pytest.mark.parametrize("block", [2, 8, 16])
def test_every_acceptance_length(block):
    ragged = Ragged("all", (block,) * block, tuple(range(block)))
    case = CommitCase(SMALL, ragged, torch.bfloat16, pages=20, room=block - 1)
    lens = check_commit(case)[4]
    assert lens.tolist() == [block - 1 - m for m in range(block)]


@pytest.mark.parametrize("seed_offset", range(10))
def test_random_batches(seed_offset, seed):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda high: int(torch.randint(0, high, (), generator=generator))  # noqa: E731
    rows = tuple(draw(12) for _ in range(1 + draw(6)))
    accepted = tuple(draw(n + 1) - 1 for n in rows)
    shape = TILE_SHAPES[draw(len(TILE_SHAPES) - 1)]
    case = CommitCase(shape, Ragged("random", rows, accepted), DTYPES[draw(2)], room=draw(12))
    case.slots[torch.rand(case.ragged.total) < 0.2] = -1
    case.positions[torch.rand(case.ragged.total) < 0.2] = -1
    options = {"carry": draw(4) > 0, "carry_embed_at": EMBED_AT[draw(2)]}
    check_commit(case, options, library=draw(4) == 0, schedule=SCHEDULES[draw(4)])


@pytest.mark.parametrize("pages,page", [(1, 112), (112, 1), (16, 7)])
def test_page_sizes(pages, page):
    check_commit(CommitCase(SMALL, RAGGED[6], torch.bfloat16, pages=pages, page=page))


# ---- the library's path: the epilogues alone, at sizes that no tile could load ----


@pytest.mark.parametrize("at", EMBED_AT)
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("shape", (*SHAPES, Shape(24, 16, 1, 1, 320, 64)), ids=str)
def test_library_epilogues(shape, dtype, at):
    check_project(shape, dtype, 11, at, library=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_library_and_tiles_agree(dtype):
    case = CommitCase(TILE_SHAPES[0], RAGGED[6], dtype)
    for a, e in zip(case.run(commit_and_carry), case.run(commit_and_carry, library=True), strict=True):
        torch.testing.assert_close(a, e, equal_nan=True, rtol=2e-2, atol=2e-2)


# ---- splits, orders of execution, determinism ----


@pytest.mark.parametrize("multiprocessors,splits", [(1, (1, 1)), (4, (1, 3)), (132, (6, 3))])
@pytest.mark.parametrize("rows", [3, 40])
def test_splits(rows, multiprocessors, splits):
    work = projection_model.Workload(rows, SPLIT.features, SPLIT.hidden, SPLIT.layers, SPLIT.heads, SPLIT.dim)
    assert tuple(p.splits for p in work.plans(multiprocessors)) == splits
    check_project(SPLIT, torch.bfloat16, rows, multiprocessors=multiprocessors)


@pytest.mark.parametrize("shape", [TILE_SHAPES[0], TILE_SHAPES[4], SPLIT], ids=str)
def test_no_order_of_execution_changes_a_bit(shape):
    features, positions, carried = inputs(shape, torch.bfloat16, 13)
    args = (features, positions, *weights(shape, torch.bfloat16).args(), carried)
    first = project_kv(*args)
    for schedule in SCHEDULES:
        same(project_kv(*args, schedule=schedule), first)


@pytest.mark.parametrize("rows", [16, 40])
@pytest.mark.parametrize("at", EMBED_AT)
@pytest.mark.parametrize("library", [False, True], ids=["tiles", "library"])
def test_off_commits_the_same_bits(library, at, rows):
    case = CommitCase(TILE_SHAPES[0], Ragged("r", (8,) * (rows // 8), (2,) * (rows // 8)), torch.bfloat16)
    on = case.run(commit_and_carry, carry_embed_at=at, library=library)
    off = case.run(commit_and_carry, carry_embed_at=at, carry=False, library=library)
    case.weights.embedding = None  # the baseline drafter
    baseline = case.run(commit_and_carry, carry=False, library=library)
    same(off[:2], on[:2])
    same(baseline, off)
    assert off[2].isnan().all() and off[3].isnan().all() and (off[4] == 0).all()


@pytest.mark.parametrize("at", EMBED_AT)
def test_same_bits_as_project_kv(at):
    case = CommitCase(TILE_SHAPES[1], RAGGED[8], torch.bfloat16)
    k_cache, v_cache, k_segment, v_segment, lens = case.run(commit_and_carry, carry_embed_at=at)
    _, index, expected_lens = reference.gather_rejected(
        case.features, case.ragged.row_start(), case.ragged.num_accepted(), case.room
    )
    rejected = torch.zeros(case.ragged.total, dtype=torch.bool)
    rejected[index[index >= 0].long()] = True
    k, v = project_kv(case.features, case.positions, *case.weights.args(), rejected, carry_embed_at=at)
    assert_equal(lens, expected_lens, "segment_lens")
    slots = case.slots[~rejected]
    for cache, segment, rows in ((k_cache, k_segment, k), (v_cache, v_segment, v)):
        assert_equal(cache.flatten(1, 2)[:, slots], rows[:, ~rejected])
        for i, n in enumerate(lens.tolist()):
            assert_equal(segment[:, i, :n], rows[:, index[i, :n].long()])


def test_rows_do_not_see_each_other():
    """The bits of a row are the same whatever stands beside it, as long as the number of rows stays."""
    shape = TILE_SHAPES[0]
    features, positions, carried = inputs(shape, torch.bfloat16, 20)
    w = weights(shape, torch.bfloat16)
    first = project_kv(features, positions, *w.args(), carried)
    features[10:] = torch.randn(10, shape.features).to(torch.bfloat16)
    carried[10:] = ~carried[10:]
    second = project_kv(features, positions, *w.args(), carried)
    same([x[:, :10] for x in first], [x[:, :10] for x in second])


# ---- exact cases ----


@pytest.mark.parametrize("library", [False, True], ids=["tiles", "library"])
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("dim", [64, 80, 128, 256])
def test_small_integers_are_exact(dim, dtype, library):
    """Norms of constant vectors are powers of two, the rotation is by a right angle: no rounding anywhere, so
    kernel and CPU op agree in every bit."""
    hidden, heads, layers = 16, 2, 2
    features = torch.zeros(5, 8)
    features[:, 0] = torch.tensor([1.0, -1.0, 2.0, -2.0, 4.0])  # fc spreads this over H: rms is its size
    fc = torch.zeros(hidden, 8)
    fc[:, 0] = 1
    kv = torch.zeros(layers, 2, heads, dim, hidden)
    kv[:, 0, :, :, 0] = 2.0  # K: +-2 everywhere, normed to +-1
    kv[:, 1, :, :, 3] = torch.arange(dim).remainder(13).float()
    k_norm = torch.arange(layers * dim).remainder(7).float().view(layers, dim)
    turns = torch.tensor([[1.0, 0], [0, 1], [-1, 0], [0, -1]])
    cos_sin = turns.repeat_interleave(dim // 2, 1)
    norm = torch.arange(1, hidden + 1).float()
    args = [t.to(dtype) for t in (fc, norm, kv.view(-1, hidden), k_norm)]
    positions = int32(0, 1, 2, 3, 1)
    actual = project_kv(features.to(dtype), positions, *args, cos_sin, eps=0.0, library=library)
    wide = [t.float() for t in args]
    expected = ops.project_kv(features, positions, *wide, cos_sin, eps=0.0)
    same(actual, [e.to(dtype) for e in expected])


def test_zero_embedding_changes_no_bit():
    case = CommitCase(TILE_SHAPES[3], RAGGED[4], torch.bfloat16)
    case.weights.embedding.zero_()
    zero = case.run(commit_and_carry)
    case.weights.embedding = None
    same(zero, case.run(commit_and_carry))


def test_float16_keeps_the_range_of_the_reference():
    """fc's result times the norm's weight would overflow float16; normed first, it does not."""
    shape = TILE_SHAPES[0]
    features, positions, _ = inputs(shape, torch.float16, 4)
    w = weights(shape, torch.float16)
    w.fc *= 4096
    w.norm *= 64
    args = (features, positions, *w.args())
    exact = reference.project_kv(features.double(), positions, *w.args(torch.float64))
    for a, p, e in zip(project_kv(*args), reference.project_kv(*args), exact, strict=True):
        assert_close(a, p, e)


# ---- rows that go nowhere, strides, arguments out of range ----


@pytest.mark.parametrize("garbage", [float("nan"), float("inf")])
@pytest.mark.parametrize("library", [False, True], ids=["tiles", "library"])
def test_dead_rows_may_hold_garbage(library, garbage):
    case = CommitCase(SMALL, Ragged("dead", (8, 8), (3, -1)), torch.bfloat16)
    clean = case.run(commit_and_carry, library=library)
    case.features[8:] = garbage
    case.slots[8:] = 10**9
    case.slots[4:8] = -77  # rejected rows have no slot
    case.positions[8:] = -12345
    same(case.run(commit_and_carry, library=library), clean)


def test_padding_rows_are_not_counted():
    case = CommitCase(SMALL, Ragged("padding", (8,), (2,)), torch.bfloat16)
    case.positions[1] = case.positions[5] = -1
    assert check_commit(case)[4].tolist() == [4]


@pytest.mark.parametrize("library", [False, True], ids=["tiles", "library"])
def test_strided_operands(library):
    """Caches that are slices of larger pools, heads outside slots; features and weights that are
    slices too."""
    case = CommitCase(SMALL, RAGGED[6], torch.bfloat16)
    s, batch = case.shape, len(RAGGED[6].rows)
    expected = case.run(commit_and_carry, library=library)
    nan = float("nan")
    pool = torch.full((case.pages + 2, s.layers, 2, s.heads, case.page, s.dim), nan, dtype=torch.bfloat16)
    caches = [pool[1:-1, :, i].permute(1, 0, 3, 2, 4) for i in range(2)]
    parts = torch.full((batch, s.layers + 1, 2, case.room, s.heads, s.dim + 2), nan, dtype=torch.bfloat16)
    segments = [parts[:, 1:, i, :, :, 1:-1].permute(1, 0, 2, 3, 4) for i in range(2)]
    lens = int32(*[5] * batch)
    w = case.weights

    def slices(t: Tensor) -> Tensor:
        wide = torch.full((t.shape[0], t.shape[1] + 16), nan, dtype=t.dtype)
        wide[:, 8:-8] = t
        return wide[:, 8:-8]

    commit_and_carry(
        slices(case.features), case.positions, RAGGED[6].row_start(), RAGGED[6].num_accepted(), case.slots,
        *caches, *segments, lens, slices(w.fc), w.norm, slices(w.kv), w.k_norm, w.cos_sin, w.embedding,
        library=library,
    )  # fmt: skip
    same((*caches, *segments, lens), expected)
    assert pool[0].isnan().all() and pool[-1].isnan().all() and parts[:, 0].isnan().all()


def test_rows_out_of_range_go_nowhere():
    """What the CPU op raises, a kernel cannot: such a row is written nowhere, the others as ever."""
    case = CommitCase(SMALL, Ragged("bad", (4, 4), (2, 0)), torch.bfloat16)
    good = case.run(commit_and_carry)
    slots = case.slots.clone()
    case.slots[0] = case.pages * case.page
    case.slots[1] = -2
    case.positions[2] = 64  # committed; cos_sin has 64 rows
    bad = case.run(commit_and_carry)
    for cache, clean in zip(bad[:2], good[:2], strict=True):
        expected = clean.clone().flatten(1, 2)
        expected[:, slots[:3]] = float("nan")
        assert_equal(cache.flatten(1, 2), expected)
    same(bad[2:], good[2:])


def test_rows_in_front_of_the_first_request_go_nowhere(monkeypatch):
    case = CommitCase(SMALL, Ragged("bad", (4, 4), (2, 0)), torch.bfloat16)
    good = case.run(commit_and_carry)
    monkeypatch.setattr(Ragged, "row_start", lambda self: int32(2, 4, 8))
    monkeypatch.setattr(Ragged, "num_accepted", lambda self: int32(0, 0))
    for cache, clean in zip(case.run(commit_and_carry)[:2], good[:2], strict=True):
        rows, expected = cache.flatten(1, 2), clean.flatten(1, 2)
        assert rows[:, case.slots[:2]].isnan().all()
        assert_equal(rows[:, case.slots[2]], expected[:, case.slots[2]])


@pytest.mark.parametrize("wrong", [64, -2, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("library", [False, True], ids=["tiles", "library"])
def test_a_position_out_of_range_is_padding(library, wrong):
    """Committed and carried rows alike: a bad carried row is not counted, so no row of a segment is left
    unwritten below its length."""
    case = CommitCase(SMALL, Ragged("bad", (8, 8), (3, 0)), torch.bfloat16)  # cos_sin has 64 rows
    case.positions[[1, 5, 9, 15]] = -1
    expected = case.run(commit_and_carry, library=library)
    assert expected[4].tolist() == [3, 5]
    case.positions[[1, 5, 9, 15]] = wrong
    same(case.run(commit_and_carry, library=library), expected)

    args = (case.features, case.positions, *case.weights.args())
    bad = project_kv(*args, library=library)
    same(
        bad,
        project_kv(args[0], case.positions.where(case.positions != wrong, -1), *args[2:], library=library),
    )
    assert all((x[:, [1, 5, 9, 15]] == 0).all() and (x[:, 0] != 0).any() for x in bad)


@pytest.mark.slow  # a build of its own
def test_values_out_of_range_trap_in_a_debug_build():
    debug = {"defines": ("CARRYOVER_DEBUG", "CARRYOVER_ONE_TILE")}
    case = CommitCase(TILE_SHAPES[0], Ragged("bad", (8, 8), (3, 0)), torch.bfloat16)
    case.positions[[1, 5]] = case.slots[2] = -1
    same(case.run(commit_and_carry, **debug), case.run(commit_and_carry))
    args = (case.features, case.positions, *case.weights.args())
    same(project_kv(*args, **debug), project_kv(*args))
    for tensor, row, wrong in (
        (case.slots, 0, case.pages * case.page),
        (case.slots, 0, -2),
        (case.positions, 0, 64),  # committed
        (case.positions, 6, 64),  # carried
        (case.positions, 6, -2),
    ):
        good = tensor[row].clone()
        tensor[row] = wrong
        with pytest.raises(KernelFault, match="__trap"):
            case.run(commit_and_carry, **debug)
        if tensor is case.positions:
            with pytest.raises(KernelFault, match="__trap"):
                project_kv(*args, **debug)
        tensor[row] = good


@pytest.mark.parametrize("start", [(0, 4, 400), (0, -4, 8), (5, 4, 8)])
@pytest.mark.parametrize("accepted", [(1, 1), (9, 2), (-7, 3)])
def test_nonsense_in_ragged_arguments_stays_inside_the_arguments(start, accepted):
    case = CommitCase(SMALL, Ragged("bad", (4, 4), (2, 0)), torch.bfloat16)
    guarded = case.outputs()
    commit_and_carry(
        case.features, case.positions, int32(*start), int32(*accepted), case.slots,
        *(g.tensor for g in guarded), *case.weights.args(),
    )  # fmt: skip
    for g in guarded:
        g.check()
    assert ((guarded[4].tensor >= 0) & (guarded[4].tensor <= 8)).all()


def test_operands_that_tiles_cannot_load_are_refused():
    shape = SHAPES[4]  # F = 17
    features, positions, _ = inputs(shape, torch.bfloat16, 3)
    with pytest.raises(KernelFault, match="tiles cannot load"):
        project_kv(features, positions, *weights(shape, torch.bfloat16).args())


# ---- the plan ----


@pytest.mark.parametrize("multiprocessors", [1, 108, 132, 148])
@pytest.mark.parametrize("head", [1, 40, 64, 80, 128, 192, 256])
@pytest.mark.parametrize("depth", [8, 72, 2560, 12800])
def test_plan_covers_the_product_once(depth, head, multiprocessors):
    for rows in (1, 16, 17, 64, 65, 200, 512):
        for heads in (1, 7, 80):
            cols = heads * (head if head > 1 else 32)
            p = plan(rows, cols, depth, head, multiprocessors)
            assert p["used_cols"] % head == 0 and 0 < p["used_cols"] <= p["tile_cols"]
            assert (p["row_blocks"] - 1) * p["tile_rows"] < rows <= p["row_blocks"] * p["tile_rows"]
            assert (p["col_tiles"] - 1) * p["used_cols"] < cols <= p["col_tiles"] * p["used_cols"]
            assert (p["splits"] - 1) * p["split_depth"] < depth <= p["splits"] * p["split_depth"]
            assert p["split_depth"] % (64 if p["tile_cols"] == 128 else 32) == 0
            model = projection_model.plan(rows, cols, depth, head, multiprocessors)
            tile = model.tile
            assert tuple(p.values()) == (tile.rows, tile.cols, *dataclasses.astuple(model)[1:])
            assert p["splits"] == 1 or model.blocks <= tile.blocks * multiprocessors


def test_predictions_hold_together():
    for gpu in projection_model.GPUS:
        for work in projection_model.WORKLOADS.values():
            p = projection_model.predict(work, gpu)
            assert work.weight_bytes() < p.bytes and 0 < p.share < 1 <= min(p.occupancy)
            assert max(p.smem) <= gpu.smem_block
    assert max(tile.smem for tile in projection_model.TILES) <= 99 << 10  # of sm_120


# ---- sanitizers: one tile, because CuTe takes minutes to instrument ----

ONE_TILE = ("CARRYOVER_ONE_TILE",)
NARROW = tuple(s for s in TILE_SHAPES if s.dim <= 128)


@pytest.mark.parametrize("kind", ["asan", "tsan"])
@pytest.mark.parametrize("library", [False, True], ids=["tiles", "library"])
def test_sanitizers(library, kind):
    for shape, ragged in ((TILE_SHAPES[1], RAGGED[7]), (TILE_SHAPES[6], RAGGED[1]), (SPLIT, RAGGED[4])):
        case = CommitCase(shape, ragged, torch.bfloat16)
        how = {"kind": kind, "defines": ONE_TILE, "schedule": EAGER, "library": library}
        check_commit(case, {"carry_embed_at": "post_norm"}, **how)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["asan", "tsan"])
@pytest.mark.parametrize("rows", [1, 5, 16])
@pytest.mark.parametrize("shape", NARROW, ids=str)
def test_sanitizers_at_every_shape(shape, rows, kind):
    check_project(shape, torch.bfloat16, rows, kind=kind, defines=ONE_TILE, schedule=LATE)


@pytest.mark.slow
@pytest.mark.parametrize("at", EMBED_AT)
@pytest.mark.parametrize("rows", [1, 16, 40, 100, 512])
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("shape", TILE_SHAPES, ids=str)
def test_full_matrix(shape, dtype, rows, at):
    late = check_project(shape, dtype, rows, at, schedule=LATE)
    assert all(torch.isfinite(x).all() for x in late)


@pytest.mark.slow
@pytest.mark.parametrize("carry", [True, False], ids=["on", "off"])
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("ragged", RAGGED, ids=lambda r: r.name)
@pytest.mark.parametrize("shape", TILE_SHAPES[:-1], ids=str)
def test_full_matrix_of_commits(shape, ragged, schedule, carry):
    case = CommitCase(shape, ragged, torch.bfloat16)
    case.slots[torch.rand(ragged.total) < 0.1] = -1
    check_commit(case, {"carry": carry}, schedule=schedule)
