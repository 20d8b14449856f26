// What every kernel file includes: the types, dynamic shared memory, the launch. The same file is compiled by
// nvcc and, with CARRYOVER_SIMT, by a host compiler that runs every CUDA thread as a fiber (tests/simt).
//
// Rules that keep both happy: shared memory is dynamic only (CARRYOVER_SMEM), block sizes are multiples of
// 32, PTX lives in ptx.cuh, kernels are launched with launch().
#pragma once

#ifdef CARRYOVER_SIMT
#include "simt.h"
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#define CARRYOVER_SMEM(name) extern __shared__ __align__(128) unsigned char name[]
#endif

#include <stdint.h>

namespace carryover {
namespace cuda {

using bf16 = __nv_bfloat16;
using fp16 = __half;

constexpr unsigned kFullMask = 0xffffffffu;

__device__ __forceinline__ float to_float(float x) {
  return x;
}
__device__ __forceinline__ float to_float(bf16 x) {
  return __bfloat162float(x);
}
__device__ __forceinline__ float to_float(fp16 x) {
  return __half2float(x);
}

template <class T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ bf16 from_float<bf16>(float x) {
  return __float2bfloat16(x);
}
template <>
__device__ __forceinline__ fp16 from_float<fp16>(float x) {
  return __float2half(x);
}

template <class T>
__host__ __device__ constexpr T ceil_div(T a, T b) {
  return (a + b - 1) / b;
}

// More dynamic shared memory than this must be asked for; no supported GPU has more than kSmemMax for a block
// (sm_90, sm_100; sm_80 has 163 KiB, sm_120 99 KiB).
constexpr size_t kSmemDefault = 48 << 10, kSmemMax = 227 << 10;

// Launches on the stream and returns what the launch said. No synchronisation, no allocation: capture-safe.
template <class... Params, class... Args>
cudaError_t launch(void (*kernel)(Params...), dim3 grid, dim3 block, size_t smem, cudaStream_t stream,
                   const Args&... args) {
#ifdef CARRYOVER_SIMT
  (void)stream;
  simt::launch(grid, block, smem, [&] { kernel(args...); });
  return cudaSuccess;
#else
  if (smem > kSmemDefault) {
    const cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(smem));
    if (error != cudaSuccess) return error;
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = grid, config.blockDim = block;
  config.dynamicSmemBytes = smem, config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, args...);
#endif
}

}  // namespace cuda
}  // namespace carryover
