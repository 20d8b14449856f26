// gather_rejected on the GPU: checks, outputs, launch. No workspace.
#include <torch/csrc/stable/ops.h>

#include "cuda/bindings.h"
#include "cuda/gather_rejected.h"
#include "ops.h"
#include "ragged_arguments.h"

namespace carryover {
namespace cuda {

std::tuple<Tensor, Tensor, Tensor> gather_rejected(const Tensor& hidden, const Tensor& row_start,
                                                   const Tensor& num_accepted, int64_t max_rejected) {
  const Checker check = Checker::cuda("gather_rejected", hidden);
  check.floating(hidden, "hidden", /*float32_on_gpu=*/true);
  check.rank(hidden, "hidden", 2, "[T, F]");
  check.dense_rows(hidden, "hidden");
  check.require(max_rejected >= 0, "max_rejected must be >= 0, got ", max_rejected);

  GatherParams p = {};
  p.requests = check_ragged(check, row_start, num_accepted);
  p.total = hidden.size(0), p.max_rejected = max_rejected;
  const Device device(hidden);
  Tensor rows = torch::stable::new_empty(hidden, {p.requests, max_rejected, hidden.size(1)});
  Tensor index = torch::stable::new_empty(hidden, {p.requests, max_rejected}, ScalarType::Int);
  Tensor lens = torch::stable::new_empty(hidden, {p.requests}, ScalarType::Int);
  if (p.requests == 0) return {rows, index, lens};
  const auto bytes = static_cast<int64_t>(hidden.element_size());
  p.hidden = hidden.const_data_ptr();
  p.row_start = row_start.const_data_ptr<int32_t>();
  p.num_accepted = num_accepted.const_data_ptr<int32_t>();
  p.rows = rows.mutable_data_ptr();
  p.index = index.mutable_data_ptr<int32_t>();
  p.lens = lens.mutable_data_ptr<int32_t>();
  p.width_bytes = hidden.size(1) * bytes;
  p.stride_bytes = hidden.stride(0) * bytes;
  check_launch(check, gather_rejected(p, device.stream()));
  return {rows, index, lens};
}

}  // namespace cuda
}  // namespace carryover
