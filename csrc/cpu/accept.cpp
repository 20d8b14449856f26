// Host side of accept: checks, threads; and the plain float64 path.
#include "cpu/accept.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "cpu/dispatch.h"
#include "ops.h"
#include "sampling.h"

CARRYOVER_KERNEL(accept_requests, AcceptParams)

namespace carryover {
namespace {

const Checker kCheck("accept");

// float64 logits: everything in double. For comparisons, not for speed.
void accept_double(const AcceptParams& p, int64_t r, std::vector<double>& w) {
  const int64_t n = p.vocab;
  w.resize(n);
  for (int64_t k = 0;; ++k) {
    const double* x = static_cast<const double*>(p.logits) + r * p.logits_batch + k * p.logits_row;
    const double* top = std::max_element(x, x + n);
    const int64_t token = k < p.drafts ? p.draft_tokens[r * p.drafts + k] : -1;
    p.num_accepted[r] = static_cast<int32_t>(k);
    if (p.temperature == 0) {
      p.next_token[r] = top - x;
      if (k < p.drafts && token == p.next_token[r]) continue;
      return;
    }
    double total = 0;
    for (int64_t i = 0; i < n; ++i) total += w[i] = std::exp((x[i] - *top) / p.temperature);
    for (int64_t i = 0; i < n; ++i) w[i] /= total;
    const float* u = p.uniforms + r * (p.drafts + 1);
    if (token >= 0) {
      const float* q = p.draft_probs ? p.draft_probs + r * p.probs_batch + k * p.probs_row : nullptr;
      if (u[k] * double(q ? q[token] : 1.0f) < w[token]) continue;
      std::vector<double> rest(n);
      double left = 0;
      for (int64_t i = 0; i < n; ++i)
        left += rest[i] = std::max(0.0, w[i] - (q ? double(q[i]) : double(i == token)));
      if (left > 0) w.swap(rest);
    }
    total = 0;
    for (int64_t i = 0; i < n; ++i) total += w[i];
    double cumulated = 0;
    p.next_token[r] = 0;
    for (int64_t i = 0; i < n; ++i) {
      if (!(w[i] > 0)) continue;
      p.next_token[r] = i;
      cumulated += w[i];
      if (cumulated > u[p.drafts] * total) break;
    }
    return;
  }
}

}  // namespace

std::tuple<Tensor, Tensor> accept(const Tensor& draft_tokens, const Tensor& target_logits,
                                  std::optional<Tensor> draft_probs, std::optional<Tensor> uniforms,
                                  double temperature) {
  AcceptArguments a{draft_tokens, target_logits, draft_probs, uniforms, temperature};
  a.check(kCheck);
  const int64_t batch = a.batch, drafts = a.drafts, vocab = a.vocab;

  AcceptParams p = {};
  p.dtype = kernel_dtype(target_logits.scalar_type());
  p.batch = batch, p.drafts = drafts, p.vocab = vocab;
  p.temperature = a.temperature;
  p.draft_tokens = draft_tokens.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < batch * drafts; ++i)
    kCheck.require(p.draft_tokens[i] >= -1 && p.draft_tokens[i] < vocab, "draft_tokens[", i / drafts, ", ",
                   i % drafts, "] = ", p.draft_tokens[i], " is out of range; it must be a token 0..",
                   vocab - 1, " or -1 (padding)");
  if (temperature > 0) {
    p.uniforms = uniforms->const_data_ptr<float>();
    for (int64_t i = 0; i < batch * (drafts + 1); ++i)
      kCheck.require(p.uniforms[i] >= 0 && p.uniforms[i] <= 1, "uniforms[", i / (drafts + 1), ", ",
                     i % (drafts + 1), "] = ", p.uniforms[i],
                     " is out of range; draw it from [0, 1) with torch.rand");
    if (draft_probs) {
      p.draft_probs = draft_probs->const_data_ptr<float>();
      p.probs_batch = draft_probs->stride(0), p.probs_row = draft_probs->stride(1);
    }
  }
  p.logits = target_logits.const_data_ptr();
  p.logits_batch = target_logits.stride(0), p.logits_row = target_logits.stride(1);

  Tensor num_accepted = torch::stable::new_empty(draft_tokens, {batch}, ScalarType::Int);
  Tensor next_token = torch::stable::new_empty(draft_tokens, {batch});
  if (batch == 0) return {num_accepted, next_token};
  p.num_accepted = num_accepted.mutable_data_ptr<int32_t>();
  p.next_token = next_token.mutable_data_ptr<int64_t>();
  if (p.dtype == DType::kFloat64) {
    std::vector<double> weights;
    for (int64_t r = 0; r < batch; ++r) accept_double(p, r, weights);
    return {num_accepted, next_token};
  }

  static thread_local std::vector<double>
      buffer;  // stays: a decoder calls with the same sizes again and again
  const int64_t workers = std::min<int64_t>(batch, torch::stable::get_num_threads());
  const int64_t doubles = temperature > 0 ? (vocab + 15) / 16 * 8 + vocab / kAcceptBlock + 1 : 0;
  if (int64_t(buffer.size()) < workers * doubles) buffer.resize(workers * doubles);
  p.scratch = reinterpret_cast<float*>(buffer.data());
  p.scratch_size = doubles * 2;
  int64_t next = 0;
  p.next = &next;
  torch::stable::parallel_for(0, workers, 1,
                              [&](int64_t b, int64_t e) { CARRYOVER_CALL(accept_requests, p, b, e); });
  return {num_accepted, next_token};
}

}  // namespace carryover
