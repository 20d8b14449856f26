// gather_rejected: a copy, so the rows move as bytes whatever their dtype.
#include <torch/csrc/stable/ops.h>

#include <cstring>

#include "checks.h"
#include "cpu/ragged.h"
#include "ops.h"

namespace carryover {

std::tuple<Tensor, Tensor, Tensor> gather_rejected(const Tensor& hidden, const Tensor& row_start,
                                                   const Tensor& num_accepted, int64_t max_rejected) {
  const Checker check("gather_rejected");
  check.floating(hidden, "hidden");
  check.rank(hidden, "hidden", 2, "[T, F]");
  check.dense_rows(hidden, "hidden");
  check.require(max_rejected >= 0, "max_rejected must be >= 0, got ", max_rejected);
  const int64_t total = hidden.size(0), width = hidden.size(1);
  const RaggedBatch batch(check, row_start, num_accepted, total);

  const int64_t requests = batch.requests;
  Tensor rows = torch::stable::new_empty(hidden, {requests, max_rejected, width});
  Tensor index = torch::stable::new_empty(hidden, {requests, max_rejected}, ScalarType::Int);
  Tensor lens = torch::stable::new_empty(hidden, {requests}, ScalarType::Int);
  if (requests == 0) return {rows, index, lens};

  int32_t* index_data = index.mutable_data_ptr<int32_t>();
  int32_t* lens_data = lens.mutable_data_ptr<int32_t>();
  for (int64_t i = 0; i < requests; ++i) {
    const int64_t first = batch.first_rejected(i), count = batch.num_rejected(i, max_rejected);
    lens_data[i] = static_cast<int32_t>(count);
    for (int64_t j = 0; j < max_rejected; ++j) {
      index_data[i * max_rejected + j] = j < count ? static_cast<int32_t>(first + j) : -1;
    }
  }
  const size_t bytes = static_cast<size_t>(width) * hidden.element_size();
  const int64_t stride = hidden.stride(0) * static_cast<int64_t>(hidden.element_size());
  const char* source = static_cast<const char*>(hidden.const_data_ptr());
  char* out = static_cast<char*>(rows.mutable_data_ptr());
  if (bytes == 0) return {rows, index, lens};
  torch::stable::parallel_for(0, requests * max_rejected, 1 + (1 << 16) / static_cast<int64_t>(bytes),
                              [&](int64_t begin, int64_t end) {
                                for (int64_t r = begin; r < end; ++r) {
                                  char* to = out + static_cast<size_t>(r) * bytes;
                                  if (index_data[r] < 0) {
                                    std::memset(to, 0, bytes);
                                  } else {
                                    std::memcpy(to, source + index_data[r] * stride, bytes);
                                  }
                                }
                              });
  return {rows, index, lens};
}

}  // namespace carryover
