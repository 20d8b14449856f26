// Attention of a block's queries over context | segment | block, for one instruction set level.
//
// The queries of one KV head (b rows times the heads of its group) are packed with the query index in the
// vector lanes, so that
//   S^T[key][query] = sum_c K[key][c] * Q^T[c][query]      and      O^T[c][query] += V[key][c] *
//   P^T[key][query]
// are both "broadcast one number of K or V, multiply with a few vectors". K is never transposed or copied,
// every row of K and V is read once for all queries of its group, and maxima and sums of the softmax are
// lane-wise: no horizontal operation anywhere. Keys arrive as row pointers, 128 at a time: pages, the segment
// and the block are the same to the arithmetic.
//
// With AVX512-BF16 two channels (or two keys) are taken per instruction; elsewhere bfloat16 rows are widened
// into a scratch tile first.
#include "cpu/segment_attention.h"

#include "cpu/kernels/lanes.h"

#ifndef CARRYOVER_LEVEL
#define CARRYOVER_LEVEL plain
#endif

namespace carryover::CARRYOVER_LEVEL {
namespace {

constexpr int kKeys = kAttentionTile;
constexpr float kInfinity = __builtin_inff();

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kStep =
    8;  // keys (or channels) that share a loaded query vector: 3 x 8 accumulators fit 32 registers
#else
constexpr int kStep = 4;
#endif

alignas(64) const float kZeros[kHeadSizeMax] = {};

// Everything a thread needs, carved from one buffer that the host allocates; sizes in floats are rounded to
// whole cache lines.
template <int W>
struct Scratch {
  float* q;       // [d or d/2][rows]: packed queries
  float* s;       // [kKeys][3 * W]: scores, then probabilities
  float* o;       // [d_padded][rows]
  float* peak;    // [rows]: running maximum of the scores
  float* total;   // [rows]: running sum of the probabilities
  int32_t* pos;   // [rows]: position of each query
  float* k_wide;  // [kKeys][d_padded]: widened keys (bfloat16 without AVX512-BF16)
  float* v_wide;  // [kKeys][d_padded]: widened values, or pairs of values
};

template <int W>
Scratch<W> carve(float* p, int rows, int d) {
  const int dp = padded_head(d);
  Scratch<W> s;
  auto take = [&](int64_t n) {
    float* r = p;
    p += cache_lines(n);
    return r;
  };
  s.q = take(int64_t(dp) * rows);
  s.s = take(int64_t(kKeys) * 3 * W);
  s.o = take(int64_t(dp) * rows);
  s.peak = take(rows);
  s.total = take(rows);
  s.pos = reinterpret_cast<int32_t*>(take(rows));
  s.k_wide = take(int64_t(kKeys) * dp);
  s.v_wide = take(int64_t(kKeys) * dp);
  return s;
}

// One tile of keys: where the rows are and which queries see them. A query at position t sees key j iff
// low[j] <= t < high[j].
struct Tile {
  int count = 0, padded = 0;
  bool masked = false;
  const void* k[kKeys];
  const void* v[kKeys];
  int32_t low[kKeys], high[kKeys];
};

// Walks the visible rows of a unit in order: context, segment, block.
template <typename T>
struct KeyWalk {
  const AttentionParams& p;
  const AttentionUnit& u;
  int32_t context, segment, block, next = 0;
  int64_t head_k[3], head_v[3];

  KeyWalk(const AttentionParams& params, const AttentionUnit& unit) : p(params), u(unit) {
    context = p.context_lens[u.request];
    segment = u.last && p.segment_lens ? p.segment_lens[u.request] : 0;
    block = u.last ? (p.block_lens ? p.block_lens[u.request] : p.rows) : 0;
    if (context < 0) segment = block = 0;  // inactive request: sees nothing, its output is zero
  }

