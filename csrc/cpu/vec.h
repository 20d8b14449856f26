// SIMD primitives shared by the CPU kernels, and how the choice at run time works.
//
// A kernel file (csrc/cpu/kernels/*.cpp, listed in CMakeLists.txt under KERNELS) is compiled once for each
// level: plain (any architecture), avx2 (+FMA), avx512 (F, BW, VL, DQ) and avx512_bf16. CMake sets
// CARRYOVER_LEVEL to the level's name and the compiler flags of that level. Everything here and in the kernel
// file lives in `namespace carryover { namespace CARRYOVER_LEVEL { ... } }`, so that the linker never merges
// code of two levels. For the same reason kernel files include only this header, params.h and C headers: an
// inline function of the C++ library compiled with AVX-512 could be the copy that an older machine ends up
// calling. The host file calls the kernel by CARRYOVER_CALL; see csrc/cpu/dispatch.h.
//
// `Vec` holds Vec::kWidth floats: 16 (AVX-512), 8 (AVX2), 8 in plain C++ (left to the compiler: SSE2, NEON).
#pragma once

#include <float.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#ifndef CARRYOVER_LEVEL
#error "compile this file through the KERNELS list of CMakeLists.txt, which sets CARRYOVER_LEVEL"
#endif

namespace carryover {
namespace CARRYOVER_LEVEL {

struct bf16 {
  uint16_t bits;
};

static inline float to_float(float x) {
  return x;
}
static inline float to_float(bf16 x) {
  const uint32_t u = static_cast<uint32_t>(x.bits) << 16;
  float f;
  memcpy(&f, &u, 4);
  return f;
}

// Round to nearest even; NaN stays NaN (PyTorch's rule: 0x7fc0).
static inline bf16 to_bf16(float f) {
  uint32_t u;
  memcpy(&u, &f, 4);
  if (f != f) return bf16{0x7fc0};
  u += 0x7fffu + ((u >> 16) & 1u);
  return bf16{static_cast<uint16_t>(u >> 16)};
}

static inline void from_float(float f, float* out) {
  *out = f;
}
static inline void from_float(float f, bf16* out) {
  *out = to_bf16(f);
}

#if defined(__AVX512F__)

struct Vec {
  static constexpr int kWidth = 16;
  __m512 v;

  static Vec zero() { return {_mm512_setzero_ps()}; }
  static Vec set1(float x) { return {_mm512_set1_ps(x)}; }
  static Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
  static Vec load(const bf16* p) { return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
  // The first n (0..kWidth) elements, zeros behind them.
  static Vec load(const float* p, int n) { return {_mm512_maskz_loadu_ps(mask(n), p)}; }
  static Vec load(const bf16* p, int n) { return widen(_mm256_maskz_loadu_epi16(mask(n), p)); }
  void store(float* p) const { _mm512_storeu_ps(p, v); }
  void store(bf16* p) const { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow()); }
  void store(float* p, int n) const { _mm512_mask_storeu_ps(p, mask(n), v); }
  void store(bf16* p, int n) const { _mm256_mask_storeu_epi16(p, mask(n), narrow()); }

  static __mmask16 mask(int n) { return static_cast<__mmask16>((1u << n) - 1u); }
  static Vec widen(__m256i h) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16))};
  }
  // Integer rounding, not vcvtneps2bf16: that instruction flushes denormals, PyTorch does not.
  __m256i narrow() const {
    const __m512i u = _mm512_castps_si512(v);
    const __m512i lsb = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    __m512i r = _mm512_add_epi32(u, _mm512_add_epi32(lsb, _mm512_set1_epi32(0x7fff)));
    r = _mm512_srli_epi32(r, 16);
    r = _mm512_mask_mov_epi32(r, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc0));
    return _mm512_cvtepi32_epi16(r);
  }
};

