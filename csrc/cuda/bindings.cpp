#include "cuda/bindings.h"

#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

namespace carryover {
namespace cuda {
namespace {

using CurrentStream = AOTITorchError (*)(int32_t, void**);

// Lives in libtorch_cuda, which a CPU-only PyTorch does not have: found when the first kernel is launched,
// not when the module is loaded. A tensor on a GPU means that the library is there.
CurrentStream find_current_stream() {
  const char* name = "aoti_torch_get_current_cuda_stream";
  void* library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
  void* found = dlsym(library != nullptr ? library : RTLD_DEFAULT, name);
  if (found == nullptr)
    throw std::runtime_error(std::string("carryover_ext: this PyTorch has no ") + name +
                             "; install a CUDA build of PyTorch 2.11 or later");
  return reinterpret_cast<CurrentStream>(found);
}

}  // namespace

cudaStream_t Device::stream() const {
  static const CurrentStream current = find_current_stream();
  void* stream = nullptr;
  if (current(index_, &stream) != 0)
    throw std::runtime_error("carryover_ext: PyTorch gave no current stream for cuda:" +
                             std::to_string(index_));
  return static_cast<cudaStream_t>(stream);
}

int Device::multiprocessors() const {
  int count = 0;
  const cudaError_t status = cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, index_);
  if (status != cudaSuccess)
    throw std::runtime_error("carryover_ext: cuda:" + std::to_string(index_) + ": " +
                             cudaGetErrorString(status));
  return count;
}

void check_launch(const Checker& check, cudaError_t status) {
  if (status == cudaSuccess) return;
  check.fail("the kernel could not be launched: ", cudaGetErrorString(status),
             status == cudaErrorNoKernelImageForDevice
                 ? "; build for this GPU: CARRYOVER_CUDA=1 CARRYOVER_CUDA_ARCHS=<its architecture>"
                 : "");
}

}  // namespace cuda
}  // namespace carryover