  void push(Tile& t, const KeyRows& rows, int64_t batch, int64_t row, int32_t position, bool ordered) const {
    const int j = t.count++;
    t.k[j] =
        static_cast<const T*>(rows.k) + batch * rows.k_batch + row * rows.k_row + u.kv_head * rows.k_head;
    t.v[j] =
        static_cast<const T*>(rows.v) + batch * rows.v_batch + row * rows.v_row + u.kv_head * rows.v_head;
    t.low[j] = ordered ? position : INT32_MIN;
    t.high[j] = p.window > 0 ? position + p.window : INT32_MAX;
    t.masked |= t.low[j] > context || t.high[j] <= context + p.rows - 1;
  }

  bool fill(Tile& t) {
    t.count = 0;
    t.masked = false;
    const int32_t from_context = u.end - u.begin, from_segment = from_context + segment,
                  all = from_segment + block;
    while (t.count < kKeys && next < from_context) {  // run by run inside a page
      const int32_t s = u.begin + next, page = s / p.page_size, first = s % p.page_size;
      int32_t run = p.page_size - first;
      if (run > from_context - next) run = from_context - next;
      if (run > kKeys - t.count) run = kKeys - t.count;
      const int64_t index =
          p.block_table ? p.block_table[int64_t(u.request) * p.max_pages + page] : u.request;
      for (int32_t r = 0; r < run; ++r) push(t, p.context, index, first + r, s + r, false);
      next += run;
    }
    for (; t.count < kKeys && next < from_segment; ++next)
      push(t, p.segment, u.request, next - from_context, context + next - from_context, false);
    for (; t.count < kKeys && next < all; ++next)
      push(t, p.block, u.request, next - from_segment, context + next - from_segment, p.causal);
    t.padded = (t.count + kStep - 1) / kStep * kStep;
    for (int j = t.count; j < t.padded; ++j) {  // seen by nobody, and safe to read
      t.k[j] = t.v[j] = kZeros;
      t.low[j] = t.high[j] = INT32_MAX;
      t.masked = true;
    }
    return t.count > 0;
  }
};

// ---- products
// ------------------------------------------------------------------------------------------------------------

// acc[r][j] += sum over c of a[c][r] * b_j[c], one float per step of c. Sums of 64 products are added to each
// other: long rows keep the accuracy of a blocked summation.
template <int W, int R, int J>
inline void dot_f32(const float* a, int64_t lda, const void* const* rows, int n, Vec<W> (&acc)[R][J]) {
  const float* b[J];
  for (int j = 0; j < J; ++j) b[j] = static_cast<const float*>(rows[j]);
  for (int first = 0; first < n; first += 64) {
    const int stop = first + 64 < n ? first + 64 : n;
    Vec<W> part[R][J] = {};
    for (int c = first; c < stop; ++c) {
      Vec<W> x[R];
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) x[r] = load<W>(a + c * lda + r * W);
#pragma GCC unroll 8
      for (int j = 0; j < J; ++j) {
        const Vec<W> y = splat<W>(b[j][c]);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) part[r][j] = x[r] * y + part[r][j];
      }
    }
#pragma GCC unroll 8
    for (int j = 0; j < J; ++j)
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) acc[r][j] = acc[r][j] + part[r][j];
  }
}

// acc[r][j] += sum over keys of a[key][r] * b[key][j]: b is a row of values per key.
template <int W, int R, int J>
inline void outer_f32(const float* a, int64_t lda, const void* const* b, int64_t column, int keys,
                      Vec<W> (&acc)[R][J]) {
  for (int k = 0; k < keys; ++k) {
    Vec<W> x[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) x[r] = load<W>(a + k * lda + r * W);
    const float* row = static_cast<const float*>(b[k]) + column;
#pragma GCC unroll 8
    for (int j = 0; j < J; ++j) {
      const Vec<W> y = splat<W>(row[j]);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) acc[r][j] = x[r] * y + acc[r][j];
    }
  }
}

#ifdef __AVX512BF16__
// The same with pairs of bfloat16: a[c][r] and b_j[c] hold channels 2c and 2c+1 in 32 bits.
template <int W, int R, int J>
inline void dot_pairs(const float* a, int64_t lda, const void* const* rows, int n, Vec<W> (&acc)[R][J]) {
  const int32_t* b[J];
  for (int j = 0; j < J; ++j) b[j] = static_cast<const int32_t*>(rows[j]);
  for (int c = 0; c < n; ++c) {
    Vec<W> x[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) x[r] = load<W>(a + c * lda + r * W);
#pragma GCC unroll 8
    for (int j = 0; j < J; ++j) {
      const IVec<W> y = splat_pair<W>(b[j] + c);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) acc[r][j] = dot_bf16<W>(acc[r][j], x[r], y);
    }
  }
}

