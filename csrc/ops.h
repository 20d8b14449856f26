// The CPU implementations that ops.cpp registers.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <tuple>

namespace carryover {

using torch::stable::Tensor;

std::tuple<Tensor, Tensor, Tensor> gather_rejected(const Tensor& hidden, const Tensor& row_start,
                                                   const Tensor& num_accepted, int64_t max_rejected);

std::tuple<Tensor, Tensor> project_kv(const Tensor& features, const Tensor& positions,
                                      const Tensor& fc_weight, const Tensor& norm_weight,
                                      const Tensor& kv_weight, const Tensor& k_norm_weight,
                                      const Tensor& cos_sin, std::optional<Tensor> carry_embedding,
                                      std::optional<Tensor> carried, double eps, bool carry_pre_norm);

void commit_and_carry(const Tensor& features, const Tensor& positions, const Tensor& row_start,
                      const Tensor& num_accepted, const Tensor& slot_mapping, const Tensor& k_cache,
                      const Tensor& v_cache, const Tensor& k_segment, const Tensor& v_segment,
                      const Tensor& segment_lens, const Tensor& fc_weight, const Tensor& norm_weight,
                      const Tensor& kv_weight, const Tensor& k_norm_weight, const Tensor& cos_sin,
                      std::optional<Tensor> carry_embedding, double eps, bool carry_pre_norm, bool carry);

void check_commit_and_carry(const Tensor& positions, const Tensor& row_start, const Tensor& num_accepted,
                            const Tensor& slot_mapping, int64_t pages, int64_t page_size, int64_t room,
                            int64_t positions_end, bool carry);

Tensor segment_attention(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache,
                         const Tensor& context_lens, std::optional<Tensor> k_segment,
                         std::optional<Tensor> v_segment, std::optional<Tensor> segment_lens,
                         const Tensor& k_block, const Tensor& v_block, std::optional<Tensor> block_table,
                         std::optional<Tensor> sinks, std::optional<Tensor> block_lens, double scale,
                         bool causal, int64_t window, double soft_cap);

std::tuple<Tensor, Tensor> accept(const Tensor& draft_tokens, const Tensor& target_logits,
                                  std::optional<Tensor> draft_probs, std::optional<Tensor> uniforms,
                                  double temperature);

std::tuple<Tensor, Tensor, Tensor> markov_sample(const Tensor& base_logits, const Tensor& prev_tokens,
                                                 const Tensor& markov_w1, const Tensor& markov_w2,
                                                 std::optional<Tensor> d2t, std::optional<Tensor> uniforms,
                                                 double temperature, bool with_probs);

}  // namespace carryover
