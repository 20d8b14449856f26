// Vectors of floats and the few functions of them that the kernels need, written with the vector types of GCC
// and Clang: the same source gives SSE2, AVX2, AVX-512 and NEON code. Only bfloat16 products use an
// intrinsic.
#pragma once

#include <stdint.h>
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

#ifndef CARRYOVER_LEVEL
#define CARRYOVER_LEVEL plain
#endif

// The product and the sum of a multiply-add are one instruction where the machine has it.
#ifdef __clang__
#pragma clang fp contract(fast)
#endif

namespace carryover::CARRYOVER_LEVEL {
namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

template <int W>
struct VecOf {
  typedef float F __attribute__((vector_size(W * 4)));
  typedef int32_t I __attribute__((vector_size(W * 4)));
  typedef float LooseF __attribute__((vector_size(W * 4), aligned(4), may_alias));
  typedef int32_t LooseI __attribute__((vector_size(W * 4), aligned(4), may_alias));
};
template <int W>
using Vec = typename VecOf<W>::F;
template <int W>
using IVec = typename VecOf<W>::I;

template <int W>
inline Vec<W> load(const float* p) {
  return *reinterpret_cast<const typename VecOf<W>::LooseF*>(p);
}
template <int W>
inline IVec<W> iload(const int32_t* p) {
  return *reinterpret_cast<const typename VecOf<W>::LooseI*>(p);
}
template <int W>
inline void store(float* p, Vec<W> x) {
  *reinterpret_cast<typename VecOf<W>::LooseF*>(p) = x;
}
template <int W>
inline Vec<W> splat(float x) {
  return x - Vec<W>{};  // exact, and one broadcast
}
template <int W>
inline IVec<W> isplat(int32_t x) {
  return x - IVec<W>{};
}

// e^x for x <= 0, to about one unit in the last place (kRough: to 4e-6, below the rounding of bfloat16).
// Below kLeast it stays at about 2^-126. x = n ln 2 + f ln 2: the integer n lands in the low bits of x
// log2(e) + 1.5 * 2^23.
constexpr float kLeast = -87.33f;

template <int W, bool kRough>
inline Vec<W> exp(Vec<W> x) {
  const Vec<W> least = splat<W>(kLeast), magic = splat<W>(12582912.f), log2e = splat<W>(1.44269504f);
  x = x > least ? x : least;
  const Vec<W> t = x * log2e + magic, n = t - magic;
  Vec<W> f = x * log2e - n, y;
  if constexpr (kRough) {
    y = f * 0.009570102207362652f + 0.05591786280274391f;
    y = y * f + 0.240247443318367f;
    y = y * f + 0.6931217908859253f;
    y = y * f + 0.9999992847442627f;
  } else {
    f = f + x * 1.92596299e-8f;  // what the float log2(e) lacks
    y = f * 0.0001534581242594868f + 0.0013399932067841291f;
    y = y * f + 0.009618489071726799f;
    y = y * f + 0.05550328642129898f;
    y = y * f + 0.24022646248340607f;
    y = y * f + 0.6931471824645996f;
    y = y * f + 1.f;
  }
  return (Vec<W>)((IVec<W>)y + ((IVec<W>)t << 23));
}

// tanh to a few units in the last place: x * P(x^2) near 0, 1 - 2 / (e^(2x) + 1) elsewhere.
template <int W>
inline Vec<W> tanh(Vec<W> x) {
  const Vec<W> s = x * x, size = x < Vec<W>{} ? -x : x;
  Vec<W> p = s * -0.005852168425917625f + 0.020753629505634308f;
  p = p * s + -0.05376870557665825f;
  p = p * s + 0.13331688940525055f;
  p = p * s + -0.3333328366279602f;
  p = p * s + 1.0f;
  const Vec<W> e = exp<W, false>(size * -2.f);  // e^(-2 |x|)
  const Vec<W> far = (1.f - e) / (1.f + e);
  return size < splat<W>(0.6f) ? x * p : (x < Vec<W>{} ? -far : far);
}

inline float to_float(float x) {
  return x;
}
inline float to_float(uint16_t x) {
  const uint32_t bits = uint32_t(x) << 16;
  float y;
  __builtin_memcpy(&y, &bits, 4);
  return y;
}

template <typename T>
inline T from_float(float x);
template <>
inline float from_float<float>(float x) {
  return x;
}
template <>
inline uint16_t from_float<uint16_t>(float x) {  // to the nearest, ties to even; NaN stays NaN
  uint32_t bits;
  __builtin_memcpy(&bits, &x, 4);
  return x != x ? uint16_t(0x7fc0) : uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

template <typename T>
inline void widen(const T* x, float* y, int n) {
  for (int i = 0; i < n; ++i) y[i] = to_float(x[i]);
}

// Two neighbouring bfloat16.
inline uint32_t load_pair(const void* p) {
  uint32_t x;
  __builtin_memcpy(&x, p, 4);
  return x;
}

#ifdef __AVX512BF16__
template <int W>
inline IVec<W> splat_pair(const int32_t* p) {
  int32_t x;
  __builtin_memcpy(&x, p, 4);
  return isplat<W>(x);
}

// sum + a.even * b.even + a.odd * b.odd
template <int W>
inline Vec<W> dot_bf16(Vec<W> sum, Vec<W> a, IVec<W> b) {
  if constexpr (W == 16)
    return (Vec<W>)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
  else
    return (Vec<W>)_mm256_dpbf16_ps((__m256)sum, (__m256bh)a, (__m256bh)b);
}

// Lane i of the result holds bfloat16(a[i]) in the low and bfloat16(b[i]) in the high half.
alignas(64) const uint16_t kInterleave16[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
alignas(32) const uint16_t kInterleave8[16] = {0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15};

template <int W>
inline Vec<W> pack_bf16(Vec<W> a, Vec<W> b) {
  if constexpr (W == 16) {
    const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a);
    return (Vec<W>)_mm512_permutexvar_epi16(_mm512_load_si512(kInterleave16), both);
  } else {
    const __m256i both = (__m256i)_mm256_cvtne2ps_pbh((__m256)b, (__m256)a);
    return (Vec<W>)_mm256_permutexvar_epi16(_mm256_load_si256((const __m256i*)kInterleave8), both);
  }
}
#endif

}  // namespace
}  // namespace carryover::CARRYOVER_LEVEL
