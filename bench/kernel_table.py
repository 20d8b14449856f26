"""The CUDA kernels: budgets that tests/test_cuda_static.py holds the compiler to, and predictions.

    python bench/kernel_table.py [--update]      prints both, and writes them into bench/README.md

Everything here is computed, nothing is measured: bench/ops.py measures, on a GPU.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import attention_model
import projection_model
import sampling_model
from gpus import GPUS

WIDE = "LDG.E.128"  # a 16-byte load
COPY = "LDGSTS"  # cp.async
MATRIX = ("LDSM", "HMMA")  # ldmatrix and mma


@dataclass(frozen=True)
class Budget:
    """Of all instantiations of a kernel, on every architecture. No kernel may spill or use local memory."""

    source: str  # csrc/cuda/<source>.cu
    kernel: str
    threads: str  # of a block
    registers: int  # of a thread, at most
    sass: tuple[str, ...] = ()  # instructions that every instantiation must have, unless `only`
    only: str = ""  # part of the mangled name of those that must


BUDGETS = (
    Budget("gather_rejected", "gather_rejected_kernel", "128", 40, (WIDE,), "uint4"),
    Budget("gather_rejected", "no_rejected_kernel", "128", 16),
    Budget("accept", "accept_chunk_kernel", "256", 48, (WIDE,)),
    Budget("accept", "accept_judge_kernel", "256", 64),
    Budget("accept", "accept_residual_kernel", "256", 64, (WIDE,)),
    Budget("accept", "accept_draw_kernel", "256", 64),
    Budget("markov_sample", "markov_step_kernel", "128", 168, (COPY, *MATRIX)),
    Budget("markov_sample", "markov_draw_kernel", "128", 64, (COPY, *MATRIX)),
    Budget("markov_sample", "markov_scale_kernel", "128", 40),
    Budget("project_kv", "commit_routes_kernel", "128", 48),
    Budget("project_kv", "project_routes_kernel", "128", 48),
    Budget("project_kv", "project_kernel", "128 or 256", 216, (COPY, *MATRIX)),
    Budget("project_kv", "carry_norm_kernel", "256", 64),
    Budget("project_kv", "route_kv_kernel", "128", 64),
    Budget("segment_attention", "segment_attention_kernel", "64, 128 or 256", 255, (COPY, *MATRIX)),
    Budget("segment_attention", "segment_attention_combine_kernel", "128", 80),
)

SOURCES = tuple(dict.fromkeys(b.source for b in BUDGETS))


def _registers(kernel: str) -> int:
    return next(b.registers for b in BUDGETS if b.kernel == kernel)


def budget_table() -> list[str]:
    rows = [
        "| source | kernel | threads | registers at most | instructions it must have |",
        "|---|---|---|---|---|",
    ]
    for b in BUDGETS:
        must = ", ".join(b.sass) + (f" ({b.only})" if b.only else "")
        rows.append(f"| {b.source}.cu | {b.kernel} | {b.threads} | {b.registers} | {must or '-'} |")
    return rows


def _row(work: str, p: object, **more: object) -> str:
    values = {**vars(p), **more}
    smem = values.get("smem", "-")
    smem = smem if isinstance(smem, tuple) else (smem,)
    kib = " and ".join(f"{s / 1024:.0f}" if isinstance(s, int) else "-" for s in smem)
    blocks = values["blocks"] if isinstance(values["blocks"], tuple) else (values["blocks"],)
    resident = values["occupancy"] if isinstance(values["occupancy"], tuple) else (values["occupancy"],)
    return (
        f"| {work} | {values['gpu']} | {values['bytes'] / 1e6:.2f} | {values['flops'] / 1e9:.2f} "
        f"| {values['floor_us']:.1f} | {' and '.join(map(str, blocks))} | {kib} "
        f"| {' and '.join(map(str, resident))} | {100 * values['share']:.0f} % | not measured: no GPU |"
    )


def prediction_table() -> list[str]:
    """Floor: the larger of all bytes at the nominal bandwidth and all operations at the rate of mma.sync."""
    rows = [
        "| work | GPU | MB | GFLOP | floor us | blocks | KiB smem | blocks an SM | expected bandwidth "
        "| measured us |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for gpu in GPUS:
        for name, work in projection_model.WORKLOADS.items():
            prediction = projection_model.predict(work, gpu)
            rows.append(_row(f"commit_and_carry {name}", prediction))
        for name, attention in attention_model.WORKLOADS.items():
            prediction = attention_model.predict(attention, gpu, _registers("segment_attention_kernel"))
            rows.append(_row(f"segment_attention {name}", prediction))
    registers = {
        "gather": _registers("gather_rejected_kernel"),
        "accept": _registers("accept_chunk_kernel"),
        "markov": _registers("markov_step_kernel"),
    }
    rows += [_row(p.work, p) for p in sampling_model.predictions(registers)]
    return rows


BEGIN, END = "<!-- kernel_table.py writes from here -->", "<!-- to here -->"


def text() -> str:
    return "\n".join([*budget_table(), "", *prediction_table()])


def main() -> None:
    print(text())
    if "--update" in sys.argv:
        readme = Path(__file__).with_name("README.md")
        before, rest = readme.read_text(encoding="utf-8").split(BEGIN)
        readme.write_text(f"{before}{BEGIN}\n{text()}\n{END}{rest.split(END)[1]}", encoding="utf-8")


if __name__ == "__main__":
    main()
