"""What holds for every op: schema, fake, twin, docstring, opcheck, compile(fullgraph=True), export."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from cases import RAGGED, SHAPES, CommitCase, int32
from compare import assert_equal
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.overrides import TorchFunctionMode

from carryover_ext import ops, reference

NAMES = ("gather_rejected", "project_kv", "commit_and_carry", "segment_attention", "accept", "markov_sample")


@dataclass
class Sample:
    """A call of the public op; `changed` are the arguments that it writes."""

    name: str
    args: tuple[object, ...]
    options: dict[str, object]
    changed: tuple[Tensor, ...] = ()

    def __call__(self) -> object:
        return getattr(ops, self.name)(*self.args, **self.options)


def _gather(dtype: torch.dtype, grad: bool) -> Sample:
    ragged = RAGGED[6]
    hidden = torch.randn(ragged.total, 12).to(dtype).requires_grad_(grad)
    return Sample("gather_rejected", (hidden, ragged.row_start(), ragged.num_accepted(), 15), {})


def _project(dtype: torch.dtype, grad: bool) -> Sample:
    case = CommitCase(SHAPES[0], RAGGED[6], dtype)
    carried = torch.rand(case.ragged.total) < 0.5
    case.features.requires_grad_(grad)
    for t in (
        case.weights.fc,
        case.weights.norm,
        case.weights.kv,
        case.weights.k_norm,
        case.weights.embedding,
    ):
        t.requires_grad_(grad)
    args = (case.features, case.positions, *case.weights.args(), carried)
    return Sample("project_kv", args, {"carry_embed_at": "post_norm"})


def _commit(dtype: torch.dtype, grad: bool) -> Sample:
    case = CommitCase(SHAPES[0], RAGGED[6], dtype)
    outputs = [torch.zeros_like(g.tensor) for g in case.outputs()]
    start, accepted = case.ragged.row_start(), case.ragged.num_accepted()
    args = (case.features, case.positions, start, accepted, case.slots, *outputs, *case.weights.args())
    return Sample("commit_and_carry", args, {}, tuple(outputs))


def _attention(dtype: torch.dtype, grad: bool) -> Sample:
    batch, block, heads, kv_heads, dim, room = 3, 5, 4, 2, 32, 4

    def rows(*shape: int) -> Tensor:
        return torch.randn(*shape).to(dtype).requires_grad_(grad)

    args = (
        rows(batch, block, heads, dim),
        rows(8, 4, kv_heads, dim),
        rows(8, 4, kv_heads, dim),
        int32(7, 0, 8),
        rows(batch, room, kv_heads, dim),
        rows(batch, room, kv_heads, dim),
        int32(2, 4, 0),
        rows(batch, block, kv_heads, dim),
        rows(batch, block, kv_heads, dim),
        torch.tensor([[3, 1], [0, 0], [5, 2]], dtype=torch.int32),
    )
    return Sample("segment_attention", args, {"window": 6, "soft_cap": 20.0, "sinks": torch.randn(heads)})


def _accept(dtype: torch.dtype, grad: bool) -> Sample:
    batch, drafts, vocab = 3, 4, 11
    probs = torch.randn(batch, drafts, vocab).softmax(-1)
    logits = torch.randn(batch, drafts + 1, vocab).to(dtype)
    tokens = torch.randint(0, vocab, (batch, drafts))
    args = (tokens, logits, probs, torch.rand(batch, drafts + 1), 0.7)
    return Sample("accept", args, {})


def _markov(dtype: torch.dtype, grad: bool) -> Sample:
    batch, steps, vocab, rank = 3, 4, 11, 5
    logits, w1, w2 = (torch.randn(s).to(dtype) for s in ((batch, steps, vocab), (20, rank), (vocab, rank)))
    d2t = torch.randperm(20)[:vocab].sort().values
    args = (logits, torch.tensor([7, -1, 19]), w1, w2, d2t, torch.rand(batch, steps), 0.7, True)
    return Sample("markov_sample", args, {})


SAMPLES: dict[str, Callable[[torch.dtype, bool], Sample]] = {
    "gather_rejected": _gather,
    "project_kv": _project,
    "commit_and_carry": _commit,
    "segment_attention": _attention,
    "accept": _accept,
    "markov_sample": _markov,
}
DIFFERENTIABLE = ("gather_rejected", "project_kv", "segment_attention")


class _Recorder(TorchFunctionMode):
    """Keeps the arguments that the public op passes on to the dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[object, tuple, dict]] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if "carryover_ext" in str(func):
            self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", NAMES)
