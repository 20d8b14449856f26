// accept and markov_sample on the GPU: checks, outputs and workspace, launches. Nothing here reads a value on
// the device: a token out of range counts as padding (accept) or has no bias (markov_sample).
#include <torch/csrc/stable/ops.h>

#include "cuda/accept.h"
#include "cuda/bindings.h"
#include "cuda/markov_sample.h"
#include "ops.h"
#include "sampling.h"

namespace carryover {
namespace cuda {
namespace {

DType kernel_dtype(ScalarType t) {
  return t == ScalarType::BFloat16 ? DType::kBFloat16
         : t == ScalarType::Half   ? DType::kFloat16
                                   : DType::kFloat32;
}

// From PyTorch's allocator, and so part of a captured graph.
Tensor new_workspace(const Tensor& like, int64_t bytes) {
  return torch::stable::new_empty(like, {bytes}, ScalarType::Byte);
}

// Grids count requests and rows in 16 bits.
void check_sizes(const Checker& check, int64_t batch, int64_t rows, int64_t vocab) {
  check.require(batch <= 65535 && rows <= 65535, "at most 65535 requests and rows are possible, got ", batch,
                " and ", rows);
  check.require(vocab <= INT32_MAX / 2, "the vocabulary must be at most ", INT32_MAX / 2, ", got ", vocab);
}

}  // namespace

std::tuple<Tensor, Tensor> accept(const Tensor& draft_tokens, const Tensor& target_logits,
                                  std::optional<Tensor> draft_probs, std::optional<Tensor> uniforms,
                                  double temperature) {
  const Checker check = Checker::cuda("accept", target_logits);
  AcceptArguments a{draft_tokens, target_logits, draft_probs, uniforms, temperature};
  a.check(check);
  check_sizes(check, a.batch, a.drafts + 1, a.vocab);

  const Device device(target_logits);
  Tensor num_accepted = torch::stable::new_empty(draft_tokens, {a.batch}, ScalarType::Int);
  Tensor next_token = torch::stable::new_empty(draft_tokens, {a.batch});
  if (a.batch == 0) return {num_accepted, next_token};
  Tensor workspace = new_workspace(target_logits, accept_workspace(a.batch, a.drafts, a.vocab));
  AcceptParams p = {};
  p.dtype = kernel_dtype(target_logits.scalar_type());
  p.batch = a.batch, p.drafts = a.drafts, p.vocab = a.vocab;
  p.draft_tokens = draft_tokens.const_data_ptr<int64_t>();
  p.logits = target_logits.const_data_ptr();
  p.logits_batch = target_logits.stride(0), p.logits_row = target_logits.stride(1);
  if (a.temperature > 0) {
    p.inverse = static_cast<float>(1 / a.temperature);
    p.uniforms = uniforms->const_data_ptr<float>();
    if (draft_probs) {
      p.draft_probs = draft_probs->const_data_ptr<float>();
      p.probs_batch = draft_probs->stride(0), p.probs_row = draft_probs->stride(1);
    }
  }
  p.num_accepted = num_accepted.mutable_data_ptr<int32_t>();
  p.next_token = next_token.mutable_data_ptr<int64_t>();
  p.chunks = static_cast<AcceptChunk*>(workspace.mutable_data_ptr());
  p.residual = reinterpret_cast<double*>(p.chunks + a.batch * (a.drafts + 1) * accept_chunks(a.vocab));
  check_launch(check, accept(p, device.stream()));
  return {num_accepted, next_token};
}

std::tuple<Tensor, Tensor, Tensor> markov_sample(const Tensor& base_logits, const Tensor& prev_tokens,
                                                 const Tensor& markov_w1, const Tensor& markov_w2,
                                                 std::optional<Tensor> d2t, std::optional<Tensor> uniforms,
                                                 double temperature, bool with_probs,
                                                 std::optional<Tensor> seeds, std::optional<Tensor> offsets) {
  const Checker check = Checker::cuda("markov_sample", base_logits);
  MarkovArguments a{base_logits, prev_tokens, markov_w1, markov_w2,  d2t,
                    uniforms,    seeds,       offsets,   temperature};
  a.check(check);
  check_sizes(check, a.batch, a.steps, a.vocab);
  check.require(a.rank <= kMarkovRankMax, "markov_w1 has rank ", a.rank, "; on the GPU it must be at most ",
                kMarkovRankMax);

  const bool full = with_probs && a.temperature > 0;
  const Device device(base_logits);
  Tensor tokens = torch::stable::new_empty(prev_tokens, {a.batch, a.steps});
  Tensor token_probs = torch::stable::new_empty(prev_tokens, {a.batch, a.steps}, ScalarType::Float);
  Tensor probs =
      torch::stable::new_empty(prev_tokens, {full ? a.batch : 0, a.steps, a.vocab}, ScalarType::Float);
  if (a.batch == 0 || a.steps == 0) return {tokens, token_probs, probs};
  Tensor workspace = new_workspace(base_logits, markov_workspace(a.batch, a.vocab));
  MarkovParams p = {};
  p.dtype = kernel_dtype(base_logits.scalar_type());
  p.batch = a.batch, p.steps = a.steps, p.vocab = a.vocab, p.tokens = a.tokens, p.rank = a.rank;
  p.logits = base_logits.const_data_ptr();
  p.logits_batch = base_logits.stride(0), p.logits_step = base_logits.stride(1);
  p.prev = prev_tokens.const_data_ptr<int64_t>();
  p.w1 = markov_w1.const_data_ptr(), p.w2 = markov_w2.const_data_ptr();
  if (d2t) p.d2t = d2t->const_data_ptr<int64_t>();
  if (a.temperature > 0) {
    p.inverse = static_cast<float>(1 / a.temperature);
    if (seeds)
      p.seeds = seeds->const_data_ptr<int64_t>();
    else
      p.uniforms = uniforms->const_data_ptr<float>();
    if (offsets) p.offsets = offsets->const_data_ptr<int64_t>();
  }
  p.out_tokens = tokens.mutable_data_ptr<int64_t>();
  p.token_probs = token_probs.mutable_data_ptr<float>();
  p.probs = full ? probs.mutable_data_ptr<float>() : nullptr;
  p.partials = static_cast<MarkovPartial*>(workspace.mutable_data_ptr());
  p.scales = reinterpret_cast<MarkovScale*>(p.partials + a.batch * markov_segments(a.vocab));
  check_launch(check, markov_sample(p, device.multiprocessors(), device.stream()));
  return {tokens, token_probs, probs};
}

}  // namespace cuda
}  // namespace carryover
