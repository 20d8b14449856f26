// What the host hands to the attention kernel: raw pointers, 64-bit strides in elements, one plain list of
// work.
#pragma once
#include <stdint.h>

#include "params.h"

namespace carryover {

// One piece of work: the queries of one KV head of one request against a range of its context rows, and in
// the last piece of a request also against its segment and block.
struct AttentionUnit {
  int32_t request, kv_head;
  int32_t begin, end;  // context rows [begin, end)
  int32_t last;        // 1: segment and block rows follow the context rows
  int32_t partial;     // -1: the only piece, write the output; otherwise the index of the partial result
};

// A (request, KV head) that was cut into pieces: partials [first, first + count) make its output.
struct AttentionMerge {
  int32_t request, kv_head, first, count;
};

struct AttentionParams {
  DType dtype;
  int32_t batch, rows, heads, kv_heads, head_size;  // rows = b, queries of a request
  int32_t page_size, max_pages;  // context row s is row s % page_size of page block_table[s / page_size]
  const void* q;                 // [B, b, nh, d]
  int64_t q_batch, q_row, q_head;
  KeyRows context;              // batch stride = page stride
  const int32_t* block_table;   // [B, max_pages] or null: request i owns page i
  const int32_t* context_lens;  // [B]
  KeyRows segment;              // [B, R, nkv, d] or null pointers
  const int32_t* segment_lens;  // [B] or null
  KeyRows block;                // [B, b, nkv, d]
  const int32_t* block_lens;    // [B] or null: all b rows
  const float* sinks;           // [nh] or null
  double scale, soft_cap;       // soft_cap 0: none
  int32_t causal, window;       // window 0: none
  void* out;                    // [B, b, nh, d], contiguous
  const AttentionUnit* units;
  const AttentionMerge* merges;
  int64_t num_units;
  int64_t* next;         // shared counter of units taken
  float* scratch;        // one for each worker
  int64_t scratch_size;  // floats
  // Partial results: accumulators [d_padded, rows_padded], then running maxima and sums [rows_padded] each.
  float* partials;
  int64_t partial_size;  // floats in one partial result
};

// static: this header is compiled for several instruction sets, none of which may leak into another
constexpr int kMaxLanes = 16;  // widest vector, in floats
constexpr int kHeadSizeMax = 512;
constexpr int kAttentionTile = 128;  // keys taken at a time

static inline int64_t cache_lines(int64_t floats) {
  return (floats + 15) / 16 * 16;
}
// The head size rounded up to whole column groups.
static inline int32_t padded_head(int32_t d) {
  return (d + 7) / 8 * 8;
}
static inline int64_t padded_rows(int64_t rows) {
  return cache_lines(rows);
}
static inline int64_t attention_partial_floats(int64_t rows, int32_t d) {
  return padded_rows(rows) * (padded_head(d) + 2);
}
// What carve() in kernels/segment_attention.cpp cuts up.
static inline int64_t attention_scratch_floats(int64_t rows, int32_t d) {
  const int64_t padded = padded_rows(rows), dp = padded_head(d);
  return 2 * dp * padded + 3 * padded + kAttentionTile * 3 * kMaxLanes + 2 * kAttentionTile * dp;
}

}  // namespace carryover
