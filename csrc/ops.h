// The ops that ops.cpp registers: one signature each, and an implementation for each device.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <tuple>

namespace carryover {

using torch::stable::Tensor;

using GatherRejected = std::tuple<Tensor, Tensor, Tensor>(const Tensor& hidden, const Tensor& row_start,
                                                          const Tensor& num_accepted, int64_t max_rejected);

using ProjectKv = std::tuple<Tensor, Tensor>(const Tensor& features, const Tensor& positions,
                                             const Tensor& fc_weight, const Tensor& norm_weight,
                                             const Tensor& kv_weight, const Tensor& k_norm_weight,
                                             const Tensor& cos_sin, std::optional<Tensor> carry_embedding,
                                             std::optional<Tensor> carried, double eps, bool carry_pre_norm);

using CommitAndCarry = void(const Tensor& features, const Tensor& positions, const Tensor& row_start,
                            const Tensor& num_accepted, const Tensor& slot_mapping, const Tensor& k_cache,
                            const Tensor& v_cache, const Tensor& k_segment, const Tensor& v_segment,
                            const Tensor& segment_lens, const Tensor& fc_weight, const Tensor& norm_weight,
                            const Tensor& kv_weight, const Tensor& k_norm_weight, const Tensor& cos_sin,
                            std::optional<Tensor> carry_embedding, double eps, bool carry_pre_norm,
                            bool carry);

using SegmentAttention = Tensor(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache,
                                const Tensor& context_lens, std::optional<Tensor> k_segment,
                                std::optional<Tensor> v_segment, std::optional<Tensor> segment_lens,
                                const Tensor& k_block, const Tensor& v_block,
                                std::optional<Tensor> block_table, std::optional<Tensor> sinks,
                                std::optional<Tensor> block_lens, double scale, bool causal, int64_t window,
                                double soft_cap);

using Accept = std::tuple<Tensor, Tensor>(const Tensor& draft_tokens, const Tensor& target_logits,
                                          std::optional<Tensor> draft_probs, std::optional<Tensor> uniforms,
                                          double temperature);

using MarkovSample = std::tuple<Tensor, Tensor, Tensor>(const Tensor& base_logits, const Tensor& prev_tokens,
                                                        const Tensor& markov_w1, const Tensor& markov_w2,
                                                        std::optional<Tensor> d2t,
                                                        std::optional<Tensor> uniforms, double temperature,
                                                        bool with_probs, std::optional<Tensor> seeds,
                                                        std::optional<Tensor> offsets);

GatherRejected gather_rejected;
ProjectKv project_kv;
CommitAndCarry commit_and_carry;
SegmentAttention segment_attention;
Accept accept;
MarkovSample markov_sample;

void check_project_kv(const Tensor& positions, int64_t positions_end);

void check_commit_and_carry(const Tensor& positions, const Tensor& row_start, const Tensor& num_accepted,
                            const Tensor& slot_mapping, int64_t pages, int64_t page_size, int64_t room,
                            int64_t positions_end, bool carry);

namespace cuda {

GatherRejected gather_rejected;
ProjectKv project_kv;
CommitAndCarry commit_and_carry;
SegmentAttention segment_attention;
Accept accept;
MarkovSample markov_sample;

// Rows up to which project_kv and commit_and_carry use their own GEMM, above it the library's.
int64_t project_crossover();
void set_project_crossover(int64_t rows);

}  // namespace cuda
}  // namespace carryover
