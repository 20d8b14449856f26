"""project_kv against the float64 reference, at each instruction set; exact cases, gradients, errors."""

from __future__ import annotations

import pytest
import torch
from cases import DTYPE_IDS, DTYPES, SHAPES, Shape, int32, rope_table, weights
from compare import assert_close, assert_equal

from carryover_ext import ops, reference

EMBED_AT = ("pre_norm", "post_norm")


def _inputs(shape, dtype, rows):
    features = torch.randn(rows, shape.features).to(dtype)
    positions = torch.randint(0, 64, (rows,), dtype=torch.int32)
    return features, positions, torch.rand(rows) < 0.5


@pytest.mark.parametrize("at", EMBED_AT)
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_float64(shape, dtype, at, level):
    features, positions, carried = _inputs(shape, dtype, 11)
    positions[3] = -1
    w = weights(shape, dtype)
    actual = ops.project_kv(features, positions, *w.args(), carried, carry_embed_at=at)
    plain = reference.project_kv(features, positions, *w.args(), carried, carry_embed_at=at)
    exact = reference.project_kv(
        features.double(), positions, *w.args(torch.float64), carried, carry_embed_at=at
    )
    for name, a, p, e in zip("kv", actual, plain, exact, strict=True):
        assert_close(a, p, e, name)
        assert (a[:, 3] == 0).all()


