"""segment_attention on a GPU: against the float64 reference, under graph capture, and with bad arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_cases import Case, build, mixed
from cases import int32
from compare import assert_close, assert_equal
from torch import Tensor

from carryover_ext import ops, reference

HAS_KERNEL = torch._C._dispatch_has_kernel_for_dispatch_key("carryover_ext::segment_attention", "CUDA")
pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.skipif(not HAS_KERNEL, reason="built without CUDA kernels (CARRYOVER_CUDA=1)"),
]
DTYPES = (torch.bfloat16, torch.float16)
DTYPE_IDS = ("bf16", "f16")


def on_gpu(args: list[Tensor | None]) -> list[Tensor | None]:
    return [None if x is None else x.cuda() for x in args]


def options_on_gpu(options: dict[str, Any]) -> dict[str, Any]:
    return {name: x.cuda() if isinstance(x, Tensor) else x for name, x in options.items()}


def check(case: Case, dtype: torch.dtype) -> None:
    made = build(case)
    args = made.args(dtype)
    out = ops.segment_attention(*on_gpu(args), **options_on_gpu(made.options))
    assert out.is_cuda
    plain = reference.segment_attention(*args, **made.options)
    assert_close(out.cpu(), plain, reference.segment_attention(*made.exact(dtype), **made.options))


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("case", mixed(120), ids=str)
def test_mixed(case: Case, dtype: torch.dtype) -> None:
    check(case, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("d", (64, 80, 128, 256))
@pytest.mark.parametrize("context", (511, 2048, 9000))
@pytest.mark.parametrize("window", (0, 700))
def test_long_contexts(context: int, window: int, d: int, dtype: torch.dtype) -> None:
    case = Case(rows=16, group=4, d=d, context=context, window=window, sinks=True, sink_level=5)
    check(case, dtype)


@pytest.mark.parametrize("batch,rows", [(0, 4), (3, 0), (0, 0)])
def test_empty(batch: int, rows: int) -> None:
    made = build(Case(batch=batch, rows=rows, page=None))
    out = ops.segment_attention(*on_gpu(made.args(torch.bfloat16)), **options_on_gpu(made.options))
    assert out.shape == (batch, rows, 4, 32)


def test_a_captured_graph_follows_the_lengths() -> None:
    made = build(Case(batch=4, rows=16, group=4, d=128, context=600, segment=15, ragged_block=True))
    args = [None if x is None else x.nan_to_num(0.5) for x in made.args(torch.bfloat16)]
    args[9] = torch.arange(4 * args[9].shape[1]).view(4, -1).int() % args[1].shape[0]
    gpu, options = on_gpu(args), options_on_gpu(made.options)
    ops.segment_attention(*gpu, **options)  # outside the graph once: the library is loaded
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ops.segment_attention(*gpu, **options)
    for _ in range(100):
        lens = (torch.randint(-1, 601, (4,)), torch.randint(0, 16, (4,)), torch.randint(0, 17, (4,)))
        for target, value in zip((gpu[3], gpu[6], options["block_lens"]), lens, strict=True):
            target.copy_(value.int())
        graph.replay()
        assert_equal(out, ops.segment_attention(*gpu, **options), "replay")
        exact = [None if x is None else x.double() if x.is_floating_point() else x for x in gpu]
        plain = reference.segment_attention(*gpu, **options)
        assert_close(out, plain, reference.segment_attention(*exact, **options))


def test_reruns_and_streams_give_the_same_bits() -> None:
    made = build(Case(batch=3, rows=16, group=4, d=128, context=3000, sinks=True))
    args, options = on_gpu(made.args(torch.bfloat16)), options_on_gpu(made.options)
    first = ops.segment_attention(*args, **options)
    streams = [torch.cuda.Stream() for _ in range(2)]
    for i in range(1000):
        stream = streams[i % 2]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            again = ops.segment_attention(*args, **options)
            different = (again != first).any()
        torch.cuda.current_stream().wait_stream(stream)
        assert not different, f"run {i}"


BAD = {
    "float32": ({"dtype": torch.float32}, r"q must be bfloat16 or float16 on the GPU, got float32"),
    "head-size": ({"d": 36}, r"q has head size 36; on the GPU it must be a multiple of 8"),
    "large-head": ({"d": 264}, r"q has head size 264; it must be 1..256"),
    "cache-on-the-cpu": ({"cpu": 1}, r"k_cache must be on the GPU .* got a tensor on the CPU"),
    "lens-on-the-cpu": ({"cpu": 3}, r"context_lens must be on the GPU .* got a tensor on the CPU"),
    "q-on-the-cpu": ({"cpu": 0}, r"q must be on the GPU .* got a tensor on the CPU"),
    "misplaced": ({"shift": 7}, r"k_block must start at a multiple of 16 bytes, got an offset of 2"),
    "stride": ({"stride": 7}, r"k_block must have strides that are multiples of 8 elements"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_named(name: str) -> None:
    how, message = BAD[name]
    made = build(Case(d=how.get("d", 32)))
    args = on_gpu(made.args(how.get("dtype", torch.bfloat16)))
    if "cpu" in how:
        args[how["cpu"]] = args[how["cpu"]].cpu()
    if "shift" in how:
        x = args[how["shift"]]
        moved = torch.cat([x.new_zeros(1), x.flatten()])[1:]
        args[how["shift"]] = moved.view(x.shape)
    if "stride" in how:
        x = args[how["stride"]]
        args[how["stride"]] = torch.nn.functional.pad(x, (0, 1))[..., :-1]
    with pytest.raises(RuntimeError, match=message):
        ops.segment_attention(*args, **options_on_gpu(made.options))


def test_bad_values_are_found_and_do_no_harm() -> None:
    made = build(Case(batch=3, rows=4, context=60, page=16))
    args = on_gpu(made.args(torch.bfloat16))
    good = ops.segment_attention(*args, **options_on_gpu(made.options))
    args[9] = args[9].clone()
    args[9][0, 1] = 1 << 30
    which = (1, 3, 4, 6, 7, 9)
    with pytest.raises(RuntimeError, match=r"block_table\[0, 1\] = 1073741824 is out of range"):
        ops.check_segment_attention(*(args[n] for n in which))
    out = ops.segment_attention(*args, **options_on_gpu(made.options))
    assert_equal(out[1:], good[1:], "other requests")
    args[3] = torch.cat([int32(1 << 30).cuda(), args[3][1:]])
    assert torch.isfinite(ops.segment_attention(*args, **options_on_gpu(made.options))[1:]).all()
