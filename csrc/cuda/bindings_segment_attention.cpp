// segment_attention on the GPU: checks, output and workspace, launch. Nothing here reads a value on the
// device.
//
// Workspace, float32, from PyTorch's allocator (and so part of a captured graph): for P > 1 pieces,
// P * B * b * nh * d partial outputs and then P * B * b * nh * 2 statistics; none for one piece. P depends on
// shapes and the number of multiprocessors alone (attention_plan in segment_attention.h).
#include <torch/csrc/stable/ops.h>

#include "attention.h"
#include "cuda/bindings.h"
#include "cuda/segment_attention.h"
#include "ops.h"

namespace carryover {
namespace cuda {
namespace {

// Rows are read 16 bytes at a time.
void check_alignment(const Checker& check, const Tensor& t, const char* name) {
  check.require(reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0, name,
                " must start at a multiple of 16 bytes, got an offset of ",
                reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16, "; call .clone()");
  for (int64_t i = 0; i + 1 < t.dim(); ++i)
    check.require(t.size(i) <= 1 || t.stride(i) % 8 == 0, name,
                  " must have strides that are multiples of 8 elements (16 bytes), got ", t.stride(i),
                  " in dimension ", i, "; call .contiguous()");
}

}  // namespace

Tensor segment_attention(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache,
                         const Tensor& context_lens, std::optional<Tensor> k_segment,
                         std::optional<Tensor> v_segment, std::optional<Tensor> segment_lens,
                         const Tensor& k_block, const Tensor& v_block, std::optional<Tensor> block_table,
                         std::optional<Tensor> sinks, std::optional<Tensor> block_lens, double scale,
                         bool causal, int64_t window, double soft_cap) {
  const Checker check = Checker::cuda("segment_attention", q);
  AttentionArguments a{q,       k_cache, v_cache,     context_lens, k_segment,  v_segment, segment_lens,
                       k_block, v_block, block_table, sinks,        block_lens, scale,     causal,
                       window,  soft_cap};
  a.check(check, kAttentionHeadMax);
  check.require(a.d % 8 == 0, "q has head size ", a.d, "; on the GPU it must be a multiple of 8, at most ",
                kAttentionHeadMax);
  for (const int64_t n :
       {a.batch, a.rows, a.heads, a.pages, a.page, a.max_pages, a.segment_rows, a.rows * a.heads})
    check.require(n <= INT32_MAX / 2, "a size of ", n, " is too large; sizes must be at most ",
                  INT32_MAX / 2);
  check_alignment(check, q, "q");
  check_alignment(check, k_cache, "k_cache");
  check_alignment(check, v_cache, "v_cache");
  check_alignment(check, k_block, "k_block");
  check_alignment(check, v_block, "v_block");
  if (k_segment) check_alignment(check, *k_segment, "k_segment");
  if (v_segment) check_alignment(check, *v_segment, "v_segment");

  const Device device(q);
  Tensor out = torch::stable::new_empty(q, {a.batch, a.rows, a.heads, a.d});
  if (out.numel() == 0) return out;
  SegmentAttentionParams p = {};
  a.fill(p);
  p.bf16 = q.scalar_type() == ScalarType::BFloat16;
  p.pages = a.pages, p.capacity = a.capacity, p.segment_rows = a.segment_rows;
  p.out = out.mutable_data_ptr();
  p.plan =
      attention_plan(p.batch, p.rows, p.heads, p.kv_heads, p.head_size, a.capacity, device.multiprocessors());
  const int64_t floats = attention_workspace(p.batch, p.rows, p.heads, p.head_size, p.plan.pieces);
  Tensor workspace = torch::stable::new_empty(q, {floats}, ScalarType::Float);
  if (floats > 0) {
    p.partial_out = workspace.mutable_data_ptr<float>();
    p.partial_stats = p.partial_out + int64_t(p.plan.pieces) * out.numel();
  }
  check_launch(check, segment_attention(p, device.stream()));
  return out;
}

}  // namespace cuda
}  // namespace carryover