@pytest.mark.parametrize("rows", [0, 1, 2, 5, 16, 17, 64, 131])
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_row_counts(rows, dtype):
    shape = Shape(48, 64, 3, 2, 64, 64)
    features, positions, carried = _inputs(shape, dtype, rows)
    w = weights(shape, dtype)
    k, v = ops.project_kv(features, positions, *w.args(), carried)
    assert k.shape == v.shape == (3, rows, 2, 64)
    plain = reference.project_kv(features, positions, *w.args(), carried)
    exact = reference.project_kv(features.double(), positions, *w.args(torch.float64), carried)
    assert_close(k, plain[0], exact[0], "k")
    assert_close(v, plain[1], exact[1], "v")


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("dim", [32, 64, 80, 128, 256])
def test_small_integers_are_exact(dim, dtype, level):
    """Norms of constant vectors are powers of two, the rotation is by a right angle: no rounding anywhere."""
    rows, hidden, heads, layers = 5, 16, 2, 2
    features = torch.zeros(rows, 8)
    features[:, 0] = torch.tensor(
        [1.0, -1.0, 2.0, -2.0, 4.0]
    )  # fc spreads this over H: rms is its absolute value
    fc = torch.zeros(hidden, 8)
    fc[:, 0] = 1
    sign = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0])
    norm = torch.arange(1, hidden + 1).float()
    kv = torch.zeros(layers, 2, heads, dim, hidden)
    kv[:, 0, :, :, 0] = 2.0  # K: +-2 everywhere, normed to +-1
    kv[:, 1, :, :, 3] = torch.arange(dim).remainder(13).float()
    k_norm = torch.arange(layers * dim).remainder(7).float().view(layers, dim)
    cos_sin = torch.zeros(4, dim)
    for p, (c, s) in enumerate(((1, 0), (0, 1), (-1, 0), (0, -1))):
        cos_sin[p, : dim // 2], cos_sin[p, dim // 2 :] = c, s
    positions = int32(0, 1, 2, 3, 1)
    weight = [t.to(dtype) for t in (fc, norm, kv.view(-1, hidden), k_norm)]
    k, v = ops.project_kv(features.to(dtype), positions, *weight, cos_sin, eps=0.0)
    a = sign[:, None] * k_norm[:, None, :]  # [L, T, d]
    rotated = torch.empty(layers, rows, dim)
    half = dim // 2
    for t, p in enumerate(positions.tolist()):
        c, s = cos_sin[p, 0], cos_sin[p, half]
        rotated[:, t, :half] = a[:, t, :half] * c - a[:, t, half:] * s
        rotated[:, t, half:] = a[:, t, half:] * c + a[:, t, :half] * s
    expected_v = 4 * sign[:, None] * torch.arange(dim).remainder(13)
    assert_equal(k, rotated[:, :, None].expand(-1, -1, heads, -1).to(dtype), "k")
    assert_equal(v, expected_v[None, :, None].expand(layers, -1, heads, -1).to(dtype), "v")


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("at", EMBED_AT)
def test_zero_embedding_changes_no_bit(at, dtype):
    shape = SHAPES[0]
    features, positions, carried = _inputs(shape, dtype, 9)
    w = weights(shape, dtype)
    w.embedding.zero_()
    with_zero = ops.project_kv(features, positions, *w.args(), carried, carry_embed_at=at)
    w.embedding = None
    without = ops.project_kv(features, positions, *w.args())
    for a, e in zip(with_zero, without, strict=True):
        assert_equal(a, e)


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("at", EMBED_AT)
def test_carried_rows_change_no_bit_of_others(at, dtype, level):
    shape = SHAPES[1]
    features, positions, carried = _inputs(shape, dtype, 24)
    w = weights(shape, dtype)
    plain = ops.project_kv(features, positions, *w.args(), torch.zeros_like(carried), carry_embed_at=at)
    some = ops.project_kv(features, positions, *w.args(), carried, carry_embed_at=at)
    for a, e in zip(some, plain, strict=True):
        assert_equal(a[:, ~carried], e[:, ~carried])
        assert not torch.equal(a[:, carried], e[:, carried])


def test_embedding_before_fc_is_embedding_after_it():
    """fc is linear without bias: U(H + E) = fc(H) + fc(E), the paper's form."""
    shape = SHAPES[3]
    features, positions, carried = _inputs(shape, torch.float64, 8)
    w = weights(shape, torch.float64)
    before = torch.randn(shape.features, dtype=torch.float64)
    w.embedding = w.fc @ before
    a = ops.project_kv(features, positions, *w.args(), carried)
    b = ops.project_kv(features + carried[:, None] * before, positions, *w.args())
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


def test_position_zero_is_not_rotated_and_rotation_is_relative():
    shape = SHAPES[0]
    w = weights(shape, torch.float64)
    features = torch.randn(1, shape.features, dtype=torch.float64).expand(2, -1)
    k = [ops.project_kv(features, int32(p, p + 5), *w.args())[0] for p in (0, 20)]
    dots = [(x[:, 0] * x[:, 1]).sum(-1) for x in k]
    torch.testing.assert_close(dots[0], dots[1], rtol=1e-5, atol=1e-6)  # the table is float32


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_garbage_in_padding_rows_stays_there(bad, level):
    shape = SHAPES[2]
    features, positions, carried = _inputs(shape, torch.float32, 6)
    w = weights(shape, torch.float32)
    clean = ops.project_kv(features, positions, *w.args(), carried)
    features[4] = bad
    positions[4] = -1
    keep = torch.arange(6) != 4
    for a, e in zip(ops.project_kv(features, positions, *w.args(), carried), clean, strict=True):
        assert_equal(a[:, keep], e[:, keep])
        assert (a[:, 4] == 0).all()


def test_strided_features_and_weights():
    shape = SHAPES[0]
    features, positions, _ = _inputs(shape, torch.float32, 7)
    w = weights(shape, torch.float32)
    expected = ops.project_kv(features, positions, *w.args())
    wide = torch.randn(7, 2 * shape.features)
    wide[:, ::2] = features
    w.kv = w.kv.t().contiguous().t()
    for a, e in zip(ops.project_kv(wide[:, ::2], positions, *w.args()), expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("marked", ["some", "none", "no-embedding"])
@pytest.mark.parametrize("at", EMBED_AT)
@pytest.mark.parametrize(
    "shape", [Shape(7, 5, 2, 2, 6, 4), Shape(6, 9, 1, 1, 8, 8), Shape(5, 4, 2, 1, 4, 0)], ids=str
)
def test_gradcheck(shape, at, marked):
    w = weights(shape, torch.float64, embedding=marked != "no-embedding", positions=8)
    inputs = [torch.randn(4, shape.features, dtype=torch.float64), w.fc, w.norm, w.kv, w.k_norm]
    if w.embedding is not None:
        inputs.append(w.embedding)
    carried = torch.tensor([True, False, True, False]) if marked == "some" else None
    positions = int32(0, 7, -1, 3)

    def call(f, fc, norm, kv, k_norm, embedding=None):
        return ops.project_kv(
            f, positions, fc, norm, kv, k_norm, w.cos_sin, embedding, carried, carry_embed_at=at
        )

    inputs = [t.requires_grad_() for t in inputs]
    if marked == "none":  # the embedding is not used
        assert torch.autograd.gradcheck(lambda *a: call(*a, w.embedding.detach()), inputs[:5])
    else:
        assert torch.autograd.gradcheck(call, inputs)


@pytest.mark.parametrize("rows", [0, 1, 13])
@pytest.mark.parametrize("at", EMBED_AT)
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_gradients_against_reference(dtype, at, rows):
    """By the tolerance rule, with autograd through the reference as plain PyTorch."""
    shape = SHAPES[3]
    features, positions, carried = _inputs(shape, dtype, rows)
    w = weights(shape, dtype)
    seeds = [torch.randn(shape.layers, rows, shape.heads, shape.dim).to(dtype) for _ in range(2)]

    def gradients(function, cast):
        args = [t.detach().clone().to(cast) for t in (features, *w.args()) if t is not w.cos_sin]
        f, fc, norm, kv, k_norm, embedding = (t.requires_grad_() for t in args)
        out = function(f, positions, fc, norm, kv, k_norm, w.cos_sin, embedding, carried, carry_embed_at=at)
        loss = sum((o * s.to(cast)).sum() for o, s in zip(out, seeds, strict=True))
        return torch.autograd.grad(loss, (f, fc, norm, kv, k_norm, embedding))

    actual = gradients(ops.project_kv, dtype)
    plain = gradients(reference.project_kv, dtype)
    exact = gradients(reference.project_kv, torch.float64)
    names = ("features", "fc", "norm", "kv", "k_norm", "carry_embedding")
    for name, a, p, e in zip(names, actual, plain, exact, strict=True):
        assert_close(a, p, e, name)


def test_padding_may_hold_anything():
    """NaN in a row without a position reaches no gradient, and a batch of padding alone has zeros."""
    shape = SHAPES[0]
    features, _, _ = _inputs(shape, torch.float32, 3)
    w = weights(shape, torch.float32)
    for positions, table in ((int32(0, -1, 2), w.cos_sin), (int32(-1, -1, -1), w.cos_sin[:0])):
        found = []
        for filler in (0.0, float("nan")):
            padded = features.clone()
            padded[positions < 0] = filler
            args = [t.detach().clone().requires_grad_() for t in (padded, w.fc, w.norm, w.kv, w.k_norm)]
            k, v = ops.project_kv(args[0], positions, *args[1:], table)
            found.append(torch.autograd.grad((k.square() + v).sum(), args))
        for clean, dirty in zip(*found, strict=True):
            assert_equal(dirty, clean)
        assert not found[1][0][positions < 0].any() and bool(found[1][1].any()) == (len(table) > 0)


def test_weights_that_require_grad_record_nothing_under_no_grad():
    shape = SHAPES[0]
    features, positions, carried = _inputs(shape, torch.float32, 3)
    w = weights(shape, torch.float32)
    w.fc.requires_grad_()
    with torch.no_grad():
        k, _ = ops.project_kv(features, positions, *w.args(), carried)
    assert not k.requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_changes_no_bit(dtype):
    shape = SHAPES[0]
    features, positions, carried = _inputs(shape, torch.float32, 5)
    w = weights(shape, torch.float32)
    expected = ops.project_kv(features, positions, *w.args(), carried)
    with torch.autocast("cpu", dtype):
        actual = ops.project_kv(features, positions, *w.args(), carried)
    for a, e in zip(actual, expected, strict=True):
        assert_equal(a, e)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["f32", "f64"])
def test_autocast_around_backward_changes_no_bit(dtype):
    """A caller may call backward inside of its autocast: the formula keeps its precision."""
    shape = SHAPES[0]
    features, positions, carried = _inputs(shape, dtype, 5)
    w = weights(shape, dtype)
    wanted = [features, w.fc, w.kv]
    for tensor in wanted:
        tensor.requires_grad_()
    found = []
    for autocast in (False, True):
        k, v = ops.project_kv(features, positions, *w.args(), carried)
        loss = k.square().sum() + v.square().sum()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            found.append(torch.autograd.grad(loss, wanted))
    for a, e in zip(found[1], found[0], strict=True):
        assert_equal(a, e)


def _arguments(**change):
    shape = Shape(8, 6, 2, 3, 4, 4)
    torch.manual_seed(0)
    w = weights(shape, torch.float32, positions=10)
    names = ("fc_weight", "norm_weight", "kv_weight", "k_norm_weight", "cos_sin", "carry_embedding")
    args = {
        "features": torch.randn(3, 8),
        "positions": int32(0, 1, 2),
        **dict(zip(names, w.args(), strict=True)),
    }
    return args | {"carried": torch.tensor([True, False, True])} | change


ERRORS = {
    "features-int": (
        {"features": torch.zeros(3, 8, dtype=torch.int32)},
        "features must be float32, .* got int32",
    ),
    "features-half": ({"features": torch.zeros(3, 8).half()}, "features must be .* got float16"),
    "features-rank": ({"features": torch.zeros(8)}, r"features must have shape \[T, F\], got \[8\]"),
    "fc-dtype": (
        {"fc_weight": torch.zeros(6, 8).bfloat16()},
        "fc_weight must have the dtype of features, float32, got",
    ),
    "fc-shape": (
        {"fc_weight": torch.zeros(6, 9)},
        r"fc_weight must have shape \[H, F\] = \[any, 8\], got \[6, 9\]",
    ),
    "fc-empty": ({"fc_weight": torch.zeros(0, 8)}, "fc_weight must have at least one row"),
    "norm-shape": ({"norm_weight": torch.zeros(5)}, r"norm_weight must have shape \[H\] = \[6\], got \[5\]"),
    "norm-strided": ({"norm_weight": torch.zeros(12)[::2]}, "norm_weight must be contiguous, got strides"),
    "kv-columns": (
        {"kv_weight": torch.zeros(48, 5)},
        r"kv_weight must have shape .* \[any, 6\], got \[48, 5\]",
    ),
    "kv-rows": (
        {"kv_weight": torch.zeros(47, 6)},
        r"kv_weight must have L\*2\*nkv\*d rows with L = 2 and d = 4",
    ),
    "k-norm-rank": ({"k_norm_weight": torch.zeros(4)}, r"k_norm_weight must have shape \[L, d\], got \[4\]"),
    "k-norm-empty": (
        {"k_norm_weight": torch.zeros(0, 4)},
        r"k_norm_weight must have shape \[L, d\] with L, d > 0",
    ),
    "table-dtype": (
        {"cos_sin": torch.zeros(10, 4).double()},
        "cos_sin must be float32, got float64; convert",
    ),
    "table-odd": (
        {"cos_sin": torch.zeros(10, 3)},
        "cos_sin must have an even number of columns, at most d = 4",
    ),
    "table-wide": (
        {"cos_sin": rope_table(10, 6)},
        "cos_sin must have an even number of columns, at most d = 4",
    ),
    "positions-dtype": ({"positions": torch.tensor([0, 1, 2])}, "positions must be int32, got int64"),
    "positions-shape": ({"positions": int32(0, 1)}, r"positions must have shape \[T\] = \[3\], got \[2\]"),
    "position-high": (
        {"positions": int32(0, 10, 2)},
        r"positions\[1\] = 10 is out of range: cos_sin has 10 rows",
    ),
    "position-low": ({"positions": int32(0, 1, -2)}, r"positions\[2\] = -2 is out of range"),
    "carried-dtype": ({"carried": int32(0, 1, 1)}, "carried must be bool, got int32"),
    "carried-shape": ({"carried": torch.ones(4, dtype=torch.bool)}, r"carried must have shape \[T\] = \[3\]"),
    "no-embedding": ({"carry_embedding": None}, "carried marks rows but carry_embedding is None"),
    "embedding-shape": (
        {"carry_embedding": torch.zeros(8)},
        r"carry_embedding must have shape \[H\] = \[6\], got",
    ),
    "embedding-dtype": (
        {"carry_embedding": torch.zeros(6).double()},
        "carry_embedding must have the dtype of features",
    ),
    "eps": ({"eps": -1.0}, "eps must be >= 0, got -1"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case):
    change, message = ERRORS[case]
    with pytest.raises(RuntimeError, match="project_kv: " + message):
        ops.project_kv(**_arguments(**change))


def test_unknown_embedding_place():
    with pytest.raises(ValueError, match="carry_embed_at='after' is not one of"):
        ops.project_kv(**_arguments(carry_embed_at="after"))


def test_the_check_of_positions_says_what_the_op_says():
    """For a GPU, where the op itself takes such rows for padding."""
    table = _arguments()["cos_sin"]
    ops.check_project_kv(int32(0, -1, 9), table)
    ops.check_project_kv(int32(), table)
    for wrong in (10, -2):
        with pytest.raises(
            RuntimeError, match=rf"project_kv: positions\[2\] = {wrong} is out of range: cos_sin"
        ):
            ops.check_project_kv(int32(0, -1, wrong), table)
    with pytest.raises(RuntimeError, match="positions must be int32, got int64"):
        ops.check_project_kv(torch.tensor([0]), table)
    torch.library.opcheck(torch.ops.carryover_ext.check_project_kv.default, (int32(0, 3), 10))
