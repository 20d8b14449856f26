"""segment_attention: against the float64 reference, at every level, and what it must never touch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attention_cases import Call, Case, build, mixed
from cases import DTYPE_IDS, DTYPES, int32
from compare import assert_close, assert_equal
from torch import Tensor

from carryover_ext import ops, reference


def check(case: Case, dtype: torch.dtype) -> None:
    call = build(case)
    args = call.args(dtype)
    before = [None if x is None else x.clone() for x in args]
    out = ops.segment_attention(*args, **call.options)
    for x, y in zip(args, before, strict=True):
        if x is not None and y is not None:
            assert_equal(x, y, "an input")
    plain = reference.segment_attention(*args, **call.options)
    assert_close(out, plain, reference.segment_attention(*call.exact(dtype), **call.options))


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("case", mixed(100), ids=str)
def test_mixed(case: Case, dtype: torch.dtype) -> None:
    check(case, dtype)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=DTYPE_IDS[:2])
@pytest.mark.parametrize("d", (1, 7, 32, 36, 64, 80, 96, 128, 256))
def test_head_sizes_at_every_level(d: int, dtype: torch.dtype, level: str) -> None:
    check(Case(rows=8, group=3, d=d, context=150, causal=True, soft_cap=8.0, sinks=True), dtype)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=DTYPE_IDS[:2])
@pytest.mark.parametrize("group,rows", [(1, 1), (1, 16), (3, 8), (3, 16), (4, 16), (5, 16), (7, 3), (8, 16)])
def test_tiles_at_every_level(group: int, rows: int, dtype: torch.dtype, level: str) -> None:
    check(Case(batch=1, rows=rows, kv_heads=1, group=group, d=64, context=70, window=50), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("page", (None, 16), ids=("contiguous", "paged"))
@pytest.mark.parametrize("context", (0, 1, 8, 127, 128, 129, 300))
@pytest.mark.parametrize("segment", (None, 0, 1, 15))
def test_lengths(context: int, segment: int | None, page: int | None, dtype: torch.dtype) -> None:
    check(Case(batch=3, rows=8, group=2, context=context, segment=segment, page=page), dtype)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=DTYPE_IDS[:2])
@pytest.mark.parametrize("window", (0, 5, 600))
@pytest.mark.parametrize("context", (511, 767, 768, 1300))
def test_context_in_several_pieces(context: int, window: int, dtype: torch.dtype, level: str) -> None:
    check(Case(batch=2, rows=5, kv_heads=1, group=3, context=context, window=window, sinks=True), dtype)


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


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("batch,rows", [(0, 4), (3, 0), (0, 0)])
def test_empty(batch: int, rows: int, dtype: torch.dtype) -> None:
    call = build(replace(Case(), batch=batch, rows=rows, page=None))
    out = ops.segment_attention(*call.args(dtype), **call.options)
    assert out.shape == (batch, rows, 4, 32) and out.dtype == dtype


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("page", (None, 16))
def test_inactive_requests_and_rows_are_zero(dtype: torch.dtype, page: int | None, level: str) -> None:
    call = build(Case(batch=3, rows=4, page=page, ragged_block=True, sinks=True))
    args = call.args(dtype)
    args[3] = torch.where(torch.arange(3) == 1, -1, args[3]).int()
    out = ops.segment_attention(*args, **call.options)
    assert (out[1] == 0).all() and not out.isnan().any()
    for i, n in enumerate(call.options["block_lens"].tolist()):
        assert (out[i, n:] == 0).all()
    exact = [x.double() if x is not None and x.is_floating_point() else x for x in args]
    plain = reference.segment_attention(*args, **call.options)
    assert_close(out, plain, reference.segment_attention(*exact, **call.options))


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("context", (0, 33, 700))
@pytest.mark.parametrize("causal", (False, True))
def test_an_empty_segment_is_no_segment(dtype: torch.dtype, context: int, causal: bool, level: str) -> None:
    call = build(Case(batch=3, rows=8, context=context, segment=15, causal=causal))
    args = call.args(dtype)
    args[6] = torch.zeros_like(args[6])
    without = [*args[:4], None, None, None, *args[7:]]
    assert_equal(
        ops.segment_attention(*args, **call.options),
        ops.segment_attention(*without, **call.options),
        "empty segment",
    )


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=DTYPE_IDS[:2])
@pytest.mark.parametrize("context", (60, 800))
def test_a_request_does_not_depend_on_its_batch(dtype: torch.dtype, context: int) -> None:
    call = build(Case(batch=4, rows=8, group=3, d=64, context=context))
    args = call.args(dtype)
    whole = ops.segment_attention(*args, **call.options)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        for i in range(4):
            one = [x if n in (1, 2) else x[i : i + 1] for n, x in enumerate(args)]
            assert_equal(ops.segment_attention(*one, **call.options), whole[i : i + 1], f"request {i} alone")
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=DTYPE_IDS[:2])
def test_paged_equals_contiguous(dtype: torch.dtype, level: str) -> None:
    call = build(Case(batch=3, rows=8, context=300, page=None))
    args = call.args(dtype)
    plain = ops.segment_attention(*args, **call.options)
    rows = args[1].shape[1]  # a page for each row, in reverse order
    table = torch.arange(3 * rows).view(3, rows)
    paged = [c.flatten(0, 1).flip(0)[:, None].contiguous() for c in args[1:3]]
    args[1:3] = paged
    args[9] = (3 * rows - 1 - table).int()
    assert_equal(ops.segment_attention(*args, **call.options), plain, "paged")


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_strided_arguments(dtype: torch.dtype, level: str) -> None:
    """Views of a fused projection, and one layer of a stacked cache."""
    call = build(Case(batch=2, rows=6, kv_heads=2, group=3, d=32))
    args = call.args(dtype)
    expected = ops.segment_attention(*args, **call.options)
    q, k, v = args[0], args[7], args[8]
    fused = torch.cat([q, k, v], 2)
    args[0], args[7], args[8] = fused[:, :, :6], fused[:, :, 6:8], fused[:, :, 8:]
    args[1] = torch.stack([args[1] * float("nan"), args[1]], 2)[:, :, 1]
    args[4] = args[4].transpose(0, 1).contiguous().transpose(0, 1)
    assert not args[0].is_contiguous() and not args[1].is_contiguous()
    assert_equal(ops.segment_attention(*args, **call.options), expected, "strided")


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=DTYPE_IDS[:2])
@pytest.mark.parametrize("scale", (1e-3, 0.2, 3.0))
def test_scale(dtype: torch.dtype, scale: float) -> None:
    call = build(Case(batch=2, rows=4))
    options = {**call.options, "scale": scale}
    args = call.args(dtype)
    out = ops.segment_attention(*args, **options)
    plain = reference.segment_attention(*args, **options)
    assert_close(out, plain, reference.segment_attention(*call.exact(dtype), **options))


def test_small_integers_are_exact(level: str) -> None:
    """Equal keys weigh the same: with a power of two of them the output is an exact mean."""
    v = torch.randint(-8, 9, (1, 16, 2, 32)).float()
    q, k = torch.ones(1, 4, 4, 32), torch.ones(1, 16, 2, 32)
    out = ops.segment_attention(q, k, v, int32(12), None, None, None, k[:, :4], v[:, 12:16])
    assert_equal(out, v.mean(1)[:, None].repeat_interleave(2, 2).expand(1, 4, 4, 32).contiguous())


# ---- gradients -----------------------------------------------------------------------------------


GRADIENT_CASES = (
    Case(batch=2, rows=2, kv_heads=1, group=2, d=3, context=5, segment=2, page=None),
    Case(batch=2, rows=3, kv_heads=2, group=1, d=2, context=5, segment=2, page=2, causal=True, window=4),
    Case(
        batch=2, rows=2, kv_heads=1, group=3, d=2, context=4, segment=None, page=2, soft_cap=1.5, sinks=True
    ),
    Case(batch=2, rows=3, kv_heads=1, group=1, d=2, context=0, segment=3, page=None, ragged_block=True),
    Case(
        batch=1, rows=2, kv_heads=2, group=2, d=2, context=3, segment=0, page=1, sinks=True, ragged_block=True
    ),
)
FLOATS = (0, 1, 2, 4, 5, 7, 8)


def leaves(call: Call) -> list[Tensor | None]:
    return [
        x.nan_to_num(0.5).requires_grad_() if n in FLOATS and x is not None else x
        for n, x in enumerate(call.positional)
    ]


@pytest.mark.parametrize("case", GRADIENT_CASES, ids=str)
def test_gradcheck(case: Case) -> None:
    call = build(case)
    args = leaves(call)
    given = [n for n in FLOATS if args[n] is not None]

    def f(*values: Tensor) -> Tensor:
        full = list(args)
        for n, x in zip(given, values, strict=True):
            full[n] = x
        return ops.segment_attention(*full, **call.options)

    assert torch.autograd.gradcheck(f, tuple(args[n] for n in given))


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize(
    "case",
    [
        Case(batch=3, rows=4, group=3, context=40, causal=True, sinks=True),
        Case(
            batch=4,
            rows=8,
            group=2,
            context=30,
            page=None,
            window=9,
            soft_cap=3.0,
            sinks=True,
            ragged_block=True,
        ),
        Case(batch=2, rows=3, d=64, context=150, segment=None, page=5),
    ],
    ids=str,
)
def test_gradients_follow_the_reference(case: Case, dtype: torch.dtype) -> None:
    call = build(case)
    sinks = call.options["sinks"]
    weight = torch.randn(case.batch, case.rows, case.kv_heads * case.group, case.d)

    def gradients(function, dtype: torch.dtype, exact: bool) -> list[Tensor]:
        args = call.exact(dtype) if exact else call.args(dtype)
        args = [
            x.clone().requires_grad_() if n in FLOATS and x is not None else x for n, x in enumerate(args)
        ]
        s = sinks.clone().requires_grad_() if sinks is not None else None
        out = function(*args, **{**call.options, "sinks": s})
        (out.float() * weight).sum().backward()
        wanted = [args[n] for n in FLOATS if args[n] is not None] + ([s] if s is not None else [])
        return [x.grad for x in wanted]

    found = gradients(ops.segment_attention, dtype, False)
    plain = gradients(reference.segment_attention, dtype, False)
    exact = gradients(reference.segment_attention, dtype, True)
    for i, (a, p, e) in enumerate(zip(found, plain, exact, strict=True)):
        assert not a.isnan().any(), f"gradient {i} is NaN"
        error, allowed = (a.double() - e).abs().max(), 2 * (p.double() - e).abs().max()
        unit = 1e-6 if a.dtype != torch.bfloat16 else 2**-8
        assert error <= allowed + unit * e.abs().max(), (
            f"gradient {i}: error {error:.3e}, allowed {allowed:.3e}"
        )


def test_shared_pages_sum_their_gradients() -> None:
    """Anchors of one sequence are requests over the same pages, each with its own length."""
    table = int32(2, 0).expand(5, 2).contiguous()
    lens = int32(3, 7, -1, 8, 0)
    cache = [torch.randn(3, 4, 2, 8, dtype=torch.float64).requires_grad_() for _ in "kv"]
    own = [torch.randn(5, n, h, 8, dtype=torch.float64) for n, h in ((3, 4), (2, 2), (2, 2), (3, 2), (3, 2))]
    q, k_segment, v_segment, k_block, v_block = (x.requires_grad_() for x in own)
    segment_lens = int32(2, 0, 1, 2, 1)
    weight = torch.randn(5, 3, 4, 8, dtype=torch.float64)
    wanted = (q, *cache, k_segment, v_segment, k_block, v_block)
    found = []
    for f in (ops.segment_attention, reference.segment_attention):
        out = f(q, *cache, lens, k_segment, v_segment, segment_lens, k_block, v_block, table)
        found.append(torch.autograd.grad((out * weight).sum(), wanted))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    assert (found[0][1][1] == 0).all()  # the page that nobody uses


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_autocast_around_backward_changes_no_bit(dtype: torch.dtype) -> None:
    call = build(Case(batch=3, rows=4, group=3, context=40, causal=True, sinks=True))
    args = [
        x.clone().requires_grad_() if n in FLOATS and x is not None else x
        for n, x in enumerate(call.args(dtype))
    ]
    wanted = [args[n] for n in FLOATS if n < len(args) and args[n] is not None]
    found = []
    for autocast in (False, True):
        out = ops.segment_attention(*args, **call.options).float().square().sum()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            found.append(torch.autograd.grad(out, wanted))
    for a, e in zip(found[1], found[0], strict=True):
        assert a.dtype == e.dtype and torch.equal(a, e)


def test_blocks_without_rows_have_gradients_of_zero() -> None:
    cache = [torch.randn(3, 4, 2, 8).requires_grad_() for _ in "kv"]
    own = [torch.randn(2, n, h, 8).requires_grad_() for n, h in ((0, 4), (2, 2), (2, 2), (0, 2), (0, 2))]
    q, k_segment, v_segment, k_block, v_block = own
    table = int32(2, 0).expand(2, 2).contiguous()
    out = ops.segment_attention(
        q, *cache, int32(3, 7), k_segment, v_segment, int32(2, 0), k_block, v_block, table
    )
    for gradient, x in zip(torch.autograd.grad(out.sum(), [*own, *cache]), [*own, *cache], strict=True):
        assert gradient.shape == x.shape and not gradient.any()


# ---- contracts -----------------------------------------------------------------------------------


def opcheck_args(case: Case, dtype: torch.dtype, grad: bool) -> tuple[tuple, dict]:
    call = build(case)
    args = [
        x.nan_to_num(0.5).to(dtype) if n in FLOATS and x is not None else x
        for n, x in enumerate(call.positional)
    ]
    if grad:
        args = [x.requires_grad_() if n in FLOATS and x is not None else x for n, x in enumerate(args)]
    o = call.options
    keywords = {
        "scale": case.d**-0.5,
        "causal": o["causal"],
        "window": o["window"],
        "soft_cap": o["soft_cap"],
    }
    return (*args, o["sinks"], o["block_lens"]), keywords


@pytest.mark.parametrize("grad", (False, True), ids=("inference", "training"))
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=DTYPE_IDS[:2])
@pytest.mark.parametrize(
    "case", (Case(), Case(segment=None, page=None, sinks=True, ragged_block=True)), ids=str
)
def test_opcheck(case: Case, dtype: torch.dtype, grad: bool) -> None:
    args, keywords = opcheck_args(case, dtype, grad)
    torch.library.opcheck(torch.ops.carryover_ext.segment_attention.default, args, keywords)


def test_opcheck_backward() -> None:
    args, keywords = opcheck_args(Case(sinks=True), torch.float32, False)
    grad = torch.randn_like(args[0])
    torch.library.opcheck(
        torch.ops.carryover_ext.segment_attention_backward.default,
        (grad, *args),
        {**keywords, "cache_grad": True},
    )


def put(n: int, make):
    """Replaces argument n by what `make` makes of the arguments."""
    return lambda a, o: a.__setitem__(n, make(a))


def option(name: str, value):
    return lambda a, o: o.__setitem__(name, value)


BAD = {
    "q-dtype": (put(0, lambda a: a[0].half()), r"q must be float32, bfloat16 or float64, got float16"),
    "q-rank": (put(0, lambda a: a[0][0]), r"q must have shape \[B, b, nh, d\]"),
    "q-stride": (put(0, lambda a: a[0].transpose(2, 3).contiguous().transpose(2, 3)), r"q must be contig"),
    "cache-dtype": (put(1, lambda a: a[1].double()), r"k_cache must have the dtype of q"),
    "cache-heads": (put(1, lambda a: a[1][:, :, :1].repeat(1, 1, 3, 1)), r"no multiple of the 3 KV heads"),
    "cache-v": (put(2, lambda a: a[2][:-1]), r"v_cache must have the shape of k_cache"),
    "block-shape": (put(7, lambda a: a[7][:, :2]), r"k_block must have shape \[B, b, nkv, d\]"),
    "lens-dtype": (put(3, lambda a: a[3].long()), r"context_lens must be int32, got int64"),
    "lens-high": (lambda a, o: a[3].fill_(999), r"context_lens\[0\] = 999 is out of range"),
    "lens-low": (lambda a, o: a[3].fill_(-2), r"context_lens\[0\] = -2 is out of range"),
    "segment-high": (lambda a, o: a[6].fill_(8), r"segment_lens\[0\] = 8 is out of range; it must be 0\.\.7"),
    "segment-half": (put(5, lambda a: None), r"k_segment, v_segment and segment_lens belong together"),
    "table-dtype": (put(9, lambda a: a[9].long()), r"block_table must be int32"),
    "table-entry": (lambda a, o: a[9].fill_(99), r"block_table\[0, 0\] = 99 is out of range"),
    "table-shape": (put(9, lambda a: a[9][:1]), r"block_table must have shape \[B, max_pages\]"),
    "table-missing": (
        lambda a, o: a.__setitem__(slice(None), [*a[:1], a[1][:1], a[2][:1], *a[3:9], None]),
        r"room for 1 requests",
    ),
    "scale": (option("scale", 0.0), r"scale must be a finite number above 0, got 0"),
    "window": (option("window", -1), r"window must be 0 .* got -1"),
    "soft-cap": (option("soft_cap", -2.0), r"soft_cap must be 0 .* got -2"),
    "sinks-dtype": (option("sinks", torch.zeros(4, dtype=torch.float64)), r"sinks must be float32"),
    "sinks-shape": (option("sinks", torch.zeros(3)), r"sinks must have shape \[nh\]"),
    "block-lens": (option("block_lens", int32(5, 0)), r"block_lens\[0\] = 5 is out of range"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_named(name: str) -> None:
    call = build(Case())
    args, options = call.args(torch.float32), dict(call.options)
    spoil, message = BAD[name]
    spoil(args, options)
    with pytest.raises(RuntimeError, match=message):
        ops.segment_attention(*args, **options)


VALUES = ("lens-high", "lens-low", "segment-high", "table-entry", "block-lens")


@pytest.mark.parametrize("name", VALUES)
def test_bad_values_are_found_without_the_op(name: str) -> None:
    call = build(Case())
    args, options = call.args(torch.float32), dict(call.options)
    which = (1, 3, 4, 6, 7, 9)
    ops.check_segment_attention(*(args[n] for n in which), options["block_lens"])
    BAD[name][0](args, options)
    with pytest.raises(RuntimeError) as of_op:
        ops.segment_attention(*args, **options)
    with pytest.raises(RuntimeError) as found:
        ops.check_segment_attention(*(args[n] for n in which), options["block_lens"])
    assert str(found.value) == str(of_op.value).splitlines()[0]
