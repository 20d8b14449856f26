// Greedy matching and exact rejection sampling; see accept.h for the launches. Probabilities are float32,
// sums that decide a draw are double.
#pragma once

#include "cuda/accept.h"
#include "cuda/common.cuh"
#include "cuda/reduce.cuh"

namespace carryover {
namespace cuda {

template <class T>
struct alignas(16) Vector {
  static constexpr int kSize = 16 / sizeof(T);
  T x[kSize];
};

// f(index, logit) for the entries of [begin, end) that are this thread's, in ascending order; 16 bytes a load
// where the row's address allows.
template <class T, class F>
__device__ __forceinline__ void for_entries(const T* row, int64_t begin, int64_t end, F f) {
  int64_t i = begin;
  if (reinterpret_cast<uintptr_t>(row + begin) % 16 == 0) {
    constexpr int n = Vector<T>::kSize;
    const int64_t vectors = (end - begin) / n;
    for (int64_t v = threadIdx.x; v < vectors; v += blockDim.x) {
      const Vector<T> x = *reinterpret_cast<const Vector<T>*>(row + begin + v * n);
#pragma unroll
      for (int j = 0; j < n; ++j) f(begin + v * n + j, to_float(x.x[j]));
    }
    i = begin + vectors * n;
  }
  for (i += threadIdx.x; i < end; i += blockDim.x) f(i, to_float(row[i]));
}

template <class T>
__device__ __forceinline__ const T* logits_row(const AcceptParams& p, int64_t request, int64_t k) {
  return static_cast<const T*>(p.logits) + request * p.logits_batch + k * p.logits_row;
}

// Of one chunk of one row: grid (chunks, K + 1, B).
template <class T>
__global__ void __launch_bounds__(kAcceptThreads)
    accept_chunk_kernel(const __grid_constant__ AcceptParams p) {
  CARRYOVER_SMEM(memory);
  const int64_t request = blockIdx.z, k = blockIdx.y, begin = int64_t(blockIdx.x) * kAcceptChunk;
  const int64_t end = begin + kAcceptChunk < p.vocab ? begin + kAcceptChunk : p.vocab;
  const T* row = logits_row<T>(p, request, k);
  Best best = no_best();
  for_entries(row, begin, end, [&](int64_t i, float x) {
    if (x > best.value) best = {x, static_cast<int32_t>(i)};
  });
  best = block_reduce(best, Larger{}, reinterpret_cast<Best*>(memory));
  double sum = 0;
  if (p.inverse > 0 && best.at != kNowhere) {  // the chunk is read again: it is in the L1 or L2 cache
    float part = 0;
    for_entries(row, begin, end, [&](int64_t, float x) { part += expf((x - best.value) * p.inverse); });
    sum = block_reduce(double(part), Plus{}, reinterpret_cast<double*>(memory));
  }
  if (threadIdx.x == 0)
    p.chunks[(request * (p.drafts + 1) + k) * gridDim.x + blockIdx.x] = {best.value, best.at, sum};
}

// Largest logit of a row and its sum of exponentials.
struct RowLaw {
  float top;
  double total;
};

__device__ __forceinline__ double rescale(float top, float to, float inverse) {
  return top == -INFINITY ? 0.0f : expf((top - to) * inverse);
}

__device__ inline RowLaw row_law(const AcceptChunk* chunks, int64_t count, float inverse) {
  RowLaw law = {-INFINITY, 0};
  for (int64_t c = 0; c < count; ++c) law.top = chunks[c].top > law.top ? chunks[c].top : law.top;
  for (int64_t c = 0; c < count; ++c) law.total += rescale(chunks[c].top, law.top, inverse) * chunks[c].sum;
  return law;
}

__device__ __forceinline__ float probability(float x, const RowLaw& law, float inverse) {
  return expf((x - law.top) * inverse) * static_cast<float>(1.0 / law.total);
}

// One block a request: how many drafts hold; greedy also the next token. Threads take rows.
template <class T>
__global__ void __launch_bounds__(kAcceptThreads)
    accept_judge_kernel(const __grid_constant__ AcceptParams p) {
  CARRYOVER_SMEM(memory);
  const int64_t request = blockIdx.x, count = accept_chunks(p.vocab);
  const AcceptChunk* chunks = p.chunks + request * (p.drafts + 1) * count;
  const int64_t* tokens = p.draft_tokens + request * p.drafts;
  int32_t stop = static_cast<int32_t>(p.drafts);  // the first draft that does not hold
  for (int64_t k = threadIdx.x; k < p.drafts && k < stop; k += blockDim.x) {
    const int64_t token = tokens[k];
    bool held = token >= 0 && token < p.vocab;
    if (held && p.inverse > 0) {
      const RowLaw law = row_law(chunks + k * count, count, p.inverse);
      const float q = p.draft_probs ? p.draft_probs[request * p.probs_batch + k * p.probs_row + token] : 1.0f;
      const float x = to_float(logits_row<T>(p, request, k)[token]);
      held = p.uniforms[request * (p.drafts + 1) + k] * q < probability(x, law, p.inverse);
    } else if (held) {
      Best best = no_best();
      for (int64_t c = 0; c < count; ++c)
        best = better(best, {chunks[k * count + c].top, chunks[k * count + c].at});
      held = token == (best.at == kNowhere ? 0 : best.at);
    }
    if (!held) stop = static_cast<int32_t>(k);
  }
  stop = block_reduce(stop, Smaller{}, reinterpret_cast<int32_t*>(memory));
  if (threadIdx.x != 0) return;
  p.num_accepted[request] = stop;
  if (p.inverse > 0) return;
  Best best = no_best();
  for (int64_t c = 0; c < count; ++c)
    best = better(best, {chunks[stop * count + c].top, chunks[stop * count + c].at});
  p.next_token[request] = best.at == kNowhere ? 0 : best.at;
}

// The law of the next token, not normalised: p, or what q leaves of it.
template <class T>
struct NextLaw {
  const T* logits;
  const float* q;   // null: one-hot at `refused`, or nothing to subtract
  int64_t refused;  // -1: nothing to subtract
  float inverse;
  RowLaw law;

