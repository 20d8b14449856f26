// What the host hands to the kernels of project_kv and commit_and_carry, and the plan: tiles and splits, from
// static shapes and the number of multiprocessors alone. Plain C++: no CUDA code, no torch header.
//
// One call is three launches: route_rows (where each row goes, lengths of the segments), fc GEMM, kv GEMM.
// Above kProjectCrossover rows the library's GEMM takes over, followed by the same epilogues as kernels of
// their own.
//
// Bytes and operations of a call with T rows, N = L * 2 * nkv * d (bench/projection_model.py computes them):
//   bytes      = 2 * (H*F + N*H)       weights, each read once
//              + 2 * T*(F + 2*H + N)   features in, fc's result out and in, K and V out
//   operations = 2 * T*(F*H + H*N)
// Partial sums of the splits, 8 * T * (H * fc.splits + N * kv.splits) bytes out and in, stay in the L2 cache.
//
// Floor = max(bytes / bandwidth, operations / peak of mma.sync), with data-sheet values: H200 4.8 TB/s, 60 %
// of 989 TFLOP/s; A100-80GB 2.04 TB/s, 90 % of 312 TFLOP/s. Predicted, not measured (no GPU so far):
//
//   drafter                      F      H     N      T    MB     GFLOP  H200 us  A100 us
//   Qwen3-4B, 5 taps, 5 layers   12800  2560  10240  16   118.9  1.89   24.8     58.3
//   (nkv 8, d 128)                                   64   121.6  7.55   25.3     59.6
//   Qwen3-8B, 5 taps, 5 layers   20480  4096  10240  16   252.9  4.03   52.7     124.0
//   (nkv 8, d 128)                                   64   256.6  16.1   53.5     125.9
//
// Memory is the limit in all of them. Above 64 rows a second block of rows reads every weight again, from the
// L2 cache, whose bandwidth is about that of an H200's memory: there the crossover to the library's GEMM
// lies.
#pragma once

#include <cuda_runtime_api.h>
#include <stdint.h>

#include "params.h"

namespace carryover {
namespace cuda {

constexpr int64_t kProjectCrossover = 64;  // rows; see above
constexpr int32_t kProjectHeadMax = 256;   // head sizes above go to the library's GEMM
constexpr int32_t kProjectSplitsMax = 16;
constexpr int32_t kProjectDepthMin =
    128;  // columns of a split at least: below, filling the pipeline dominates

// C[rows, cols] = A[rows, depth] B[cols, depth]^T as blocks of tile_rows x tile_cols, of which used_cols
// columns hold something: a block of the second GEMM takes whole heads, because k_norm needs them.
struct GemmPlan {
  int32_t tile_rows;    // 16 or 64
  int32_t tile_cols;    // 128 or 256
  int32_t used_cols;    // <= tile_cols
  int32_t row_blocks;   // ceil(rows / tile_rows)
  int32_t col_tiles;    // ceil(cols / used_cols)
  int32_t splits;       // of the depth
  int32_t split_depth;  // multiple of the depth of a tile

