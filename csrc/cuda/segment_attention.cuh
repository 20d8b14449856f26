// Attention of a block's queries over context | segment | block, and the combine of pieces.
//
// The queries of one KV head (block rows x the heads of its group) are the rows of one tile, so every key and
// value is read once for all of them. The keys of a request form one sequence: the visible context rows, then
// the segment, then the block; where a row of it lies in memory is the business of the loader alone. The
// sequence is cut into pieces of equal length, whose number depends on static shapes only and whose length on
// the lengths on the device; a piece that would be empty is left out by both kernels.
//
// 16 rows of a tile belong to a warp; with fewer than four warps of rows, several warps share the rows and
// take different keys of each tile. Tiles of keys are double-buffered with cp.async. Scores are kept in
// base 2.
#pragma once

#include "cuda/common.cuh"
#include "cuda/ptx.cuh"
#include "cuda/segment_attention.h"

namespace carryover {
namespace cuda {

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kNegInfinity = -INFINITY;

template <class T_, int kHead_, int kRows_>
struct AttentionTile {
  using T = T_;
  static constexpr int kHead = kHead_, kRows = kRows_;
  static constexpr int kKeys = kHead > 128 ? 32 : 64;
  static constexpr int kRowWarps = kRows / 16;
  static constexpr int kKeyWarps = kRowWarps >= 4               ? 1
                                   : 4 / kRowWarps < kKeys / 16 ? 4 / kRowWarps
                                                                : kKeys / 16;
  static constexpr int kWarps = kRowWarps * kKeyWarps;
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kWarpKeys = kKeys / kKeyWarps;  // of a tile
  static constexpr int kChunks = kHead / 8;            // of 16 bytes in a row
  static constexpr int kLoadRows = kKeys / kWarps;     // rows of a tile that a warp loads
  static constexpr int kLoads = kLoadRows * kChunks / 32;
  static constexpr int kStage = 2 * kKeys * kHead;    // elements of K and V
  static constexpr bool kKeepQueries = kHead <= 128;  // in registers
  static constexpr int kMergeFloats = kHead / 2 + 4;  // of a lane
  static constexpr int kSmem = (kRows * kHead + 2 * kStage) * int(sizeof(T));
  static_assert(kRows % 16 == 0 && kHead % 32 == 0 && kWarpKeys % 16 == 0, "");
  static_assert(kKeys % kWarps == 0 && kLoadRows * kChunks % 32 == 0 && kLoadRows <= 32, "");
  static_assert((kKeyWarps - 1) * kRowWarps * kMergeFloats * 32 * 4 <= 2 * kStage * int(sizeof(T)), "");
};

// Where 16-byte chunk `chunk` of row `row` lies in a tile, in elements. Eight rows of the same chunk, which
// is what ldmatrix reads at a time, fall into eight different groups of four banks.
template <int kHead>
__host__ __device__ __forceinline__ constexpr int attention_swizzle(int row, int chunk) {
  return row * kHead + (kHead % 64 == 0 ? chunk ^ (row & 7) : chunk ^ (row >> 1 & 3)) * 8;
}

// Two numbers as the matrix instructions take them, the first in the low half.
template <class T>
__device__ __forceinline__ uint32_t pack(float low, float high) {
  const T pair[2] = {from_float<T>(low), from_float<T>(high)};
  uint32_t bits;
  memcpy(&bits, pair, sizeof bits);
  return bits;
}

// The sequence of keys of a request and how it is cut; both kernels must agree on it.
struct KeySequence {
  int context, segment, live;  // lengths; live: block rows that exist. All 0 for an inactive request
  int begin;                   // first context row that a window leaves visible
  int in_block, end;           // where the block rows start, and the number of keys
  int piece, pieces;           // keys of a piece (a multiple of kAttentionPieceStep), pieces that hold keys

