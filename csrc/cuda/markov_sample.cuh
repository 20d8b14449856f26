// Left-to-right sampling with a first-order low-rank bias; see markov_sample.h for the launches.
//
// The columns of the vocabulary are the rows of the mma (16 of markov_w2), the requests its columns (8 rows
// of markov_w1): a batch of 8 fills the instruction.
#pragma once

#include "cuda/common.cuh"
#include "cuda/markov_sample.h"
#include "cuda/ptx.cuh"
#include "cuda/reduce.cuh"
#include "philox.h"

namespace carryover {
namespace cuda {

template <class T>
using MarkovStage = T[kMarkovColumns][kMarkovDepth + kMarkovPad];

// Rows of the latent, zero-filled: depth is a multiple of 16.
__host__ __device__ constexpr int64_t markov_depth(int64_t rank) {
  return (rank + 15) / 16 * 16;
}

// The token before the step, or -1: padding, and whatever has no row in w1.
__device__ __forceinline__ int64_t token_before(const MarkovParams& p, int64_t request) {
  if (p.prev[request] < 0) return -1;
  const int64_t token = p.step == 0 ? p.prev[request] : p.out_tokens[request * p.steps + p.step - 1];
  return token < p.tokens ? token : -1;
}

// latent[i] = w1[token before request first + i], zeros for padding. Not yet visible to other threads.
template <class T>
__device__ void load_latents(const MarkovParams& p, T* latent, int64_t first, int count, int rows) {
  const int64_t depth = markov_depth(p.rank), stride = depth + kMarkovPad;
  for (int i = 0; i < rows; ++i) {
    const int64_t token = i < count ? token_before(p, first + i) : -1;
    const T* row = static_cast<const T*>(p.w1) + token * p.rank;
    for (int64_t c = threadIdx.x; c < depth; c += blockDim.x)
      latent[i * stride + c] = token >= 0 && c < p.rank ? row[c] : from_float<T>(0);
  }
}

// Columns [column, column + rows) of markov_w2 from depth k0 on into a stage, zeros behind its ends.
template <class T>
__device__ void load_columns(const MarkovParams& p, MarkovStage<T>& stage, int64_t column, int rows,
                             int64_t k0) {
  const T* w2 = static_cast<const T*>(p.w2);
  if (p.rank % 8 == 0 && reinterpret_cast<uintptr_t>(w2) % 16 == 0) {
    for (int i = threadIdx.x; i < rows * (kMarkovDepth / 8); i += blockDim.x) {
      const int r = i / (kMarkovDepth / 8), c = i % (kMarkovDepth / 8) * 8;
      const bool valid = column + r < p.vocab && k0 + c < p.rank;
      ptx::cp_async_16(&stage[r][c], valid ? w2 + (column + r) * p.rank + k0 + c : w2, valid);
    }
  } else {
    for (int i = threadIdx.x; i < rows * kMarkovDepth; i += blockDim.x) {
      const int r = i / kMarkovDepth, c = i % kMarkovDepth;
      const bool valid = column + r < p.vocab && k0 + c < p.rank;
      stage[r][c] = valid ? w2[(column + r) * p.rank + k0 + c] : from_float<T>(0);
    }
  }
}

// Adds the products of one stage: this warp's 32 columns, rows `row` on of the stage, times kTiles * 8
// requests.
template <class T, int kTiles>
__device__ __forceinline__ void multiply(const MarkovStage<T>& stage, int row, const T* latent, int64_t depth,
                                         int64_t k0, float (&acc)[2][kTiles][4]) {
  const int lane = threadIdx.x & 31;
  const int64_t stride = depth + kMarkovPad;
  const int steps = static_cast<int>((depth - k0 < kMarkovDepth ? depth - k0 : kMarkovDepth) / 16);
  for (int s = 0; s < steps; ++s) {
    uint32_t a[2][4];
#pragma unroll
    for (int m = 0; m < 2; ++m)
      ptx::ldmatrix_x4(a[m], &stage[row + m * 16 + (lane & 15)][s * 16 + (lane >> 4) * 8]);
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      uint32_t b[2];
      ptx::ldmatrix_x2(b, latent + (n * 8 + (lane & 7)) * stride + k0 + s * 16 + ((lane >> 3) & 1) * 8);
#pragma unroll
      for (int m = 0; m < 2; ++m) ptx::mma_m16n8k16<T>(acc[m][n], a[m], b);
    }
  }
}

// NaN becomes -inf: it never wins.
__device__ __forceinline__ float add_bias(float base, float bias) {
  const float x = base + bias;
  return x == x ? x : -INFINITY;
}

// One step for kTiles * 8 requests (blockIdx.y): block x takes tiles x, x + gridDim.x, ... of the columns.
template <class T, int kTiles>
__global__ void __launch_bounds__(kMarkovThreads) markov_step_kernel(const __grid_constant__ MarkovParams p) {
  CARRYOVER_SMEM(memory);
  MarkovStage<T>* stages = reinterpret_cast<MarkovStage<T>*>(memory);
  T* latent = reinterpret_cast<T*>(stages + kMarkovStages);
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, q = (lane & 3) * 2;
  const int64_t depth = markov_depth(p.rank), first = int64_t(blockIdx.y) * kTiles * 8;
  const int count = static_cast<int>(p.batch - first < kTiles * 8 ? p.batch - first : kTiles * 8);
  const int parts = static_cast<int>(ceil_div<int64_t>(depth, kMarkovDepth));
  const int64_t tiles = ceil_div<int64_t>(p.vocab, kMarkovColumns), segments = markov_segments(p.vocab);
  const int64_t mine = blockIdx.x < tiles ? (tiles - 1 - blockIdx.x) / gridDim.x + 1 : 0;

  const auto fetch = [&](int64_t item) {  // item: a part of the depth of one of this block's tiles
    if (item < mine * parts) {
      const int64_t tile = blockIdx.x + item / parts * gridDim.x;
      load_columns<T>(p, stages[item % kMarkovStages], tile * kMarkovColumns, kMarkovColumns,
                      item % parts * kMarkovDepth);
    }
    ptx::cp_async_commit();
  };
  for (int i = 0; i < kMarkovStages - 1; ++i) fetch(i);
  load_latents<T>(p, latent, first, count, kTiles * 8);

  float acc[2][kTiles][4] = {}, base[2][kTiles][4];
  for (int64_t item = 0; item < mine * parts; ++item) {
    const int part = static_cast<int>(item % parts);
    const int64_t segment = (blockIdx.x + item / parts * gridDim.x) * 4 + warp;
    const auto column = [&](int m, int i) { return segment * kMarkovSegment + m * 16 + g + 8 * (i >> 1); };
    if (part == 0) {  // early: these loads have the whole tile to arrive
#pragma unroll
      for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int n = 0; n < kTiles; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int request = n * 8 + q + (i & 1);
            const T* row =
                static_cast<const T*>(p.logits) + (first + request) * p.logits_batch + p.step * p.logits_step;
            base[m][n][i] =
                request < count && column(m, i) < p.vocab ? to_float(row[column(m, i)]) : -INFINITY;
          }
    }
    ptx::cp_async_wait<kMarkovStages - 2>();
    __syncthreads();  // this stage has arrived, and the one that fetch() overwrites has been read
    fetch(item + kMarkovStages - 1);
    multiply<T, kTiles>(stages[item % kMarkovStages], warp * kMarkovSegment, latent, depth,
                        int64_t(part) * kMarkovDepth, acc);
    if (part + 1 < parts) continue;

#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int request = n * 8 + q + e;
        float x[4];
        Best best = no_best();
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int m = j >> 1, i = (j & 1) * 2 + e;
          x[j] = add_bias(base[m][n][i], acc[m][n][i]);
          acc[m][n][i] = 0;
          if (x[j] > best.value) best = {x[j], static_cast<int32_t>(column(m, i))};
          if (p.probs && request < count && column(m, i) < p.vocab)
            p.probs[((first + request) * p.steps + p.step) * p.vocab + column(m, i)] = x[j];
        }
#pragma unroll
        for (int bits = 4; bits < 32; bits <<= 1) best = better(best, exchange(best, bits));
        MarkovPartial partial;
        partial.top = best.value;
        if (p.inverse > 0) {
          float sum = 0;
#pragma unroll
          for (int j = 0; j < 4; ++j)
            sum += best.at == kNowhere ? 0.0f : expf((x[j] - best.value) * p.inverse);
#pragma unroll
          for (int bits = 4; bits < 32; bits <<= 1) sum += exchange(sum, bits);
          partial.sum = sum;
        } else {
          partial.at = best.at;
        }
        if (g == 0 && request < count && segment < segments)
          p.partials[(first + request) * segments + segment] = partial;
      }
  }
}

