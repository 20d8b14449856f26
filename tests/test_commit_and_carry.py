"""commit_and_carry: every row where it belongs, nothing else touched; segment rules; bit-equality."""

from __future__ import annotations

import pytest
import torch
from cases import DTYPE_IDS, DTYPES, RAGGED, SHAPES, CommitCase, Ragged, Shape, int32, rope_table
from compare import assert_close, assert_equal

from carryover_ext import ops, reference

EMBED_AT = ("pre_norm", "post_norm")
OUTPUTS = ("k_cache", "v_cache", "k_segment", "v_segment")


def check(case, **options):
    """Against the float64 reference by the tolerance rule; untouched elements must still be NaN."""
    actual = case.run(ops.commit_and_carry, **options)
    plain = case.run(reference.commit_and_carry, **options)
    exact = case.run(reference.commit_and_carry, torch.float64, **options)
    assert_equal(actual[4], exact[4], "segment_lens")
    for name, a, p, e in zip(OUTPUTS, actual, plain, exact, strict=False):
        written = ~e.isnan()
        assert torch.equal(written, ~a.isnan()), f"{name}: other elements were written than expected"
        assert_close(a[written], p[written], e[written], name)
    return actual


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("ragged", RAGGED, ids=lambda r: r.name)
def test_ragged_batches(ragged, dtype, level):
    check(CommitCase(Shape(24, 32, 2, 2, 32, 32), ragged, dtype))


@pytest.mark.parametrize("at", EMBED_AT)
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape, dtype, at):
    check(CommitCase(shape, RAGGED[6], dtype), carry_embed_at=at)


@pytest.mark.parametrize("carry", [True, False], ids=["on", "off"])
@pytest.mark.parametrize("room", [0, 1, 4, 15, 31])
@pytest.mark.parametrize("ragged", [RAGGED[4], RAGGED[6], RAGGED[8]], ids=lambda r: r.name)
def test_segment_room(ragged, room, carry):
    check(CommitCase(SHAPES[0], ragged, torch.float32, room=room), carry=carry)


@pytest.mark.parametrize("pages,page", [(1, 112), (112, 1), (7, 16), (16, 7)])
def test_page_sizes(pages, page):
    check(CommitCase(SHAPES[0], RAGGED[6], torch.float32, pages=pages, page=page))


@pytest.mark.parametrize("block", [2, 8, 16])
def test_every_acceptance_length(block):
    ragged = Ragged("all", (block,) * block, tuple(range(block)))
    case = CommitCase(SHAPES[0], ragged, torch.float32, pages=20, room=block - 1)
    lens = check(case)[4]
    assert lens.tolist() == [block - 1 - m for m in range(block)]


@pytest.mark.parametrize("seed_offset", range(12))
def test_random_batches(seed_offset, seed):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda high: int(torch.randint(0, high, (), generator=generator))  # noqa: E731
    rows = tuple(draw(12) for _ in range(1 + draw(7)))
    accepted = tuple(draw(n + 1) - 1 for n in rows)
    case = CommitCase(
        SHAPES[draw(len(SHAPES))], Ragged("random", rows, accepted), DTYPES[draw(3)], room=draw(12)
    )
    case.slots[torch.rand(case.ragged.total) < 0.2] = -1
    case.positions[torch.rand(case.ragged.total) < 0.2] = -1
    check(case, carry=draw(4) > 0, carry_embed_at=EMBED_AT[draw(2)])


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("at", EMBED_AT)
def test_off_commits_the_same_bits(at, dtype, level):
    case = CommitCase(SHAPES[0], RAGGED[6], dtype)
    on = case.run(ops.commit_and_carry, carry_embed_at=at)
    off = case.run(ops.commit_and_carry, carry_embed_at=at, carry=False)
    assert_equal(off[0], on[0], "k_cache")
    assert_equal(off[1], on[1], "v_cache")
    assert off[2].isnan().all() and off[3].isnan().all() and (off[4] == 0).all()
    case.weights.embedding = None  # the baseline drafter
    baseline = case.run(ops.commit_and_carry, carry=False)
    assert_equal(off[0], baseline[0], "k_cache against a drafter without the embedding")
    assert_equal(off[1], baseline[1], "v_cache against a drafter without the embedding")


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("at", EMBED_AT)
def test_same_bits_as_project_kv(at, dtype, level):
    case = CommitCase(SHAPES[1], RAGGED[8], dtype)
    k_cache, v_cache, k_segment, v_segment, lens = case.run(ops.commit_and_carry, carry_embed_at=at)
    rejected = torch.zeros(case.ragged.total, dtype=torch.bool)
    _, index, expected_lens = ops.gather_rejected(
        case.features, case.ragged.row_start(), case.ragged.num_accepted(), case.room
    )
    rejected[index[index >= 0].long()] = True
    k, v = ops.project_kv(case.features, case.positions, *case.weights.args(), rejected, carry_embed_at=at)
    assert_equal(lens, expected_lens, "segment_lens")
    slots = case.slots[~rejected]
    for cache, segment, rows in ((k_cache, k_segment, k), (v_cache, v_segment, v)):
        assert_equal(cache.flatten(1, 2)[:, slots], rows[:, ~rejected])
        for i, n in enumerate(lens.tolist()):
            assert_equal(segment[:, i, :n], rows[:, index[i, :n].long()])
            assert segment[:, i, n:].isnan().all()