  __device__ __forceinline__ KeySequence(const SegmentAttentionParams& p, int request) {
    context = p.context_lens[request];
    segment = p.segment_lens != nullptr ? p.segment_lens[request] : 0;
    live = p.block_lens != nullptr ? p.block_lens[request] : p.rows;
#ifdef CARRYOVER_DEBUG
    if (context < -1 || context > p.capacity || segment < 0 || segment > p.segment_rows || live < 0 ||
        live > p.rows)
      __trap();
#endif
    context = min(context, p.capacity);
    segment = max(0, min(segment, p.segment_rows));
    live = max(0, min(live, p.rows));
    if (context < 0) context = segment = live = 0;
    begin = p.window > 0 ? max(0, context - p.window + 1) : 0;
    in_block = context - begin + segment;
    end = live > 0 ? in_block + live : 0;
    piece = min(ceil_div(end, p.plan.fill), max(kAttentionPieceTarget, ceil_div(end, p.plan.pieces)));
    piece = ceil_div(max(piece, p.plan.least), kAttentionPieceStep) * kAttentionPieceStep;
    pieces = end > 0 ? ceil_div(end, piece) : 0;
  }
};

template <class T>
struct RowAddress {
  const T* k;  // null: there is no such row
  const T* v;
};

template <class T>
__device__ __forceinline__ RowAddress<T> row_of(const KeyRows& rows, int64_t batch, int64_t row,
                                                int kv_head) {
  return {static_cast<const T*>(rows.k) + batch * rows.k_batch + row * rows.k_row + kv_head * rows.k_head,
          static_cast<const T*>(rows.v) + batch * rows.v_batch + row * rows.v_row + kv_head * rows.v_head};
}

// Row `key` of the sequence of a request.
template <class T>
__device__ __forceinline__ RowAddress<T> find_row(const SegmentAttentionParams& p, const KeySequence& s,
                                                  int request, int kv_head, int key, int stop) {
  if (key >= stop) return {nullptr, nullptr};
  if (key >= s.in_block) return row_of<T>(p.block, request, key - s.in_block, kv_head);
  const int row = s.begin + key;
  if (row >= s.context) return row_of<T>(p.segment, request, row - s.context, kv_head);
  if (p.block_table == nullptr) return row_of<T>(p.context, request, row, kv_head);
  const int entry = row / p.page_size;
  const int page = p.block_table[int64_t(request) * p.max_pages + entry];
  if (page < 0 || page >= p.pages) {  // never read outside the cache: the row is taken as zero
#ifdef CARRYOVER_DEBUG
    __trap();
#endif
    return {nullptr, nullptr};
  }
  return row_of<T>(p.context, page, row - entry * p.page_size, kv_head);
}

// What the softmax denominator makes of a row: `sum` and the values belong to `peak` (base 2), the sink is
// one more logit. Zero for a row that has seen no key.
__device__ __forceinline__ float normaliser(const SegmentAttentionParams& p, int head, float peak,
                                            float sum) {
  if (peak == kNegInfinity) return 0.f;
  if (p.sinks == nullptr) return 1.f / sum;
  const float sink = p.sinks[head] * kLog2e, top = fmaxf(sink, peak);
  const float shrink = ptx::exp2_approx(peak - top);
  return shrink / (sum * shrink + ptx::exp2_approx(sink - top));
}

// One block of threads: one tile of queries of one (request, KV head) against one piece of its keys.
template <class Tile>
class AttentionBlock {
  using T = typename Tile::T;
  static constexpr int kHead = Tile::kHead, kKeys = Tile::kKeys, kScoreTiles = Tile::kWarpKeys / 8;

 public:
  __device__ __forceinline__ AttentionBlock(const SegmentAttentionParams& params, unsigned char* smem,
                                            int request, int kv_head, int row_tile, int piece)
      : p(params),
        keys(params, request),
        request(request),
        kv_head(kv_head),
        row_tile(row_tile),
        piece(piece),
        group(params.heads / params.kv_heads),
        lane(threadIdx.x & 31),
        warp(threadIdx.x >> 5),
        row_warp(warp % Tile::kRowWarps),
        key_warp(warp / Tile::kRowWarps),
        q_tile(reinterpret_cast<T*>(smem)),
        stages(q_tile + Tile::kRows * kHead) {}

