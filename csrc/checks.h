// Argument checks. Every message has the form "op: argument ... got VALUE; REMEDY".
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <initializer_list>
#include <sstream>
#include <stdexcept>
#include <string>

namespace carryover {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline std::string dtype_name(ScalarType t) {
  switch (t) {
    case ScalarType::Float:
      return "float32";
    case ScalarType::Double:
      return "float64";
    case ScalarType::Half:
      return "float16";
    case ScalarType::BFloat16:
      return "bfloat16";
    case ScalarType::Int:
      return "int32";
    case ScalarType::Long:
      return "int64";
    case ScalarType::Bool:
      return "bool";
    case ScalarType::Byte:
      return "uint8";
    default:
      return "dtype #" + std::to_string(static_cast<int>(t));
  }
}

inline std::string shape_text(const Tensor& t) {
  std::string s = "[";
  for (int64_t i = 0; i < t.dim(); ++i) s += (i ? ", " : "") + std::to_string(t.size(i));
  return s + "]";
}

// The checks of one op on one device. `layout` is how the documentation writes the shape, e.g. "[T, F]".
class Checker {
 public:
  explicit Checker(const char* op) : op_(op) {}  // on the CPU

  // On the GPU of `first`, where all other tensors must be, too.
  static Checker cuda(const char* op, const Tensor& first) {
    Checker c(op);
    c.cuda_ = true;
    if (first.is_cuda()) c.index_ = first.get_device_index();
    return c;
  }

  template <class... Args>
  [[noreturn]] void fail(const Args&... args) const {
    std::ostringstream s;
    s << op_ << ": ";
    (s << ... << args);
    throw std::runtime_error(s.str());
  }

  template <class... Args>
  void require(bool ok, const Args&... args) const {
    if (!ok) fail(args...);
  }

  void device(const Tensor& t, const char* name) const {
    if (!cuda_) {
      require(t.is_cpu(), name,
              " must be on the CPU like the other arguments, got a tensor of another device; ",
              "move it with .cpu()");
      return;
    }
    require(t.is_cuda(), name, " must be on the GPU like the other arguments, got a tensor on ",
            t.is_cpu() ? "the CPU" : "a device of another kind", "; move it with .cuda()");
    require(index_ < 0 || t.get_device_index() == index_, name, " must be on cuda:", index_,
            " like the other arguments, got a tensor on cuda:", t.get_device_index(),
            "; move it with .to(\"cuda:", index_, "\")");
  }

  void dtype(const Tensor& t, const char* name, ScalarType want) const {
    device(t, name);
    require(t.scalar_type() == want, name, " must be ", dtype_name(want), ", got ",
            dtype_name(t.scalar_type()), "; convert it with .to(torch.", dtype_name(want), ")");
  }

  // A dtype that the op computes in: float32, bfloat16 or float64 on the CPU, bfloat16 or float16 on the GPU,
  // and there float32 where the op has it.
  void floating(const Tensor& t, const char* name, bool float32_on_gpu = false) const {
    device(t, name);
    const ScalarType s = t.scalar_type();
    if (cuda_ && float32_on_gpu) {
      require(s == ScalarType::Float || s == ScalarType::BFloat16 || s == ScalarType::Half, name,
              " must be float32, bfloat16 or float16 on the GPU, got ", dtype_name(s),
              "; convert it with .to(torch.float32)");
      return;
    }
    if (cuda_) {
      require(s == ScalarType::BFloat16 || s == ScalarType::Half, name,
              " must be bfloat16 or float16 on the GPU, got ", dtype_name(s),
              "; convert it with .to(torch.bfloat16)");
      return;
    }
    require(s == ScalarType::Float || s == ScalarType::BFloat16 || s == ScalarType::Double, name,
            " must be float32, bfloat16 or float64, got ", dtype_name(s),
            "; convert it with .to(torch.float32)");
  }

  void same_dtype(const Tensor& t, const char* name, const Tensor& ref, const char* ref_name) const {
    device(t, name);
    require(t.scalar_type() == ref.scalar_type(), name, " must have the dtype of ", ref_name, ", ",
            dtype_name(ref.scalar_type()), ", got ", dtype_name(t.scalar_type()),
            "; convert it with .to(torch.", dtype_name(ref.scalar_type()), ")");
  }

  void rank(const Tensor& t, const char* name, int64_t dims, const char* layout) const {
    require(t.dim() == dims, name, " must have shape ", layout, ", got ", shape_text(t));
  }

  // Checks every size; a negative entry matches anything.
  void shape(const Tensor& t, const char* name, std::initializer_list<int64_t> want,
             const char* layout) const {
    bool ok = t.dim() == static_cast<int64_t>(want.size());
    int64_t i = 0;
    for (int64_t w : want) {
      ok = ok && (w < 0 || t.size(i) == w);
      ++i;
    }
    if (ok) return;
    std::string text = "[";
    i = 0;
    for (int64_t w : want) {
      text += (i++ ? ", " : "") + (w < 0 ? std::string("any") : std::to_string(w));
    }
    fail(name, " must have shape ", layout, " = ", text, "], got ", shape_text(t));
  }

  void contiguous(const Tensor& t, const char* name) const {
    require(t.is_contiguous(), name, " must be contiguous, got strides ", strides_text(t), " for shape ",
            shape_text(t), "; call .contiguous()");
  }

  // Rows may be strided, elements of a row may not.
  void dense_rows(const Tensor& t, const char* name) const {
    const int64_t last = t.dim() - 1;
    require(t.size(last) <= 1 || t.stride(last) == 1, name,
            " must be contiguous in its last dimension, got strides ", strides_text(t), " for shape ",
            shape_text(t), "; call .contiguous()");
  }

 private:
  static std::string strides_text(const Tensor& t) {
    std::string s = "[";
    for (int64_t i = 0; i < t.dim(); ++i) s += (i ? ", " : "") + std::to_string(t.stride(i));
    return s + "]";
  }

  const char* op_;
  bool cuda_ = false;
  int32_t index_ = -1;
};

}  // namespace carryover
