// Logits with the low-rank bias, a block of the vocabulary at a time: a few rows of markov_w2 meet all
// requests while they are in the cache, and what follows (argmax, or exponentials and their sum) is done at
// once.
#include "cpu/markov_sample.h"

#include "cpu/vec.h"

namespace carryover {
namespace CARRYOVER_LEVEL {
namespace {

constexpr float kInfinity = __builtin_inff();
constexpr int kRows = 4;  // rows of w2 in a tile
#if defined(__AVX512F__)
constexpr int kRequests = 4;  // requests in a tile: kRows * kRequests accumulators
#else
constexpr int kRequests = 2;
#endif

// out[i][j] = w[i] . latent[j]
template <int R, int N, class T>
void dots(const T* w, const float* latent, int64_t rank, float (&out)[R][N]) {
  constexpr int W = Vec::kWidth;
  Vec sum[R][N];
  for (int i = 0; i < R; ++i)
    for (int j = 0; j < N; ++j) sum[i][j] = Vec::zero();
  int64_t c = 0;
  for (; c + W <= rank; c += W) {
    Vec x[N];
    for (int j = 0; j < N; ++j) x[j] = Vec::load(latent + j * rank + c);
    for (int i = 0; i < R; ++i) {
      const Vec row = Vec::load(w + i * rank + c);
      for (int j = 0; j < N; ++j) sum[i][j] = fmadd(row, x[j], sum[i][j]);
    }
  }
  if (c < rank) {
    const int rest = static_cast<int>(rank - c);
    for (int i = 0; i < R; ++i) {
      const Vec row = Vec::load(w + i * rank + c, rest);
      for (int j = 0; j < N; ++j) sum[i][j] = fmadd(row, Vec::load(latent + j * rank + c, rest), sum[i][j]);
    }
  }
  for (int i = 0; i < R; ++i)
    for (int j = 0; j < N; ++j) out[i][j] = reduce_add(sum[i][j]);
}

// R rows of w2 from `row` on, N requests from `first` on.
template <int R, int N, class T>
void tile(const MarkovParams& p, int64_t block, int64_t row, int64_t first) {
  float bias[R][N];
  dots<R, N>(static_cast<const T*>(p.w2) + row * p.rank, p.latent + first * p.rank, p.rank, bias);
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
