// CuTe atoms on the wrappers of ptx.cuh, so that a tiled kernel runs the same instructions in the simulator
// as on the GPU. CuTe's own atoms hold inline PTX that a host compiler cannot run; their layouts are taken
// over.
#pragma once

#include "cuda/ptx.cuh"

// After ptx.cuh: in the simulator CuTe must see its definition of the device language.
#include <cute/tensor.hpp>

namespace carryover {
namespace cuda {

// 16 bytes from global to shared memory (cp.async); `.with(false)` writes zeros and reads nothing.
struct CopyAsync {
  using SRegisters = cute::uint128_t[1];
  using DRegisters = cute::uint128_t[1];
};

// Four 8x8 matrices from shared memory to fragments (ldmatrix).
struct LoadMatrix {
  using SRegisters = cute::uint128_t[1];
  using DRegisters = uint32_t[4];

  CUTE_DEVICE static void copy(const cute::uint128_t& row, uint32_t& r0, uint32_t& r1, uint32_t& r2,
                               uint32_t& r3) {
    uint32_t r[4];
    ptx::ldmatrix_x4(r, &row);
    r0 = r[0], r1 = r[1], r2 = r[2], r3 = r[3];
  }
};

// d[16, 8] = a[16, 16] b[16, 8] + c in float32 (mma.sync); T is bf16 or fp16.
template <class T>
struct Mma {
  using DRegisters = float[4];
  using ARegisters = uint32_t[4];
  using BRegisters = uint32_t[2];
  using CRegisters = float[4];

  CUTE_DEVICE static void fma(float& d0, float& d1, float& d2, float& d3, const uint32_t& a0,
                              const uint32_t& a1, const uint32_t& a2, const uint32_t& a3, const uint32_t& b0,
                              const uint32_t& b1, const float& c0, const float& c1, const float& c2,
                              const float& c3) {
    float d[4] = {c0, c1, c2, c3};
    const uint32_t a[4] = {a0, a1, a2, a3}, b[2] = {b0, b1};
    ptx::mma_m16n8k16<T>(d, a, b);
    d0 = d[0], d1 = d[1], d2 = d[2], d3 = d[3];
  }
};

}  // namespace cuda
}  // namespace carryover

namespace cute {

template <>
struct Copy_Traits<carryover::cuda::CopyAsync> {
  using ThrID = Layout<_1>;
  using SrcLayout = Layout<Shape<_1, _128>>;
  using DstLayout = SrcLayout;
  using RefLayout = SrcLayout;

  bool valid = true;

  CUTE_DEVICE constexpr Copy_Traits with(bool is_valid) const { return {is_valid}; }

  template <class S, class SLayout, class D, class DLayout>
  CUTE_DEVICE friend void copy_unpack(const Copy_Traits& traits, const Tensor<S, SLayout>& source,
                                      Tensor<D, DLayout>& target) {
    static_assert(is_gmem<S>::value && is_smem<D>::value, "cp.async goes from global to shared memory");
    Tensor from = recast<const uint128_t>(source);
    Tensor to = recast<uint128_t>(target);
    static_assert(size(decltype(from){}) == 1 && size(decltype(to){}) == 1, "one atom copies 16 bytes");
    carryover::ptx::cp_async_16(raw_pointer_cast(&to(0)), raw_pointer_cast(&from(0)), traits.valid);
  }
};

template <>
struct Copy_Traits<carryover::cuda::LoadMatrix> {
  using ThrID = Copy_Traits<SM75_U32x4_LDSM_N>::ThrID;
  using SrcLayout = Copy_Traits<SM75_U32x4_LDSM_N>::SrcLayout;
  using DstLayout = Copy_Traits<SM75_U32x4_LDSM_N>::DstLayout;
  using RefLayout = Copy_Traits<SM75_U32x4_LDSM_N>::RefLayout;
};

template <class T>
struct MMA_Traits<carryover::cuda::Mma<T>> : MMA_Traits<SM80_16x8x16_F16F16F16F16_TN> {
  using ValTypeD = float;
  using ValTypeA = T;
  using ValTypeB = T;
  using ValTypeC = float;
};

}  // namespace cute
