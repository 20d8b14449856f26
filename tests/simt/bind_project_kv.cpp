// project_kv and commit_and_carry as csrc/cuda/bindings_project_kv.cpp composes them, with a plain loop in
// the place of the library's GEMM.
#include "bind.h"
#include "cuda/common.cuh"
#include "cuda/project_kv.h"

using namespace carryover;
using namespace carryover::cuda;

namespace {

template <class T>
void plain_gemm(const T* a, int64_t a_stride, const T* b, int64_t b_stride, T* out, int64_t rows,
                int64_t cols, int64_t depth) {
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < cols; ++c) {
      float sum = 0;
      for (int64_t k = 0; k < depth; ++k)
        sum += to_float(a[r * a_stride + k]) * to_float(b[c * b_stride + k]);
      out[r * cols + c] = from_float<T>(sum);
    }
  }
}

void gemm(bool is_bf16, const void* a, int64_t a_stride, const void* b, int64_t b_stride, void* out,
          int64_t rows, int64_t cols, int64_t depth) {
  if (is_bf16)
    plain_gemm(static_cast<const bf16*>(a), a_stride, static_cast<const bf16*>(b), b_stride,
               static_cast<bf16*>(out), rows, cols, depth);
  else
    plain_gemm(static_cast<const fp16*>(a), a_stride, static_cast<const fp16*>(b), b_stride,
               static_cast<fp16*>(out), rows, cols, depth);
}

struct Weights {
  Array fc, norm, kv, k_norm, cos_sin;
  MaybeArray embedding;
};

ProjectParams params(const Array& features, const Weights& w, bool is_bf16, double eps, bool pre_norm) {
  ProjectParams p = {};
  p.bf16 = is_bf16;
  p.rows = features.shape(0), p.features = features.shape(1), p.hidden = w.fc.shape(0);
  p.layers = w.k_norm.shape(0), p.dim = w.k_norm.shape(1), p.rot = w.cos_sin.shape(1);
  p.heads = w.kv.shape(0) / (2 * p.layers * p.dim);
  p.eps = static_cast<float>(eps), p.pre_norm = pre_norm;
  p.x = raw(features), p.fc = raw(w.fc), p.kv = raw(w.kv), p.norm = raw(w.norm), p.k_norm = raw(w.k_norm);
  p.x_stride = stride(features, 0), p.fc_stride = stride(w.fc, 0), p.kv_stride = stride(w.kv, 0);
  p.embedding = raw_or_null(w.embedding);
  p.cos_sin = data<float>(w.cos_sin, "cos_sin");
  return p;
}

// Fresh memory full of NaN, as large as asked for and not a byte more.
struct Memory {
  std::unique_ptr<char[]> bytes;
  explicit Memory(int64_t size) : bytes(new char[size]) { memset(bytes.get(), 0xff, size); }
};

template <class Routes>
void run(ProjectParams& p, Routes& routes, int multiprocessors, bool library) {
  if (!library && !project_tiles_fit(p)) throw std::runtime_error("the tiles cannot load these operands");
  if (!library) project_plan(p, multiprocessors);
  ProjectParams sizes = p;
  const Memory workspace(project_workspace(sizes, nullptr, !library));
  project_workspace(p, workspace.bytes.get(), !library);
  routes.routes = p.routes;
  routes.counters = p.counters;
  routes.counter_count = library ? 0 : p.fc_plan.tiles() + p.kv_plan.tiles();
  check(route_rows(routes, nullptr));
  if (!library) return check(project_rows(p, nullptr));
  const int64_t cols = p.layers * 2 * p.heads * p.dim;
  const Memory u(p.rows * p.hidden * 2), kv(p.rows * cols * 2);
  p.u = u.bytes.get();
  gemm(p.bf16, p.x, p.x_stride, p.fc, p.fc_stride, p.u, p.rows, p.hidden, p.features);
  check(carry_norm(p, nullptr));
  gemm(p.bf16, p.u, p.hidden, p.kv, p.kv_stride, kv.bytes.get(), p.rows, cols, p.hidden);
  p.kv_rows = kv.bytes.get();
  check(route_kv(p, nullptr));
}

KvDestination destination(const Array& k, const Array& v) {
  const int head = static_cast<int>(k.ndim()) - 2;
  return {raw(k), raw(v), stride(k, 0), stride(v, 0), stride(k, head), stride(v, head)};
}

}  // namespace

PYBIND11_MODULE(SIMT_MODULE, m) {
  bind_options(m);
  m.def("project_kv", [](Array features, Array positions, Array fc, Array norm, Array kv, Array k_norm,
                         Array cos_sin, MaybeArray embedding, MaybeArray carried, Array k, Array v,
                         bool is_bf16, double eps, bool pre_norm, int multiprocessors, bool library) {
    ProjectParams p = params(features, {fc, norm, kv, k_norm, cos_sin, embedding}, is_bf16, eps, pre_norm);
    if (p.rows == 0) return;
    ProjectRoutes r = {};
    r.positions = data<int32_t>(positions, "positions");
    r.carried = data_or_null<uint8_t>(carried, "carried");
    r.rows = p.rows, r.row_stride = p.heads * p.dim, r.positions_end = cos_sin.shape(0);
    p.dest[0] = p.dest[1] = destination(k, v);
    run(p, r, multiprocessors, library);
  });
  m.def("commit_and_carry", [](Array features, Array positions, Array row_start, Array num_accepted,
                               Array slots, Array k_cache, Array v_cache, Array k_segment, Array v_segment,
                               Array segment_lens, Array fc, Array norm, Array kv, Array k_norm,
                               Array cos_sin, MaybeArray embedding, bool is_bf16, double eps, bool pre_norm,
                               bool carry, int multiprocessors, bool library) {
    ProjectParams p = params(features, {fc, norm, kv, k_norm, cos_sin, embedding}, is_bf16, eps, pre_norm);
    CommitRoutes r = {};
    r.positions = data<int32_t>(positions, "positions");
    r.row_start = data<int32_t>(row_start, "row_start");
    r.num_accepted = data<int32_t>(num_accepted, "num_accepted");
    r.slots = data<int64_t>(slots, "slot_mapping");
    r.rows = p.rows, r.requests = num_accepted.shape(0);
    r.pages = k_cache.shape(1), r.page_size = k_cache.shape(2), r.room = k_segment.shape(2);
    r.positions_end = cos_sin.shape(0);
    r.k_page = stride(k_cache, 1), r.k_slot = stride(k_cache, 2);
    r.v_page = stride(v_cache, 1), r.v_slot = stride(v_cache, 2);
    r.k_request = stride(k_segment, 1), r.k_row = stride(k_segment, 2);
    r.v_request = stride(v_segment, 1), r.v_row = stride(v_segment, 2);
    r.carry = carry;
    r.segment_lens = data<int32_t>(segment_lens, "segment_lens");
    p.dest[0] = destination(k_cache, v_cache), p.dest[1] = destination(k_segment, v_segment);
    run(p, r, multiprocessors, library);
  });
  m.def("plan", [](int64_t rows, int64_t cols, int64_t depth, int head, int multiprocessors) {
    const GemmPlan p = plan_gemm(rows, cols, depth, head, multiprocessors);
    return py::make_tuple(p.tile_rows, p.tile_cols, p.used_cols, p.row_blocks, p.col_tiles, p.splits,
                          p.split_depth);
  });
}
