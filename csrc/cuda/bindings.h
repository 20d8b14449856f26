// What the bindings of all ops share. Host code: torch's stable ABI and the CUDA runtime, no kernels.
#pragma once

#include <cuda_runtime_api.h>
#include <torch/csrc/stable/accelerator.h>

#include "checks.h"

namespace carryover {
namespace cuda {

// The GPU of a tensor: the current one for as long as this object lives.
class Device {
 public:
  explicit Device(const Tensor& t) : index_(t.get_device_index()), guard_(index_) {}

  cudaStream_t stream() const;  // PyTorch's current stream
  int multiprocessors() const;

 private:
  int32_t index_;
  torch::stable::accelerator::DeviceGuard guard_;
};

// Fails with the op's name and CUDA's message.
void check_launch(const Checker& check, cudaError_t status);

}  // namespace cuda
}  // namespace carryover
