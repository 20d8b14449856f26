// A tile GEMM with everything that kernels here do to each other's memory, and faults to plant in it:
// C[M, N] = A[M, K] B[N, K]^T and the largest element of each row of C. Copies in two stages, a reduction
// between warps, an exchange inside a warp, and a reduction between blocks by the last one to finish.
#include "cuda/common.cuh"
#include "cuda/ptx.cuh"
#include "faults.h"

namespace faults {

using namespace carryover;
using cuda::bf16;

enum Fault : int {
  kNone,
  kNoBarrierBeforeUse,    // copies of other threads are read before they have arrived
  kNoBarrierAfterUse,     // a stage is overwritten while others read it
  kNoAsyncWait,           // own copies have not arrived
  kShortAsyncWait,        // waits for one group too few
  kNoBarrierInReduction,  // between warps
  kNoSyncWarp,            // between lanes
  kNoFence,               // between blocks
  kDivergentBarrier,      // one warp leaves it out
  kDifferentBarriers,     // both sides of a branch have one
  kMissingLane,           // a shuffle that not all named lanes reach
  kRowBoundOfLoad,        // reads behind A
  kRowBoundOfStore,       // writes behind C
  kSharedOverrun,         // writes behind shared memory
  kUnwrittenOutput,       // the last column
  kUnwrittenShared,       // the padding of the last K tile is not zeroed
  kWrongFragment,         // two registers of the left operand exchanged
  kWrongRow,              // the accumulator's rows g and g + 8 exchanged
  kMisalignedCopy,
  kUndefinedShift,
  kSameRowTwice,  // two blocks write the same element
  kCount
};

constexpr int kRows = 16, kColumns = 64, kDepth = 32, kThreads = 128, kPad = 8;

struct Shared {
  alignas(16) bf16 a[2][kRows][kDepth + kPad];
  alignas(16) bf16 b[2][kColumns][kDepth + kPad];
  float stage[4][kRows][kRows + 4];
  float top[4][kRows];
  int last;
};

template <int F>
__device__ void load(Shared& s, const Params& p, int stage, int k0, int m0, int n0) {
  const int t = threadIdx.x;
  if (t < 64) {
    const int r = t >> 2, c = (t & 3) * 8;
    const bool valid = (F == kRowBoundOfLoad || m0 + r < p.m) && k0 + c < p.k;
    if (F != kUnwrittenShared || valid)
      ptx::cp_async_16(
          &s.a[stage][r][c],
          p.a + int64_t(valid ? m0 + r : 0) * p.k + (valid ? k0 + c : 0) + (F == kMisalignedCopy), valid);
  }
  for (int i = t; i < kColumns * 4; i += kThreads) {
    const int r = i >> 2, c = (i & 3) * 8;
    const bool valid = n0 + r < p.n && k0 + c < p.k;
    if (F != kUnwrittenShared || valid)
      ptx::cp_async_16(&s.b[stage][r][c], p.b + int64_t(valid ? n0 + r : 0) * p.k + (valid ? k0 + c : 0),
                       valid);
  }
  ptx::cp_async_commit();
}

template <int F>
__global__ void __launch_bounds__(kThreads) kernel(const __grid_constant__ Params p) {
  CARRYOVER_SMEM(memory);
  Shared& s = *reinterpret_cast<Shared*>(memory);
  const int t = threadIdx.x, lane = t & 31, warp = t >> 5, g = lane >> 2, q = (lane & 3) * 2;
  const int m0 = blockIdx.y * kRows, n0 = blockIdx.x * kColumns, tiles = (p.k + kDepth - 1) / kDepth;
  float acc[2][4] = {};

  load<F>(s, p, 0, 0, m0, n0);
  for (int tile = 0; tile < tiles; ++tile) {
    if (tile + 1 < tiles)
      load<F>(s, p, (tile + 1) & 1, (tile + 1) * kDepth, m0, n0);
    else
      ptx::cp_async_commit();
    if (F != kNoAsyncWait) ptx::cp_async_wait<F == kShortAsyncWait ? 2 : 1>();
    if (F == kDivergentBarrier) {
      if (warp != 3) __syncthreads();
    } else if (F == kDifferentBarriers && warp == 3) {
      __syncthreads();
    } else if (F != kNoBarrierBeforeUse) {
      __syncthreads();
    }
    for (int k = 0; k < kDepth; k += 16) {
      uint32_t a[4], b[4];
      ptx::ldmatrix_x4(a, &s.a[tile & 1][lane & 15][k + (lane >> 4) * 8]);
      ptx::ldmatrix_x4(b,
                       &s.b[tile & 1][warp * 16 + (lane & 7) + (lane >> 4) * 8][k + ((lane >> 3) & 1) * 8]);
      if (F == kWrongFragment) {
        const uint32_t x = a[1];
        a[1] = a[2], a[2] = x;
      }
      for (int j = 0; j < 2; ++j) {
        const uint32_t half[2] = {b[2 * j], b[2 * j + 1]};
        ptx::mma_m16n8k16<bf16>(acc[j], a, half);
      }
    }
    if (F != kNoBarrierAfterUse) __syncthreads();
  }

  float top[2] = {-INFINITY, -INFINITY};  // of rows g and g + 8
  for (int j = 0; j < 2; ++j)
    for (int i = 0; i < 4; ++i)
      if (n0 + warp * 16 + j * 8 + q + (i & 1) < p.n) top[i >> 1] = fmaxf(top[i >> 1], acc[j][i]);
  for (int half = 0; half < 2; ++half) {
    if (F == kMissingLane && lane == 31) continue;
    top[half] = fmaxf(top[half], __shfl_xor_sync(cuda::kFullMask, top[half], 1));
    top[half] = fmaxf(top[half], __shfl_xor_sync(cuda::kFullMask, top[half], 2));
  }
  if ((lane & 3) == 0)
    for (int half = 0; half < 2; ++half) s.top[warp][g + 8 * half] = top[half];
  if (F == kSharedOverrun && t == 0) memory[sizeof(Shared)] = 0;

  // Through shared memory: a lane stores what other lanes hold.
  for (int j = 0; j < 2; ++j)
    for (int i = 0; i < 4; ++i)
      s.stage[warp][g + 8 * (F == kWrongRow ? 1 - (i >> 1) : i >> 1)][j * 8 + q + (i & 1)] = acc[j][i];
  if (F != kNoSyncWarp) __syncwarp();
  for (int i = lane; i < kRows * 16; i += 32) {
    const int r = i >> 4, column = n0 + warp * 16 + (i & 15);
    const int row = F == kSameRowTwice && blockIdx.y == 1 && r == 0 ? 0 : m0 + r;
    if ((F == kRowBoundOfStore || row < p.m) && column < p.n - (F == kUnwrittenOutput))
      p.c[int64_t(row) * p.n + column] = s.stage[warp][r][i & 15];
  }
  if (F == kUndefinedShift && p.m > 0) p.top[0] = float(1 << (p.k + 32 * (t == 0)));

  if (F != kNoBarrierInReduction) __syncthreads();
  if (t < kRows && m0 + t < p.m) {
    float most = s.top[0][t];
    for (int w = 1; w < 4; ++w) most = fmaxf(most, s.top[w][t]);
    p.partial[int64_t(blockIdx.x) * p.m + m0 + t] = most;
  }
  if (F != kNoFence) __threadfence();
  __syncthreads();
  if (t == 0) s.last = atomicAdd(&p.finished[blockIdx.y], 1u) + 1 == gridDim.x;
  __syncthreads();
  if (!s.last) return;
  if (F != kNoFence) __threadfence();
  if (t < kRows && m0 + t < p.m) {
    float most = -INFINITY;
    for (unsigned x = 0; x < gridDim.x; ++x) most = fmaxf(most, p.partial[int64_t(x) * p.m + m0 + t]);
    p.top[m0 + t] = most;
  }
}

template <int F>
cudaError_t run_from(const Params& p, int fault) {
  if constexpr (F == kCount) {
    return cudaErrorInvalidValue;
  } else {
    if (fault != F) return run_from<F + 1>(p, fault);
    const dim3 grid((p.n + kColumns - 1) / kColumns, (p.m + kRows - 1) / kRows);
    return cuda::launch(kernel<F>, grid, dim3(kThreads), sizeof(Shared), nullptr, p);
  }
}

cudaError_t run(const Params& p, int fault) {
  return run_from<0>(p, fault);
}

}  // namespace faults