// b[pair][column] holds the values of keys 2*pair and 2*pair+1.
template <int W, int R, int J>
inline void outer_pairs(const float* a, int64_t lda, const int32_t* b, int64_t ldb, int pairs,
                        Vec<W> (&acc)[R][J]) {
  for (int k = 0; k < pairs; ++k) {
    Vec<W> x[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) x[r] = load<W>(a + k * lda + r * W);
#pragma GCC unroll 8
    for (int j = 0; j < J; ++j) {
      const IVec<W> y = splat_pair<W>(b + k * ldb + j);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) acc[r][j] = dot_bf16<W>(acc[r][j], x[r], y);
    }
  }
}
#endif

// ---- one tile of keys against R vectors of queries
// -------------------------------------------------------------------------

template <typename T>
constexpr bool pairs_of(int d) {
#ifdef __AVX512BF16__
  return sizeof(T) == 2 && d % 2 == 0;
#else
  (void)d;
  return false;
#endif
}

// Scores into s[key][3W], and their maxima into peak. Compiled four ways: with masks and soft cap, or
// without.
template <typename T, int W, int R, bool kPairs, bool kMask, bool kCap>
void scores(const AttentionParams& p, const Tile& t, const float* q, int64_t ldq, const int32_t* pos,
            float* s, Vec<W> (&peak)[R]) {
  const Vec<W> scale = splat<W>(kCap ? float(p.scale / p.soft_cap) : float(p.scale)),
               cap = splat<W>(float(p.soft_cap));
  IVec<W> at[R];
  for (int r = 0; r < R; ++r) at[r] = iload<W>(pos + r * W);
  for (int j0 = 0; j0 < t.padded; j0 += kStep) {
    Vec<W> acc[R][kStep] = {};
#ifdef __AVX512BF16__
    if constexpr (kPairs) {
      dot_pairs<W, R, kStep>(q, ldq, t.k + j0, p.head_size / 2, acc);
    } else
#endif
      dot_f32<W, R, kStep>(q, ldq, t.k + j0, p.head_size, acc);
#pragma GCC unroll 8
    for (int j = 0; j < kStep; ++j) {
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        Vec<W> x = acc[r][j] * scale;
        if constexpr (kCap) x = tanh<W>(x) * cap;
        if constexpr (kMask) {
          const IVec<W> seen = (isplat<W>(t.low[j0 + j]) <= at[r]) & (at[r] < isplat<W>(t.high[j0 + j]));
          x = seen ? x : splat<W>(-kInfinity);
        }
        peak[r] = x > peak[r] ? x : peak[r];
        store<W>(s + (j0 + j) * 3 * W + r * W, x);
      }
    }
  }
}

// Scores to probabilities in place, relative to `peak`; with kPairs two keys are packed to bfloat16 pairs,
// one row for two keys.
template <int W, int R, bool kPairs, bool kMask>
void probabilities(const Tile& t, float* s, const Vec<W> (&peak)[R], Vec<W> (&total)[R]) {
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    Vec<W> sum = {};
    for (int j = 0; j < t.padded; j += 2) {
      Vec<W> a = load<W>(s + j * 3 * W + r * W), b = load<W>(s + (j + 1) * 3 * W + r * W);
      const Vec<W> x = a - peak[r], y = b - peak[r];
      a = exp<W, kPairs>(x), b = exp<W, kPairs>(y);
      if constexpr (kMask) {  // exp clamps: an unseen key must weigh exactly nothing
        a = x < splat<W>(kLeast) ? Vec<W>{} : a;
        b = y < splat<W>(kLeast) ? Vec<W>{} : b;
      }
      sum = sum + (a + b);
#ifdef __AVX512BF16__
      if constexpr (kPairs) {
        store<W>(s + (j / 2) * 3 * W + r * W, pack_bf16<W>(a, b));
        continue;
      }
#endif
      store<W>(s + j * 3 * W + r * W, a);
      store<W>(s + (j + 1) * 3 * W + r * W, b);
    }
    total[r] = sum;
  }
}