  __device__ NextLaw(const AcceptParams& p, int64_t request) : q(nullptr), refused(-1), inverse(p.inverse) {
    const int64_t k = p.num_accepted[request], count = accept_chunks(p.vocab);
    logits = logits_row<T>(p, request, k);
    law = row_law(p.chunks + (request * (p.drafts + 1) + k) * count, count, p.inverse);
    if (k == p.drafts) return;
    const int64_t token = p.draft_tokens[request * p.drafts + k];
    if (token < 0 || token >= p.vocab) return;  // padding
    refused = token;
    if (p.draft_probs) q = p.draft_probs + request * p.probs_batch + k * p.probs_row;
  }

  __device__ float residual(int64_t i, float x) const {
    const float w = probability(x, law, inverse);
    if (q == nullptr) return i == refused ? 0.0f : w;
    return w > q[i] ? w - q[i] : 0.0f;
  }
};

// What is left of each chunk of the deciding row: grid (chunks, B).
template <class T>
__global__ void __launch_bounds__(kAcceptThreads, 4)
    accept_residual_kernel(const __grid_constant__ AcceptParams p) {
  CARRYOVER_SMEM(memory);
  const int64_t request = blockIdx.y, begin = int64_t(blockIdx.x) * kAcceptChunk;
  const int64_t end = begin + kAcceptChunk < p.vocab ? begin + kAcceptChunk : p.vocab;
  const NextLaw<T> next(p, request);
  float part = 0;
  if (next.refused >= 0)
    for_entries(next.logits, begin, end, [&](int64_t i, float x) { part += next.residual(i, x); });
  const double sum = block_reduce(double(part), Plus{}, reinterpret_cast<double*>(memory));
  if (threadIdx.x == 0) p.residual[request * gridDim.x + blockIdx.x] = sum;
}

// One block a request: the first entry whose cumulated weight is above u times the total.
template <class T>
__global__ void __launch_bounds__(kAcceptThreads) accept_draw_kernel(const __grid_constant__ AcceptParams p) {
  CARRYOVER_SMEM(memory);
  double* scratch = reinterpret_cast<double*>(memory);
  const int64_t request = blockIdx.x, count = accept_chunks(p.vocab), k = p.num_accepted[request];
  const NextLaw<T> next(p, request);
  const double* residual = p.residual + request * count;
  double total = 0;
  if (next.refused >= 0)
    for (int64_t c = 0; c < count; ++c) total += residual[c];
  const bool left = total > 0;  // else p itself: nothing is refused, or p equals q up to rounding
  const AcceptChunk* chunks = p.chunks + (request * (p.drafts + 1) + k) * count;
  const double norm = 1.0 / next.law.total;
  const auto weight = [&](int64_t c) {
    return left ? residual[c] : rescale(chunks[c].top, next.law.top, p.inverse) * chunks[c].sum * norm;
  };
  if (!left) {
    total = 0;
    for (int64_t c = 0; c < count; ++c) total += weight(c);
  }
  const double target = double(p.uniforms[request * (p.drafts + 1) + p.drafts]) * total;
  // Every thread finds the same chunk. None: u is at its very end, and the last one that weighs anything is
  // meant.
  double before = 0, cumulated = 0;
  int64_t chunk = 0;
  for (int64_t c = 0; c < count; ++c) {
    const double here = weight(c);
    if (!(here > 0)) continue;
    chunk = c, before = cumulated;
    cumulated += here;
    if (cumulated > target) break;
  }

  const int64_t begin = chunk * kAcceptChunk,
                end = begin + kAcceptChunk < p.vocab ? begin + kAcceptChunk : p.vocab;
  const int64_t share =
      ceil_div<int64_t>(end - begin, blockDim.x);  // contiguous: the order of the entries counts
  const int64_t first = begin + threadIdx.x * share, behind = first + share < end ? first + share : end;
  const auto entry = [&](int64_t i) {
    const float x = to_float(next.logits[i]);
    return left ? next.residual(i, x) : probability(x, next.law, p.inverse);
  };
  double mine = 0;
  for (int64_t i = first; i < behind; ++i) mine += entry(i);
  double inside = before + block_scan(mine, scratch).before;
  int32_t found = kNowhere, last = -1;
  for (int64_t i = first; i < behind; ++i) {
    const float w = entry(i);
    if (!(w > 0)) continue;
    last = static_cast<int32_t>(i);
    inside += w;
    if (inside > target && found == kNowhere) found = last;
  }
  found = block_reduce(found, Smaller{}, reinterpret_cast<int32_t*>(memory));
  last = block_reduce(last, Larger{}, reinterpret_cast<int32_t*>(memory));
  // A chunk's sum and that of its entries differ by rounding: then the last entry of the chunk is the one
  // meant.
  if (threadIdx.x == 0) p.next_token[request] = found != kNowhere ? found : last < 0 ? 0 : last;
}

}  // namespace cuda
}  // namespace carryover
