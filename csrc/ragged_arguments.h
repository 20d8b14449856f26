// A ragged batch: request i owns rows row_start[i]..row_start[i+1]-1 and has accepted num_accepted[i] drafts
// of them (-1: inactive). What every device checks of it without reading its values.
#pragma once

#include "checks.h"

namespace carryover {

// Returns the number of requests.
inline int64_t check_ragged(const Checker& check, const Tensor& row_start, const Tensor& num_accepted) {
  check.dtype(num_accepted, "num_accepted", ScalarType::Int);
  check.rank(num_accepted, "num_accepted", 1, "[B]");
  check.contiguous(num_accepted, "num_accepted");
  const int64_t requests = num_accepted.size(0);
  check.dtype(row_start, "row_start", ScalarType::Int);
  check.shape(row_start, "row_start", {requests + 1}, "[B + 1]");
  check.contiguous(row_start, "row_start");
  return requests;
}

}  // namespace carryover
