// Kernels of project_kv and commit_and_carry; project_kv.h says how they fit together. Rounding is the
// reference's: fc's result, the normed row and each of K and V before k_norm are rounded to T, everything
// between is float32.
#pragma once

#include "cuda/gemm.cuh"
#include "cuda/project_kv.h"

namespace carryover {
namespace cuda {

constexpr int kRouteThreads = 128;

__device__ __forceinline__ void clear_counters(int32_t* counters, int64_t count, int64_t thread,
                                               int64_t threads) {
  for (int64_t i = thread; i < count; i += threads) counters[i] = 0;
}

// A row that an argument sends outside its bounds.
__device__ __forceinline__ void bad_row() {
#ifdef CARRYOVER_DEBUG
  __trap();
#endif
}

// A position that RoPE has a row for. -1 is padding; any other value is a mistake, and its row is treated
// like padding.
__device__ __forceinline__ bool rotatable(int32_t position, int64_t end) {
  if (position < -1 || position >= end) bad_row();
  return position >= 0 && position < end;
}

// First rejected row and end of request i, both within the rows that exist; an inactive request has none.
struct Rejected {
  int64_t first, end;

  __device__ Rejected(const CommitRoutes& p, int64_t i) {
    const int32_t accepted = p.num_accepted[i];
    const int64_t begin = p.row_start[i];
    end = p.row_start[i + 1];
    first = accepted < 0 ? end : begin + accepted + 1;
    if (begin < 0 || end > p.rows || accepted < -1 || accepted >= end - begin) bad_row(), first = end = 0;
  }
};

// Rows of [first, end) that have a position, counted up to `most`.
__device__ __forceinline__ int64_t count_rows(const CommitRoutes& p, int64_t first, int64_t end,
                                              int64_t most) {
  int64_t n = 0;
  for (int64_t t = first; t < end && n < most; ++t) n += rotatable(p.positions[t], p.positions_end);
  return n;
}

__device__ __forceinline__ RowRoute commit_route(const CommitRoutes& p, int64_t t) {
  RowRoute r = {Target::kNowhere, p.positions[t], 0, 0};
  if (p.requests == 0) return r;
  int64_t low = 0, high = p.requests;  // the request: the last one that starts at or before t
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    (p.row_start[middle] <= t ? low : high) = middle;
  }
  if (t < p.row_start[low]) return bad_row(), r;  // row_start[0] is not 0
  if (p.num_accepted[low] < 0) return r;
  const Rejected rejected(p, low);
  if (t >= rejected.end) return r;
  if (t < rejected.first) {
    const int64_t slot = p.slots[t];
    if (slot == -1 || !rotatable(r.position, p.positions_end)) return r;
    if (slot < 0 || slot >= p.pages * p.page_size) return bad_row(), r;
    const int64_t page = slot / p.page_size, offset = slot % p.page_size;
    r.target = Target::kCommitted;
    r.k_offset = page * p.k_page + offset * p.k_slot;
    r.v_offset = page * p.v_page + offset * p.v_slot;
  } else {
    if (!p.carry) return r;
    const int64_t j = count_rows(p, rejected.first, t, p.room);
    if (j >= p.room || !rotatable(r.position, p.positions_end)) return r;
    r.target = Target::kCarried;
    r.k_offset = low * p.k_request + j * p.k_row;
    r.v_offset = low * p.v_request + j * p.v_row;
  }
  return r;
}

// A thread a row and a request: each counts what lies before it, so that no order of threads matters.
__global__ void __launch_bounds__(kRouteThreads)
    commit_routes_kernel(const __grid_constant__ CommitRoutes p) {
  const int64_t i = int64_t(blockIdx.x) * kRouteThreads + threadIdx.x;
  clear_counters(p.counters, p.counter_count, i, int64_t(gridDim.x) * kRouteThreads);
  if (i < p.rows) p.routes[i] = commit_route(p, i);
  if (i < p.requests) {
    const Rejected rejected(p, i);
    p.segment_lens[i] =
        p.carry ? static_cast<int32_t>(count_rows(p, rejected.first, rejected.end, p.room)) : 0;
  }
}

__global__ void __launch_bounds__(kRouteThreads)
    project_routes_kernel(const __grid_constant__ ProjectRoutes p) {
  const int64_t t = int64_t(blockIdx.x) * kRouteThreads + threadIdx.x;
  clear_counters(p.counters, p.counter_count, t, int64_t(gridDim.x) * kRouteThreads);
  if (t >= p.rows) return;
  RowRoute r = {Target::kCommitted, p.positions[t], t * p.row_stride, t * p.row_stride};
  if (p.carried && p.carried[t]) r.target = Target::kCarried;
  if (!rotatable(r.position, p.positions_end)) r.target = Target::kZero;
  p.routes[t] = r;
}

// Four elements of T.
template <class T>
struct alignas(8) Quad {
  T x[4];
};

// ---- first GEMM's epilogue: u, and the sums of squares of its rows ----

// A warp a row, four columns a lane; H is a multiple of 8 (project_tiles_fit).
template <class Tile>
__device__ __forceinline__ void store_u(const ProjectParams& p, const float* sums, int64_t row0, int rows,
                                        int tile, int64_t col0, int cols) {
  using T = typename Tile::T;
  const int lane = threadIdx.x & 31;
  for (int r = threadIdx.x >> 5; r < rows; r += Tile::kWarps) {
    const int64_t t = row0 + r;
    const bool embed = p.pre_norm && p.embedding && p.routes[t].target == Target::kCarried;
    float square = 0;
    for (int column = lane * 4; column < cols; column += 128) {
      Quad<T> u;
      for (int i = 0; i < 4; ++i) {
        u.x[i] = from_float<T>(sums[r * Tile::kSumStride + column + i]);
        float x = to_float(u.x[i]);
        if (embed) x += to_float(static_cast<const T*>(p.embedding)[col0 + column + i]);
        square += x * x;
      }
      *reinterpret_cast<Quad<T>*>(static_cast<T*>(p.u) + t * p.hidden + col0 + column) = u;
    }
    square = warp_sum(square);
    if (lane == 0) p.squares[t * p.fc_plan.col_tiles + tile] = square;
  }
}

// ---- second GEMM: rows normed on the load; k_norm, RoPE and the routed store behind it ----

// u + E, RMS norm, weight, E: one element.
__device__ __forceinline__ float norm_element(float u, float scale, float weight, float before, float after) {
  return (u + before) * scale * weight + after;
}

// What the second GEMM does to A on its way from shared memory; the first one leaves A as it is.
template <class T>
struct NormedRows {
  const ProjectParams& p;
  bool active;
  float* scale;    // [kRows] of shared memory
  uint8_t* embed;  // [kRows] of shared memory
  int64_t row0;
  int32_t rows;
  Quad<T> weight[2], extra[2];

