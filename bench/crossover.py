"""Up to how many rows the projection's own GEMM beats the library's on this GPU.

    python bench/crossover.py [--seconds 0.2] [--out crossover.json]

Times project_kv both ways over rows of 8 to 512, for a small and for two large drafters, and prints what
`kProjectCrossover` (csrc/cuda/project_kv.h) should be: the value of the large drafters, since small ones take
microseconds either way. A running process can be changed with `ops.set_project_crossover`.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch
from common import interleave, ratio
from ops import DTYPES, Model, Shape, projection

from carryover_ext import ops

ROWS = (8, 16, 24, 32, 48, 64, 80, 96, 128, 160, 192, 256, 384, 512)
MODELS = {
    "smollm2-135m": Model(576, 4, 2, 9, 3, 64, 49152),
    "qwen3-4b": Model(2560, 5, 5, 32, 8, 128, 151936),
    "qwen3-8b": Model(4096, 5, 5, 32, 8, 128, 151936),
}
LARGE = ("qwen3-4b", "qwen3-8b")


def crossing(ratios: dict[int, float]) -> int:
    """The last number of rows before the library is faster, or 0; `ratios` are library / own, by rows."""
    last = 0
    for rows, library_over_own in sorted(ratios.items()):
        if library_over_own < 1:
            break
        last = rows
    return last


def measure(model: Model, dtype: str, seconds: float) -> dict[int, dict[str, float]]:
    found = {}
    for rows in ROWS:
        features, positions, weights, _, _ = projection(Shape(model, 1, rows, dtype))
        args = (features, positions, *weights)

        def run(limit: int, args: tuple = args) -> None:
            ops.set_project_crossover(limit)
            ops.project_kv(*args)

        times = interleave({"own": lambda: run(1 << 30), "library": lambda: run(0)}, seconds)
        found[rows] = {name: t.p50 for name, t in times.items()}
        found[rows]["ratio"] = ratio(times["library"], times["own"])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=0.2, help="for each number of rows (default 0.2)")
    parser.add_argument("--dtype", default="bf16", choices=("bf16", "f16"))
    parser.add_argument("--out", type=Path, help="JSON file")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("PyTorch sees no GPU here, and the crossover is one of GPU kernels")
    assert options.dtype in DTYPES
    torch.set_default_device("cuda")
    torch.manual_seed(0)
    before = ops.project_crossover()
    result: dict[str, object] = {"gpu": torch.cuda.get_device_name(), "now": before}
    crossings = {}
    with torch.no_grad():
        for name, model in MODELS.items():
            found = measure(model, options.dtype, options.seconds)
            crossings[name] = crossing({rows: x["ratio"] for rows, x in found.items()})
            result[name] = {"rows": found, "crossing": crossings[name]}
            print(f"{name}: own / library us, library over own")
            for rows, x in found.items():
                print(f"  {rows:4d} rows: {x['own']:8.1f} / {x['library']:8.1f}, {x['ratio']:.2f}x")
            print(f"  the own GEMM is faster up to {crossings[name]} rows")
    ops.set_project_crossover(before)
    result["advice"] = min(crossings[name] for name in LARGE)
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"kProjectCrossover is {before}; by these times it should be {result['advice']} on this GPU")


if __name__ == "__main__":
    main()
