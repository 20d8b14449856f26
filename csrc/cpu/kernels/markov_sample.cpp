// Logits with the low-rank bias, a block of the vocabulary at a time: a few rows of markov_w2 meet all
// requests while they are in the cache, and what follows (argmax, or exponentials and their sum) is done at
// once.
#include "cpu/markov_sample.h"

#include "cpu/vec.h"

namespace carryover {
namespace CARRYOVER_LEVEL {
namespace {

constexpr float kInfinity = __builtin_inff();
constexpr int kRows = 4;  // rows of w2 in a tile, at most four (see reduce)
#if defined(__AVX512F__)
constexpr int kRequests = 4;  // requests in a tile: kRows * kRequests accumulators
#else
constexpr int kRequests = 2;
#endif
// GCC keeps a tile in registers only when its loops are unrolled early. Plain lanes are loops themselves.
#if defined(__AVX2__)
#define UNROLL _Pragma("GCC unroll 4")
#else
#define UNROLL
#endif

// Sums of the lanes of a tile.
template <int R, int N>
void reduce(const Vec (&sum)[R][N], float (&out)[R][N]) {
  UNROLL
  for (int j = 0; j < N; ++j) {
#if defined(__AVX2__)
    __m256 y[4];  // four rows at a time: half of the shuffles of four reduce_add
    for (int i = R; i < 4; ++i) y[i] = _mm256_setzero_ps();
    UNROLL
    for (int i = 0; i < R; ++i) {
#if defined(__AVX512F__)
      y[i] = _mm256_add_ps(_mm512_castps512_ps256(sum[i][j].v),
                           _mm512_maskz_extractf32x8_ps(0xff, sum[i][j].v, 1));
#else
      y[i] = sum[i][j].v;
#endif
    }
    const __m256 both = _mm256_hadd_ps(_mm256_hadd_ps(y[0], y[1]), _mm256_hadd_ps(y[2], y[3]));
    float four[4];
    _mm_storeu_ps(four, _mm_add_ps(_mm256_castps256_ps128(both), _mm256_extractf128_ps(both, 1)));
    UNROLL
    for (int i = 0; i < R; ++i) out[i][j] = four[i];
#else
    for (int i = 0; i < R; ++i) out[i][j] = reduce_add(sum[i][j]);
#endif
  }
}

// out[i][j] = w[i] . latent[j]
template <int R, int N, class T>
void dots(const T* w, const T* latent, int64_t rank, float (&out)[R][N]) {
  constexpr int W = Vec::kWidth;
  Vec sum[R][N];
  UNROLL
  for (int i = 0; i < R; ++i) {
    UNROLL
    for (int j = 0; j < N; ++j) sum[i][j] = Vec::zero();
  }
  int64_t c = 0;
  for (; c + W <= rank; c += W) {
    Vec x[N];
    UNROLL
    for (int j = 0; j < N; ++j) x[j] = Vec::load(latent + j * rank + c);
    UNROLL
    for (int i = 0; i < R; ++i) {
      const Vec row = Vec::load(w + i * rank + c);
      UNROLL
      for (int j = 0; j < N; ++j) sum[i][j] = fmadd(row, x[j], sum[i][j]);
    }
  }
  if (c < rank) {
    const int rest = static_cast<int>(rank - c);
    UNROLL
    for (int i = 0; i < R; ++i) {
      const Vec row = Vec::load(w + i * rank + c, rest);
      UNROLL
      for (int j = 0; j < N; ++j) sum[i][j] = fmadd(row, Vec::load(latent + j * rank + c, rest), sum[i][j]);
    }
  }
  reduce(sum, out);
}

#if defined(__AVX512BF16__)
// Products of bfloat16 pairs without widening.
template <int R, int N>
void dots(const bf16* w, const bf16* latent, int64_t rank, float (&out)[R][N]) {
  Vec sum[R][N];
  UNROLL
  for (int i = 0; i < R; ++i) {
    UNROLL
    for (int j = 0; j < N; ++j) sum[i][j] = Vec::zero();
  }
  for (int64_t c = 0; c < rank; c += 32) {
    const __mmask32 some = rank - c < 32 ? (1u << (rank - c)) - 1u : 0xffffffffu;
    __m512bh x[N];
    UNROLL
    for (int j = 0; j < N; ++j) x[j] = (__m512bh)_mm512_maskz_loadu_epi16(some, latent + j * rank + c);
    UNROLL
    for (int i = 0; i < R; ++i) {
      const __m512bh row = (__m512bh)_mm512_maskz_loadu_epi16(some, w + i * rank + c);
      UNROLL
      for (int j = 0; j < N; ++j) sum[i][j].v = _mm512_dpbf16_ps(sum[i][j].v, row, x[j]);
    }
  }
  reduce(sum, out);
}
#endif

// R rows of w2 from `row` on, N requests from `first` on.
template <int R, int N, class T>
void tile(const MarkovParams& p, int64_t block, int64_t row, int64_t first) {
  float bias[R][N];
  dots<R, N>(static_cast<const T*>(p.w2) + row * p.rank, static_cast<const T*>(p.latent) + first * p.rank,
             p.rank, bias);
  for (int j = 0; j < N; ++j) {
    const int64_t b = first + j, r = p.request[b];
    const T* base = static_cast<const T*>(p.logits) + r * p.logits_batch + row;
    if (p.inverse > 0) {
      float* out = p.weights + r * p.weights_batch + row;
      for (int i = 0; i < R; ++i) out[i] = to_float(base[i]) + bias[i][j];
      continue;
    }
    float& top = p.block_top[block * p.batch + b];
    for (int i = 0; i < R; ++i) {
      const float x = to_float(base[i]) + bias[i][j];
      if (x > top) top = x, p.block_index[block * p.batch + b] = row + i;  // the first of equals, never NaN
    }
  }
}

template <int R, class T>
void rows(const MarkovParams& p, int64_t block, int64_t row) {
  int64_t b = 0;
  for (; b + kRequests <= p.batch; b += kRequests) tile<R, kRequests, T>(p, block, row, b);
  for (; b < p.batch; ++b) tile<R, 1, T>(p, block, row, b);
}

// In place: x becomes e^((x - top) / T). NaN and -inf weigh nothing.
void exponentials(float* x, int64_t n, float inverse, float* block_top, double* block_sum) {
  constexpr int W = Vec::kWidth;
  Vec most = Vec::set1(-kInfinity);
  int64_t i = 0;
  for (; i + W <= n; i += W) most = max(Vec::load(x + i), most);
  float top = reduce_max(most);
  for (; i < n; ++i) top = x[i] > top ? x[i] : top;
  *block_top = top;
  *block_sum = 0;
  if (top == -kInfinity) {
    memset(x, 0, sizeof(float) * static_cast<size_t>(n));
    return;
  }
  const Vec shift = Vec::set1(top), factor = Vec::set1(inverse);
  Vec sum = Vec::zero();
  for (i = 0; i + W <= n; i += W) {
    const Vec e = exp((Vec::load(x + i) - shift) * factor);
    e.store(x + i);
    sum = sum + e;
  }
  double total = reduce_add(sum);
  if (i < n) {
    const int rest = static_cast<int>(n - i);
    exp((Vec::load(x + i, rest) - shift) * factor).store(x + i, rest);
    for (; i < n; ++i) total += x[i];
  }
  *block_sum = total;
}

template <class T>
void blocks(const MarkovParams& p, int64_t begin, int64_t end) {
  for (int64_t block = begin; block < end; ++block) {
    const int64_t first = block * kMarkovBlock;
    const int64_t last = first + kMarkovBlock < p.vocab ? first + kMarkovBlock : p.vocab;
    if (p.inverse == 0) {
      for (int64_t b = 0; b < p.batch; ++b) {
        p.block_top[block * p.batch + b] = -kInfinity;
        p.block_index[block * p.batch + b] = -1;
      }
    }
    int64_t row = first;
    for (; row + kRows <= last; row += kRows) rows<kRows, T>(p, block, row);
    for (; row < last; ++row) rows<1, T>(p, block, row);
    if (p.inverse == 0) continue;
    for (int64_t b = 0; b < p.batch; ++b) {
      const int64_t at = block * p.batch + b;
      exponentials(p.weights + p.request[b] * p.weights_batch + first, last - first, p.inverse,
                   p.block_top + at, p.block_sum + at);
    }
  }
}

}  // namespace

// Blocks begin .. end-1 of the vocabulary.
void markov_blocks(const MarkovParams& p, int64_t begin, int64_t end) {
  if (p.dtype == DType::kBFloat16)
    blocks<bf16>(p, begin, end);
  else
    blocks<float>(p, begin, end);
}

// The same blocks: weights become probabilities.
void markov_scale(const MarkovParams& p, int64_t begin, int64_t end) {
  constexpr int W = Vec::kWidth;
  for (int64_t b = 0; b < p.batch; ++b) {
    float* row = p.weights + p.request[b] * p.weights_batch;
    for (int64_t block = begin; block < end; ++block) {
      const int64_t first = block * kMarkovBlock;
      const int64_t last = first + kMarkovBlock < p.vocab ? first + kMarkovBlock : p.vocab;
      const float scale = p.block_scale[block * p.batch + b];
      const Vec factor = Vec::set1(scale);
      int64_t i = first;
      for (; i + W <= last; i += W) (Vec::load(row + i) * factor).store(row + i);
      for (; i < last; ++i) row[i] *= scale;
    }
  }
}

}  // namespace CARRYOVER_LEVEL
}  // namespace carryover
