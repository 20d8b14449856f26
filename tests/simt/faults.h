// The kernel with planted faults, faults.cu.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

namespace faults {

struct Params {
  const __nv_bfloat16 *a, *b;
  float* c;
  float *partial, *top;  // [blocks of columns, M], [M]
  unsigned* finished;    // [blocks of rows], zero
  int m, n, k;
};

cudaError_t run(const Params& p, int fault);  // fault: an index of the enum in faults.cu

}  // namespace faults