static inline Vec operator+(Vec a, Vec b) {
  return {_mm512_add_ps(a.v, b.v)};
}
static inline Vec operator-(Vec a, Vec b) {
  return {_mm512_sub_ps(a.v, b.v)};
}
static inline Vec operator*(Vec a, Vec b) {
  return {_mm512_mul_ps(a.v, b.v)};
}
static inline Vec operator/(Vec a, Vec b) {
  return {_mm512_div_ps(a.v, b.v)};
}
static inline Vec fmadd(Vec a, Vec b, Vec c) {
  return {_mm512_fmadd_ps(a.v, b.v, c.v)};
}
static inline Vec max(Vec a, Vec b) {
  return {_mm512_max_ps(a.v, b.v)};
}
static inline Vec min(Vec a, Vec b) {
  return {_mm512_min_ps(a.v, b.v)};
}
static inline Vec round_nearest(Vec a) {
  return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
// a * 2^n for integral n
static inline Vec scale_pow2(Vec a, Vec n) {
  return {_mm512_scalef_ps(a.v, n.v)};
}
static inline float reduce_add(Vec a) {
  return _mm512_reduce_add_ps(a.v);
}
static inline float reduce_max(Vec a) {
  return _mm512_reduce_max_ps(a.v);
}

#elif defined(__AVX2__)

struct Vec {
  static constexpr int kWidth = 8;
  __m256 v;

  static Vec zero() { return {_mm256_setzero_ps()}; }
  static Vec set1(float x) { return {_mm256_set1_ps(x)}; }
  static Vec load(const float* p) { return {_mm256_loadu_ps(p)}; }
  static Vec load(const bf16* p) { return widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
  static Vec load(const float* p, int n) { return {_mm256_maskload_ps(p, mask(n))}; }
  static Vec load(const bf16* p, int n) {
    alignas(16) uint16_t part[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    memcpy(part, p, sizeof(bf16) * static_cast<size_t>(n));
    return widen(_mm_load_si128(reinterpret_cast<const __m128i*>(part)));
  }
  void store(float* p) const { _mm256_storeu_ps(p, v); }
  void store(bf16* p) const { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), narrow()); }
  void store(float* p, int n) const { _mm256_maskstore_ps(p, mask(n), v); }
  void store(bf16* p, int n) const {
    alignas(16) uint16_t part[8];
    _mm_store_si128(reinterpret_cast<__m128i*>(part), narrow());
    memcpy(p, part, sizeof(bf16) * static_cast<size_t>(n));
  }

  static __m256i mask(int n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }
  static Vec widen(__m128i h) {
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16))};
  }
  __m128i narrow() const {
    const __m256i u = _mm256_castps_si256(v);
    const __m256i lsb = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    __m256i r = _mm256_add_epi32(u, _mm256_add_epi32(lsb, _mm256_set1_epi32(0x7fff)));
    r = _mm256_srli_epi32(r, 16);
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    r = _mm256_blendv_epi8(r, _mm256_set1_epi32(0x7fc0), nan);
    return _mm_packus_epi32(_mm256_castsi256_si128(r), _mm256_extracti128_si256(r, 1));
  }
};

static inline Vec operator+(Vec a, Vec b) {
  return {_mm256_add_ps(a.v, b.v)};
}
static inline Vec operator-(Vec a, Vec b) {
  return {_mm256_sub_ps(a.v, b.v)};
}
static inline Vec operator*(Vec a, Vec b) {
  return {_mm256_mul_ps(a.v, b.v)};
}
static inline Vec operator/(Vec a, Vec b) {
  return {_mm256_div_ps(a.v, b.v)};
}
static inline Vec fmadd(Vec a, Vec b, Vec c) {
  return {_mm256_fmadd_ps(a.v, b.v, c.v)};
}
static inline Vec max(Vec a, Vec b) {
  return {_mm256_max_ps(a.v, b.v)};
}
static inline Vec min(Vec a, Vec b) {
  return {_mm256_min_ps(a.v, b.v)};
}
static inline Vec round_nearest(Vec a) {
  return {_mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
// a * 2^n for integral n in [-252, 254]; in two steps so that denormal results are right.
static inline Vec scale_pow2(Vec a, Vec n) {
  const __m256i i = _mm256_cvtps_epi32(n.v);
  const __m256i half = _mm256_srai_epi32(i, 1), rest = _mm256_sub_epi32(i, half);
  const __m256i bias = _mm256_set1_epi32(127);
  const __m256 p = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(half, bias), 23));
  const __m256 q = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(rest, bias), 23));
  return {_mm256_mul_ps(_mm256_mul_ps(a.v, p), q)};
}
static inline float reduce_add(Vec a) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
static inline float reduce_max(Vec a) {
  __m128 s = _mm_max_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  s = _mm_max_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}