template <typename T, int W, int R, bool kPairs>
void tile_rows(const AttentionParams& p, const Tile& t, const Scratch<W>& x, int row, int rows) {
  const float* q = x.q + row;
  Vec<W> old[R], peak[R], shrink[R], total[R] = {};
  for (int r = 0; r < R; ++r) old[r] = peak[r] = load<W>(x.peak + row + r * W);
  const bool cap = p.soft_cap > 0;
  if (t.masked) {
    if (cap)
      scores<T, W, R, kPairs, true, true>(p, t, q, rows, x.pos + row, x.s, peak);
    else
      scores<T, W, R, kPairs, true, false>(p, t, q, rows, x.pos + row, x.s, peak);
  } else {
    if (cap)
      scores<T, W, R, kPairs, false, true>(p, t, q, rows, x.pos + row, x.s, peak);
    else
      scores<T, W, R, kPairs, false, false>(p, t, q, rows, x.pos + row, x.s, peak);
  }
  for (int r = 0; r < R; ++r) {
    store<W>(x.peak + row + r * W, peak[r]);
    // No key seen yet: subtract 0 instead of -inf, which leaves every probability at 0.
    peak[r] = peak[r] == splat<W>(-kInfinity) ? Vec<W>{} : peak[r];
    const Vec<W> down = old[r] - peak[r];
    shrink[r] = down < splat<W>(kLeast) ? Vec<W>{} : exp<W, false>(down);
  }
  if (t.masked)
    probabilities<W, R, kPairs, true>(t, x.s, peak, total);
  else
    probabilities<W, R, kPairs, false>(t, x.s, peak, total);
  for (int r = 0; r < R; ++r) {
    float* sum = x.total + row + r * W;
    store<W>(sum, load<W>(sum) * shrink[r] + total[r]);
  }

  const int dp = padded_head(p.head_size);
  for (int c = 0; c < dp; c += kStep) {
    Vec<W> acc[R][kStep] = {};
#ifdef __AVX512BF16__
    if constexpr (kPairs) {
      outer_pairs<W, R, kStep>(x.s, 3 * W, reinterpret_cast<const int32_t*>(x.v_wide) + c, dp, t.padded / 2,
                               acc);
    } else
#endif
      outer_f32<W, R, kStep>(x.s, 3 * W, t.v, c, t.padded, acc);
#pragma GCC unroll 8
    for (int j = 0; j < kStep; ++j)
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        float* o = x.o + int64_t(c + j) * rows + row + r * W;
        store<W>(o, load<W>(o) * shrink[r] + acc[r][j]);
      }
  }
}

// Brings the rows of a tile into the form that the products read.
template <typename T, int W, bool kPairs>
void prepare(const AttentionParams& p, Tile& t, const Scratch<W>& x) {
  const int d = p.head_size, dp = padded_head(d);
  if constexpr (kPairs) {  // interleave the values of two keys; keys are read where they are
    uint32_t* out = reinterpret_cast<uint32_t*>(x.v_wide);
    for (int j = 0; j < t.padded; j += 2, out += dp) {
      const uint16_t* a = static_cast<const uint16_t*>(t.v[j]);
      const uint16_t* b = static_cast<const uint16_t*>(t.v[j + 1]);
      for (int c = 0; c < d; ++c) out[c] = uint32_t(a[c]) | uint32_t(b[c]) << 16;
      for (int c = d; c < dp; ++c) out[c] = 0;
    }
  } else if (sizeof(T) == 2 || d != dp) {
    for (int j = 0; j < t.padded; ++j) {
      float* k = x.k_wide + int64_t(j) * dp;
      float* v = x.v_wide + int64_t(j) * dp;
      widen(static_cast<const T*>(t.k[j]), k, d);
      widen(static_cast<const T*>(t.v[j]), v, d);
      for (int c = d; c < dp; ++c) k[c] = v[c] = 0;
      t.k[j] = k, t.v[j] = v;
    }
  }
}