  constexpr int64_t tiles() const { return int64_t(row_blocks) * col_tiles; }
  int64_t partials() const {  // floats of workspace
    return splits == 1 ? 0 : tiles() * splits * tile_rows * tile_cols;
  }
};

inline GemmPlan plan_gemm(int64_t rows, int64_t cols, int64_t depth, int32_t head, int32_t multiprocessors) {
  GemmPlan p = {};
  p.tile_cols = head > 128 ? 256 : 128;
  p.used_cols = p.tile_cols / head * head;
  p.tile_rows = rows <= 16 ? 16 : 64;
  p.row_blocks = int32_t((rows + p.tile_rows - 1) / p.tile_rows);
  p.col_tiles = int32_t((cols + p.used_cols - 1) / p.used_cols);
  const int64_t step = p.tile_cols == 256 ? 32 : 64;
  const int64_t fit = p.tile_rows * p.tile_cols > 64 * 128 ? 1 : 2;  // GemmTile::kBlocks
  int64_t splits = multiprocessors * fit / (p.tiles() > 0 ? p.tiles() : 1);
  if (splits > depth / kProjectDepthMin) splits = depth / kProjectDepthMin;
  if (splits > kProjectSplitsMax) splits = kProjectSplitsMax;
  if (splits < 1) splits = 1;
  const int64_t steps = (depth + step - 1) / step, each = (steps + splits - 1) / splits;
  p.split_depth = int32_t(each * step);
  p.splits = int32_t((steps + each - 1) / each);  // none is empty
  return p;
}

// Where the rows of commit_and_carry go. A row whose slot or position is out of range goes nowhere and is not
// counted (builds with CARRYOVER_DEBUG trap); ragged arguments are clamped to the T rows that exist.
struct CommitRoutes {
  const int32_t* positions;     // [T]
  const int32_t* row_start;     // [B + 1]
  const int32_t* num_accepted;  // [B]
  const int64_t* slots;         // [T]
  int64_t rows, requests;       // T, B
  int64_t pages, page_size;
  int64_t room;                                // R, rows of a segment
  int64_t positions_end;                       // rows of cos_sin
  int64_t k_page, k_slot, v_page, v_slot;      // strides of the caches
  int64_t k_request, k_row, v_request, v_row;  // strides of the segments
  bool carry;
  RowRoute* routes;       // [T]
  int32_t* segment_lens;  // [B]
  int32_t* counters;      // [counter_count], set to 0
  int64_t counter_count;
};

// Where the rows of project_kv go: row t of [L, T, nkv, d]; a row at position -1 (or out of range, where
// builds with CARRYOVER_DEBUG trap) becomes zero.
struct ProjectRoutes {
  const int32_t* positions;  // [T]
  const uint8_t* carried;    // [T] or null: non-zero marks a row that gets the embedding
  int64_t rows, row_stride, positions_end;
  RowRoute* routes;   // [T]
  int32_t* counters;  // [counter_count], set to 0
  int64_t counter_count;
};

struct ProjectParams {
  bool bf16;  // else float16
  int64_t rows, features, hidden, layers, heads, dim, rot;
  float eps;
  bool pre_norm;
  const void* x;   // [T, F], rows x_stride apart
  const void* fc;  // [H, F], rows fc_stride apart
  const void* kv;  // [L*2*nkv*d, H], rows kv_stride apart
  int64_t x_stride, fc_stride, kv_stride;
  const void* norm;       // [H]
  const void* embedding;  // [H] or null
  const void* k_norm;     // [L, d]
  const float* cos_sin;   // [P, rot]
  KvDestination dest[2];  // committed, carried
  GemmPlan fc_plan, kv_plan;
  // Workspace.
  RowRoute* routes;     // [T]; kCarried: the row gets the embedding
  void* u;              // [T, H], fc's result
  float* squares;       // [T, fc_plan.col_tiles], partial sums of squares of its rows (embedding included)
  float* partials;      // [max(fc_plan.partials(), kv_plan.partials())]
  int32_t* counters;    // [fc_plan.tiles() + kv_plan.tiles()], zero
  const void* kv_rows;  // [T, L*2*nkv*d]: second GEMM's result, for route_kv alone
};

// Whether the tiles can load these operands: 16-byte rows and a head that fits a block. Else the library's
// GEMM.
inline bool project_tiles_fit(const ProjectParams& p) {
  const auto address = reinterpret_cast<uintptr_t>(p.x) | reinterpret_cast<uintptr_t>(p.fc) |
                       reinterpret_cast<uintptr_t>(p.kv) | reinterpret_cast<uintptr_t>(p.norm) |
                       reinterpret_cast<uintptr_t>(p.embedding);
  const int64_t sizes = p.features | p.hidden | p.x_stride | p.fc_stride | p.kv_stride;
  return address % 16 == 0 && sizes % 8 == 0 && p.features > 0 && p.dim <= kProjectHeadMax;
}

// Only where project_tiles_fit holds.
inline void project_plan(ProjectParams& p, int32_t multiprocessors) {
  p.fc_plan = plan_gemm(p.rows, p.hidden, p.features, 1, multiprocessors);
  p.kv_plan = plan_gemm(p.rows, p.layers * 2 * p.heads * p.dim, p.hidden, int32_t(p.dim), multiprocessors);
}

// Sets the pointers into a workspace and returns its size in bytes; every part starts at a multiple of 16.
// Behind the library's GEMM only the routes are needed.
inline int64_t project_workspace(ProjectParams& p, void* base, bool tiles) {
  int64_t used = 0;
  const auto take = [&](int64_t bytes) {
    char* part = static_cast<char*>(base) + used;
    used += (bytes + 15) / 16 * 16;
    return static_cast<void*>(part);
  };
  p.routes = static_cast<RowRoute*>(take(p.rows * int64_t(sizeof(RowRoute))));
  if (!tiles) return used;
  const int64_t fc = p.fc_plan.partials(), kv = p.kv_plan.partials();
  p.u = take(p.rows * p.hidden * 2);
  p.squares = static_cast<float*>(take(p.rows * p.fc_plan.col_tiles * 4));
  p.partials = static_cast<float*>(take((fc > kv ? fc : kv) * 4));
  p.counters = static_cast<int32_t*>(take((p.fc_plan.tiles() + p.kv_plan.tiles()) * 4));
  return used;
}

cudaError_t route_rows(const CommitRoutes& p, cudaStream_t stream);
cudaError_t route_rows(const ProjectRoutes& p, cudaStream_t stream);

// Both GEMMs with their epilogues; project_tiles_fit must hold.
cudaError_t project_rows(const ProjectParams& p, cudaStream_t stream);

// The epilogues alone, behind the library's GEMMs: `u` becomes its normed self; `kv_rows` go where they
// belong.
cudaError_t carry_norm(const ProjectParams& p, cudaStream_t stream);
cudaError_t route_kv(const ProjectParams& p, cudaStream_t stream);

}  // namespace cuda
}  // namespace carryover
