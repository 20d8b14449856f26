// Every op's schema and registration: the table of contents of the extension.
// Shapes, dtypes and errors are documented in carryover_ext/ops/<op>.py, fakes and gradients live there too.
#include "ops.h"

#include <torch/csrc/stable/library.h>

#include "cpu/dispatch.h"

STABLE_TORCH_LIBRARY(carryover_ext, m) {
  m.def(
      "gather_rejected(Tensor hidden, Tensor row_start, Tensor num_accepted, SymInt max_rejected)"
      " -> (Tensor rows, Tensor index, Tensor lens)");
  m.def(
      "project_kv(Tensor features, Tensor positions, Tensor fc_weight, Tensor norm_weight, Tensor kv_weight,"
      " Tensor k_norm_weight, Tensor cos_sin, Tensor? carry_embedding, Tensor? carried, *, float eps,"
      " bool carry_pre_norm) -> (Tensor k, Tensor v)");
  m.def(
      "commit_and_carry(Tensor features, Tensor positions, Tensor row_start, Tensor num_accepted,"
      " Tensor slot_mapping, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor(c!) k_segment, Tensor(d!) "
      "v_segment,"
      " Tensor(e!) segment_lens, Tensor fc_weight, Tensor norm_weight, Tensor kv_weight, Tensor "
      "k_norm_weight,"
      " Tensor cos_sin, Tensor? carry_embedding, *, float eps, bool carry_pre_norm, bool carry) -> ()");
  // What the CUDA kernels of these two cannot raise.
  m.def("check_project_kv(Tensor positions, int positions_end) -> ()");
  m.def(
      "check_commit_and_carry(Tensor positions, Tensor row_start, Tensor num_accepted, Tensor slot_mapping, "
      "int pages,"
      " int page_size, int room, int positions_end, bool carry) -> ()");
  m.def(
      "segment_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor context_lens, Tensor? k_segment,"
      " Tensor? v_segment, Tensor? segment_lens, Tensor k_block, Tensor v_block, Tensor? block_table,"
      " Tensor? sinks, Tensor? block_lens, *, float scale, bool causal, int window, float soft_cap) -> "
      "Tensor");
  m.def(  // the kernel is Python: carryover_ext/ops/segment_attention.py
      "segment_attention_backward(Tensor grad, Tensor q, Tensor k_cache, Tensor v_cache, Tensor context_lens,"
      " Tensor? k_segment, Tensor? v_segment, Tensor? segment_lens, Tensor k_block, Tensor v_block,"
      " Tensor? block_table, Tensor? sinks, Tensor? block_lens, *, float scale, bool causal, int window,"
      " float soft_cap, bool cache_grad) -> Tensor[]");
  m.def(
      "accept(Tensor draft_tokens, Tensor target_logits, Tensor? draft_probs, Tensor? uniforms, float "
      "temperature)"
      " -> (Tensor num_accepted, Tensor next_token)");
  m.def(
      "markov_sample(Tensor base_logits, Tensor prev_tokens, Tensor markov_w1, Tensor markov_w2, Tensor? d2t,"
      " Tensor? uniforms, float temperature, bool with_probs, Tensor? seeds=None, Tensor? offsets=None)"
      " -> (Tensor tokens, Tensor token_probs, Tensor probs)");
#ifdef CARRYOVER_CUDA
  m.def("project_crossover() -> int");
  m.def("set_project_crossover(int rows) -> ()");
#endif
  m.def("cpu_level() -> int");
  m.def("max_cpu_level() -> int");
  m.def("set_cpu_level(int level) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(carryover_ext, CPU, m) {
  m.impl("gather_rejected", TORCH_BOX(&carryover::gather_rejected));
  m.impl("project_kv", TORCH_BOX(&carryover::project_kv));
  m.impl("commit_and_carry", TORCH_BOX(&carryover::commit_and_carry));
  m.impl("check_project_kv", TORCH_BOX(&carryover::check_project_kv));
  m.impl("check_commit_and_carry", TORCH_BOX(&carryover::check_commit_and_carry));
  m.impl("segment_attention", TORCH_BOX(&carryover::segment_attention));
  m.impl("accept", TORCH_BOX(&carryover::accept));
  m.impl("markov_sample", TORCH_BOX(&carryover::markov_sample));
}

#ifdef CARRYOVER_CUDA
STABLE_TORCH_LIBRARY_IMPL(carryover_ext, CUDA, m) {
  m.impl("gather_rejected", TORCH_BOX(&carryover::cuda::gather_rejected));
  m.impl("project_kv", TORCH_BOX(&carryover::cuda::project_kv));
  m.impl("commit_and_carry", TORCH_BOX(&carryover::cuda::commit_and_carry));
  m.impl("segment_attention", TORCH_BOX(&carryover::cuda::segment_attention));
  m.impl("accept", TORCH_BOX(&carryover::cuda::accept));
  m.impl("markov_sample", TORCH_BOX(&carryover::cuda::markov_sample));
}
#endif

STABLE_TORCH_LIBRARY_IMPL(carryover_ext, CompositeExplicitAutograd, m) {
  m.impl("cpu_level", TORCH_BOX(&carryover::cpu_level));
  m.impl("max_cpu_level", TORCH_BOX(&carryover::max_cpu_level));
  m.impl("set_cpu_level", TORCH_BOX(&carryover::set_cpu_level));
#ifdef CARRYOVER_CUDA
  m.impl("project_crossover", TORCH_BOX(&carryover::cuda::project_crossover));
  m.impl("set_project_crossover", TORCH_BOX(&carryover::cuda::set_project_crossover));
#endif
}