  // 1 / rms of every row from fc's partial sums; a warp a row.
  __device__ void begin() {
    if (!active) return;
    const int lane = threadIdx.x & 31, tiles = p.fc_plan.col_tiles;
    for (int r = threadIdx.x >> 5; r < rows; r += blockDim.x >> 5) {
      float square = 0;
      for (int i = lane; i < tiles; i += 32) square += p.squares[(row0 + r) * tiles + i];
      square = warp_sum(square);
      if (lane == 0) {
        scale[r] = 1.0f / sqrtf(square / static_cast<float>(p.hidden) + p.eps);
        embed[r] = p.embedding && p.routes[row0 + r].target == Target::kCarried;
      }
    }
    __syncthreads();
  }

  __device__ void fetch(int column) {
    const auto* w = reinterpret_cast<const Quad<T>*>(static_cast<const T*>(p.norm) + column);
    weight[0] = w[0], weight[1] = w[1];
    if (p.embedding) {
      const auto* e = reinterpret_cast<const Quad<T>*>(static_cast<const T*>(p.embedding) + column);
      extra[0] = e[0], extra[1] = e[1];
    }
  }

  __device__ void apply(T* chunk, int row) {
    Quad<T>* quad = reinterpret_cast<Quad<T>*>(chunk);
    const float by = scale[row];
    const bool before = embed[row] && p.pre_norm, after = embed[row] && !p.pre_norm;
    for (int h = 0; h < 2; ++h) {
      Quad<T> q = quad[h];
      for (int i = 0; i < 4; ++i) {
        q.x[i] = from_float<T>(norm_element(to_float(q.x[i]), by, to_float(weight[h].x[i]),
                                            before ? to_float(extra[h].x[i]) : 0.0f,
                                            after ? to_float(extra[h].x[i]) : 0.0f));
      }
      quad[h] = q;
    }
  }
};

// One head of one row to where the row goes, by one warp. `head` counts the heads of all layers, K and V
// alike; x(i) is element i as the GEMM left it, rounded to T.
template <class T, class Load>
__device__ __forceinline__ void store_head(const ProjectParams& p, const RowRoute& route, int64_t head,
                                           const Load& x) {
  if (route.target == Target::kNowhere) return;
  const int lane = threadIdx.x & 31, dim = static_cast<int>(p.dim), half = static_cast<int>(p.rot / 2);
  const int64_t layer = head / (2 * p.heads), within = head % (2 * p.heads);
  const bool is_k = within < p.heads;
  const KvDestination& to = p.dest[route.target == Target::kCarried ? 1 : 0];
  T* out = is_k
               ? static_cast<T*>(to.k) + route.k_offset + layer * to.k_layer + within * to.k_head
               : static_cast<T*>(to.v) + route.v_offset + layer * to.v_layer + (within - p.heads) * to.v_head;
  const bool zero = route.target == Target::kZero, rotate = is_k && !zero;
  const T* weight = static_cast<const T*>(p.k_norm) + layer * p.dim;
  const float* cos_sin = p.cos_sin + (zero ? 0 : route.position) * p.rot;
  float scale = 0;
  if (rotate) {
    float square = 0;
    for (int i = lane; i < dim; i += 32) square += x(i) * x(i);
    scale = 1.0f / sqrtf(warp_sum(square) / static_cast<float>(dim) + p.eps);
  }
  const auto normed = [&](int i) { return x(i) * scale * to_float(weight[i]); };
  const auto element = [&](int i) {
    if (zero) return 0.0f;
    if (!is_k) return x(i);
    if (i < half) return normed(i) * cos_sin[i] - normed(i + half) * cos_sin[half + i];
    if (i < 2 * half) return normed(i) * cos_sin[i - half] + normed(i - half) * cos_sin[i];
    return normed(i);
  };
  if (dim % 4 == 0 && reinterpret_cast<uintptr_t>(out) % 8 == 0) {
    for (int i = lane * 4; i < dim; i += 128) {
      Quad<T> q;
      for (int e = 0; e < 4; ++e) q.x[e] = from_float<T>(element(i + e));
      *reinterpret_cast<Quad<T>*>(out + i) = q;
    }
  } else {
    for (int i = lane; i < dim; i += 32) out[i] = from_float<T>(element(i));
  }
}

template <class Tile>
__device__ __forceinline__ void store_kv(const ProjectParams& p, const float* sums, int64_t row0, int rows,
                                         int64_t col0, int cols) {
  using T = typename Tile::T;
  const int dim = static_cast<int>(p.dim), heads = cols / dim;
  for (int i = threadIdx.x >> 5; i < rows * heads; i += Tile::kWarps) {
    const int r = i / heads, h = i % heads;
    const float* from = sums + r * Tile::kSumStride + h * dim;
    store_head<T>(p, p.routes[row0 + r], col0 / dim + h,
                  [&](int e) { return to_float(from_float<T>(from[e])); });
  }
}

// One kernel for both GEMMs: they differ in operands, in what happens to A on the load, and in the epilogue.
template <class T, int kRows, int kCols>
__global__ void __launch_bounds__(GemmTile<T, kRows, kCols>::kThreads, GemmTile<T, kRows, kCols>::kBlocks)
    project_kernel(const __grid_constant__ ProjectParams p, bool second) {
  using Tile = GemmTile<T, kRows, kCols>;
  CARRYOVER_SMEM(smem);
  float* scale = reinterpret_cast<float*>(smem + Tile::kBytes);
  int* flag = reinterpret_cast<int*>(scale + kRows);
  uint8_t* embed = reinterpret_cast<uint8_t*>(flag + 1);
  const GemmPlan& plan = second ? p.kv_plan : p.fc_plan;
  const int split = blockIdx.z, tile = blockIdx.y;
  const int64_t row0 = int64_t(blockIdx.x) * kRows, col0 = int64_t(tile) * plan.used_cols;
  const int64_t cols = second ? p.layers * 2 * p.heads * p.dim : p.hidden;
  GemmOperands<T> o;
  o.a_stride = second ? p.hidden : p.x_stride;
  o.b_stride = second ? p.kv_stride : p.fc_stride;
  o.a = static_cast<const T*>(second ? p.u : p.x) + row0 * o.a_stride;
  o.b = static_cast<const T*>(second ? p.kv : p.fc) + col0 * o.b_stride;
  o.a_rows = static_cast<int32_t>(min(int64_t(kRows), p.rows - row0));
  o.b_rows = static_cast<int32_t>(min(int64_t(plan.used_cols), cols - col0));
  o.depth = static_cast<int32_t>(second ? p.hidden : p.features);
  o.begin = split * plan.split_depth, o.end = min(o.depth, o.begin + plan.split_depth);

  auto acc = cute::partition_fragment_C(typename Tile::TiledMma{},
                                        cute::Shape<cute::Int<kRows>, cute::Int<kCols>>{});
  cute::clear(acc);
  NormedRows<T> rows{p, second, scale, embed, row0, o.a_rows, {}, {}};
  multiply<Tile>(o, smem, acc, rows);
  const int64_t block = int64_t(tile) * gridDim.x + blockIdx.x;
  int32_t* counters = p.counters + (second ? p.fc_plan.tiles() : 0);
  if (!add_splits<Tile>(acc, p.partials + block * plan.splits * kRows * kCols, counters + block, split,
                        plan.splits, flag))
    return;
  const float* sums = spread<Tile>(acc, smem);
  if (second)
    store_kv<Tile>(p, sums, row0, o.a_rows, col0, o.b_rows);
  else
    store_u<Tile>(p, sums, row0, o.a_rows, tile, col0, o.b_rows);
}

// ---- the epilogues behind the library's GEMMs ----

constexpr int kNormThreads = 256;

// A block a row of u, in place.
template <class T>
__global__ void __launch_bounds__(kNormThreads) carry_norm_kernel(const __grid_constant__ ProjectParams p) {
  CARRYOVER_SMEM(smem);
  float* parts = reinterpret_cast<float*>(smem);  // [warps]
  const int64_t t = blockIdx.x;
  const int thread = threadIdx.x, lane = thread & 31;
  T* u = static_cast<T*>(p.u) + t * p.hidden;
  const T* weight = static_cast<const T*>(p.norm);
  const T* extra = static_cast<const T*>(p.embedding);
  const bool embed = extra && p.routes[t].target == Target::kCarried;
  const bool before = embed && p.pre_norm, after = embed && !p.pre_norm;
  float square = 0;
  for (int64_t i = thread; i < p.hidden; i += kNormThreads) {
    const float x = to_float(u[i]) + (before ? to_float(extra[i]) : 0.0f);
    square += x * x;
  }
  square = warp_sum(square);
  if (lane == 0) parts[thread >> 5] = square;
  __syncthreads();
  square = 0;
  for (int w = 0; w < kNormThreads / 32; ++w) square += parts[w];
  const float scale = 1.0f / sqrtf(square / static_cast<float>(p.hidden) + p.eps);
  for (int64_t i = thread; i < p.hidden; i += kNormThreads) {
    const float e = embed ? to_float(extra[i]) : 0.0f;
    u[i] = from_float<T>(
        norm_element(to_float(u[i]), scale, to_float(weight[i]), before ? e : 0.0f, after ? e : 0.0f));
  }
}

// A warp a head of a row.
template <class T>
__global__ void __launch_bounds__(kRouteThreads) route_kv_kernel(const __grid_constant__ ProjectParams p) {
  const int64_t heads = p.layers * 2 * p.heads;
  const int64_t i = int64_t(blockIdx.x) * (kRouteThreads / 32) + (threadIdx.x >> 5);
  if (i >= p.rows * heads) return;
  const T* from = static_cast<const T*>(p.kv_rows) + i * p.dim;
  store_head<T>(p, p.routes[i / heads], i % heads, [&](int e) { return to_float(from[e]); });
}

}  // namespace cuda
}  // namespace carryover
