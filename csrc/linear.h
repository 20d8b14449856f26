// The library's GEMM, through the dispatcher: oneDNN or MKL on the CPU, cuBLAS on the GPU.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <array>
#include <optional>

namespace carryover {

using torch::stable::Tensor;

// Weights may require gradients; the gradient is a formula in Python, so nothing may be recorded here.
class NoGrad {
 public:
  NoGrad() : before_(aoti_torch_grad_mode_is_enabled()) { aoti_torch_grad_mode_set_enabled(false); }
  ~NoGrad() { aoti_torch_grad_mode_set_enabled(before_); }
  NoGrad(const NoGrad&) = delete;
  NoGrad& operator=(const NoGrad&) = delete;

 private:
  bool before_;
};

// x [T, K], weight [N, K] -> [T, N], contiguous.
inline Tensor linear(const Tensor& x, const Tensor& weight) {
  using torch::stable::detail::from;
  std::array<StableIValue, 3> stack{from(x), from(weight), from(std::optional<Tensor>())};
  STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::linear", "", stack.data(), TORCH_ABI_VERSION));
  Tensor out = torch::stable::detail::to<Tensor>(stack[0]);
  return out.is_contiguous() ? out
                             : torch::stable::contiguous(out);  // it always is; the epilogues rely on it
}

}  // namespace carryover
