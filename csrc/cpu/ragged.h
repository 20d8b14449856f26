// The rows of a ragged batch, its values checked.
#pragma once

#include <algorithm>

#include "ragged_arguments.h"

namespace carryover {

struct RaggedBatch {
  const int32_t* row_start;
  const int32_t* num_accepted;
  int64_t requests;

  RaggedBatch(const Checker& check, const Tensor& row_start_arg, const Tensor& num_accepted_arg,
              int64_t total) {
    requests = check_ragged(check, row_start_arg, num_accepted_arg);
    row_start = row_start_arg.const_data_ptr<int32_t>();
    num_accepted = num_accepted_arg.const_data_ptr<int32_t>();
    check.require(row_start[0] == 0, "row_start[0] must be 0, got ", row_start[0]);
    for (int64_t i = 0; i < requests; ++i) {
      check.require(row_start[i + 1] >= row_start[i], "row_start must not decrease, got row_start[", i,
                    "] = ", row_start[i], " and row_start[", i + 1, "] = ", row_start[i + 1]);
    }
    check.require(row_start[requests] == total, "row_start must end at the number of rows, ", total,
                  ", got row_start[", requests, "] = ", row_start[requests]);
    for (int64_t i = 0; i < requests; ++i) {
      check.require(num_accepted[i] >= -1 && num_accepted[i] < num_rows(i), "num_accepted[", i,
                    "] = ", num_accepted[i], " is out of range: request ", i, " has ", num_rows(i),
                    " rows, so it must be -1 (inactive)",
                    num_rows(i) > 0 ? " or 0.." + std::to_string(num_rows(i) - 1) : std::string());
    }
  }

  int64_t num_rows(int64_t i) const { return row_start[i + 1] - row_start[i]; }
  int64_t first_rejected(int64_t i) const { return row_start[i] + num_accepted[i] + 1; }
  int64_t num_rejected(int64_t i, int64_t limit) const {
    return num_accepted[i] < 0 ? 0 : std::min<int64_t>(limit, num_rows(i) - num_accepted[i] - 1);
  }
};

}  // namespace carryover
