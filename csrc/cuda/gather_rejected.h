// What the host hands to the kernel of gather_rejected.
#pragma once

#include <cuda_runtime_api.h>
#include <stdint.h>

namespace carryover {
namespace cuda {

// A request whose `row_start` or `num_accepted` is out of range has no rejected rows.
struct GatherParams {
  const void* hidden;           // [T, F] bytes, rows row_bytes apart
  const int32_t* row_start;     // [B + 1]
  const int32_t* num_accepted;  // [B]
  void* rows;                   // [B, R, F]
  int32_t* index;               // [B, R]
  int32_t* lens;                // [B]
  int64_t total;                // T
  int64_t requests, max_rejected;
  int64_t width_bytes;   // of a row
  int64_t stride_bytes;  // between rows of hidden
};

cudaError_t gather_rejected(const GatherParams& p, cudaStream_t stream);

}  // namespace cuda
}  // namespace carryover
