// Twins of the wrappers in csrc/cuda/ptx.cuh. Fragment layouts are those of the PTX ISA: ldmatrix .m8n8.b16
// and mma.m16n8k16 with 16-bit operands.
#pragma once

#include "simt.h"

namespace carryover {
namespace ptx {

inline void cp_async_16(void* shared, const void* global, bool valid) {
  simt::copy_async(shared, global, valid ? 16 : 0);
}
inline void cp_async_commit() {
  simt::commit_async();
}
template <int N>
void cp_async_wait() {
  simt::wait_async(N);
}

struct LoadMatrix {
  uint16_t row[8];
  uint32_t* r;
};

template <int N, bool kTrans>
void load_matrix(uint32_t* r, const void* address) {
  LoadMatrix me;
  me.r = r;
  if (simt::lane() < 8 * N) {  // the lane whose address it is reads, where sanitizers see it
    if (reinterpret_cast<uintptr_t>(address) & 15) simt::fault("ldmatrix: address is not a multiple of 16");
    for (int i = 0; i < 8; ++i) me.row[i] = static_cast<const uint16_t*>(address)[i];
  }
  simt::collective(simt::Collective::kLoadMatrix, ~0u, &me, [](void* const* args, uint32_t) SIMT_EXCHANGE {
    const auto row = [&](int matrix, int i) { return static_cast<LoadMatrix*>(args[matrix * 8 + i])->row; };
    for (int l = 0; l < 32; ++l) {
      const int g = l >> 2, t = (l & 3) * 2;
      for (int m = 0; m < N; ++m) {
        const uint32_t low = kTrans ? row(m, t)[g] : row(m, g)[t];
        const uint32_t high = kTrans ? row(m, t + 1)[g] : row(m, g)[t + 1];
        static_cast<LoadMatrix*>(args[l])->r[m] = low | high << 16;
      }
    }
  });
}

inline void ldmatrix_x4(uint32_t (&r)[4], const void* row) {
  load_matrix<4, false>(r, row);
}
inline void ldmatrix_x4_trans(uint32_t (&r)[4], const void* row) {
  load_matrix<4, true>(r, row);
}
inline void ldmatrix_x2(uint32_t (&r)[2], const void* row) {
  load_matrix<2, false>(r, row);
}
inline void ldmatrix_x2_trans(uint32_t (&r)[2], const void* row) {
  load_matrix<2, true>(r, row);
}

template <class T>
float widen(uint32_t bits);
template <>
inline float widen<cuda::bf16>(uint32_t bits) {
  return simt::bits<float>(bits << 16);
}
template <>
inline float widen<cuda::fp16>(uint32_t bits) {
  return __half2float(__half(__half_raw{static_cast<uint16_t>(bits)}));
}

struct Mma {
  const uint32_t *a, *b;
  float* d;
};

template <class T>
void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  Mma me{a, b, d};
  simt::collective(simt::Collective::kMma, ~0u, &me, [](void* const* args, uint32_t) SIMT_EXCHANGE {
    float A[16][16], B[16][8], D[16][8];
    for (int l = 0; l < 32; ++l) {
      const auto* x = static_cast<const Mma*>(args[l]);
      const int g = l >> 2, t = (l & 3) * 2;
      for (int i = 0; i < 4; ++i) {
        const int r = g + 8 * (i & 1), k = t + 8 * (i >> 1);
        A[r][k] = widen<T>(x->a[i] & 0xffff), A[r][k + 1] = widen<T>(x->a[i] >> 16);
      }
      for (int i = 0; i < 2; ++i) {
        B[t + 8 * i][g] = widen<T>(x->b[i] & 0xffff), B[t + 8 * i + 1][g] = widen<T>(x->b[i] >> 16);
      }
      for (int i = 0; i < 4; ++i) D[g + 8 * (i >> 1)][t + (i & 1)] = x->d[i];
    }
    for (int r = 0; r < 16; ++r)
      for (int k = 0; k < 16; ++k)
        for (int n = 0; n < 8; ++n) D[r][n] += A[r][k] * B[k][n];
    for (int l = 0; l < 32; ++l) {
      const int g = l >> 2, t = (l & 3) * 2;
      for (int i = 0; i < 4; ++i) static_cast<Mma*>(args[l])->d[i] = D[g + 8 * (i >> 1)][t + (i & 1)];
    }
  });
}

inline float exp2_approx(float x) {
  const float y = std::exp2(x);
  return y < 1.1754944e-38f ? 0.f : y;  // NaN stays NaN
}

inline uint4 load_streaming(const void* global) {
  if (reinterpret_cast<uintptr_t>(global) & 15)
    simt::fault("load_streaming: address is not a multiple of 16");
  return *static_cast<const uint4*>(global);
}

}  // namespace ptx
}  // namespace carryover
