"""What segment_attention's CUDA kernels should reach: bytes, operations, the floor of the time, occupancy.

Predictions, not measurements. The plan and the tiles repeat csrc/cuda/segment_attention.{h,cuh};
tests/test_simt_segment_attention.py holds the two against each other.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpus import GPUS, LATENCY, REACHABLE, Gpu, blocks_resident, ceil

TILE_HEADS = (64, 96, 128, 256)
TILE_ROWS = (16, 32, 64, 128)
PIECE_STEP, PIECE_TARGET, PIECES_MAX, BLOCKS_PER_SM = 128, 8192, 64, 2
WORKSPACE_MAX = 16 << 20  # floats, of pieces beyond those that fill the chip


@dataclass(frozen=True)
class Tile:
    """One instantiation of the kernel."""

    head: int
    rows: int

    @property
    def keys(self) -> int:
        return 32 if self.head > 128 else 64

    @property
    def warps(self) -> int:
        row_warps = self.rows // 16
        return row_warps * (1 if row_warps >= 4 else min(4 // row_warps, self.keys // 16))

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def smem(self) -> int:
        """Bytes: the queries, and two stages of keys and values."""
        return 2 * self.head * (self.rows + 2 * 2 * self.keys)

    def occupancy(self, gpu: Gpu, registers: int) -> int:
        """Blocks on a multiprocessor."""
        return blocks_resident(gpu, self.threads, registers, self.smem)


TILES = tuple(Tile(h, r) for h in TILE_HEADS for r in TILE_ROWS if h <= 128 or r <= 64)


def tile_of(group_rows: int, d: int) -> Tile:
    head = next(h for h in TILE_HEADS if d <= h)
    most = 128 if head <= 128 else 64
    return Tile(head, next((r for r in TILE_ROWS if min(group_rows, most) <= r), most))


@dataclass(frozen=True)
class Workload:
    """`context` rows of every request, in a cache with room for `capacity`."""

    batch: int
    rows: int
    heads: int
    kv_heads: int
    d: int
    context: int
    segment: int
    capacity: int

    @property
    def keys(self) -> int:
        return self.context + self.segment + self.rows

    @property
    def tile(self) -> Tile:
        return tile_of(self.rows * self.heads // self.kv_heads, self.d)

    @property
    def row_tiles(self) -> int:
        return ceil(self.rows * self.heads // self.kv_heads, self.tile.rows)

    def plan(self, gpu: Gpu) -> tuple[int, int, int]:
        """What the host code decides: pieces in the grid, pieces that fill the chip, least keys of one."""
        blocks = self.batch * self.kv_heads * self.row_tiles
        longest = self.capacity + self.rows
        least = max(PIECE_STEP, 2 * self.tile.rows)
        most = max(1, min(PIECES_MAX, longest // (2 * least)))
        fill = max(1, min(most, gpu.multiprocessors * BLOCKS_PER_SM // blocks if blocks else 1))
        room = WORKSPACE_MAX // (self.batch * self.rows * self.heads * (self.d + 2))
        return max(fill, min(most, room, ceil(longest, PIECE_TARGET))), fill, least

    def used_pieces(self, gpu: Gpu) -> int:
        """Those that hold keys: what the kernels decide, from the lengths on the device."""
        pieces, fill, least = self.plan(gpu)
        piece = min(ceil(self.keys, fill), max(PIECE_TARGET, ceil(self.keys, pieces)))
        return ceil(self.keys, ceil(max(piece, least), PIECE_STEP) * PIECE_STEP)

    def bytes(self) -> int:
        """Keys, values, queries and outputs, each once."""
        keys = self.batch * self.kv_heads * self.keys * self.d * 2 * 2
        return keys + 2 * self.batch * self.rows * self.heads * self.d * 2

    def partial_bytes(self, gpu: Gpu) -> int:
        """Partial results, written and read; they stay in the L2 cache."""
        pieces = self.used_pieces(gpu)
        return 2 * pieces * self.batch * self.rows * self.heads * (self.d + 2) * 4 if pieces > 1 else 0

    def flops(self) -> int:
        """Of the tensor cores, rows and channels that only fill up a tile included."""
        tile = self.tile
        keys = ceil(self.keys, tile.keys) * tile.keys
        return 4 * self.batch * self.kv_heads * self.row_tiles * tile.rows * keys * tile.head


@dataclass(frozen=True)
class Prediction:
    """Times in microseconds; `share` is the expected part of the nominal bandwidth."""

    gpu: str
    pieces: int
    blocks: int
    bytes: int
    partial_bytes: int
    flops: int
    memory_us: float
    tensor_us: float
    floor_us: float
    smem: int
    occupancy: int
    share: float


def predict(work: Workload, gpu: Gpu, registers: int = 255) -> Prediction:
    """The floor is the larger of two: all bytes at the nominal bandwidth, all operations at the rate of
    mma.sync."""
    tile, pieces = work.tile, work.used_pieces(gpu)
    blocks = work.batch * work.kv_heads * work.row_tiles * pieces
    memory = work.bytes() / gpu.bandwidth * 1e6
    tensor = work.flops() / (gpu.tensor * gpu.mma_share) * 1e6
    occupancy = tile.occupancy(gpu, registers)
    # One tile of keys and values is on its way while another is worked on.
    in_flight = min(occupancy, blocks / gpu.multiprocessors) * 2 * tile.keys * work.d * 2
    needed = gpu.bandwidth * LATENCY / gpu.multiprocessors
    return Prediction(
        gpu=gpu.name,
        pieces=pieces,
        blocks=blocks,
        bytes=work.bytes(),
        partial_bytes=work.partial_bytes(gpu),
        flops=work.flops(),
        memory_us=memory,
        tensor_us=tensor,
        floor_us=max(memory, tensor),
        smem=tile.smem,
        occupancy=occupancy,
        share=min(REACHABLE, in_flight / needed, memory / tensor),
    )


# Drafters of Qwen3-4B (32 heads, 8 KV heads of 128) and SmolLM2-135M, block of 16, 15 carried rows.
WORKLOADS = {
    "qwen3-4b B1 c1024": Workload(1, 16, 32, 8, 128, 1024, 15, 32768),
    "qwen3-4b B1 c8192": Workload(1, 16, 32, 8, 128, 8192, 15, 32768),
    "qwen3-4b B8 c4096": Workload(8, 16, 32, 8, 128, 4096, 15, 32768),
    "qwen3-4b B32 c4096": Workload(32, 16, 32, 8, 128, 4096, 15, 32768),
    "smollm2-135m B1 c1024": Workload(1, 16, 9, 3, 64, 1024, 15, 2048),
}


def main() -> None:
    for name, work in WORKLOADS.items():
        for gpu in GPUS:
            p = predict(work, gpu)
            print(
                f"{name:22} {p.gpu:10} {p.pieces:3} pieces {p.blocks:5} blocks "
                f"{p.bytes / 1e6:7.2f} MB (+ {p.partial_bytes / 1e6:5.2f} in L2) "
                f"{p.flops / 1e9:7.2f} GFLOP  memory {p.memory_us:7.2f} us  tensor {p.tensor_us:7.2f} us  "
                f"floor {p.floor_us:7.2f} us  {p.smem >> 10} KiB x {p.occupancy}  share {p.share:.2f}"
            )


if __name__ == "__main__":
    main()