  __device__ __forceinline__ void run() {
    if (piece > 0 && piece >= keys.pieces) return;
    const int first = piece * keys.piece, stop = min(keys.end, first + keys.piece);
    if (first < stop) attend(first, stop);
    store();
  }

 private:
  const SegmentAttentionParams& p;
  const KeySequence keys;
  const int request, kv_head, row_tile, piece, group;
  const int lane, warp, row_warp, key_warp;
  T* const q_tile;
  T* const stages;

  float o[kHead / 8][4] = {};
  float peak[2] = {kNegInfinity, kNegInfinity};  // of the scores, in their unit
  float sum[2] = {};

  // The two rows of a lane in its warp's 16 are lane / 4 and lane / 4 + 8.
  __device__ __forceinline__ int query(int half) const {
    return row_tile * Tile::kRows + row_warp * 16 + (lane >> 2) + half * 8;
  }

  __device__ __forceinline__ void load_queries() const {
    for (int i = threadIdx.x; i < Tile::kRows * Tile::kChunks; i += Tile::kThreads) {
      const int row = i / Tile::kChunks, chunk = i % Tile::kChunks;
      const int m = row_tile * Tile::kRows + row, t = m / group;
      const bool valid = t < keys.live && chunk * 8 < p.head_size;  // other rows may hold anything
      const T* from = static_cast<const T*>(p.q);
      if (valid)
        from +=
            request * p.q_batch + t * p.q_row + int64_t(kv_head * group + m % group) * p.q_head + chunk * 8;
      ptx::cp_async_16(q_tile + attention_swizzle<kHead>(row, chunk), from, valid);
    }
  }

  // Lane l of a warp knows the address of row l of the rows that the warp loads.
  __device__ __forceinline__ RowAddress<T> look_up(int first, int stop) const {
    return find_row<T>(p, keys, request, kv_head, first + warp * Tile::kLoadRows + lane % Tile::kLoadRows,
                       stop);
  }

  __device__ __forceinline__ void load(const RowAddress<T>& rows, int stage) const {
    T* k = stages + stage * Tile::kStage;
    T* v = k + kKeys * kHead;
#pragma unroll
    for (int i = 0; i < Tile::kLoads; ++i) {
      const int at = i * 32 + lane, row = at / Tile::kChunks, chunk = at % Tile::kChunks;
      const T* from_k = reinterpret_cast<const T*>(
          __shfl_sync(kFullMask, reinterpret_cast<unsigned long long>(rows.k), row));
      const T* from_v = reinterpret_cast<const T*>(
          __shfl_sync(kFullMask, reinterpret_cast<unsigned long long>(rows.v), row));
      const bool valid = from_k != nullptr && chunk * 8 < p.head_size;
      const int to = attention_swizzle<kHead>(warp * Tile::kLoadRows + row, chunk);
      ptx::cp_async_16(k + to, valid ? from_k + chunk * 8 : p.q, valid);
      ptx::cp_async_16(v + to, valid ? from_v + chunk * 8 : p.q, valid);
    }
  }

  __device__ __forceinline__ void load_query_fragment(uint32_t (&a)[4], int step) const {
    ptx::ldmatrix_x4(a,
                     q_tile + attention_swizzle<kHead>(row_warp * 16 + (lane & 15), step * 2 + (lane >> 4)));
  }

  __device__ __forceinline__ void attend(int first, int stop) {
    load_queries();
    load(look_up(first, stop), 0);
    ptx::cp_async_commit();
    RowAddress<T> next = look_up(first + kKeys, stop);  // a tile ahead: its latency hides behind the products
    ptx::cp_async_wait<0>();
    __syncthreads();

    uint32_t kept[Tile::kKeepQueries ? kHead / 16 : 1][4];
    if constexpr (Tile::kKeepQueries) {
#pragma unroll
      for (int step = 0; step < kHead / 16; ++step) load_query_fragment(kept[step], step);
    }
    int stage = 0;
    for (int at = first; at < stop; at += kKeys, stage ^= 1) {
      if (at + kKeys < stop) {
        load(next, stage ^ 1);
        next = look_up(at + 2 * kKeys, stop);
      }
      ptx::cp_async_commit();
      const T* k = stages + stage * Tile::kStage;
      float s[kScoreTiles][4] = {};
      score(k, kept, s);
      soften(s, at, stop);
      weigh(k + kKeys * kHead, s);
      ptx::cp_async_wait<0>();
      __syncthreads();
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      sum[half] += __shfl_xor_sync(kFullMask, sum[half], 1);
      sum[half] += __shfl_xor_sync(kFullMask, sum[half], 2);
    }
    if constexpr (Tile::kKeyWarps > 1) merge_key_warps();
  }