// Row i of a tile is head i / b of the group, block row i % b: neighbours in a vector are neighbours in the
// block.
template <typename T, int W, bool kPairs>
void pack_queries(const AttentionParams& p, const AttentionUnit& u, const Scratch<W>& x, int count,
                  int rows) {
  const int group = p.heads / p.kv_heads, d = p.head_size, context = p.context_lens[u.request];
  const int live = p.block_lens ? p.block_lens[u.request] : p.rows;
  for (int i = 0; i < rows; ++i) {
    const int row = i % p.rows, head = u.kv_head * group + i / p.rows;
    x.pos[i] = i < count ? context + row : context;
    x.peak[i] = -kInfinity;
    x.total[i] = 0;
    const bool used = i < count && row < live;  // the rest may be garbage: never touched
    const T* q =
        static_cast<const T*>(p.q) + u.request * p.q_batch + row * p.q_row + int64_t(head) * p.q_head;
    if constexpr (kPairs) {
      uint32_t* out = reinterpret_cast<uint32_t*>(x.q) + i;
      for (int c = 0; c < d / 2; ++c) out[int64_t(c) * rows] = used ? uint32_t(load_pair(q + 2 * c)) : 0;
    } else {
      for (int c = 0; c < d; ++c) x.q[int64_t(c) * rows + i] = used ? to_float(q[c]) : 0.f;
    }
  }
  for (int64_t i = 0, n = int64_t(padded_head(d)) * rows; i < n; ++i) x.o[i] = 0;
}

// Divides by the softmax denominator and writes the rows of one KV head.
template <typename T>
void finish(const AttentionParams& p, int request, int kv_head, const float* o, const float* peak,
            const float* total, int rows) {
  const int group = p.heads / p.kv_heads, d = p.head_size;
  const int live = p.block_lens ? p.block_lens[request] : p.rows;
  for (int i = 0; i < p.rows * group; ++i) {
    const int row = i % p.rows, head = kv_head * group + i / p.rows;
    T* out = static_cast<T*>(p.out) + ((int64_t(request) * p.rows + row) * p.heads + head) * d;
    float factor = 0;  // rows beyond block_len, and rows that saw no key
    if (row < live && peak[i] != -kInfinity) {
      float shrink = 1, extra = 0;
      if (p.sinks) {
        const float sink = p.sinks[head], top = sink > peak[i] ? sink : peak[i];
        shrink = __builtin_expf(peak[i] - top), extra = __builtin_expf(sink - top);
      }
      factor = shrink / (total[i] * shrink + extra);
    }
    if (factor == 0)
      for (int c = 0; c < d; ++c) out[c] = from_float<T>(0.f);
    else
      for (int c = 0; c < d; ++c) out[c] = from_float<T>(o[int64_t(c) * rows + i] * factor);
  }
}

template <typename T, int W, bool kPairs>
void run_unit(const AttentionParams& p, const AttentionUnit& u, float* scratch) {
  const int count = p.rows * (p.heads / p.kv_heads), rows = (count + W - 1) / W * W;
  const Scratch<W> x = carve<W>(scratch, rows, p.head_size);
  pack_queries<T, W, kPairs>(p, u, x, count, rows);
  KeyWalk<T> walk(p, u);
  Tile t;
  while (walk.fill(t)) {
    prepare<T, W, kPairs>(p, t, x);
    int row = 0;
    while (row < rows) {
      const int left = (rows - row) / W;
      if (left >= 3 && left != 4)
        tile_rows<T, W, 3, kPairs>(p, t, x, row, rows), row += 3 * W;
      else if (left >= 2)
        tile_rows<T, W, 2, kPairs>(p, t, x, row, rows), row += 2 * W;
      else
        tile_rows<T, W, 1, kPairs>(p, t, x, row, rows), row += W;
    }
  }
  if (u.partial < 0) {
    finish<T>(p, u.request, u.kv_head, x.o, x.peak, x.total, rows);
  } else {
    const int64_t n = int64_t(padded_head(p.head_size)) * rows;
    float* out = p.partials + u.partial * p.partial_size;
    __builtin_memcpy(out, x.o, n * sizeof(float));
    __builtin_memcpy(out + n, x.peak, rows * sizeof(float));
    __builtin_memcpy(out + n + rows, x.total, rows * sizeof(float));
  }
}

