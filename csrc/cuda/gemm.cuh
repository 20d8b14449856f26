// C = A B^T for a handful of rows of A: B (the weights) is streamed once through a ring of shared-memory
// stages (cp.async), tiles are read by ldmatrix and multiplied by mma.sync, sums are float32. Layouts,
// partitions and atoms are CuTe's.
#pragma once

#include "cuda/cute_atoms.cuh"

namespace carryover {
namespace cuda {

// A block computes kRows x kCols; its warps tile the columns first, because rows are few and weights many.
template <class T_, int kRows_, int kCols_>
struct GemmTile {
  using T = T_;
  static constexpr int kRows = kRows_, kCols = kCols_;
  static constexpr int kDepth = kCols > 128 ? 32 : 64;
  static constexpr int kStages =
      kRows == 16 || kCols > 128 ? 4 : 3;                      // two blocks fit a multiprocessor of an A100
  static constexpr int kWarps = kCols / 32, kThreads = kCols;  // a warp: all rows, 32 columns
  static constexpr int kBlocks =
      kRows * kCols > 64 * 128 ? 1 : 2;  // on a multiprocessor; registers are the limit

  static constexpr int kChunks = kDepth / 8;  // 16-byte pieces of a row
  static constexpr int kThreadsA = kRows * kChunks < kThreads ? kRows * kChunks : kThreads;

  // The swizzle spreads the eight rows of an 8x8 matrix over all banks.
  using Row =
      cute::Layout<cute::Shape<cute::_8, cute::Int<kDepth>>, cute::Stride<cute::Int<kDepth>, cute::_1>>;
  using Atom = decltype(cute::composition(cute::Swizzle<kDepth == 64 ? 3 : 2, 3, 3>{}, Row{}));
  using LayoutA = decltype(cute::tile_to_shape(
      Atom{}, cute::Shape<cute::Int<kRows>, cute::Int<kDepth>, cute::Int<kStages>>{}));
  using LayoutB = decltype(cute::tile_to_shape(
      Atom{}, cute::Shape<cute::Int<kCols>, cute::Int<kDepth>, cute::Int<kStages>>{}));

  template <int kThreadCount>
  using CopyOf = decltype(cute::make_tiled_copy(
      cute::Copy_Atom<CopyAsync, T>{},
      cute::Layout<cute::Shape<cute::Int<kThreadCount / kChunks>, cute::Int<kChunks>>,
                   cute::Stride<cute::Int<kChunks>, cute::_1>>{},
      cute::Layout<cute::Shape<cute::_1, cute::_8>>{}));
  using CopyA = CopyOf<kThreadsA>;
  using CopyB = CopyOf<kThreads>;

  using TiledMma = decltype(cute::make_tiled_mma(
      cute::MMA_Atom<Mma<T>>{}, cute::Layout<cute::Shape<cute::_1, cute::Int<kWarps>, cute::_1>>{},
      cute::Tile<cute::_16, cute::Int<16 * kWarps>, cute::_16>{}));

  // The sums in shared memory, for the epilogue; the pad keeps the rows of a fragment in different banks.
  static constexpr int kSumStride = kCols + 8;
  using LayoutC = cute::Layout<cute::Shape<cute::Int<kRows>, cute::Int<kCols>>,
                               cute::Stride<cute::Int<kSumStride>, cute::_1>>;