  // s = Q K^T
  template <int kKept>
  __device__ __forceinline__ void score(const T* k, const uint32_t (&kept)[kKept][4],
                                        float (&s)[kScoreTiles][4]) const {
    const int row = key_warp * Tile::kWarpKeys + (lane & 7) + (lane >> 4) * 8, chunk = lane >> 3 & 1;
#pragma unroll(Tile::kKeepQueries ? kHead / 16 : 4)  // whole, the loads of 256 channels would take registers
    for (int step = 0; step < kHead / 16; ++step) {
      uint32_t a[4];
      if constexpr (Tile::kKeepQueries) {
#pragma unroll
        for (int i = 0; i < 4; ++i) a[i] = kept[step][i];
      } else {
        load_query_fragment(a, step);
      }
#pragma unroll
      for (int n = 0; n < kScoreTiles; n += 2) {
        uint32_t b[4];
        ptx::ldmatrix_x4(b, k + attention_swizzle<kHead>(row + n * 8, step * 2 + chunk));
        ptx::mma_m16n8k16<T>(s[n], a, {b[0], b[1]});
        ptx::mma_m16n8k16<T>(s[n + 1], a, {b[2], b[3]});
      }
    }
  }

  // Scores to probabilities relative to the running maximum; what was summed before shrinks with it.
  __device__ __forceinline__ void soften(float (&s)[kScoreTiles][4], int at, int stop) {
    // Exponents are unit * (score - peak). A soft cap brings its own factor.
    const float unit = p.soft_cap > 0 ? 1.f : p.scale * kLog2e;
    if (p.soft_cap > 0) {
      const float inner = 2.f * kLog2e * p.scale / p.soft_cap, outer = p.soft_cap * kLog2e;
#pragma unroll
      for (int n = 0; n < kScoreTiles; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i)  // tanh(x) = 1 - 2 / (1 + exp(2 x))
          s[n][i] = outer - __fdividef(2.f * outer, 1.f + ptx::exp2_approx(inner * s[n][i]));
    }
    // Positions count from the context's end: query t stands at t.
    const int from = keys.begin - keys.context;
    const bool hidden = p.window > 0 && min(from + at, 0) + p.window <= p.rows - 1;
    const bool ordered = p.causal && at + kKeys > keys.in_block;
    if (at + kKeys > stop || hidden || ordered) {
      const int t0 = query(0) / group, t1 = query(1) / group;
#pragma unroll
      for (int n = 0; n < kScoreTiles; ++n) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int key = at + key_warp * Tile::kWarpKeys + n * 8 + (lane & 3) * 2 + j;
          const bool in_block = key >= keys.in_block;
          const int position = from + key - (in_block ? keys.segment : 0);
          const int low = in_block && p.causal ? position : INT32_MIN;
          const int high = key >= stop ? INT32_MIN : p.window > 0 ? position + p.window : INT32_MAX;
          if (t0 < low || t0 >= high) s[n][j] = kNegInfinity;
          if (t1 < low || t1 >= high) s[n][2 + j] = kNegInfinity;
        }
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float top = peak[half];
#pragma unroll
      for (int n = 0; n < kScoreTiles; ++n) top = fmaxf(top, fmaxf(s[n][2 * half], s[n][2 * half + 1]));
      top = fmaxf(top, __shfl_xor_sync(kFullMask, top, 1));
      top = fmaxf(top, __shfl_xor_sync(kFullMask, top, 2));
      // No key seen yet: relative to 0, which leaves every probability at 0.
      const float base = top == kNegInfinity ? 0.f : unit * top;
      const float shrink = ptx::exp2_approx(unit * peak[half] - base);
      peak[half] = top;
      float total = 0.f;
#pragma unroll
      for (int n = 0; n < kScoreTiles; ++n) {
#pragma unroll
        for (int j = 2 * half; j < 2 * half + 2; ++j) {
          s[n][j] = ptx::exp2_approx(fmaf(unit, s[n][j], -base));
          total += s[n][j];
        }
      }
      sum[half] = sum[half] * shrink + total;
#pragma unroll
      for (int c = 0; c < kHead / 8; ++c) o[c][2 * half] *= shrink, o[c][2 * half + 1] *= shrink;
    }
  }