#else  // plain C++

struct Vec {
  static constexpr int kWidth = 8;
  float v[8];

  static Vec zero() { return set1(0.0f); }
  static Vec set1(float x) { return {{x, x, x, x, x, x, x, x}}; }
  static Vec load(const float* p) { return load(p, 8); }
  static Vec load(const bf16* p) { return load(p, 8); }
  template <class T>
  static Vec load(const T* p, int n) {
    Vec r = zero();
    for (int i = 0; i < n; ++i) r.v[i] = to_float(p[i]);
    return r;
  }
  template <class T>
  void store(T* p) const {
    store(p, 8);
  }
  template <class T>
  void store(T* p, int n) const {
    for (int i = 0; i < n; ++i) from_float(v[i], p + i);
  }
};

#define CARRYOVER_LANES(expr)                  \
  Vec r;                                       \
  for (int i = 0; i < 8; ++i) r.v[i] = (expr); \
  return r
static inline Vec operator+(Vec a, Vec b) {
  CARRYOVER_LANES(a.v[i] + b.v[i]);
}
static inline Vec operator-(Vec a, Vec b) {
  CARRYOVER_LANES(a.v[i] - b.v[i]);
}
static inline Vec operator*(Vec a, Vec b) {
  CARRYOVER_LANES(a.v[i] * b.v[i]);
}
static inline Vec operator/(Vec a, Vec b) {
  CARRYOVER_LANES(a.v[i] / b.v[i]);
}
static inline Vec fmadd(Vec a, Vec b, Vec c) {
  CARRYOVER_LANES(a.v[i] * b.v[i] + c.v[i]);
}
static inline Vec max(Vec a, Vec b) {
  CARRYOVER_LANES(a.v[i] > b.v[i] ? a.v[i] : b.v[i]);
}
static inline Vec min(Vec a, Vec b) {
  CARRYOVER_LANES(a.v[i] < b.v[i] ? a.v[i] : b.v[i]);
}
static inline Vec round_nearest(Vec a) {
  CARRYOVER_LANES(__builtin_rintf(a.v[i]));
}
static inline Vec scale_pow2(Vec a, Vec n) {
  CARRYOVER_LANES(__builtin_ldexpf(a.v[i], static_cast<int>(n.v[i])));
}
#undef CARRYOVER_LANES
static inline float reduce_add(Vec a) {
  return ((a.v[0] + a.v[4]) + (a.v[2] + a.v[6])) + ((a.v[1] + a.v[5]) + (a.v[3] + a.v[7]));
}
static inline float reduce_max(Vec a) {
  float m = a.v[0];
  for (int i = 1; i < 8; ++i) m = a.v[i] > m ? a.v[i] : m;
  return m;
}

#endif

// e^x with about 1 ulp of error; 0 below -104 (also for -inf), x clamped above 88.72.
static inline Vec exp(Vec x) {
  x = min(max(x, Vec::set1(-104.0f)), Vec::set1(88.72283f));
  const Vec n = round_nearest(x * Vec::set1(1.44269504088896341f));
  // Cody-Waite: x - n ln 2 in two parts.
  Vec r = fmadd(n, Vec::set1(-0.693359375f), x);
  r = fmadd(n, Vec::set1(2.12194440e-4f), r);
  Vec p = Vec::set1(1.9875691500e-4f);  // Cephes expf
  p = fmadd(p, r, Vec::set1(1.3981999507e-3f));
  p = fmadd(p, r, Vec::set1(8.3334519073e-3f));
  p = fmadd(p, r, Vec::set1(4.1665795894e-2f));
  p = fmadd(p, r, Vec::set1(1.6666665459e-1f));
  p = fmadd(p, r, Vec::set1(5.0000001201e-1f));
  p = fmadd(p, r * r, r) + Vec::set1(1.0f);
  return scale_pow2(p, n);
}

}  // namespace CARRYOVER_LEVEL
}  // namespace carryover
