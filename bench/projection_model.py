"""What the CUDA kernels of project_kv and commit_and_carry should reach: bytes, operations, the floor of the
time, occupancy.

Predictions, not measurements. The plan and the tiles repeat csrc/cuda/{project_kv.h,gemm.cuh};
tests/test_simt_project_kv.py holds the two against each other.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpus import GPUS, LATENCY, REACHABLE, Gpu, blocks_resident, ceil

SPLITS_MAX, DEPTH_MIN = 16, 128


@dataclass(frozen=True)
class Tile:
    """One instantiation of the kernel: rows x cols of the result, `depth` columns of the operands a stage."""

    rows: int
    cols: int

    @property
    def depth(self) -> int:
        return 32 if self.cols > 128 else 64

    @property
    def stages(self) -> int:
        return 4 if self.rows == 16 or self.cols > 128 else 3

    @property
    def threads(self) -> int:
        return self.cols

    @property
    def blocks(self) -> int:
        """On a multiprocessor, as the plan counts and the kernel's registers allow."""
        return 1 if self.rows * self.cols > 64 * 128 else 2

    @property
    def smem(self) -> int:
        """Bytes: the larger of the stages and the sums, then scales, a flag and marks of the rows."""
        stages = 2 * (self.rows + self.cols) * self.depth * self.stages
        return max(stages, 4 * self.rows * (self.cols + 8)) + 5 * self.rows + 4

    @property
    def registers(self) -> int:
        """Of a thread, at most; sm_90a takes 94 and 205."""
        return 104 if self.rows == 16 else 216

    def occupancy(self, gpu: Gpu) -> int:
        """Blocks on a multiprocessor."""
        return blocks_resident(gpu, self.threads, self.registers, self.smem)


TILES = tuple(Tile(rows, cols) for cols in (128, 256) for rows in (16, 64))


@dataclass(frozen=True)
class Plan:
    """How the host code cuts one GEMM, ``[rows, depth] x [cols, depth]^T``."""

    tile: Tile
    used_cols: int
    row_blocks: int
    col_tiles: int
    splits: int
    split_depth: int

    @property
    def blocks(self) -> int:
        return self.row_blocks * self.col_tiles * self.splits

    @property
    def partial_bytes(self) -> int:
        """Sums of the splits, written and read; they stay in the L2 cache."""
        return 2 * 4 * self.blocks * self.tile.rows * self.tile.cols if self.splits > 1 else 0