  // o += P V: the accumulators of the scores are, in pairs, the left operand of the next product.
  __device__ __forceinline__ void weigh(const T* v, const float (&s)[kScoreTiles][4]) {
    const int row = key_warp * Tile::kWarpKeys + (lane & 15), chunk = lane >> 4;
#pragma unroll
    for (int n = 0; n < kScoreTiles; n += 2) {
      const uint32_t a[4] = {pack<T>(s[n][0], s[n][1]), pack<T>(s[n][2], s[n][3]),
                             pack<T>(s[n + 1][0], s[n + 1][1]), pack<T>(s[n + 1][2], s[n + 1][3])};
#pragma unroll
      for (int c = 0; c < kHead / 8; c += 2) {
        uint32_t b[4];
        ptx::ldmatrix_x4_trans(b, v + attention_swizzle<kHead>(row + n * 8, c + chunk));
        ptx::mma_m16n8k16<T>(o[c], a, {b[0], b[1]});
        ptx::mma_m16n8k16<T>(o[c + 1], a, {b[2], b[3]});
      }
    }
  }

  // Warps of the same rows, other keys: their results go to the first of them, lane by lane, through the
  // stages.
  __device__ __forceinline__ void merge_key_warps() {
    float* slots = reinterpret_cast<float*>(stages);
    const auto slot = [&](int other) {
      return slots + ((other - 1) * Tile::kRowWarps + row_warp) * Tile::kMergeFloats * 32 + lane;
    };
    if (key_warp > 0) {
      float* to = slot(key_warp);
#pragma unroll
      for (int c = 0; c < kHead / 8; ++c)
#pragma unroll
        for (int i = 0; i < 4; ++i) to[(c * 4 + i) * 32] = o[c][i];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        to[(kHead / 2 + half) * 32] = peak[half];
        to[(kHead / 2 + 2 + half) * 32] = sum[half];
      }
    }
    __syncthreads();
    if (key_warp > 0) return;
    const float unit = p.soft_cap > 0 ? 1.f : p.scale * kLog2e;
    for (int other = 1; other < Tile::kKeyWarps; ++other) {
      const float* from = slot(other);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float their = from[(kHead / 2 + half) * 32], top = fmaxf(peak[half], their);
        const float base = top == kNegInfinity ? 0.f : unit * top;
        const float mine = ptx::exp2_approx(unit * peak[half] - base);
        const float theirs = ptx::exp2_approx(unit * their - base);
        peak[half] = top;
        sum[half] = sum[half] * mine + from[(kHead / 2 + 2 + half) * 32] * theirs;
#pragma unroll
        for (int c = 0; c < kHead / 8; ++c)
#pragma unroll
          for (int i = 2 * half; i < 2 * half + 2; ++i)
            o[c][i] = o[c][i] * mine + from[(c * 4 + i) * 32] * theirs;
      }
    }
  }

  __device__ __forceinline__ void store() const {
    if (key_warp > 0) return;
    const float unit = p.soft_cap > 0 ? 1.f : p.scale * kLog2e;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int m = query(half), t = m / group, head = kv_head * group + m % group;
      if (t >= p.rows) continue;
      const int64_t row = (int64_t(request) * p.rows + t) * p.heads + head;
      if (keys.pieces <= 1) {
        const float factor = t < keys.live ? normaliser(p, head, unit * peak[half], sum[half]) : 0.f;
        T* to = static_cast<T*>(p.out) + row * p.head_size;
#pragma unroll
        for (int c = 0; c < kHead / 8; ++c) {
          const int channel = c * 8 + (lane & 3) * 2;
          if (channel < p.head_size)
            *reinterpret_cast<uint32_t*>(to + channel) =
                pack<T>(o[c][2 * half] * factor, o[c][2 * half + 1] * factor);
        }
      } else if (t < keys.live) {
        const int64_t at = int64_t(piece) * p.batch * p.rows * p.heads + row;
        float* to = p.partial_out + at * p.head_size;
#pragma unroll
        for (int c = 0; c < kHead / 8; ++c) {
          const int channel = c * 8 + (lane & 3) * 2;
          if (channel < p.head_size)
            *reinterpret_cast<float2*>(to + channel) = make_float2(o[c][2 * half], o[c][2 * half + 1]);
        }
        if ((lane & 3) == 0)
          reinterpret_cast<float2*>(p.partial_stats)[at] = make_float2(unit * peak[half], sum[half]);
      }
    }
  }
};

