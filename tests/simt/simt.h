// CUDA's device language for a host compiler: every CUDA thread of a block is a fiber on one OS thread, and a
// scheduler chooses which one runs (simt_rt.cpp). Kernel files reach this header through cuda/common.cuh when
// CARRYOVER_SIMT is defined. Only the parts of CUDA that kernels here use are defined; what is missing does
// not compile.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#undef __global__
#undef __device__
#undef __host__
#undef __shared__
#undef __constant__
#undef __forceinline__
#undef __noinline__
#undef __launch_bounds__
#undef __grid_constant__
#define __global__
#define __device__
#define __host__
#define __shared__ static_shared_memory_is_not_simulated_use_CARRYOVER_SMEM
#define __constant__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __grid_constant__
#define CARRYOVER_SMEM(name) unsigned char* const name = simt::dynamic_smem()

#ifdef __SANITIZE_THREAD__  // the exchange between lanes is the simulator's own doing, not a race
#define SIMT_EXCHANGE __attribute__((no_sanitize("thread")))
#else
#define SIMT_EXCHANGE
#endif

namespace simt {

struct Context {
  uint3 thread, block;
  dim3 block_size, grid_size;
};

Context& context();  // of the running fiber
unsigned char* dynamic_smem();
int lane();

// Runs the grid, block after block; throws std::runtime_error when a thread did something illegal.
using Body = void (*)(const void* capture);
void launch(dim3 grid, dim3 block, size_t smem, Body body, const void* capture);
template <class F>
void launch(dim3 grid, dim3 block, size_t smem, const F& f) {
  launch(grid, block, smem, [](const void* capture) { (*static_cast<const F*>(capture))(); }, &f);
}

[[noreturn]] void fault(const char* what);  // ends the launch with an error

void barrier(const char* file, int line);  // __syncthreads
void fence();                              // __threadfence

// All lanes of mask meet; the last one runs fn over the arguments of all (indexed by lane), then all go on.
enum class Collective { kShuffle, kVote, kSyncWarp, kLoadMatrix, kMma };
using Exchange = void (*)(void* const* args, uint32_t mask);
void collective(Collective op, uint32_t mask, void* arg, Exchange fn);

void copy_async(void* shared, const void* global, int bytes);  // the rest of 16 bytes becomes zero
void commit_async();
void wait_async(int groups);

template <class T>
struct Shuffle {
  T value, result;
  int source;
};

template <class T>
T shuffle(uint32_t mask, T value, int source) {
  Shuffle<T> me{value, value, source};
  collective(Collective::kShuffle, mask, &me, [](void* const* args, uint32_t m) SIMT_EXCHANGE {
    for (int l = 0; l < 32; ++l) {
      if (!(m >> l & 1)) continue;
      auto* x = static_cast<Shuffle<T>*>(args[l]);
      if (!(m >> x->source & 1)) fault("shuffle reads a lane outside its mask");
      x->result = static_cast<Shuffle<T>*>(args[x->source])->value;
    }
  });
  return me.result;
}

struct Vote {
  bool value;
  uint32_t result;
};

inline uint32_t ballot(uint32_t mask, bool value) {
  Vote me{value, 0};
  collective(Collective::kVote, mask, &me, [](void* const* args, uint32_t m) SIMT_EXCHANGE {
    uint32_t all = 0;
    for (int l = 0; l < 32; ++l)
      if (m >> l & 1) all |= static_cast<uint32_t>(static_cast<Vote*>(args[l])->value) << l;
    for (int l = 0; l < 32; ++l)
      if (m >> l & 1) static_cast<Vote*>(args[l])->result = all;
  });
  return me.result;
}

template <class To, class From>
To bits(From x) {
  static_assert(sizeof(To) == sizeof(From), "");
  To y;
  std::memcpy(&y, &x, sizeof y);
  return y;
}

template <class T, class Op>
T atomic(T* p, Op op) {
  T before, after;
  __atomic_load(p, &before, __ATOMIC_RELAXED);
  do {
    after = op(before);
  } while (!__atomic_compare_exchange(p, &before, &after, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
  return before;
}

}  // namespace simt

#define threadIdx (::simt::context().thread)
#define blockIdx (::simt::context().block)
#define blockDim (::simt::context().block_size)
#define gridDim (::simt::context().grid_size)
#define __syncthreads() ::simt::barrier(__FILE__, __LINE__)

inline void __syncwarp(uint32_t mask = ~0u) {
  simt::collective(simt::Collective::kSyncWarp, mask, nullptr, [](void* const*, uint32_t) {});
}
inline void __threadfence() {
  simt::fence();
}

template <class T>
T __shfl_sync(uint32_t mask, T v, int source, int width = 32) {
  return simt::shuffle(mask, v, (simt::lane() & ~(width - 1)) | (source & (width - 1)));
}
template <class T>
T __shfl_xor_sync(uint32_t mask, T v, int bits, int width = 32) {
  const int to = simt::lane() ^ bits;
  return simt::shuffle(mask, v, (to | (width - 1)) <= (simt::lane() | (width - 1)) ? to : simt::lane());
}
template <class T>
T __shfl_down_sync(uint32_t mask, T v, int by, int width = 32) {
  const int at = simt::lane() & (width - 1);
  return simt::shuffle(mask, v, at + by < width ? simt::lane() + by : simt::lane());
}
template <class T>
T __shfl_up_sync(uint32_t mask, T v, int by, int width = 32) {
  const int at = simt::lane() & (width - 1);
  return simt::shuffle(mask, v, at - by >= 0 ? simt::lane() - by : simt::lane());
}
inline uint32_t __ballot_sync(uint32_t mask, bool v) {
  return simt::ballot(mask, v);
}
inline int __any_sync(uint32_t mask, bool v) {
  return simt::ballot(mask, v) != 0;
}
inline int __all_sync(uint32_t mask, bool v) {
  return simt::ballot(mask, v) == mask;
}

template <class T>
T atomicAdd(T* p, T v) {
  return simt::atomic(p, [v](T x) { return x + v; });
}
template <class T>
T atomicMax(T* p, T v) {
  return simt::atomic(p, [v](T x) { return x > v ? x : v; });
}
template <class T>
T atomicMin(T* p, T v) {
  return simt::atomic(p, [v](T x) { return x < v ? x : v; });
}
template <class T>
T atomicExch(T* p, T v) {
  return simt::atomic(p, [v](T) { return v; });
}
inline unsigned atomicInc(unsigned* p, unsigned limit) {
  return simt::atomic(p, [limit](unsigned x) { return x >= limit ? 0u : x + 1; });
}

template <class T>
T __ldg(const T* p) {
  return *p;
}
template <class T>
T __ldcg(const T* p) {
  return *p;
}
template <class T>
void __stcs(T* p, T v) {
  *p = v;
}

using std::max;
using std::min;
inline float __expf(float x) {
  return std::exp(x);
}
inline float __logf(float x) {
  return std::log(x);
}
inline float __fdividef(float a, float b) {
  return a / b;
}
inline float __frcp_rn(float x) {
  return 1.0f / x;
}
inline float rsqrtf(float x) {
  return 1.0f / std::sqrt(x);
}
inline float __int_as_float(int x) {
  return simt::bits<float>(x);
}
inline int __float_as_int(float x) {
  return simt::bits<int>(x);
}
inline float __uint_as_float(unsigned x) {
  return simt::bits<float>(x);
}
inline unsigned __float_as_uint(float x) {
  return simt::bits<unsigned>(x);
}
inline int __popc(unsigned x) {
  return __builtin_popcount(x);
}
inline int __ffs(int x) {
  return __builtin_ffs(x);
}
inline int __clz(int x) {
  return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x));
}
inline void __trap() {
  simt::fault("__trap()");
}