  static constexpr size_t kBytesA = sizeof(T) * kRows * kDepth * kStages;
  static constexpr size_t kBytesB = sizeof(T) * kCols * kDepth * kStages;
  static constexpr size_t kBytesC = sizeof(float) * kRows * kSumStride;
  static constexpr size_t kBytes = kBytesA + kBytesB > kBytesC ? kBytesA + kBytesB : kBytesC;
};

// One block's part of the operands: pointers to its first row, rows that exist.
template <class T>
struct GemmOperands {
  const T *a, *b;
  int64_t a_stride, b_stride;
  int32_t a_rows, b_rows;
  int32_t depth;       // columns that exist
  int32_t begin, end;  // columns of this split; begin is a multiple of kDepth
};

// acc += A B^T over the columns of the split. `rows` changes A in shared memory before it is multiplied:
// begin() runs once behind the first loads and may use barriers, fetch(column) before the wait for a stage,
// apply(chunk, row) on each 16-byte piece that this thread has copied itself: no barrier is needed for that.
template <class Tile, class Acc, class Rows>
__device__ __forceinline__ void multiply(const GemmOperands<typename Tile::T>& o, unsigned char* smem,
                                         Acc& acc, Rows& rows) {
  using namespace cute;
  using T = typename Tile::T;
  const int thread = threadIdx.x;
  Tensor sA = make_tensor(make_smem_ptr(reinterpret_cast<T*>(smem)), typename Tile::LayoutA{});
  Tensor sB =
      make_tensor(make_smem_ptr(reinterpret_cast<T*>(smem + Tile::kBytesA)), typename Tile::LayoutB{});
  const int first = o.begin / Tile::kDepth, last = (o.end + Tile::kDepth - 1) / Tile::kDepth;
  Tensor gA = make_tensor(make_gmem_ptr(o.a), make_shape(Int<Tile::kRows>{}, Int<Tile::kDepth>{}, last),
                          make_stride(o.a_stride, _1{}, Int<Tile::kDepth>{}));
  Tensor gB = make_tensor(make_gmem_ptr(o.b), make_shape(Int<Tile::kCols>{}, Int<Tile::kDepth>{}, last),
                          make_stride(o.b_stride, _1{}, Int<Tile::kDepth>{}));

  const auto copy_a = typename Tile::CopyA{}.get_slice(thread);
  const auto copy_b = typename Tile::CopyB{}.get_slice(thread);
  Tensor from_a = copy_a.partition_S(gA);  // (8, rows of the thread, 1, step)
  Tensor from_b = copy_b.partition_S(gB);
  Tensor to_a = copy_a.partition_D(sA);
  Tensor to_b = copy_b.partition_D(sB);
  Tensor at_a = copy_a.partition_S(make_identity_tensor(Shape<Int<Tile::kRows>, Int<Tile::kDepth>>{}));
  Tensor at_b = copy_b.partition_S(make_identity_tensor(Shape<Int<Tile::kCols>, Int<Tile::kDepth>>{}));
  const Copy_Atom<CopyAsync, T> copy_atom;
  const bool copies_a = thread < Tile::kThreadsA;
  const int column = get<1>(at_b(0, 0, 0));  // of all pieces of this thread, in A and in B

  const auto load = [&](int step) {
    const int stage = (step - first) % Tile::kStages;
    const bool inside = step * Tile::kDepth + column < o.depth;
    if (copies_a) {
      CUTE_UNROLL
      for (int i = 0; i < size<1>(from_a); ++i) {
        copy_atom.with(inside && get<0>(at_a(0, i, 0)) < o.a_rows)
            .call(from_a(_, i, 0, step), to_a(_, i, 0, stage));
      }
    }
    CUTE_UNROLL
    for (int i = 0; i < size<1>(from_b); ++i) {
      copy_atom.with(inside && get<0>(at_b(0, i, 0)) < o.b_rows)
          .call(from_b(_, i, 0, step), to_b(_, i, 0, stage));
    }
  };

  const typename Tile::TiledMma mma;
  const auto mma_slice = mma.get_slice(thread);
  Tensor a = mma_slice.partition_fragment_A(sA(_, _, 0));
  Tensor b = mma_slice.partition_fragment_B(sB(_, _, 0));
  const auto read_a = make_tiled_copy_A(Copy_Atom<LoadMatrix, T>{}, mma);
  const auto read_b = make_tiled_copy_B(Copy_Atom<LoadMatrix, T>{}, mma);
  Tensor tile_a = read_a.get_slice(thread).partition_S(sA);
  Tensor tile_b = read_b.get_slice(thread).partition_S(sB);
  Tensor into_a = read_a.get_slice(thread).retile_D(a);
  Tensor into_b = read_b.get_slice(thread).retile_D(b);

  CUTE_UNROLL
  for (int i = 0; i < Tile::kStages - 1; ++i) {
    if (first + i < last) load(first + i);
    ptx::cp_async_commit();
  }
  rows.begin();
  for (int step = first; step < last; ++step) {
    const int stage = (step - first) % Tile::kStages, at = step * Tile::kDepth + column;
    const bool mine = rows.active && copies_a && at < o.depth;
    if (mine) rows.fetch(at);
    ptx::cp_async_wait<Tile::kStages - 2>();
    if (mine) {
      CUTE_UNROLL
      for (int i = 0; i < size<1>(to_a); ++i) {
        const int row = get<0>(at_a(0, i, 0));
        if (row < o.a_rows) rows.apply(raw_pointer_cast(&to_a(0, i, 0, stage)), row);
      }
    }
    __syncthreads();  // the stage is complete, and the one that the next load overwrites has been read
    if (step + Tile::kStages - 1 < last) load(step + Tile::kStages - 1);
    ptx::cp_async_commit();
    CUTE_UNROLL
    for (int k = 0; k < size<2>(a); ++k) {
      copy(read_a, tile_a(_, _, k, stage), into_a(_, _, k));
      copy(read_b, tile_b(_, _, k, stage), into_b(_, _, k));
      gemm(mma, a(_, _, k), b(_, _, k), acc);
    }
  }
  ptx::cp_async_wait<0>();
  __syncthreads();  // the epilogue reuses the stages
}

// Adds the sums of all splits of a tile, in the order of the splits whoever comes last. True in the block
// that came last: it alone has the total and goes on. `partials` are the tile's, [splits][kThreads * sums of
// a thread]; `counter` counts arrivals from zero; `flag` is a word of shared memory.
template <class Tile, class Acc>
__device__ __forceinline__ bool add_splits(Acc& acc, float* partials, int32_t* counter, int split, int splits,
                                           int* flag) {
  if (splits == 1) return true;
  constexpr int kQuads = Tile::kRows * Tile::kCols / Tile::kThreads / 4;
  const int thread = threadIdx.x;
  float4* mine = reinterpret_cast<float4*>(partials) + int64_t(split) * kQuads * Tile::kThreads;
  CUTE_UNROLL
  for (int i = 0; i < kQuads; ++i) {
    mine[i * Tile::kThreads + thread] =
        make_float4(acc(4 * i), acc(4 * i + 1), acc(4 * i + 2), acc(4 * i + 3));
  }
  __threadfence();
  __syncthreads();  // all threads have written and fenced before one of them says so
  if (thread == 0) *flag = atomicAdd(counter, 1) == splits - 1;
  __syncthreads();
  if (!*flag) return false;
  __threadfence();
  cute::clear(acc);
  const float4* from = reinterpret_cast<const float4*>(partials) + thread;
  for (int s = 0; s < splits; ++s, from += kQuads * Tile::kThreads) {
    CUTE_UNROLL
    for (int i = 0; i < kQuads; ++i) {
      const float4 v = __ldcg(from + i * Tile::kThreads);
      acc(4 * i) += v.x, acc(4 * i + 1) += v.y, acc(4 * i + 2) += v.z, acc(4 * i + 3) += v.w;
    }
  }
  return true;
}

// The sums to shared memory, row-major with stride kSumStride.
template <class Tile, class Acc>
__device__ __forceinline__ const float* spread(const Acc& acc, unsigned char* smem) {
  using namespace cute;
  Tensor sums = make_tensor(make_smem_ptr(reinterpret_cast<float*>(smem)), typename Tile::LayoutC{});
  Tensor mine = typename Tile::TiledMma{}.get_slice(threadIdx.x).partition_C(sums);
  copy(acc, mine);
  __syncthreads();
  return reinterpret_cast<const float*>(smem);
}

__device__ __forceinline__ float warp_sum(float x) {
  for (int i = 16; i > 0; i >>= 1) x += __shfl_xor_sync(kFullMask, x, i);
  return x;
}

}  // namespace cuda
}  // namespace carryover
