// What the bindings of all ops share. A test hands over numpy arrays: bfloat16 and float16 as int16 with the
// same bits, None where the op takes no tensor. Nothing is copied or converted.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <stdexcept>
#include <string>

#include "simt_rt.h"

namespace py = pybind11;
using Array = py::array;
using MaybeArray = py::object;  // an array or None

// The address, after a check of the element size.
template <class T>
T* data(const Array& a, const char* name) {
  if (a.itemsize() != static_cast<py::ssize_t>(sizeof(T)))
    throw std::runtime_error(std::string(name) + ": elements of " + std::to_string(a.itemsize()) +
                             " bytes, wanted " + std::to_string(sizeof(T)));
  return const_cast<T*>(static_cast<const T*>(a.data()));
}

template <class T>
T* data_or_null(const MaybeArray& a, const char* name) {
  return a.is_none() ? nullptr : data<T>(a.cast<Array>(), name);
}

inline void* raw(const Array& a) {
  return const_cast<void*>(a.data());
}
inline void* raw_or_null(const MaybeArray& a) {
  return a.is_none() ? nullptr : raw(a.cast<Array>());
}

// In elements.
inline int64_t stride(const Array& a, int i) {
  return a.strides(i) / a.itemsize();
}

inline void check(cudaError_t status) {
  if (status != cudaSuccess) throw std::runtime_error("launch failed with error " + std::to_string(status));
}

// The function that chooses the schedule; every module has it.
inline void bind_options(py::module_& m) {
  m.def("configure", [](const std::string& schedule, uint64_t seed, bool eager) {
    simt::Options o;
    if (schedule == "fifo")
      o.schedule = simt::Options::kFifo;
    else if (schedule == "random")
      o.schedule = simt::Options::kRandom;
    else if (schedule == "priority")
      o.schedule = simt::Options::kPriority;
    else
      throw std::runtime_error("schedule '" + schedule + "' is not one of fifo, random, priority");
    o.seed = seed, o.eager = eager;
    simt::configure(o);
  });
}
