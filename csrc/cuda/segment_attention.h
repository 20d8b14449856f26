// What the host hands to the attention kernels, and the plan: tile and number of pieces, from static shapes
// and the number of multiprocessors alone.
#pragma once

#include <cuda_runtime_api.h>
#include <stdint.h>

#include "params.h"

namespace carryover {
namespace cuda {

// How the keys of a request are cut.
struct AttentionPlan {
  int32_t pieces;  // at most, and in the grid
  int32_t fill;    // <= pieces: as many fill the chip; more only where a piece would become too long
  int32_t least;   // keys of a piece: below, writing and reading partial results costs more than it saves
};

// Rows are addressed as KeyRows says. Lengths live on the device and are clamped to their capacities.
struct SegmentAttentionParams {
  bool bf16;                                        // else float16
  int32_t batch, rows, heads, kv_heads, head_size;  // rows = b, queries of a request
  int32_t page_size, max_pages, pages;              // max_pages 1 without a block table
  int32_t capacity;                                 // context rows of a request at most
  const void* q;                                    // [B, b, nh, d]
  int64_t q_batch, q_row, q_head;
  KeyRows context;              // [N, page, nkv, d], batch stride = page stride
  const int32_t* block_table;   // [B, max_pages] or null: request i owns page i
  const int32_t* context_lens;  // [B]
  KeyRows segment;              // [B, R, nkv, d] or null pointers
  int32_t segment_rows;         // R
  const int32_t* segment_lens;  // [B] or null
  KeyRows block;                // [B, b, nkv, d]
  const int32_t* block_lens;    // [B] or null: all b rows
  const float* sinks;           // [nh] or null
  float scale, soft_cap;        // soft_cap 0: none
  int32_t causal, window;       // window 0: none
  void* out;                    // [B, b, nh, d], contiguous
  AttentionPlan plan;
  float* partial_out;    // [plan.pieces, B, b, nh, d], not normalised; null if there is one piece
  float* partial_stats;  // [plan.pieces, B, b, nh, 2]: maximum (base 2) and sum; null if there is one piece
};

constexpr int32_t kAttentionHeadMax = 256;
constexpr int32_t kAttentionPieceStep = 128;     // keys: pieces are multiples of it
constexpr int32_t kAttentionPieceTarget = 8192;  // keys: above, one long request keeps a ragged batch waiting
constexpr int32_t kAttentionPiecesMax = 64;
constexpr int64_t kAttentionWorkspaceMax = 16 << 20;  // floats, of pieces beyond those that fill the chip
constexpr int32_t kAttentionBlocksPerSm = 2;

// Head size of the tile; channels between d and it are zero.
constexpr int32_t attention_tile_head(int32_t d) {
  return d <= 64 ? 64 : d <= 96 ? 96 : d <= 128 ? 128 : 256;
}

// Query rows (block rows x heads of a group) of a tile. 128 rows of 256 channels exceed the shared memory of
// sm_120.
constexpr int32_t attention_tile_rows(int32_t group_rows, int32_t d) {
  const int32_t most = attention_tile_head(d) > 128 ? 64 : 128;
  return group_rows <= 16 ? 16 : group_rows <= 32 ? 32 : group_rows <= 64 || most == 64 ? 64 : 128;
}

// Depends on no length and not on the segment: an empty segment gives the bits of none.
inline AttentionPlan attention_plan(int32_t batch, int32_t rows, int32_t heads, int32_t kv_heads, int32_t d,
                                    int64_t capacity, int32_t multiprocessors) {
  const auto bounded = [](int64_t n, int64_t most) {
    return int32_t(n > most ? (most < 1 ? 1 : most) : (n < 1 ? 1 : n));
  };
  const int64_t group_rows = int64_t(rows) * (heads / kv_heads), keys = capacity + rows;
  const int32_t tile = attention_tile_rows(bounded(group_rows, 128), d);
  const int64_t blocks = int64_t(batch) * kv_heads * ((group_rows + tile - 1) / tile);
  AttentionPlan plan;
  plan.least = 2 * tile > kAttentionPieceStep ? 2 * tile : kAttentionPieceStep;
  int64_t most = keys / (2 * plan.least);
  if (most > kAttentionPiecesMax) most = kAttentionPiecesMax;
  plan.fill = bounded(blocks > 0 ? int64_t(multiprocessors) * kAttentionBlocksPerSm / blocks : 1, most);
  const int64_t floats = int64_t(batch) * rows * heads * (d + 2);  // of a piece
  if (floats > 0 && most > kAttentionWorkspaceMax / floats) most = kAttentionWorkspaceMax / floats;
  plan.pieces = bounded((keys + kAttentionPieceTarget - 1) / kAttentionPieceTarget, most);
  if (plan.pieces < plan.fill) plan.pieces = plan.fill;
  return plan;
}

// Floats of workspace: partial outputs, then partial statistics. None if there is one piece.
inline int64_t attention_workspace(int32_t batch, int32_t rows, int32_t heads, int32_t d, int32_t pieces) {
  return pieces == 1 ? 0 : int64_t(pieces) * batch * rows * heads * (d + 2);
}

// Two kernels if there are pieces, else one.
cudaError_t segment_attention(const SegmentAttentionParams& p, cudaStream_t stream);

}  // namespace cuda
}  // namespace carryover