// Sums the partial results of one (request, KV head) into the first of them.
template <typename T, int W>
void merge(const AttentionParams& p, const AttentionMerge& m) {
  const int count = p.rows * (p.heads / p.kv_heads), rows = (count + W - 1) / W * W,
            dp = padded_head(p.head_size);
  float* first = p.partials + m.first * p.partial_size;
  float *peak = first + int64_t(dp) * rows, *total = peak + rows;
  for (int k = 1; k < m.count; ++k) {
    const float* other = first + k * p.partial_size;
    for (int r = 0; r < rows; r += W) {
      const float *other_peak = other + int64_t(dp) * rows + r, *other_total = other_peak + rows;
      const Vec<W> a = load<W>(peak + r), b = load<W>(other_peak);
      Vec<W> top = a > b ? a : b;
      store<W>(peak + r, top);
      top = top == splat<W>(-kInfinity) ? Vec<W>{} : top;
      const Vec<W> da = a - top, db = b - top;
      const Vec<W> fa = da < splat<W>(kLeast) ? Vec<W>{} : exp<W, false>(da);
      const Vec<W> fb = db < splat<W>(kLeast) ? Vec<W>{} : exp<W, false>(db);
      store<W>(total + r, load<W>(total + r) * fa + load<W>(other_total) * fb);
      for (int c = 0; c < dp; ++c) {
        const int64_t at = int64_t(c) * rows + r;
        store<W>(first + at, load<W>(first + at) * fa + load<W>(other + at) * fb);
      }
    }
  }
  finish<T>(p, m.request, m.kv_head, first, peak, total, rows);
}

// Half-width vectors when they waste fewer lanes: 24 queries are three vectors of 8, not two of 16.
inline bool narrow(const AttentionParams& p) {
  const int rest = p.rows * (p.heads / p.kv_heads) % kLanes;
  return kLanes == 16 && rest > 0 && rest <= kLanes / 2;
}

template <typename T>
void unit_of(const AttentionParams& p, const AttentionUnit& u, float* scratch) {
  constexpr int half = kLanes == 16 ? 8 : kLanes;
#ifdef __AVX512BF16__
  if (pairs_of<T>(p.head_size)) {
    if (narrow(p))
      run_unit<T, half, sizeof(T) == 2>(p, u, scratch);
    else
      run_unit<T, kLanes, sizeof(T) == 2>(p, u, scratch);
    return;
  }
#endif
  if (narrow(p))
    run_unit<T, half, false>(p, u, scratch);
  else
    run_unit<T, kLanes, false>(p, u, scratch);
}

template <typename T>
void merge_of(const AttentionParams& p, const AttentionMerge& m) {
  if (narrow(p))
    merge<T, kLanes == 16 ? 8 : kLanes>(p, m);
  else
    merge<T, kLanes>(p, m);
}

}  // namespace

// Worker threads take units from a shared counter: requests of unequal length balance themselves.
void attention_units(const AttentionParams& p, int64_t begin, int64_t end) {
  if (begin >= end) return;
  float* scratch = p.scratch + begin * p.scratch_size;
  for (;;) {
    const int64_t i = __atomic_fetch_add(p.next, 1, __ATOMIC_RELAXED);
    if (i >= p.num_units) return;
    if (p.dtype == DType::kBFloat16)
      unit_of<uint16_t>(p, p.units[i], scratch);
    else
      unit_of<float>(p, p.units[i], scratch);
  }
}

void attention_merge(const AttentionParams& p, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    if (p.dtype == DType::kBFloat16)
      merge_of<uint16_t>(p, p.merges[i]);
    else
      merge_of<float>(p, p.merges[i]);
  }
}

}  // namespace carryover::CARRYOVER_LEVEL
