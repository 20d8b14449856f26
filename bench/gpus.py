"""The GPUs that the predictions are for, and what all of them need: rounding up, and how many blocks fit."""

from __future__ import annotations

from dataclasses import dataclass

LATENCY = 0.7e-6  # s, of a load from HBM under load (assumed)
REACHABLE = 0.9  # of the nominal bandwidth, by a plain copy (assumed)


@dataclass(frozen=True)
class Gpu:
    """Data-sheet values; `tensor` is dense 16-bit FLOP/s, of which mma.sync reaches the share `mma_share`."""

    name: str
    multiprocessors: int
    bandwidth: float  # bytes/s
    tensor: float
    mma_share: float
    smem_sm: int  # bytes of a multiprocessor
    smem_block: int  # bytes that a block can have
    registers: int = 65536


H200 = Gpu("H200", 132, 4.8e12, 989e12, 0.6, 228 << 10, 227 << 10)
A100 = Gpu("A100-80GB", 108, 2.039e12, 312e12, 0.9, 164 << 10, 163 << 10)
GPUS = (H200, A100)


def ceil(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def blocks_resident(gpu: Gpu, threads: int, registers: int, smem: int) -> int:
    """Blocks that fit on a multiprocessor; 1 KiB of shared memory a block is the system's."""
    warps = threads // 32
    per_warp = ceil(registers * 32, 256) * 256
    return min(gpu.smem_sm // (smem + 1024), gpu.registers // (per_warp * warps), 64 // warps)
