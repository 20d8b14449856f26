// project_kv and commit_and_carry on the GPU: checks, outputs and workspace, launches. Nothing here reads a
// value on the device: what the CPU op raises for a slot, a position or a ragged argument out of range, the
// kernels cannot; they write such a row nowhere (project_kv: zeros), and trap in builds with
// CARRYOVER_DEBUG. check_commit_and_carry and check_project_kv report it.
//
// Workspace from PyTorch's allocator (and so part of a captured graph): project_workspace() of project_kv.h.
#include <torch/csrc/stable/ops.h>

#include "cuda/bindings.h"
#include "cuda/project_kv.h"
#include "linear.h"
#include "ops.h"
#include "projection.h"
#include "ragged_arguments.h"

namespace carryover {
namespace cuda {
namespace {

// Up to so many rows the tiles compute; above, the library's GEMM. Tests and benchmarks change it.
int64_t crossover = kProjectCrossover;

ProjectParams fill(const Checker& check, const Tensor& features, const ProjectionWeights& w) {
  ProjectParams p = {};
  p.bf16 = features.scalar_type() == ScalarType::BFloat16;
  p.rows = features.size(0), p.features = features.size(1), p.hidden = w.hidden;
  p.layers = w.layers, p.heads = w.heads, p.dim = w.dim, p.rot = w.rot;
  for (const int64_t n : {p.rows, p.features, p.hidden, w.kv.size(0)})
    check.require(n <= INT32_MAX / 2, "a size of ", n, " is too large; sizes must be at most ",
                  INT32_MAX / 2);
  p.eps = static_cast<float>(w.eps), p.pre_norm = w.pre_norm;
  p.x = features.const_data_ptr(), p.fc = w.fc.const_data_ptr(), p.kv = w.kv.const_data_ptr();
  p.x_stride = features.stride(0), p.fc_stride = w.fc.stride(0), p.kv_stride = w.kv.stride(0);
  p.norm = w.norm.const_data_ptr();
  p.embedding = w.embedding ? w.embedding->const_data_ptr() : nullptr;
  p.k_norm = w.k_norm.const_data_ptr();
  p.cos_sin = w.cos_sin.const_data_ptr<float>();
  return p;
}

bool dense(const Tensor& t) {
  return t.stride(1) == 1;
}

// Routes, then both GEMMs with their epilogues, by the tiles or by the library.
template <class Routes>
void launch(const Checker& check, const Device& device, const Tensor& features, const ProjectionWeights& w,
            ProjectParams& p, Routes& routes) {
  const bool tiles =
      p.rows <= crossover && dense(features) && dense(w.fc) && dense(w.kv) && project_tiles_fit(p);
  if (tiles) project_plan(p, device.multiprocessors());
  ProjectParams sizes = p;
  Tensor workspace =
      torch::stable::new_empty(features, {project_workspace(sizes, nullptr, tiles)}, ScalarType::Byte);
  project_workspace(p, workspace.mutable_data_ptr(), tiles);
  routes.routes = p.routes;
  routes.counters = p.counters;
  routes.counter_count = tiles ? p.fc_plan.tiles() + p.kv_plan.tiles() : 0;
  const cudaStream_t stream = device.stream();
  check_launch(check, route_rows(routes, stream));
  if (p.rows == 0) return;
  if (tiles) return check_launch(check, project_rows(p, stream));
  const NoGrad no_grad;
  const Tensor u = linear(features, w.fc);
  p.u = u.mutable_data_ptr();
  check_launch(check, carry_norm(p, stream));
  const Tensor kv = linear(u, w.kv);
  p.kv_rows = kv.const_data_ptr();
  check_launch(check, route_kv(p, stream));
}

}  // namespace

std::tuple<Tensor, Tensor> project_kv(const Tensor& features, const Tensor& positions,
                                      const Tensor& fc_weight, const Tensor& norm_weight,
                                      const Tensor& kv_weight, const Tensor& k_norm_weight,
                                      const Tensor& cos_sin, std::optional<Tensor> carry_embedding,
                                      std::optional<Tensor> carried, double eps, bool carry_pre_norm) {
  const Checker check = Checker::cuda("project_kv", features);
  const ProjectionWeights w(check, features, fc_weight, norm_weight, kv_weight, k_norm_weight, cos_sin,
                            carry_embedding, eps, carry_pre_norm);
  ProjectRoutes r = {};
  r.rows = features.size(0);
  r.positions = checked_positions(check, positions, r.rows);
  r.carried = checked_marks(check, carried, carry_embedding, r.rows);
  r.row_stride = w.heads * w.dim;
  r.positions_end = w.positions;
  ProjectParams p = fill(check, features, w);
  const Device device(features);
  Tensor k = torch::stable::new_empty(features, {w.layers, r.rows, w.heads, w.dim});
  Tensor v = torch::stable::new_empty(features, {w.layers, r.rows, w.heads, w.dim});
  if (r.rows == 0) return {k, v};
  p.dest[0] = p.dest[1] = kv_destination(k, v);
  launch(check, device, features, w, p, r);
  return {k, v};
}

void commit_and_carry(const Tensor& features, const Tensor& positions, const Tensor& row_start,
                      const Tensor& num_accepted, const Tensor& slot_mapping, const Tensor& k_cache,
                      const Tensor& v_cache, const Tensor& k_segment, const Tensor& v_segment,
                      const Tensor& segment_lens, const Tensor& fc_weight, const Tensor& norm_weight,
                      const Tensor& kv_weight, const Tensor& k_norm_weight, const Tensor& cos_sin,
                      std::optional<Tensor> carry_embedding, double eps, bool carry_pre_norm, bool carry) {
  const Checker check = Checker::cuda("commit_and_carry", features);
  const ProjectionWeights w(check, features, fc_weight, norm_weight, kv_weight, k_norm_weight, cos_sin,
                            carry_embedding, eps, carry_pre_norm);
  CommitRoutes r = {};
  r.rows = features.size(0);
  r.positions = checked_positions(check, positions, r.rows);
  r.requests = check_ragged(check, row_start, num_accepted);
  const CommitArguments a(check, w, features, r.requests, slot_mapping, k_cache, v_cache, k_segment,
                          v_segment, segment_lens);
  r.row_start = row_start.const_data_ptr<int32_t>();
  r.num_accepted = num_accepted.const_data_ptr<int32_t>();
  r.slots = a.slots;
  r.pages = a.pages, r.page_size = a.page, r.room = a.room;
  r.positions_end = w.positions;
  r.k_page = k_cache.stride(1), r.k_slot = k_cache.stride(2);
  r.v_page = v_cache.stride(1), r.v_slot = v_cache.stride(2);
  r.k_request = k_segment.stride(1), r.k_row = k_segment.stride(2);
  r.v_request = v_segment.stride(1), r.v_row = v_segment.stride(2);
  r.carry = carry;
  r.segment_lens = a.segment_lens;
  ProjectParams p = fill(check, features, w);
  p.dest[0] = kv_destination(k_cache, v_cache), p.dest[1] = kv_destination(k_segment, v_segment);
  const Device device(features);
  launch(check, device, features, w, p, r);
}

int64_t project_crossover() {
  return crossover;
}

void set_project_crossover(int64_t rows) {
  Checker("set_project_crossover").require(rows >= 0, "rows must be >= 0, got ", rows);
  crossover = rows;
}

}  // namespace cuda
}  // namespace carryover
