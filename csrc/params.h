// One plain struct for each kernel; pointers carry their shape, strides are 64-bit and counted in elements.
// Included by kernel files that are compiled for several instruction sets: no functions here, no C++ headers.
#pragma once

#include <stdint.h>

namespace carryover {

enum class DType : int { kFloat32, kBFloat16, kFloat64, kFloat16 };

// Where a row of a verified block goes.
enum class Target : int8_t { kNowhere = -1, kCommitted = 0, kCarried = 1, kZero = 2 };

struct RowRoute {
  Target target;
  int32_t position;  // RoPE position, >= 0 unless kNowhere or kZero
  int64_t k_offset;  // of head 0 in layer 0 of the destination
  int64_t v_offset;
};

// Epilogue of the first GEMM, in place: u += E (carried rows), RMS norm, weight.
struct NormParams {
  DType dtype;
  void* u;                 // [T, H]
  const void* weight;      // [H]
  const void* embedding;   // [H] or null
  const uint8_t* carried;  // [T], non-zero: the row gets the embedding
  int64_t rows, hidden;
  double eps;
  bool pre_norm;  // embedding before (true) or after the norm
};

struct KvDestination {
  void* k;
  void* v;
  int64_t k_layer, v_layer;  // strides
  int64_t k_head, v_head;
};

// Epilogue of the second GEMM: k_norm, RoPE, and each row to where it belongs. Work item = row * layers +
// layer.
struct KvParams {
  DType dtype;
  const void* kv;          // [T, layers, 2, heads, dim]
  const void* k_weight;    // [layers, dim]
  const float* cos_sin;    // [positions, rot]
  const RowRoute* routes;  // [T]
  KvDestination dest[2];   // committed, carried
  int64_t rows, layers, heads, dim, rot;
  double eps;
};

// Rows of one kind of keys and values. The last dimension is contiguous; the others may have any stride.
// row(i, r) of KV head h starts at k + i*batch + r*row + h*head.
struct KeyRows {
  const void* k = nullptr;
  const void* v = nullptr;
  int64_t k_batch = 0, k_row = 0, k_head = 0;
  int64_t v_batch = 0, v_row = 0, v_head = 0;
};

}  // namespace carryover
