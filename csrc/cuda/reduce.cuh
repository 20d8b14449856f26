// Reductions and scans over a warp and over a block. `scratch` is shared memory for one value a warp.
#pragma once

#include "cuda/common.cuh"

namespace carryover {
namespace cuda {

// The largest value and its lowest index; NaN never wins.
struct Best {
  float value;
  int32_t at;
};

constexpr int32_t kNowhere = 0x7fffffff;

__device__ __forceinline__ Best no_best() {
  return {-INFINITY, kNowhere};
}

__device__ __forceinline__ Best better(Best a, Best b) {
  return b.value > a.value || (b.value == a.value && b.at < a.at) ? b : a;
}

struct Larger {
  __device__ Best operator()(Best a, Best b) const { return better(a, b); }
  __device__ float operator()(float a, float b) const { return a > b ? a : b; }
  __device__ int32_t operator()(int32_t a, int32_t b) const { return a > b ? a : b; }
};
struct Smaller {
  __device__ int32_t operator()(int32_t a, int32_t b) const { return a < b ? a : b; }
};
struct Plus {
  __device__ double operator()(double a, double b) const { return a + b; }
};

__device__ __forceinline__ Best exchange(Best x, int bits) {
  return {__shfl_xor_sync(kFullMask, x.value, bits), __shfl_xor_sync(kFullMask, x.at, bits)};
}
template <class T>
__device__ __forceinline__ T exchange(T x, int bits) {
  return __shfl_xor_sync(kFullMask, x, bits);
}

template <class T, class Op>
__device__ __forceinline__ T warp_reduce(T x, Op op) {
#pragma unroll
  for (int bits = 16; bits > 0; bits >>= 1) x = op(x, exchange(x, bits));
  return x;
}

// All threads get the result. Two barriers, so that `scratch` can be used again at once.
template <class T, class Op>
__device__ T block_reduce(T x, Op op, T* scratch) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
  x = warp_reduce(x, op);
  if (lane == 0) scratch[warp] = x;
  __syncthreads();
  x = scratch[0];
  for (int w = 1; w < warps; ++w) x = op(x, scratch[w]);
  __syncthreads();  // scratch is free again
  return x;
}

// Sums of the lanes before this one and up to it.
struct Prefix {
  double before, here;
};

__device__ __forceinline__ Prefix warp_scan(double x) {
  const int lane = threadIdx.x & 31;
  double sum = x;
#pragma unroll
  for (int by = 1; by < 32; by <<= 1) {
    const double left = __shfl_up_sync(kFullMask, sum, by);
    if (lane >= by) sum += left;
  }
  const double before = __shfl_up_sync(kFullMask, sum, 1);
  return {lane == 0 ? 0.0 : before, sum};
}

// The same over the threads of a block; the end of one thread is exactly the beginning of the next.
__device__ inline Prefix block_scan(double x, double* scratch) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const Prefix inside = warp_scan(x);
  if (lane == 31) scratch[warp] = inside.here;
  __syncthreads();
  double base = 0;
  for (int w = 0; w < warp; ++w) base += scratch[w];
  __syncthreads();
  return {base + inside.before, base + inside.here};
}

}  // namespace cuda
}  // namespace carryover