// Shared memory of the draw: the stage comes first, then the latent of one request and seven rows of zeros.
template <class T>
struct alignas(16) MarkovDraw {
  MarkovStage<T> stage;
  double scratch[kMarkovThreads / 32];
  float x[kMarkovSegment];
  double before;    // weight of all segments before the chosen one
  int64_t segment;  // the chosen one
};

// The logits of the 32 columns of a segment, by the instructions of markov_step_kernel: the same bits.
template <class T>
__device__ void segment_logits(const MarkovParams& p, MarkovDraw<T>& s, T* latent, int64_t request,
                               int64_t segment) {
  const int lane = threadIdx.x & 31, g = lane >> 2;
  const int64_t depth = markov_depth(p.rank);
  load_latents<T>(p, latent, request, 1, 8);
  float acc[2][1][4] = {};
  for (int64_t k0 = 0; k0 < depth; k0 += kMarkovDepth) {
    load_columns<T>(p, s.stage, segment * kMarkovSegment, kMarkovSegment, k0);
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    __syncthreads();
    if (threadIdx.x < 32) multiply<T, 1>(s.stage, 0, latent, depth, k0, acc);
    __syncthreads();
  }
  if (threadIdx.x < 32 && (lane & 3) == 0) {  // the request is column 0 of the mma
    const T* row = static_cast<const T*>(p.logits) + request * p.logits_batch + p.step * p.logits_step;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int at = (j >> 1) * 16 + g + 8 * (j & 1);
      const int64_t column = segment * kMarkovSegment + at;
      s.x[at] = column < p.vocab ? add_bias(to_float(row[column]), acc[j >> 1][0][(j & 1) * 2]) : -INFINITY;
    }
  }
  __syncwarp();
}

