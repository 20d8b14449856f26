"""project_kv and commit_and_carry on a GPU: against the float64 reference, under graph capture, on two
streams, again and again, and with bad arguments."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cases import RAGGED, SHAPES, CommitCase, Ragged, Shape, int32, weights
from compare import assert_close, assert_equal
from projection_cases import SPLIT, TILE_SHAPES
from torch import Tensor

from carryover_ext import ops, reference

HAS_KERNEL = torch._C._dispatch_has_kernel_for_dispatch_key("carryover_ext::commit_and_carry", "CUDA")
pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.skipif(not HAS_KERNEL, reason="built without CUDA kernels (CARRYOVER_CUDA=1)"),
]
DTYPES = (torch.bfloat16, torch.float16)
DTYPE_IDS = ("bf16", "f16")
EMBED_AT = ("pre_norm", "post_norm")
OUTPUTS = ("k_cache", "v_cache", "k_segment", "v_segment")
QWEN = Shape(12800, 2560, 5, 8, 128, 128)


@pytest.fixture(params=["tiles", "library"])
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    before = ops.project_crossover()
    ops.set_project_crossover(10**6 if request.param == "tiles" else 0)
    yield request.param
    ops.set_project_crossover(before)


def on_gpu(args: Any) -> list[Any]:
    return [x.cuda() if isinstance(x, Tensor) else x for x in args]


def commit(*args: Any, **options: Any) -> None:
    """commit_and_carry on the GPU, for CommitCase.run: outputs are copied there and back."""
    gpu = on_gpu(args)
    ops.commit_and_carry(*gpu, **options)
    for cpu, result in zip(args[5:10], gpu[5:10], strict=True):
        cpu.copy_(result)


def check_commit(case: CommitCase, **options: Any) -> None:
    actual = case.run(commit, **options)
    plain = case.run(reference.commit_and_carry, **options)
    exact = case.run(reference.commit_and_carry, torch.float64, **options)
    assert_equal(actual[4], exact[4], "segment_lens")
    for name, a, p, e in zip(OUTPUTS, actual, plain, exact, strict=False):
        written = ~e.isnan()
        assert torch.equal(written, ~a.isnan()), f"{name}: other elements were written than expected"
        assert_close(a[written], p[written], e[written], name)


def check_project(shape: Shape, rows: int, dtype: torch.dtype, at: str) -> None:
    positions = torch.randint(-1, 64, (rows,), dtype=torch.int32)
    features, carried = torch.randn(rows, shape.features).to(dtype), torch.rand(rows) < 0.5
    w = weights(shape, dtype)
    args = (features, positions, *w.args(), carried)
    actual = ops.project_kv(*on_gpu(args), carry_embed_at=at)
    plain = reference.project_kv(*args, carry_embed_at=at)
    exact = reference.project_kv(
        features.double(), positions, *w.args(torch.float64), carried, carry_embed_at=at
    )
    for name, a, p, e in zip("kv", actual, plain, exact, strict=True):
        assert_close(a.cpu(), p, e, name)


@pytest.mark.parametrize("at", EMBED_AT)
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("rows", [0, 1, 16, 17, 64, 65, 200])
@pytest.mark.parametrize("shape", TILE_SHAPES, ids=str)
def test_shapes(shape, rows, dtype, at, path):
    check_project(shape, rows, dtype, at)


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes_that_no_tile_loads(shape, dtype):
    check_project(shape, 11, dtype, "pre_norm")


@pytest.mark.parametrize("rows", [16, 64])
def test_a_drafter_of_real_size(rows, path):
    check_project(QWEN, rows, torch.bfloat16, "pre_norm")


@pytest.mark.parametrize("carry", [True, False], ids=["on", "off"])
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("ragged", RAGGED, ids=lambda r: r.name)
def test_ragged_batches(ragged, dtype, carry, path):
    case = CommitCase(TILE_SHAPES[0], ragged, dtype)
    case.slots[torch.rand(ragged.total) < 0.1] = -1
    check_commit(case, carry=carry)


def test_off_commits_the_same_bits(path):
    case = CommitCase(TILE_SHAPES[0], RAGGED[6], torch.bfloat16)
    on, off = case.run(commit), case.run(commit, carry=False)
    case.weights.embedding = None
    baseline = case.run(commit, carry=False)
    for a, b, c in zip(on[:2], off[:2], baseline[:2], strict=True):
        assert_equal(a, b)
        assert_equal(a, c)


def _gpu_case(shape: Shape) -> tuple[list[Any], CommitCase]:
    case = CommitCase(shape, Ragged("blocks", (8,) * 5, (0, 2, 7, 4, 1)), torch.bfloat16)
    args = (case.features, case.positions, case.ragged.row_start(), case.ragged.num_accepted(), case.slots)
    return on_gpu((*args, *(g.tensor for g in case.outputs()), *case.weights.args())), case


def test_a_captured_graph_follows_acceptance(path):
    args, _ = _gpu_case(SPLIT)
    again = [x.clone() if isinstance(x, Tensor) else x for x in args]
    ops.commit_and_carry(*args)  # outside the graph once: the libraries are loaded
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.commit_and_carry(*args)
    for _ in range(100):
        accepted = torch.randint(-1, 8, (5,)).int()
        for set_of in (args, again):
            set_of[3].copy_(accepted)
            for out in set_of[5:9]:
                out.fill_(float("nan"))
        graph.replay()
        ops.commit_and_carry(*again)
        for a, e in zip(args[5:10], again[5:10], strict=True):
            assert_equal(a, e, "replay")
        assert args[9].tolist() == [7 - m if m >= 0 else 0 for m in accepted.tolist()]


def test_two_streams_do_not_share_a_workspace(path):
    calls = [_gpu_case(SPLIT)[0] for _ in range(2)]
    alone = []
    for args in calls:
        ops.commit_and_carry(*args)
        alone.append([x.clone() for x in args[5:10]])
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in calls]
    for _ in range(50):
        for stream, args in zip(streams, calls, strict=True):
            with torch.cuda.stream(stream):
                ops.commit_and_carry(*args)
    torch.cuda.synchronize()
    for args, expected in zip(calls, alone, strict=True):
        for a, e in zip(args[5:10], expected, strict=True):
            assert_equal(a, e)


def test_a_thousand_reruns_give_the_same_bits():
    args, _ = _gpu_case(SPLIT)
    ops.commit_and_carry(*args)
    first = [x.clone() for x in args[5:9]]
    differ = torch.zeros((), dtype=torch.bool, device="cuda")
    for _ in range(1000):
        ops.commit_and_carry(*args)
        for a, e in zip(args[5:9], first, strict=True):
            differ |= ((a != e) & ~(a.isnan() & e.isnan())).any()
    assert not differ


def test_rows_out_of_range_go_nowhere_and_are_reported():
    args, case = _gpu_case(TILE_SHAPES[0])
    args[4][0] = case.pages * case.page
    ops.commit_and_carry(*args)
    assert args[5].flatten(1, 2)[:, case.slots[0].cuda()].isnan().all()
    checked = (args[1], args[2], args[3], args[4], args[5], args[7], args[14])
    with pytest.raises(RuntimeError, match=r"slot_mapping\[0\] = 112 is out of range"):
        ops.check_commit_and_carry(*checked)
    args[4][0], args[1][0] = -1, 10**6
    args[1][1] = 10**6
    ops.commit_and_carry(*args)
    with pytest.raises(RuntimeError, match=r"positions\[1\] = 1000000 is out of range"):
        ops.check_commit_and_carry(*checked)
    k, v = ops.project_kv(args[0], args[1], *args[10:16])
    assert all((x[:, :2] == 0).all() and (x[:, 2] != 0).any() for x in (k, v))
    with pytest.raises(RuntimeError, match=r"positions\[0\] = 1000000 is out of range"):
        ops.check_project_kv(args[1], args[14])


ERRORS = {
    "dtype": (0, lambda x: x.float(), "features must be bfloat16 or float16 on the GPU, got float32"),
    "device": (4, lambda x: x.cpu(), "slot_mapping must be on the GPU like the other arguments"),
    "weights": (10, lambda x: x.half(), "fc_weight must have the dtype of features, bfloat16"),
    "starts": (2, lambda x: x[:-1], r"row_start must have shape \[B \+ 1\]"),
    "cache": (5, lambda x: x[:, :, :, :1], r"k_cache must have shape \[L, N, page, nkv, d\]"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case):
    index, change, message = ERRORS[case]
    args, _ = _gpu_case(TILE_SHAPES[0])
    args[index] = change(args[index])
    with pytest.raises(RuntimeError, match="commit_and_carry: " + message):
        ops.commit_and_carry(*args)


def test_autocast_changes_no_bit():
    args, _ = _gpu_case(TILE_SHAPES[0])
    call = (args[0], args[1], *args[10:])
    expected = ops.project_kv(*call)
    with torch.autocast("cuda", torch.float16):
        for a, e in zip(ops.project_kv(*call), expected, strict=True):
            assert_equal(a, e)


def test_gradients_follow_the_formula():
    shape = TILE_SHAPES[0]
    w = weights(shape, torch.bfloat16)
    inputs = on_gpu((torch.randn(9, shape.features).bfloat16(), w.fc, w.norm, w.kv, w.k_norm, w.embedding))
    positions, carried = int32(*range(9)).cuda(), (torch.arange(9) % 2 == 0).cuda()

    def gradients(function):
        f, fc, norm, kv, k_norm, embedding = leaves = [x.detach().requires_grad_() for x in inputs]
        k, v = function(f, positions, fc, norm, kv, k_norm, w.cos_sin.cuda(), embedding, carried)
        return torch.autograd.grad(k.float().square().sum() + v.float().sum(), leaves)

    for a, e in zip(gradients(ops.project_kv), gradients(reference.project_kv), strict=True):
        torch.testing.assert_close(a, e, rtol=5e-2, atol=5e-2 * float(e.abs().max()))