def test_zero_embedding_carries_plain_context():
    case = CommitCase(SHAPES[0], RAGGED[4], torch.bfloat16)
    case.weights.embedding.zero_()
    zero = case.run(ops.commit_and_carry)
    case.weights.embedding = None
    for a, e in zip(zero, case.run(ops.commit_and_carry), strict=True):
        assert_equal(a, e)


@pytest.mark.parametrize(
    "first,second", [((0, 0), (7, 7)), ((0, 3), (6, -1)), ((2, 2), (5, 0)), ((7, 7), (0, 0))]
)
def test_segment_is_replaced_whole(first, second):
    """Two rounds on the same buffers: the second one's lengths and rows do not depend on the first."""
    case = CommitCase(SHAPES[0], Ragged("round", (8, 8), first), torch.float32)
    tensors = case.run(ops.commit_and_carry)
    again = CommitCase(SHAPES[0], Ragged("round", (8, 8), second), torch.float32)
    alone = again.run(ops.commit_and_carry)
    ops.commit_and_carry(
        again.features, again.positions, again.ragged.row_start(), again.ragged.num_accepted(), again.slots,
        *tensors, *again.weights.args(),
    )  # fmt: skip
    assert tensors[4].tolist() == [7 - m if m >= 0 else 0 for m in second]
    for i, n in enumerate(tensors[4].tolist()):
        assert_equal(tensors[2][:, i, :n], alone[2][:, i, :n])
        assert_equal(tensors[3][:, i, :n], alone[3][:, i, :n])


def test_requests_do_not_see_each_other():
    """A request's rows and segment have the same bits whatever the other requests did."""
    base = CommitCase(SHAPES[0], Ragged("a", (8, 8, 8), (2, 4, 6)), torch.float32)
    other = CommitCase(SHAPES[0], Ragged("b", (8, 8, 8), (7, 4, -1)), torch.float32)
    other.weights, other.slots, other.positions = base.weights, base.slots, base.positions
    other.features[8:16] = base.features[8:16]
    a, b = base.run(ops.commit_and_carry), other.run(ops.commit_and_carry)
    for x, y in zip(a[2:4], b[2:4], strict=True):
        assert_equal(x[:, 1], y[:, 1])
    for x, y in zip(a[:2], b[:2], strict=True):
        assert_equal(x.flatten(1, 2)[:, base.slots[8:13]], y.flatten(1, 2)[:, base.slots[8:13]])


def test_prefill_leaves_segments_empty():
    lens = check(CommitCase(SHAPES[0], Ragged("prefill", (30, 41), (29, 40)), torch.float32))[4]
    assert lens.tolist() == [0, 0]


@pytest.mark.parametrize("garbage", [float("nan"), float("inf")])
def test_dead_rows_may_hold_garbage(garbage, level):
    """No value of a row that goes nowhere reaches a written row; slots of rejected rows are not read."""
    case = CommitCase(SHAPES[0], Ragged("dead", (8, 8), (3, -1)), torch.float32)
    clean = case.run(ops.commit_and_carry)
    case.features[8:] = garbage
    case.slots[8:] = 10**9
    case.slots[4:8] = -77  # rejected rows have no slot
    case.positions[8:] = -12345
    for a, e in zip(case.run(ops.commit_and_carry), clean, strict=True):
        assert_equal(a, e)


def test_padding_rows_are_not_counted():
    case = CommitCase(SHAPES[0], Ragged("padding", (8,), (2,)), torch.float32)
    case.positions[1] = -1
    case.positions[5] = -1
    assert check(case)[4].tolist() == [4]