// u of this step. Seeds and offsets are read here, on the device: a replayed graph draws with new ones.
__device__ __forceinline__ double uniform(const MarkovParams& p, int64_t request) {
  if (!p.seeds) return p.uniforms[request * p.steps + p.step];
  const uint64_t offset = p.offsets ? p.offsets[request] : 0;
  return philox_uniform(p.seeds[request], offset + p.step);
}

// One block a request: the token of this step.
template <class T>
__global__ void __launch_bounds__(kMarkovThreads) markov_draw_kernel(const __grid_constant__ MarkovParams p) {
  CARRYOVER_SMEM(memory);
  MarkovDraw<T>& s = *reinterpret_cast<MarkovDraw<T>*>(memory);
  T* latent = reinterpret_cast<T*>(memory + sizeof(MarkovDraw<T>));
  const int64_t request = blockIdx.x, at = request * p.steps + p.step, segments = markov_segments(p.vocab);
  const MarkovPartial* partials = p.partials + request * segments;
  const auto write = [&](int64_t column, float probability) {
    p.out_tokens[at] = p.d2t ? p.d2t[column] : column;
    p.token_probs[at] = probability;
  };
  if (p.prev[request] < 0) {
    if (threadIdx.x == 0) p.out_tokens[at] = -1, p.token_probs[at] = 0;
    return;
  }

  Best best = no_best();
  for (int64_t i = threadIdx.x; i < segments; i += blockDim.x)
    best = better(best, {partials[i].top, p.inverse > 0 ? 0 : partials[i].at});
  best = block_reduce(best, Larger{}, reinterpret_cast<Best*>(s.scratch));
  if (!(p.inverse > 0) || best.value == -INFINITY) {
    if (threadIdx.x != 0) return;
    write(best.at == kNowhere ? 0 : best.at, 1);
    if (p.inverse > 0) {
      write(0, 1);
      p.scales[request] = {0, 0};
    }
    return;
  }

  // Each thread owns a run of segments: the order of the columns counts.
  const float top = best.value;
  const auto weight = [&](int64_t i) {
    return partials[i].top == -INFINITY ? 0.0
                                        : double(expf((partials[i].top - top) * p.inverse)) * partials[i].sum;
  };
  const int64_t share = ceil_div<int64_t>(segments, blockDim.x), begin = threadIdx.x * share;
  const int64_t end = begin + share < segments ? begin + share : segments;
  double mine = 0;
  for (int64_t i = begin; i < end; ++i) mine += weight(i);
  const Prefix run = block_scan(mine, s.scratch);
  const double total = block_reduce(mine, Plus{}, s.scratch);
  const double target = uniform(p, request) * total;
  int32_t found = kNowhere,
          last = -1;  // this thread's first segment above the target, its last with a weight
  double before = run.before, found_before = 0, last_before = 0;
  for (int64_t i = begin; i < end; ++i) {
    const double here = weight(i);
    if (!(here > 0)) continue;
    last = static_cast<int32_t>(i), last_before = before;
    if (before + here > target && found == kNowhere) found = last, found_before = before;
    before += here;
  }
  const int32_t first = block_reduce(found, Smaller{}, reinterpret_cast<int32_t*>(s.scratch));
  const int32_t final = block_reduce(last, Larger{}, reinterpret_cast<int32_t*>(s.scratch));
  // None is above: u is at its very end, and the last segment that weighs anything is meant.
  if (first != kNowhere ? found == first : last == final)
    s.segment = first != kNowhere ? first : final, s.before = first != kNowhere ? found_before : last_before;
  __syncthreads();

  segment_logits<T>(p, s, latent, request, s.segment);
  if (threadIdx.x >= 32) return;
  const int lane = threadIdx.x;
  const float e = expf((s.x[lane] - top) * p.inverse);
  const double inside = s.before + warp_scan(e).here;
  const unsigned weighty = __ballot_sync(kFullMask, e > 0);
  const unsigned above = __ballot_sync(kFullMask, e > 0 && inside > target);
  // A segment's sum and that of its columns differ by rounding: then its last column is the one meant.
  const int chosen = above ? __ffs(static_cast<int>(above)) - 1 : 31 - __clz(static_cast<int>(weighty));
  const float inverse_total = static_cast<float>(1.0 / total);
  if (lane == chosen) write(s.segment * kMarkovSegment + lane, e * inverse_total);
  if (lane == 0) p.scales[request] = {top, inverse_total};
}

// Logits become q, in place: grid (blocks of columns, B).
__global__ void __launch_bounds__(kMarkovThreads)
    markov_scale_kernel(const __grid_constant__ MarkovParams p) {
  const int64_t request = blockIdx.y;
  float* row = p.probs + (request * p.steps + p.step) * p.vocab;
  const bool padding = p.prev[request] < 0;
  const MarkovScale scale = padding ? MarkovScale{0, 0} : p.scales[request];
  for (int64_t v = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; v < p.vocab;
       v += int64_t(gridDim.x) * blockDim.x)
    row[v] = padding                    ? 0.0f
             : scale.inverse_total == 0 ? (v == 0 ? 1.0f : 0.0f)
                                        : expf((row[v] - scale.top) * p.inverse) * scale.inverse_total;
}

}  // namespace cuda
}  // namespace carryover
