// Run-time choice of the instruction set. Host files (which include torch) use this header, kernel files do
// not.
//
// A kernel is a free function `void name(const Params&, int64_t begin, int64_t end)` in
// csrc/cpu/kernels/<file>.cpp. CMake compiles that file once for each level, each time in its own namespace.
// In the host file, at global scope:
//
//   CARRYOVER_KERNEL(name, Params)          // declares carryover::<level>::name for each level
//   ...
//   torch::stable::parallel_for(0, n, grain, [&](int64_t b, int64_t e) { CARRYOVER_CALL(name, params, b, e);
//   });
#pragma once

#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>

#include "params.h"

namespace carryover {

enum class Level : int { kPlain = 0, kAvx2 = 1, kAvx512 = 2, kAvx512Bf16 = 3 };

// The level in use: the best one that the machine has, or what CARRYOVER_CPU_CAPABILITY (default | avx2 |
// avx512 | avx512_bf16; read once) or set_level() says.
Level level();
int64_t cpu_level();                // op cpu_level() -> int
int64_t max_cpu_level();            // op max_cpu_level() -> int
void set_cpu_level(int64_t value);  // op set_cpu_level(int level) -> (); for tests

// Only for dtypes that Checker::floating lets through.
inline DType kernel_dtype(torch::headeronly::ScalarType t) {
  if (t == torch::headeronly::ScalarType::BFloat16) return DType::kBFloat16;
  return t == torch::headeronly::ScalarType::Double ? DType::kFloat64 : DType::kFloat32;
}

}  // namespace carryover

#define CARRYOVER_DECLARE(level, name, Params) \
  namespace carryover::level {                 \
  void name(const Params&, int64_t, int64_t);  \
  }

#ifdef CARRYOVER_X86
#define CARRYOVER_KERNEL(name, Params)    \
  CARRYOVER_DECLARE(plain, name, Params)  \
  CARRYOVER_DECLARE(avx2, name, Params)   \
  CARRYOVER_DECLARE(avx512, name, Params) \
  CARRYOVER_DECLARE(avx512_bf16, name, Params)
#define CARRYOVER_CALL(name, params, begin, end)                \
  switch (::carryover::level()) {                               \
    case ::carryover::Level::kAvx512Bf16:                       \
      ::carryover::avx512_bf16::name((params), (begin), (end)); \
      break;                                                    \
    case ::carryover::Level::kAvx512:                           \
      ::carryover::avx512::name((params), (begin), (end));      \
      break;                                                    \
    case ::carryover::Level::kAvx2:                             \
      ::carryover::avx2::name((params), (begin), (end));        \
      break;                                                    \
    default:                                                    \
      ::carryover::plain::name((params), (begin), (end));       \
  }
#else
#define CARRYOVER_KERNEL(name, Params) CARRYOVER_DECLARE(plain, name, Params)
#define CARRYOVER_CALL(name, params, begin, end) ::carryover::plain::name((params), (begin), (end))
#endif
