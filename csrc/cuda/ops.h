// The CUDA implementations that ops.cpp registers: same signatures as those of csrc/ops.h.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <tuple>

namespace carryover {
namespace cuda {

using torch::stable::Tensor;

std::tuple<Tensor, Tensor, Tensor> gather_rejected(const Tensor& hidden, const Tensor& row_start,
                                                   const Tensor& num_accepted, int64_t max_rejected);

Tensor segment_attention(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache,
                         const Tensor& context_lens, std::optional<Tensor> k_segment,
                         std::optional<Tensor> v_segment, std::optional<Tensor> segment_lens,
                         const Tensor& k_block, const Tensor& v_block, std::optional<Tensor> block_table,
                         std::optional<Tensor> sinks, std::optional<Tensor> block_lens, double scale,
                         bool causal, int64_t window, double soft_cap);

}  // namespace cuda
}  // namespace carryover
