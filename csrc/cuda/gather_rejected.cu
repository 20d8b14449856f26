#include "cuda/gather_rejected.cuh"

namespace carryover {
namespace cuda {

cudaError_t gather_rejected(const GatherParams& p, cudaStream_t stream) {
  if (p.requests == 0) return cudaSuccess;
  const dim3 block(kGatherThreads);
  if (p.max_rejected == 0)
    return launch(no_rejected_kernel, dim3(ceil_div<int64_t>(p.requests, kGatherThreads)), block, 0, stream,
                  p);
  const dim3 grid(ceil_div<int64_t>(p.requests * p.max_rejected, kGatherThreads / 32));
  const auto all = reinterpret_cast<uintptr_t>(p.hidden) | reinterpret_cast<uintptr_t>(p.rows) |
                   static_cast<uintptr_t>(p.width_bytes) | static_cast<uintptr_t>(p.stride_bytes);
  if (all % 16 == 0) return launch(gather_rejected_kernel<uint4>, grid, block, 0, stream, p);
  if (all % 4 == 0) return launch(gather_rejected_kernel<uint32_t>, grid, block, 0, stream, p);
  return launch(gather_rejected_kernel<uint16_t>, grid, block, 0, stream, p);
}

}  // namespace cuda
}  // namespace carryover