def plan(rows: int, cols: int, depth: int, head: int, multiprocessors: int) -> Plan:
    tile_cols = 256 if head > 128 else 128
    tile = Tile(16 if rows <= 16 else 64, tile_cols)
    used = tile_cols // head * head
    row_blocks, col_tiles = ceil(rows, tile.rows), ceil(cols, used)
    splits = multiprocessors * tile.blocks // max(1, row_blocks * col_tiles)
    splits = max(1, min(splits, depth // DEPTH_MIN, SPLITS_MAX))
    steps = ceil(depth, tile.depth)
    each = ceil(steps, splits)
    return Plan(tile, used, row_blocks, col_tiles, ceil(steps, each), each * tile.depth)


@dataclass(frozen=True)
class Workload:
    """`rows` verified rows of a batch, through fc ``[hidden, features]`` and K and V of all layers."""

    rows: int
    features: int
    hidden: int
    layers: int
    kv_heads: int
    d: int

    @property
    def cols(self) -> int:
        return self.layers * 2 * self.kv_heads * self.d

    def plans(self, multiprocessors: int) -> tuple[Plan, Plan]:
        return (
            plan(self.rows, self.hidden, self.features, 1, multiprocessors),
            plan(self.rows, self.cols, self.hidden, self.d, multiprocessors),
        )

    def weight_bytes(self) -> int:
        return 2 * self.hidden * (self.features + self.cols)

    def bytes(self) -> int:
        """Weights, features, K and V, each once; fc's result out and in."""
        return self.weight_bytes() + 2 * self.rows * (self.features + 2 * self.hidden + self.cols)

    def flops(self) -> int:
        """Useful ones."""
        return 2 * self.rows * self.hidden * (self.features + self.cols)

    def tile_flops(self, multiprocessors: int) -> int:
        """Those of the tensor cores, rows and columns that only fill up a tile included."""
        total = 0
        for p, depth in zip(self.plans(multiprocessors), (self.features, self.hidden), strict=True):
            total += 2 * p.row_blocks * p.tile.rows * p.col_tiles * p.tile.cols * depth
        return total


@dataclass(frozen=True)
class Prediction:
    """Times in microseconds; `share` is the expected part of the nominal bandwidth while the GEMMs run."""

    gpu: str
    splits: tuple[int, int]
    blocks: tuple[int, int]
    bytes: int
    partial_bytes: int
    flops: int
    memory_us: float
    tensor_us: float
    floor_us: float
    smem: tuple[int, int]
    occupancy: tuple[int, int]
    share: float


def predict(work: Workload, gpu: Gpu) -> Prediction:
    """The floor is the larger of two: all bytes at the nominal bandwidth, all operations of the tiles at the
    rate of mma.sync."""
    plans = work.plans(gpu.multiprocessors)
    memory = work.bytes() / gpu.bandwidth * 1e6
    tensor = work.tile_flops(gpu.multiprocessors) / (gpu.tensor * gpu.mma_share) * 1e6
    occupancy = tuple(p.tile.occupancy(gpu) for p in plans)
    needed = gpu.bandwidth * LATENCY / gpu.multiprocessors
    flights = [  # weights on their way to a multiprocessor
        min(o, p.blocks / gpu.multiprocessors) * (p.tile.stages - 1) * p.used_cols * p.tile.depth * 2
        for p, o in zip(plans, occupancy, strict=True)
    ]
    return Prediction(
        gpu=gpu.name,
        splits=(plans[0].splits, plans[1].splits),
        blocks=(plans[0].blocks, plans[1].blocks),
        bytes=work.bytes(),
        partial_bytes=sum(p.partial_bytes for p in plans),
        flops=work.flops(),
        memory_us=memory,
        tensor_us=tensor,
        floor_us=max(memory, tensor),
        smem=(plans[0].tile.smem, plans[1].tile.smem),
        occupancy=(occupancy[0], occupancy[1]),
        share=min(REACHABLE, min(flights) / needed, memory / tensor),
    )


# Drafters of Qwen3-4B and Qwen3-8B (5 taps, 5 layers), one with heads of 256, SmolLM2-135M; blocks of 16.
WORKLOADS = {
    f"{name} T{rows}": Workload(rows, *sizes)
    for name, sizes in {
        "qwen3-4b": (12800, 2560, 5, 8, 128),
        "qwen3-8b": (20480, 4096, 5, 8, 128),
        "head-256": (12800, 2560, 5, 4, 256),
        "smollm2-135m": (2880, 576, 2, 3, 64),
    }.items()
    for rows in (16, 64)  # above, the library's GEMM computes
}


def main() -> None:
    for name, work in WORKLOADS.items():
        for gpu in GPUS:
            p = predict(work, gpu)
            print(
                f"{name:18} {p.gpu:10} splits {p.splits[0]:2} {p.splits[1]:2} "
                f"blocks {p.blocks[0]:4} {p.blocks[1]:4} "
                f"{p.bytes / 1e6:7.2f} MB (+ {p.partial_bytes / 1e6:6.2f} in L2) {p.flops / 1e9:6.2f} GFLOP  "
                f"memory {p.memory_us:7.2f} us  tensor {p.tensor_us:6.2f} us  floor {p.floor_us:7.2f} us  "
                f"{p.smem[0] >> 10} and {p.smem[1] >> 10} KiB x {p.occupancy[0]} and {p.occupancy[1]}  "
                f"share {p.share:.2f}"
            )


if __name__ == "__main__":
    main()
