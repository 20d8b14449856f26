// Host side of markov_sample: checks, the steps of a block, draws; and the plain float64 path.
#include "cpu/markov_sample.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "cpu/dispatch.h"
#include "ops.h"
#include "philox.h"
#include "sampling.h"

CARRYOVER_KERNEL(markov_blocks, MarkovParams)
CARRYOVER_KERNEL(markov_scale, MarkovParams)

namespace carryover {
namespace {

const Checker kCheck("markov_sample");

// A whole call. Pointers of results are those of the caller's tensors.
struct Call {
  DType dtype;
  int64_t batch, steps, vocab, tokens, rank;  // tokens: rows of markov_w1
  const void* logits;
  int64_t logits_batch, logits_step;
  const int64_t* prev;     // [B]
  const void* w1;          // [V, r]
  const void* w2;          // [Vd, r]
  const int64_t* d2t;      // [Vd] or null
  const float* uniforms;   // [B, K] or null (greedy)
  double temperature;      // 0: greedy
  int64_t* out_tokens;     // [B, K]
  float* out_token_probs;  // [B, K]
  float* out_probs;        // [B, K, Vd] or null
};

// The drawn entry of request b and the scale of each block. Nothing has weight: the first entry, for certain.
struct Draw {
  int64_t index;
  float probability;
};

Draw draw(const MarkovParams& p, int64_t blocks, int64_t b, double u, std::vector<float>& scale) {
  float* w = p.weights + p.request[b] * p.weights_batch;
  double top = -std::numeric_limits<double>::infinity();
  for (int64_t k = 0; k < blocks; ++k) top = std::max<double>(top, p.block_top[k * p.batch + b]);
  double total = 0;
  std::vector<double> part(blocks, 0.0);  // e^((top of the block - top) / T)
  for (int64_t k = 0; k < blocks; ++k) {
    if (!(p.block_sum[k * p.batch + b] > 0)) continue;
    part[k] = std::exp((p.block_top[k * p.batch + b] - top) * p.inverse);
    total += part[k] * p.block_sum[k * p.batch + b];
  }
  for (int64_t k = 0; k < blocks; ++k)
    scale[k * p.batch + b] = total > 0 ? static_cast<float>(part[k] / total) : 0.0f;
  if (!(total > 0)) {
    w[0] = 1;
    scale[b] = 1;
    return {0, 1.0f};
  }
  const double target = u * total;
  double before = 0;
  int64_t last = -1;
  for (int64_t k = 0; k < blocks; ++k) {
    const double here = part[k] * p.block_sum[k * p.batch + b];
    const int64_t end = std::min(p.vocab, (k + 1) * kMarkovBlock);
    if (before + here <= target && end < p.vocab) {
      before += here;
      continue;
    }
    bool any = false;
    double inside = before;
    for (int64_t i = k * kMarkovBlock; i < end; ++i) {
      if (!(w[i] * scale[k * p.batch + b] > 0)) continue;
      last = i, any = true;
      inside += part[k] * w[i];
      if (inside > target) break;
    }
    // A block's sum and that of its entries differ by rounding: then the last entry of the block is meant.
    if (any && (inside > target || end < p.vocab)) break;
    before += here;
  }
  if (last < 0)  // u at its very end, and the last blocks weigh nothing
    for (int64_t i = p.vocab - 1; last < 0 && i >= 0; --i)
      if (w[i] * scale[i / kMarkovBlock * p.batch + b] > 0) last = i;
  return {last, w[last] * scale[last / kMarkovBlock * p.batch + b]};
}

void sample_float(const Call& c) {
  std::vector<int64_t> live;  // requests that are not padding
  for (int64_t i = 0; i < c.batch; ++i)
    if (c.prev[i] >= 0) live.push_back(i);
  const int64_t n = live.size(), blocks = (c.vocab + kMarkovBlock - 1) / kMarkovBlock;
  if (n == 0) return;
  std::vector<int64_t> prev(n), index;
  for (int64_t i = 0; i < n; ++i) prev[i] = c.prev[live[i]];
  const size_t element = c.dtype == DType::kBFloat16 ? 2 : 4, row_bytes = c.rank * element;
  std::vector<char> latent(n * row_bytes);
  std::vector<float> top(blocks * n), scale, scratch;
  std::vector<double> sum;
  MarkovParams p = {};
  p.dtype = c.dtype, p.batch = n, p.vocab = c.vocab, p.rank = c.rank;
  p.request = live.data(), p.w2 = c.w2, p.latent = latent.data(), p.block_top = top.data();
  p.logits_batch = c.logits_batch;
  if (c.temperature > 0) {
    p.inverse = static_cast<float>(1 / c.temperature);
    sum.resize(blocks * n), scale.resize(blocks * n);
    p.block_sum = sum.data(), p.block_scale = scale.data();
    p.weights_batch = c.vocab;
    if (c.out_probs) {
      p.weights_batch *= c.steps;
    } else {
      scratch.resize(c.batch * c.vocab);
      p.weights = scratch.data();
    }
  } else {
    index.resize(blocks * n);
    p.block_index = index.data();
  }
  // Work items that a thread is worth waking for: about 64 thousand multiply-adds.
  const int64_t grain = std::max<int64_t>(1, (1 << 16) / (kMarkovBlock * c.rank * n));
  for (int64_t k = 0; k < c.steps; ++k) {
    for (int64_t i = 0; i < n; ++i)
      std::memcpy(&latent[i * row_bytes], static_cast<const char*>(c.w1) + prev[i] * row_bytes, row_bytes);
    p.logits = static_cast<const char*>(c.logits) + k * c.logits_step * element;
    if (c.out_probs) p.weights = c.out_probs + k * c.vocab;
    torch::stable::parallel_for(0, blocks, grain,
                                [&](int64_t b, int64_t e) { CARRYOVER_CALL(markov_blocks, p, b, e); });
    for (int64_t i = 0; i < n; ++i) {
      const int64_t at = live[i] * c.steps + k;
      Draw drawn = {0, 1.0f};
      if (c.temperature > 0) {
        drawn = draw(p, blocks, i, c.uniforms[at], scale);
      } else {
        float best = -std::numeric_limits<float>::infinity();
        for (int64_t b = 0; b < blocks; ++b)
          if (top[b * n + i] > best) best = top[b * n + i], drawn.index = index[b * n + i];
      }
      prev[i] = c.d2t ? c.d2t[drawn.index] : drawn.index;
      c.out_tokens[at] = prev[i];
      c.out_token_probs[at] = drawn.probability;
    }
    if (c.out_probs)
      torch::stable::parallel_for(0, blocks, std::max<int64_t>(1, 64 / n),
                                  [&](int64_t b, int64_t e) { CARRYOVER_CALL(markov_scale, p, b, e); });
  }
}

// float64: everything in double, one request after the other. For comparisons, not for speed.
void sample_double(const Call& c) {
  std::vector<double> w(c.vocab);
  for (int64_t i = 0; i < c.batch; ++i) {
    int64_t prev = c.prev[i];
    for (int64_t k = 0; k < c.steps && prev >= 0; ++k) {
      const int64_t at = i * c.steps + k;
      const double* base = static_cast<const double*>(c.logits) + i * c.logits_batch + k * c.logits_step;
      const double* latent = static_cast<const double*>(c.w1) + prev * c.rank;
      int64_t chosen = 0;
      double best = -std::numeric_limits<double>::infinity(), probability = 1;
      for (int64_t v = 0; v < c.vocab; ++v) {
        double x = 0;
        for (int64_t j = 0; j < c.rank; ++j)
          x += static_cast<const double*>(c.w2)[v * c.rank + j] * latent[j];
        w[v] = base[v] + x;
        if (w[v] > best) best = w[v], chosen = v;
      }
      if (c.temperature > 0) {
        double total = 0;
        for (double& x : w) total += x = x > -HUGE_VAL ? std::exp((x - best) / c.temperature) : 0.0;
        if (!(total > 0)) total = w[0] = 1;
        double cumulated = 0;
        for (int64_t v = 0; v < c.vocab; ++v) {
          if (!(w[v] > 0)) continue;
          chosen = v;
          cumulated += w[v];
          if (cumulated > c.uniforms[at] * total) break;
        }
        probability = w[chosen] / total;
        if (c.out_probs)
          for (int64_t v = 0; v < c.vocab; ++v)
            c.out_probs[at * c.vocab + v] = static_cast<float>(w[v] / total);
      }
      prev = c.d2t ? c.d2t[chosen] : chosen;
      c.out_tokens[at] = prev;
      c.out_token_probs[at] = static_cast<float>(probability);
    }
  }
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor> markov_sample(const Tensor& base_logits, const Tensor& prev_tokens,
                                                 const Tensor& markov_w1, const Tensor& markov_w2,
                                                 std::optional<Tensor> d2t, std::optional<Tensor> uniforms,
                                                 double temperature, bool with_probs,
                                                 std::optional<Tensor> seeds, std::optional<Tensor> offsets) {
  MarkovArguments a{base_logits, prev_tokens, markov_w1, markov_w2,  d2t,
                    uniforms,    seeds,       offsets,   temperature};
  a.check(kCheck);
  Call c = {};
  c.dtype = kernel_dtype(base_logits.scalar_type());
  c.batch = a.batch, c.steps = a.steps, c.vocab = a.vocab, c.tokens = a.tokens, c.rank = a.rank;
  c.temperature = a.temperature;
  c.prev = prev_tokens.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < c.batch; ++i)
    kCheck.require(c.prev[i] >= -1 && c.prev[i] < c.tokens, "prev_tokens[", i, "] = ", c.prev[i],
                   " is out of range; it must be a token 0..", c.tokens - 1, " or -1 (padding)");
  if (d2t) {
    c.d2t = d2t->const_data_ptr<int64_t>();
    for (int64_t v = 0; v < c.vocab; ++v)
      kCheck.require(c.d2t[v] >= 0 && c.d2t[v] < c.tokens, "d2t[", v, "] = ", c.d2t[v],
                     " is out of range; it must be a token 0..", c.tokens - 1, ", a row of markov_w1");
  }
  const bool sampled = c.temperature > 0;
  std::vector<float> drawn;
  if (sampled && seeds) {
    const int64_t *seed = seeds->const_data_ptr<int64_t>(),
                  *offset = offsets ? offsets->const_data_ptr<int64_t>() : nullptr;
    drawn.resize(c.batch * c.steps);
    for (int64_t i = 0; i < c.batch; ++i)
      for (int64_t k = 0; k < c.steps; ++k)
        drawn[i * c.steps + k] = philox_uniform(seed[i], (offset ? uint64_t(offset[i]) : 0) + k);
    c.uniforms = drawn.data();
  } else if (sampled) {
    c.uniforms = uniforms->const_data_ptr<float>();
    for (int64_t i = 0; i < c.batch * c.steps; ++i)
      kCheck.require(c.uniforms[i] >= 0 && c.uniforms[i] <= 1, "uniforms[", i / c.steps, ", ", i % c.steps,
                     "] = ", c.uniforms[i], " is out of range; draw it from [0, 1) with torch.rand");
  }
  c.logits = base_logits.const_data_ptr();
  c.logits_batch = base_logits.stride(0), c.logits_step = base_logits.stride(1);
  c.w1 = markov_w1.const_data_ptr(), c.w2 = markov_w2.const_data_ptr();

  const bool full = sampled && with_probs;
  Tensor tokens = torch::stable::new_empty(prev_tokens, {c.batch, c.steps});
  Tensor token_probs = torch::stable::new_empty(prev_tokens, {c.batch, c.steps}, ScalarType::Float);
  Tensor probs =
      torch::stable::new_empty(prev_tokens, {full ? c.batch : 0, c.steps, c.vocab}, ScalarType::Float);
  if (c.batch == 0 || c.steps == 0) return {tokens, token_probs, probs};
  c.out_tokens = tokens.mutable_data_ptr<int64_t>();
  c.out_token_probs = token_probs.mutable_data_ptr<float>();
  c.out_probs = full ? probs.mutable_data_ptr<float>() : nullptr;
  for (int64_t i = 0; i < c.batch; ++i) {  // padding
    if (c.prev[i] >= 0) continue;
    std::fill_n(c.out_tokens + i * c.steps, c.steps, -1);
    std::fill_n(c.out_token_probs + i * c.steps, c.steps, 0.0f);
    if (full) std::fill_n(c.out_probs + i * c.steps * c.vocab, c.steps * c.vocab, 0.0f);
  }
  if (c.dtype == DType::kFloat64)
    sample_double(c);
  else
    sample_float(c);
  return {tokens, token_probs, probs};
}

}  // namespace carryover
