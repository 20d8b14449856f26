"""Times every operator against its plain form, its compiled plain form and its peers. See
bench/README.md.

python bench/ops.py [--quick] [--device cuda] [--ops segment_attention,accept] [--out ops.json]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import os
import platform
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
sys.path.insert(0, str(Path(__file__).parent))

import peers
import torch
import torch.nn.functional as F
from common import Call, Ceilings, cpu_ratio, interleave, measure_ceilings, median, ratio
from rich.console import Console
from rich.progress import track
from rich.table import Table

from carryover_ext import ops, reference
from carryover_ext.packing import fast_dtype

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
OPS = ("gather_rejected", "project_kv", "commit_and_carry", "segment_attention", "accept", "markov_sample")
MARKOV_RANK = 256


@dataclass(frozen=True)
class Model:
    """Sizes of a drafter: taps n, layers L, heads, KV heads, head size d, vocabulary."""

    hidden: int
    taps: int
    layers: int
    heads: int
    kv_heads: int
    d: int
    vocab: int


MODELS = {576: Model(576, 4, 2, 9, 3, 64, 49152), 4096: Model(4096, 5, 5, 32, 8, 128, 151936)}


@dataclass
class Bench:
    """One row: the op, the same by plain PyTorch (`eager`), what is compiled, the peers, and the work in
    it."""

    op: str
    label: str
    dtype: str
    run: Call
    eager: Call
    bytes: float
    operations: float
    peers: dict[str, Call] = field(default_factory=dict)
    setting: dict = field(default_factory=dict)
    compiled: Call | None = None


def size(*tensors: torch.Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


_compiled: dict[str, object] = {}


def compiled(name: str):
    """The reference under torch.compile; the first call of a shape compiles it."""
    if name not in _compiled:
        _compiled[name] = torch.compile(getattr(reference, name))
    return _compiled[name]


@dataclass(frozen=True)
class Shape:
    model: Model
    batch: int
    rows: int
    dtype: str

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    def tensor(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape) * scale).to(self.torch_dtype)

    def describe(self, **more: object) -> dict:
        return dict(hidden=self.model.hidden, batch=self.batch, rows=self.rows, **more)


def accepted_counts(shape: Shape) -> torch.Tensor:
    """Accepted drafts as they come: from none to all, about a third on average."""
    return (torch.arange(shape.batch) * 5 % shape.rows // 2 + (shape.batch == 1)).int()


def bench_gather(shape: Shape) -> Iterator[Bench]:
    m, b = shape.model, shape.rows
    hidden = shape.tensor(shape.batch * b, m.taps * m.hidden)
    start = (torch.arange(shape.batch + 1) * b).int()
    counts = accepted_counts(shape)
    args = (hidden, start, counts, b - 1)
    rejected = int((b - 1 - counts).sum())
    width = hidden.shape[1] * hidden.element_size()
    yield Bench(
        "gather_rejected", f"F={hidden.shape[1]}", shape.dtype,
        lambda: ops.gather_rejected(*args), lambda: reference.gather_rejected(*args),
        width * (rejected + shape.batch * (b - 1)), 0.0, setting=shape.describe(),
        compiled=lambda: compiled("gather_rejected")(*args),
    )  # fmt: skip


def projection(shape: Shape) -> tuple:
    m = shape.model
    features = shape.tensor(shape.batch * shape.rows, m.taps * m.hidden)
    positions = torch.arange(len(features)).int() % 1024
    out = m.layers * 2 * m.kv_heads * m.d
    weights = (
        shape.tensor(m.hidden, features.shape[1], scale=features.shape[1] ** -0.5),
        torch.ones(m.hidden, dtype=shape.torch_dtype),
        shape.tensor(out, m.hidden, scale=m.hidden**-0.5),
        torch.ones(m.layers, m.d, dtype=shape.torch_dtype),
        torch.randn(1024, m.d),
        shape.tensor(m.hidden),
    )
    moved = size(features, *weights) + len(features) * out * features.element_size()
    operations = 2.0 * len(features) * (features.shape[1] * m.hidden + m.hidden * out)
    return features, positions, weights, moved, operations


def bench_project(shape: Shape) -> Iterator[Bench]:
    features, positions, weights, moved, operations = projection(shape)
    carried = torch.arange(len(features)) % 2 == 1
    args = (features, positions, *weights, carried)
    plain = (features, positions, *weights)
    yield Bench(
        "project_kv", f"T={len(features)}", shape.dtype,
        lambda: ops.project_kv(*args), lambda: reference.project_kv(*args), moved, operations,
        peers=peers.projection(features, positions, weights, ops.project_kv(*plain)),
        setting=shape.describe(), compiled=lambda: compiled("project_kv")(*args),
    )  # fmt: skip


def bench_commit(shape: Shape) -> Iterator[Bench]:
    features, positions, weights, moved, operations = projection(shape)
    m, b = shape.model, shape.rows
    start = (torch.arange(shape.batch + 1) * b).int()
    counts = accepted_counts(shape)
    slots = torch.arange(len(features))
    k_cache, v_cache = (shape.tensor(m.layers, len(features) // 8 + 1, 8, m.kv_heads, m.d) for _ in "kv")
    k_segment, v_segment = (shape.tensor(m.layers, shape.batch, b - 1, m.kv_heads, m.d) for _ in "kv")
    lens = torch.zeros(shape.batch, dtype=torch.int32)
    args = (features, positions, start, counts, slots, k_cache, v_cache, k_segment, v_segment, lens, *weights)
    carried = torch.arange(len(features)) % b > counts.repeat_interleave(b)
    yield Bench(
        "commit_and_carry", f"T={len(features)}", shape.dtype,
        lambda: ops.commit_and_carry(*args), lambda: reference.commit_and_carry(*args), moved, operations,
        peers={"project_kv": lambda: ops.project_kv(features, positions, *weights, carried)},
        setting=shape.describe(), compiled=lambda: compiled("commit_and_carry")(*args),
    )  # fmt: skip


def bench_attention(shape: Shape, contexts: tuple[int, ...]) -> Iterator[Bench]:
    m, b, batch = shape.model, shape.rows, shape.batch
    for context in contexts:
        if 2 * batch * context * m.kv_heads * m.d * 4 > 1 << 29:
            continue  # the reference makes several copies of this: too much for a small machine
        q = shape.tensor(batch, b, m.heads, m.d)
        k_cache, v_cache = (shape.tensor(batch, context, m.kv_heads, m.d) for _ in "kv")
        k_segment, v_segment = (shape.tensor(batch, b - 1, m.kv_heads, m.d) for _ in "kv")
        k_block, v_block = (shape.tensor(batch, b, m.kv_heads, m.d) for _ in "kv")
        carried = b // 2  # the same for all requests: then the peer needs no mask
        lens, segment = (torch.full((batch,), n, dtype=torch.int32) for n in (context, carried))
        args = (q, k_cache, v_cache, lens, k_segment, v_segment, segment, k_block, v_block)

        def peer(q=q, k=(k_cache, k_segment, k_block), v=(v_cache, v_segment, v_block), n=carried):
            keys = torch.cat([k[0], k[1][:, :n], k[2]], 1).transpose(1, 2)
            values = torch.cat([v[0], v[1][:, :n], v[2]], 1).transpose(1, 2)
            return F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, enable_gqa=True).transpose(
                1, 2
            )

        out = ops.segment_attention(*args)
        torch.testing.assert_close(out.float(), peer().float(), rtol=0.02, atol=0.02)
        keys = context + carried + b
        moved = 2 * size(q) + 2 * batch * keys * m.kv_heads * m.d * q.element_size()
        yield Bench(
            "segment_attention", f"context={context}", shape.dtype,
            lambda args=args: ops.segment_attention(*args),
            lambda args=args: reference.segment_attention(*args), moved, 4.0 * batch * b * m.heads * m.d *
            keys, peers={"SDPA over cat": peer} | peers.attention(args, carried, out),
            setting=shape.describe(context=context),
            compiled=lambda args=args: compiled("segment_attention")(*args),
        )  # fmt: skip


def bench_accept(shape: Shape) -> Iterator[Bench]:
    m, b = shape.model, shape.rows
    logits = shape.tensor(shape.batch, b, m.vocab)
    counts = accepted_counts(shape).long()
    best = logits.argmax(-1)[:, : b - 1]
    tokens = torch.where(torch.arange(b - 1) < counts[:, None], best, (best + 1) % m.vocab)
    read = int((counts + 1).sum()) * m.vocab
    for temperature in (0.0, 1.0):
        q = u = None
        if temperature > 0:
            q = torch.softmax(logits[:, : b - 1].float(), -1)
            u = torch.zeros(shape.batch, b)  # held up to the same row as the greedy one
            u[torch.arange(shape.batch), counts.clamp(max=b - 1)] = 0.999
            u[:, -1] = 0.5
        moved = read * logits.element_size() + (
            int((counts < b - 1).sum()) * m.vocab * 4 if q is not None else 0
        )
        args = (tokens, logits, q, u, temperature)
        yield Bench(
            "accept", "greedy" if temperature == 0 else "sampled", shape.dtype,
            lambda args=args: ops.accept(*args), lambda args=args: reference.accept(*args), moved, 0.0,
            peers=peers.acceptance(args, ops.accept(*args)),
            setting=shape.describe(vocab=m.vocab, temperature=temperature),
            compiled=lambda args=args: compiled("accept")(*args),
        )  # fmt: skip


def bench_markov(shape: Shape) -> Iterator[Bench]:
    m, batch, steps = shape.model, shape.batch, shape.rows - 1
    logits = shape.tensor(batch, steps, m.vocab)
    w1, w2 = (shape.tensor(m.vocab, MARKOV_RANK, scale=MARKOV_RANK**-0.25) for _ in "12")
    prev, u = torch.randint(0, m.vocab, (batch,)), torch.rand(batch, steps)
    for temperature in (0.0, 1.0):
        args = (logits, prev, w1, w2, None, u, temperature, temperature > 0)
        written = 4 * logits.numel() if temperature > 0 else 0
        yield Bench(
            "markov_sample", "greedy" if temperature == 0 else "sampled", shape.dtype,
            lambda args=args: ops.markov_sample(*args), lambda args=args: reference.markov_sample(*args),
            steps * size(w2) + size(logits) + written, 2.0 * logits.numel() * MARKOV_RANK,
            setting=shape.describe(vocab=m.vocab, temperature=temperature, rank=MARKOV_RANK),
            compiled=lambda args=args: compiled("markov_sample")(*args),
        )  # fmt: skip


def rows_of(op: str, shape: Shape, contexts: tuple[int, ...]) -> Iterator[Bench]:
    if op == "segment_attention":
        return bench_attention(shape, contexts)
    makers = {
        "gather_rejected": bench_gather,
        "project_kv": bench_project,
        "commit_and_carry": bench_commit,
        "accept": bench_accept,
        "markov_sample": bench_markov,
    }
    return makers[op](shape)


def measure(bench: Bench, ceilings: Ceilings, seconds: float, compile_it: bool) -> dict:
    """One row of the table as a plain dictionary."""
    arms: dict[str, Call] = {"op": bench.run, "eager": bench.eager, **bench.peers}
    if compile_it and bench.compiled is not None:
        try:
            bench.compiled()
            arms["compiled"] = bench.compiled
        except Exception as error:  # no compiler, or a form that it does not take: say so and go on
            print(
                f"{bench.op} {bench.label}: not compiled ({str(error).splitlines()[0][:120]})",
                file=sys.stderr,
            )
    times = interleave(arms, seconds)
    us = times["op"]
    least = ceilings.least_us(bench.bytes, bench.operations, bench.dtype)
    return {
        "op": bench.op, "label": bench.label, "dtype": bench.dtype, **bench.setting,
        "us": {f"p{p}": round(us.percentile(p), 2) for p in (20, 50, 80)},
        "cpu_us": round(median(us.cpu), 2),
        "bytes": int(bench.bytes), "operations": int(bench.operations),
        "gb_per_s": bench.bytes / us.p50 / 1e3, "gflop_per_s": bench.operations / us.p50 / 1e3,
        "share_of_ceiling": least / us.p50,
        "eager_ratio": ratio(times["eager"], us),
        "compiled_ratio": ratio(times["compiled"], us) if "compiled" in times else None,
        "peers": {
            name: {"ratio": ratio(times[name], us), "cpu_ratio": cpu_ratio(times[name], us)}
            for name in bench.peers
        },
        "eager_cpu_ratio": cpu_ratio(times["eager"], us),
        "turns": len(us.us),
    }  # fmt: skip


HEADINGS = (
    *("op", "case", "dtype", "hidden", "B", "b", "p20 us", "p50 us", "p80 us", "CPU us", "GB/s", "GFLOP/s"),
    *("ceiling", "eager", "compiled", "peers"),
)


def text(row: dict) -> list[str]:
    def times(x: float | None) -> str:
        return "-" if x is None else f"{x:.2f}x"

    us = row["us"]
    return [
        row["op"], row["label"], row["dtype"], str(row["hidden"]), str(row["batch"]), str(row["rows"]),
        *(f"{us[p]:.0f}" if us[p] >= 100 else f"{us[p]:.1f}" for p in ("p20", "p50", "p80")),
        f"{row['cpu_us']:.0f}" if row["cpu_us"] >= 100 else f"{row['cpu_us']:.1f}",
        f"{row['gb_per_s']:.1f}", f"{row['gflop_per_s']:.0f}" if row["operations"] else "-",
        f"{row['share_of_ceiling']:.0%}", times(row["eager_ratio"]), times(row["compiled_ratio"]),
        "; ".join(
            f"{name} {times(x['ratio'])}, CPU {times(x['cpu_ratio'])}" for name, x in row["peers"].items()
        ) or "-",
    ]  # fmt: skip


def markdown(rows: list[dict]) -> str:
    lines = ["| " + " | ".join(HEADINGS) + " |", "|" + "---|" * len(HEADINGS)]
    return "\n".join(lines + ["| " + " | ".join(text(r)) + " |" for r in rows])


def plot(rows: list[dict], path: Path) -> None:
    """Ratio to each other arm, one panel an op, one point a row."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = [op for op in OPS if any(r["op"] == op for r in rows)]
    figure, panels = plt.subplots(1, len(names), figsize=(3.4 * len(names), 4), squeeze=False, sharey=True)
    styles = (("eager_ratio", "o", "#9a9a9a", "eager"), ("compiled_ratio", "s", "#4477aa", "compiled"))
    colours = {
        "SDPA over cat": "#cc5a1e",
        "project_kv": "#cc5a1e",
        "vLLM": "#228833",
        "FlashInfer": "#aa3377",
    }
    for panel, op in zip(panels[0], names, strict=True):
        mine = [r for r in rows if r["op"] == op]
        for key, marker, colour, label in styles:
            points = [(r["us"]["p50"], r[key]) for r in mine if r[key]]
            if points:
                panel.scatter(*zip(*points, strict=True), marker=marker, s=18, color=colour, label=label)
        for label, colour in colours.items():
            points = [(r["us"]["p50"], r["peers"][label]["ratio"]) for r in mine if label in r["peers"]]
            if points:
                marker = "D"
                panel.scatter(*zip(*points, strict=True), marker=marker, s=18, color=colour, label=label)
        panel.axhline(1, color="black", linewidth=0.8)
        panel.set(xscale="log", yscale="log", title=op, xlabel="time of the op, us")
        panel.legend(fontsize=7)
    panels[0][0].set_ylabel("their time / its time (above 1: the op is faster)")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="hidden 576 and one size of 4096, one dtype, few rows"
    )
    parser.add_argument("--ops", default=",".join(OPS), help="comma-separated subset")
    parser.add_argument(
        "--dtypes",
        default=None,
        help="bf16,f32 (default: both; bf16 with --quick; f32 where the CPU has no bf16), f16 on a GPU",
    )
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="where to run (default cpu)")
    parser.add_argument(
        "--seconds", type=float, default=None, help="time for each row (default 0.6; 0.3 with --quick)"
    )
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile of the reference out")
    parser.add_argument("--out", type=Path, help="JSON file")
    parser.add_argument("--plot", type=Path, help="PNG file (default: beside --out)")
    parser.add_argument("--markdown", type=Path, help="table as Markdown")
    options = parser.parse_args()
    chosen = [op.strip() for op in options.ops.split(",") if op.strip()]
    unknown = [op for op in chosen if op not in OPS]
    if unknown:
        parser.error(f"--ops {','.join(unknown)}: not one of {', '.join(OPS)}")
    cuda = options.device == "cuda"
    if cuda and not torch.cuda.is_available():
        parser.error("--device cuda: PyTorch sees no GPU here")
    has_bf16 = cuda or fast_dtype("cpu") == torch.bfloat16
    default = ("bf16" if options.quick or cuda else "bf16,f32") if has_bf16 else "f32"
    dtypes = (options.dtypes or default).split(",")
    if bad := {"f32"} & set(dtypes) if cuda else {"f16"} & set(dtypes):
        parser.error(
            f"--dtypes {options.dtypes}: the operators have no {bad.pop()} on --device {options.device}"
        )
    if any(d not in DTYPES for d in dtypes):
        parser.error(f"--dtypes {options.dtypes}: not a subset of {','.join(DTYPES)}")
    seconds = options.seconds or (0.3 if options.quick else 0.6)
    contexts = (256, 2048) if options.quick else (256, 2048, 8192)
    warnings.filterwarnings("ignore", module="torch")
    logging.getLogger("torch._dynamo").setLevel(logging.ERROR)
    torch.set_default_device(options.device)
    torch.manual_seed(0)

    console = Console(width=None if sys.stdout.isatty() else 190)
    ceilings = measure_ceilings({d: DTYPES[d] for d in dtypes}, seconds)
    rates = ", ".join(f"{d} {x / 1e9:.0f} GFLOP/s" for d, x in ceilings.flops.items())
    machine = {
        "cpu": platform.machine(), "threads": torch.get_num_threads(), "level": ops.cpu_capability(),
        "torch": torch.__version__, "bandwidth": ceilings.bandwidth,
        "flops": ceilings.flops, "gpu": torch.cuda.get_device_name() if cuda else None,
    }  # fmt: skip
    console.print(
        f"{machine['gpu'] or machine['level']}, {machine['threads']} threads, torch {torch.__version__}; "
        "ceilings of this run: "
        f"memory {ceilings.bandwidth / 1e9:.1f} GB/s, {rates}"
    )

    shapes = [
        (op, Shape(MODELS[hidden], batch, b, dtype))
        for op in chosen
        for dtype in dtypes
        for hidden in MODELS
        for batch in (1, 4, 16)
        for b in (8, 16)
        if not options.quick or (b == 16 if hidden == 576 else (b == 16 and batch == 4))
    ]
    rows: list[dict] = []
    with torch.no_grad():
        for op, shape in track(shapes, "measuring", console=Console(stderr=True), transient=True):
            # Compiling takes far longer than measuring: once for each op and model in the quick form.
            compile_it = not options.no_compile and (not options.quick or shape.batch == 4)
            for bench in rows_of(op, shape, contexts):
                rows.append(measure(bench, ceilings, seconds, compile_it))
                if options.out:  # row by row: a killed run keeps what it has
                    options.out.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")

    table = Table(*HEADINGS, title="Operators: ratios above 1 mean that the op is faster")
    for row in rows:
        table.add_row(*text(row), end_section=row is rows[-1])
    console.print(table)
    if options.markdown:
        options.markdown.write_text(markdown(rows) + "\n")
    if options.out:
        print(f"JSON: {options.out}")
    figure = options.plot or (options.out.with_suffix(".png") if options.out else None)
    if figure and importlib.util.find_spec("matplotlib") is None:  # an engine's environment may not have it
        print("no plot: matplotlib is not installed")
    elif figure:
        plot(rows, figure)
        print(f"plot: {figure}")


if __name__ == "__main__":
    main()
