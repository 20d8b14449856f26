// gather_rejected: a copy, so rows move as bytes whatever their dtype. One warp a row of the result.
#pragma once

#include "cuda/common.cuh"
#include "cuda/gather_rejected.h"

namespace carryover {
namespace cuda {

constexpr int kGatherThreads = 128;

// T is the widest type that sizes and addresses allow.
template <class T>
__global__ void __launch_bounds__(kGatherThreads)
    gather_rejected_kernel(const __grid_constant__ GatherParams p) {
  const int lane = threadIdx.x & 31;
  const int64_t out = int64_t(blockIdx.x) * (kGatherThreads / 32) + (threadIdx.x >> 5);
  if (out >= p.requests * p.max_rejected) return;
  const int64_t request = out / p.max_rejected, j = out % p.max_rejected;
  const int32_t accepted = p.num_accepted[request];
  const int64_t begin = p.row_start[request], end = p.row_start[request + 1], first = begin + accepted + 1;
  int64_t count = accepted < 0 || begin < 0 || end > p.total ? 0 : end - first;
  count = count < 0 ? 0 : count > p.max_rejected ? p.max_rejected : count;
  const bool live = j < count;
  if (lane == 0) {
    p.index[out] = live ? static_cast<int32_t>(first + j) : -1;
    if (j == 0) p.lens[request] = static_cast<int32_t>(count);
  }
  const T* from = reinterpret_cast<const T*>(static_cast<const char*>(p.hidden) +
                                             (live ? (first + j) * p.stride_bytes : 0));
  T* to = reinterpret_cast<T*>(static_cast<char*>(p.rows) + out * p.width_bytes);
  const int64_t n = p.width_bytes / int64_t(sizeof(T));
  for (int64_t i = lane; i < n; i += 32) to[i] = live ? from[i] : T{};
}

// R = 0: only the lengths.
__global__ void __launch_bounds__(kGatherThreads) no_rejected_kernel(const __grid_constant__ GatherParams p) {
  const int64_t i = int64_t(blockIdx.x) * kGatherThreads + threadIdx.x;
  if (i < p.requests) p.lens[i] = 0;
}

}  // namespace cuda
}  // namespace carryover