def test_strided_caches():
    """Caches that are slices of larger pools, heads outside slots, K and V interleaved."""
    case = CommitCase(SHAPES[0], RAGGED[6], torch.float32)
    s, batch = case.shape, len(RAGGED[6].rows)
    expected = case.run(ops.commit_and_carry)
    pool = torch.full((case.pages + 2, s.layers, 2, s.heads, case.page, s.dim), float("nan"))
    caches = [pool[1:-1, :, i].permute(1, 0, 3, 2, 4) for i in range(2)]
    parts = torch.full((batch, s.layers + 1, 2, case.room, s.heads, s.dim + 8), float("nan"))
    segments = [parts[:, 1:, i, :, :, 4:-4].permute(1, 0, 2, 3, 4) for i in range(2)]
    lens = int32(*[5] * batch)
    ops.commit_and_carry(
        case.features, case.positions, RAGGED[6].row_start(), RAGGED[6].num_accepted(), case.slots,
        *caches, *segments, lens, *case.weights.args(),
    )  # fmt: skip
    for a, e in zip((*caches, *segments, lens), expected, strict=True):
        assert_equal(a, e)
    assert pool[0].isnan().all() and pool[-1].isnan().all() and parts[:, 0].isnan().all()


def test_weights_that_require_grad():
    case = CommitCase(SHAPES[0], RAGGED[3], torch.float32)
    expected = case.run(ops.commit_and_carry)
    for t in (case.features, case.weights.fc, case.weights.embedding):
        t.requires_grad_()
    for a, e in zip(case.run(ops.commit_and_carry), expected, strict=True):
        assert_equal(a, e)
        assert not a.requires_grad


def _arguments(**change):
    torch.manual_seed(0)
    case = CommitCase(
        Shape(8, 6, 2, 3, 4, 4), Ragged("small", (3, 3), (0, 1)), torch.float32, pages=2, page=8, room=4
    )
    names = (*OUTPUTS, "segment_lens", "fc_weight", "norm_weight", "kv_weight", "k_norm_weight", "cos_sin",
             "carry_embedding")  # fmt: skip
    tensors = [g.tensor for g in case.outputs()]
    args = dict(zip(names, (*tensors, *case.weights.args()), strict=True))
    args |= {"features": case.features, "positions": int32(4, 5, 6, 1, 2, 3), "slot_mapping": torch.arange(6)}
    return args | {"row_start": int32(0, 3, 6), "num_accepted": int32(0, 1)} | change