// Grid: pieces, then row tiles, then KV heads, then requests, in one dimension.
template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kThreads > 128 ? 1 : kAttentionBlocksPerSm)
    segment_attention_kernel(const __grid_constant__ SegmentAttentionParams p, int row_tiles) {
  CARRYOVER_SMEM(smem);
  int at = blockIdx.x;
  const int piece = at % p.plan.pieces;
  at /= p.plan.pieces;
  const int row_tile = at % row_tiles;
  at /= row_tiles;
  AttentionBlock<Tile>(p, smem, at / p.kv_heads, at % p.kv_heads, row_tile, piece).run();
}

constexpr int kCombineThreads = 128;

// One warp sums the pieces of one output row. Requests with a single piece were finished by the first kernel.
template <class T>
__global__ void __launch_bounds__(kCombineThreads)
    segment_attention_combine_kernel(const __grid_constant__ SegmentAttentionParams p) {
  const int lane = threadIdx.x & 31;
  const int64_t row = int64_t(blockIdx.x) * (kCombineThreads / 32) + (threadIdx.x >> 5);
  const int64_t rows = int64_t(p.batch) * p.rows * p.heads;
  if (row >= rows) return;
  const int head = int(row % p.heads), t = int(row / p.heads % p.rows);
  const KeySequence keys(p, int(row / p.heads / p.rows));
  if (keys.pieces <= 1) return;

  const float2* stats = reinterpret_cast<const float2*>(p.partial_stats) + row;
  float peak = kNegInfinity, sum = 0.f;
  if (t < keys.live) {
    for (int i = 0; i < keys.pieces; ++i) peak = fmaxf(peak, stats[i * rows].x);
  }
  const float base = peak == kNegInfinity ? 0.f : peak;
  constexpr int kVectors = ceil_div(kAttentionHeadMax / 4, 32);
  float4 o[kVectors] = {};
  for (int i = 0; i < (t < keys.live ? keys.pieces : 0); ++i) {
    const float2 stat = stats[i * rows];
    const float weight = ptx::exp2_approx(stat.x - base);
    sum += stat.y * weight;
    const float* from = p.partial_out + (i * rows + row) * p.head_size;
#pragma unroll
    for (int n = 0; n < kVectors; ++n) {
      const int channel = (n * 32 + lane) * 4;
      if (channel >= p.head_size) continue;
      const float4 x = *reinterpret_cast<const float4*>(from + channel);
      o[n].x += weight * x.x, o[n].y += weight * x.y, o[n].z += weight * x.z, o[n].w += weight * x.w;
    }
  }
  const float factor = normaliser(p, head, peak, sum);
  T* to = static_cast<T*>(p.out) + row * p.head_size;
#pragma unroll
  for (int n = 0; n < kVectors; ++n) {
    const int channel = (n * 32 + lane) * 4;
    if (channel >= p.head_size) continue;
    *reinterpret_cast<uint2*>(to + channel) =
        make_uint2(pack<T>(o[n].x * factor, o[n].y * factor), pack<T>(o[n].z * factor, o[n].w * factor));
  }
}

}  // namespace cuda
}  // namespace carryover
