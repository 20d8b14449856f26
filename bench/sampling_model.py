"""What the CUDA kernels of gather_rejected, accept and markov_sample should reach: bytes, operations, the
floor of the time, occupancy.

Predictions, not measurements. The plan repeats csrc/cuda/{accept,markov_sample}.h; the simulator's tests of
the ops hold the two against each other.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpus import GPUS, LATENCY, REACHABLE, Gpu, blocks_resident, ceil

ACCEPT_CHUNK, ACCEPT_THREADS = 8192, 256
MARKOV_THREADS, MARKOV_COLUMNS, MARKOV_SEGMENT, MARKOV_DEPTH, MARKOV_STAGES, MARKOV_PAD = (
    128,
    128,
    32,
    64,
    3,
    8,
)
GATHER_THREADS = 128


@dataclass(frozen=True)
class Prediction:
    """Of one launch; times in microseconds, `share` is the expected part of the nominal bandwidth."""

    work: str
    gpu: str
    smem: int
    blocks: int
    bytes: int
    flops: int
    floor_us: float
    occupancy: int
    share: float


def _predict(
    work: str, gpu: Gpu, smem: int, blocks: int, size: int, flops: int, resident: int, in_flight: int
) -> Prediction:
    """`in_flight`: bytes that a block has on their way at a time."""
    memory, tensor = size / gpu.bandwidth * 1e6, flops / (gpu.tensor * gpu.mma_share) * 1e6
    per_sm = min(resident, blocks / gpu.multiprocessors) * in_flight
    share = min(REACHABLE, per_sm / (gpu.bandwidth * LATENCY / gpu.multiprocessors))
    return Prediction(work, gpu.name, smem, blocks, size, flops, max(memory, tensor), resident, share)


def accept_chunks(vocab: int) -> int:
    return ceil(vocab, ACCEPT_CHUNK)


def accept_workspace(batch: int, drafts: int, vocab: int) -> int:
    return batch * accept_chunks(vocab) * ((drafts + 1) * 16 + 8)


def predict_accept(
    gpu: Gpu, batch: int, drafts: int, vocab: int, sampled: bool, registers: int
) -> Prediction:
    """The first launch, which reads every row once; the others touch one row a request."""
    size = batch * (drafts + 1) * vocab * 2
    name = f"accept B{batch}, {'sampled' if sampled else 'greedy'}"
    if sampled:  # the row that decides, and its q
        size += batch * vocab * (2 + 4)
    blocks = batch * (drafts + 1) * accept_chunks(vocab)
    resident = blocks_resident(gpu, ACCEPT_THREADS, registers, 64)
    return _predict(name, gpu, 64, blocks, size, 0, resident, ACCEPT_THREADS * 16)


def markov_request_tiles(batch: int, rank: int) -> int:
    return 1 if batch <= 8 or rank > 1024 else 2 if batch <= 16 or rank > 512 else 4


def markov_smem(request_tiles: int, rank: int) -> int:
    depth = ceil(rank, 16) * 16 + MARKOV_PAD
    return 2 * (MARKOV_STAGES * MARKOV_COLUMNS * (MARKOV_DEPTH + MARKOV_PAD) + request_tiles * 8 * depth)


def markov_workspace(batch: int, vocab: int) -> int:
    return batch * (ceil(vocab, MARKOV_SEGMENT) * 8 + 8)


def predict_markov(gpu: Gpu, batch: int, vocab: int, rank: int, registers: int) -> Prediction:
    """One step of the block: markov_w2 once for the requests of a block, the logits, the partial results."""
    tiles = markov_request_tiles(batch, rank)
    groups = ceil(batch, 8 * tiles)
    size = groups * vocab * rank * 2 + batch * vocab * 2 + 2 * markov_workspace(batch, vocab)
    flops = 2 * groups * tiles * 8 * vocab * ceil(rank, 16) * 16
    smem = markov_smem(tiles, rank)
    resident = blocks_resident(gpu, MARKOV_THREADS, registers, smem)
    blocks = groups * min(ceil(vocab, MARKOV_COLUMNS), gpu.multiprocessors * (3 if tiles == 1 else 2))
    stages = (MARKOV_STAGES - 1) * MARKOV_COLUMNS * MARKOV_DEPTH * 2
    return _predict(f"markov_sample B{batch}, a step", gpu, smem, blocks, size, flops, resident, stages)


def predict_gather(gpu: Gpu, batch: int, rejected: int, features: int, registers: int) -> Prediction:
    """All rows rejected: each is read and written once."""
    blocks = ceil(batch * rejected, GATHER_THREADS // 32)
    resident = blocks_resident(gpu, GATHER_THREADS, registers, 0)
    size = 2 * batch * rejected * features * 2
    return _predict(f"gather_rejected B{batch}", gpu, 0, blocks, size, 0, resident, GATHER_THREADS * 16)


# Qwen3-4B: vocabulary 151936, block of 16, Markov rank 256, five taps of 2560.
VOCAB, DRAFTS, RANK, FEATURES = 151936, 15, 256, 12800


def predictions(registers: dict[str, int]) -> list[Prediction]:
    """`registers`: of gather, accept and markov, from the table of budgets."""
    rows = []
    for gpu in GPUS:
        for batch in (1, 8, 32):
            rows.append(predict_gather(gpu, batch, DRAFTS, FEATURES, registers["gather"]))
            rows += [
                predict_accept(gpu, batch, DRAFTS, VOCAB, sampled, registers["accept"])
                for sampled in (False, True)
            ]
            rows.append(predict_markov(gpu, batch, VOCAB, RANK, registers["markov"]))
    return rows