SMALL = (2, 2, 8, 3, 4)
ERRORS = {
    "features": ({"features": torch.zeros(6, 8).half()}, "features must be .* got float16"),
    "weights": ({"fc_weight": torch.zeros(6, 8).double()}, "fc_weight must have the dtype of features"),
    "row-start": ({"row_start": int32(0, 4, 5)}, "row_start must end at the number of rows, 6, got .* = 5"),
    "monotone": ({"row_start": int32(0, 7, 6)}, r"row_start must not decrease, got row_start\[1\] = 7"),
    "accepted": (
        {"num_accepted": int32(0, 3)},
        r"num_accepted\[1\] = 3 is out of range: request 1 has 3 rows",
    ),
    "slot-high": (
        {"slot_mapping": torch.tensor([16, 0, 0, 1, 2, 0])},
        r"slot_mapping\[0\] = 16 .* 2 pages of 8",
    ),
    "slot-low": (
        {"slot_mapping": torch.tensor([0, 0, 0, 1, -2, 0])},
        r"slot_mapping\[4\] = -2 is out of range",
    ),
    "slot-dtype": (
        {"slot_mapping": int32(0, 1, 2, 3, 4, 5)},
        "slot_mapping must be int64, got int32; convert",
    ),
    "slot-shape": (
        {"slot_mapping": torch.arange(5)},
        r"slot_mapping must have shape \[T\] = \[6\], got \[5\]",
    ),
    "position": (
        {"positions": int32(4, 5, 6, 64, 2, 3)},
        r"positions\[3\] = 64 is out of range: cos_sin has 64 rows",
    ),
    "position-carried": ({"positions": int32(4, 5, 99, 1, 2, 3)}, r"positions\[2\] = 99 is out of range"),
    "position-low": ({"positions": int32(-3, 5, 6, 1, 2, 3)}, r"positions\[0\] = -3 is out of range"),
    "k-dtype": (
        {"k_cache": torch.zeros(SMALL).bfloat16()},
        "k_cache must have the dtype of features, float32",
    ),
    "k-layers": (
        {"k_cache": torch.zeros(3, 2, 8, 3, 4)},
        r"k_cache must have shape \[L, N, page, nkv, d\] = \[2, any",
    ),
    "k-heads": ({"k_cache": torch.zeros(2, 2, 8, 2, 4)}, r"k_cache must have shape .* got \[2, 2, 8, 2, 4\]"),
    "k-strided": (
        {"k_cache": torch.zeros(2, 2, 8, 3, 8)[..., ::2]},
        "k_cache must be contiguous in its last",
    ),
    "v-shape": (
        {"v_cache": torch.zeros(2, 3, 8, 3, 4)},
        r"v_cache must have shape .* = \[2, 2, 8, 3, 4\], got",
    ),
    "v-strided": (
        {"v_cache": torch.zeros(2, 2, 8, 3, 8)[..., ::2]},
        "v_cache must be contiguous in its last",
    ),
    "segment-batch": (
        {"k_segment": torch.zeros(2, 1, 4, 3, 4)},
        r"k_segment must have shape .* = \[2, 2, any, 3, 4\]",
    ),
    "segment-room": (
        {"v_segment": torch.zeros(2, 2, 5, 3, 4)},
        r"v_segment must have shape .* = \[2, 2, 4, 3, 4\]",
    ),
    "lens-dtype": (
        {"segment_lens": torch.zeros(2, dtype=torch.int64)},
        "segment_lens must be int32, got int64",
    ),
    "lens-shape": ({"segment_lens": int32(0)}, r"segment_lens must have shape \[B\] = \[2\], got \[1\]"),
    "table": ({"cos_sin": rope_table(64, 6)}, "cos_sin must have an even number of columns, at most d = 4"),
    "embedding": (
        {"carry_embedding": torch.zeros(7)},
        r"carry_embedding must have shape \[H\] = \[6\], got \[7\]",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case):
    change, message = ERRORS[case]
    args = _arguments(**change)
    before = {name: args[name].clone() for name in (*OUTPUTS, "segment_lens")}
    with pytest.raises(RuntimeError, match="commit_and_carry: " + message):
        ops.commit_and_carry(**args)
    for name, tensor in before.items():
        assert_equal(args[name], tensor, f"{name} after an error")


VALUES = ("row-start", "monotone", "accepted", "slot-high", "slot-low", "position", "position-carried",
          "position-low")  # fmt: skip


def _check(args: dict, **options) -> None:
    names = ("positions", "row_start", "num_accepted", "slot_mapping", "k_cache", "k_segment", "cos_sin")
    ops.check_commit_and_carry(*(args[name] for name in names), **options)


@pytest.mark.parametrize("case", VALUES)
def test_check_commit_finds_bad_values(case):
    change, message = ERRORS[case]
    with pytest.raises(RuntimeError, match="commit_and_carry: " + message):
        _check(_arguments(**change))


def test_check_commit_accepts_what_the_op_accepts():
    _check(_arguments())
    _check(_arguments(positions=int32(4, 5, 99, 1, 2, 3)), carry=False)  # that row is not written


def test_unknown_embedding_place():
    with pytest.raises(ValueError, match="carry_embed_at='after' is not one of"):
        ops.commit_and_carry(**_arguments(carry_embed_at="after"))


def test_autograd_is_warned_of_what_is_overwritten():
    """A gradient that needs what a cache held before would be wrong without a word."""
    case = CommitCase(SHAPES[0], RAGGED[6], torch.float32)
    factor = torch.ones((), requires_grad=True)
    products = []

    def commit(*args, **options):
        products.extend(factor * tensor for tensor in args[5:10])
        before = [tensor._version for tensor in args]
        ops.commit_and_carry(*args, **options)
        bumped = [n for n, tensor in enumerate(args) if tensor._version > before[n]]
        assert bumped == [5, 6, 7, 8, 9]

    case.run(commit)
    for product in products:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.sum().backward()


def test_inference_tensors_are_written_as_well():
    """They have no versions, inside of inference mode and outside of it."""
    case = CommitCase(SHAPES[0], RAGGED[6], torch.float32)
    expected = case.run(ops.commit_and_carry)
    with torch.inference_mode():
        caches = [tensor.clone() for tensor in case.run(ops.commit_and_carry)]
    for a, e in zip(caches, expected, strict=True):
        assert a.is_inference()
        assert_equal(a, e)

    def commit(*args, **options):
        ops.commit_and_carry(*args[:5], *caches, *args[10:], **options)

    case.run(commit)
    for a, e in zip(caches, expected, strict=True):
        assert_equal(a, e)