def test_schema_twin_and_documentation(name):
    function, twin = getattr(ops, name), getattr(reference, name)
    assert hasattr(torch.ops.carryover_ext, name)
    assert inspect.signature(function) == inspect.signature(twin), (
        "the reference must have the op's signature"
    )
    for heading in ("Args:", "Raises:", "Source:"):
        assert heading in function.__doc__, f"{name} does not document {heading}"
    schema = getattr(torch.ops.carryover_ext, name).default._schema
    written = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    expected = (
        ["k_cache", "v_cache", "k_segment", "v_segment", "segment_lens"] if name == "commit_and_carry" else []
    )
    assert written == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize(
    "name,grad",
    [*((name, False) for name in NAMES), *((name, True) for name in DIFFERENTIABLE)],
    ids=lambda x: x if isinstance(x, str) else ("training" if x else "inference"),
)
def test_opcheck(name, grad, dtype):
    sample = SAMPLES[name](dtype, grad)
    with _Recorder() as recorder, torch.set_grad_enabled(grad):
        sample()
    func, args, kwargs = recorder.calls[0]
    overload = func if isinstance(func, torch._ops.OpOverload) else func.default
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-4
    results = torch.library.opcheck(overload, args, kwargs, rtol=tolerance, atol=tolerance)
    assert set(results.values()) == {"SUCCESS"}, results


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("name", NAMES)
def test_compile_fullgraph(name, dtype):
    """The compiled call has the bits of the eager one, also in what it writes."""
    sample = SAMPLES[name](dtype, False)
    before = [t.clone() for t in sample.changed]
    expected = sample()
    changed = [t.clone() for t in sample.changed]
    for t, b in zip(sample.changed, before, strict=True):
        t.copy_(b)
    torch.compiler.reset()
    compiled = torch.compile(getattr(ops, name), fullgraph=True, backend="aot_eager")
    actual = compiled(*sample.args, **sample.options)
    assert_same(actual, expected)
    for t, e in zip(sample.changed, changed, strict=True):
        assert_equal(t, e)


def test_compile_dynamic_rows():
    """Ragged batches of any size share a graph."""
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(ops.commit_and_carry, fullgraph=True, backend=counter, dynamic=True)
    for ragged in (RAGGED[6], RAGGED[8], RAGGED[9], RAGGED[3], RAGGED[7]):
        case = CommitCase(SHAPES[0], ragged, torch.float32)
        for a, e in zip(case.run(compiled), case.run(ops.commit_and_carry), strict=True):
            assert_equal(a, e)
    assert counter.frame_count <= 2  # the first guesses that equal sizes stay equal


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_compiled_gradient(name):
    sample = SAMPLES[name](torch.float32, True)
    inputs = [t for t in sample.args if isinstance(t, Tensor) and t.requires_grad]

    def gradients(function):
        out = function(*sample.args, **sample.options)
        out = [out] if isinstance(out, Tensor) else [t for t in out if t.is_floating_point()]
        return torch.autograd.grad(sum((t * t).sum() for t in out), inputs)

    torch.compiler.reset()
    compiled = torch.compile(getattr(ops, name), fullgraph=True, backend="aot_eager")
    for a, e in zip(gradients(compiled), gradients(getattr(ops, name)), strict=True):
        torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_export(name):
    sample = SAMPLES[name](torch.float32, False)
    tensors = [a for a in sample.args if isinstance(a, Tensor)]
    places = [i for i, a in enumerate(sample.args) if isinstance(a, Tensor)]
    options = dict(sample.options)

    class Module(torch.nn.Module):
        def forward(self, *inputs: Tensor):
            args = list(sample.args)
            for i, t in zip(places, inputs, strict=True):
                args[i] = t
            return getattr(ops, name)(*args, **options)

    fresh = [t.clone() for t in tensors]
    program = torch.export.export(Module(), tuple(fresh))
    graphs = [m.graph for m in program.graph_module.modules() if isinstance(m, torch.fx.GraphModule)]
    targets = [str(node.target) for graph in graphs for node in graph.nodes if node.op == "call_function"]
    assert any(f"carryover_ext.{name}" in t for t in targets), targets
    expected = sample()
    assert_same(program.module()(*fresh), expected)
    for t, e in zip(fresh, tensors, strict=True):
        assert_equal(t, e)


def assert_same(actual: object, expected: object) -> None:
    if isinstance(expected, Tensor):
        assert_equal(actual, expected)
    elif expected is not None:
        for a, e in zip(actual, expected, strict=True):
            assert_same(a, e)


def test_missing_extension_is_explained(tmp_path, monkeypatch):
    from carryover_ext import _library

    monkeypatch.setattr(_library, "_PATH", tmp_path / "_C.abi3.so")
    with pytest.raises(ImportError, match=r"_C\.abi3\.so is missing from .*pip install"):
        _library._load()


def test_capabilities():
    available = ops.available_capabilities()
    assert available[0] == "default" and ops.cpu_capability() in available
    with pytest.raises(ValueError, match="name='avx1024' is not one of default, avx2"):
        ops.set_cpu_capability("avx1024")
