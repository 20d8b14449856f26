// project_kv and commit_and_carry: GEMM, epilogue 1 (embedding, RMS norm), GEMM, epilogue 2 (k_norm, RoPE,
// routing). The two GEMMs see every row in both ops and whatever `carry` says, so the bits of a committed row
// never depend on what happens to the other rows. The GEMMs are aten::linear (oneDNN, MKL); only the
// epilogues are ours.
#include <vector>

#include "cpu/dispatch.h"
#include "cpu/ragged.h"
#include "linear.h"
#include "ops.h"
#include "projection.h"

CARRYOVER_KERNEL(carry_norm, NormParams)
CARRYOVER_KERNEL(route_kv, KvParams)

namespace carryover {
namespace {

// Checks that `position` of row t may be used; -1 is padding and never gets here.
void check_position(const Checker& check, int64_t end, int64_t t, int32_t position) {
  check.require(position >= 0 && position < end, "positions[", t, "] = ", position,
                " is out of range: cos_sin has ", end, " rows, so it must be -1 (padding) or 0..", end - 1);
}

// Where each row of commit_and_carry goes.
struct CommitRouting {
  std::vector<RowRoute> routes;
  std::vector<uint8_t> carried;
  std::vector<int32_t> lens;
  bool any = false;
};

// Elements between pages and slots of a cache, between requests and rows of a segment.
struct CommitStrides {
  int64_t page = 0, slot = 0, request = 0, row = 0;
};

// Routes every row and checks the values on the way.
CommitRouting route(const Checker& check, const int32_t* position, int64_t positions_end,
                    const RaggedBatch& batch, const int64_t* slot, int64_t total, int64_t pages, int64_t page,
                    int64_t room, bool carry, const CommitStrides& k, const CommitStrides& v) {
  CommitRouting r;
  r.routes.resize(static_cast<size_t>(total), RowRoute{Target::kNowhere, -1, 0, 0});
  r.carried.resize(static_cast<size_t>(total), 0);
  r.lens.resize(static_cast<size_t>(batch.requests), 0);
  for (int64_t i = 0; i < batch.requests; ++i) {
    if (batch.num_accepted[i] < 0) continue;
    const int64_t first_rejected = batch.first_rejected(i);
    for (int64_t t = batch.row_start[i]; t < batch.row_start[i + 1]; ++t) {
      if (position[t] == -1) continue;
      if (t < first_rejected) {
        check.require(slot[t] >= -1 && slot[t] < pages * page, "slot_mapping[", t, "] = ", slot[t],
                      " is out of range: the cache has ", pages, " pages of ", page,
                      " slots, so it must be -1 (nowhere) or 0..", pages * page - 1);
        if (slot[t] == -1) continue;
        const int64_t n = slot[t] / page, offset = slot[t] % page;
        r.routes[t] = {Target::kCommitted, position[t], n * k.page + offset * k.slot,
                       n * v.page + offset * v.slot};
      } else if (carry && r.lens[i] < room) {
        const int64_t j = r.lens[i]++;
        r.routes[t] = {Target::kCarried, position[t], i * k.request + j * k.row, i * v.request + j * v.row};
        r.carried[t] = 1;
      } else {
        continue;
      }
      check_position(check, positions_end, t, position[t]);
      r.any = true;
    }
  }
  return r;
}

// Both GEMMs with their epilogues. `carried` marks the rows that get the embedding.
void launch(const Tensor& features, const ProjectionWeights& w, const uint8_t* carried,
            const std::vector<RowRoute>& routes, const KvDestination& committed,
            const KvDestination& segment) {
  const NoGrad no_grad;
  const DType dtype = kernel_dtype(features.scalar_type());
  const int64_t rows = features.size(0);
  const Tensor u = linear(features, w.fc);
  const NormParams norm{dtype,
                        u.mutable_data_ptr(),
                        w.norm.const_data_ptr(),
                        w.embedding ? w.embedding->const_data_ptr() : nullptr,
                        carried,
                        rows,
                        w.hidden,
                        w.eps,
                        w.pre_norm};
  torch::stable::parallel_for(0, rows, 1 + 16384 / w.hidden, [&](int64_t begin, int64_t end) {
    CARRYOVER_CALL(carry_norm, norm, begin, end);
  });

  const Tensor kv = linear(u, w.kv);
  const KvParams route{dtype,
                       kv.const_data_ptr(),
                       w.k_norm.const_data_ptr(),
                       w.cos_sin.const_data_ptr<float>(),
                       routes.data(),
                       {committed, segment},
                       rows,
                       w.layers,
                       w.heads,
                       w.dim,
                       w.rot,
                       w.eps};
  torch::stable::parallel_for(
      0, rows * w.layers, 1 + 8192 / (w.heads * w.dim),
      [&](int64_t begin, int64_t end) { CARRYOVER_CALL(route_kv, route, begin, end); });
}

}  // namespace

std::tuple<Tensor, Tensor> project_kv(const Tensor& features, const Tensor& positions,
                                      const Tensor& fc_weight, const Tensor& norm_weight,
                                      const Tensor& kv_weight, const Tensor& k_norm_weight,
                                      const Tensor& cos_sin, std::optional<Tensor> carry_embedding,
                                      std::optional<Tensor> carried, double eps, bool carry_pre_norm) {
  const Checker check("project_kv");
  const ProjectionWeights w(check, features, fc_weight, norm_weight, kv_weight, k_norm_weight, cos_sin,
                            carry_embedding, eps, carry_pre_norm);
  const int64_t total = features.size(0);
  const int32_t* position = checked_positions(check, positions, total);
  const uint8_t* marks = checked_marks(check, carried, carry_embedding, total);
  std::vector<uint8_t> none;
  if (marks == nullptr) {
    none.resize(static_cast<size_t>(total), 0);
    marks = none.data();
  }

  Tensor k = torch::stable::new_empty(features, {w.layers, total, w.heads, w.dim});
  Tensor v = torch::stable::new_empty(features, {w.layers, total, w.heads, w.dim});
  if (total == 0) return {k, v};

  std::vector<RowRoute> routes(static_cast<size_t>(total));
  for (int64_t t = 0; t < total; ++t) {
    const int64_t offset = t * w.heads * w.dim;
    routes[t] = {Target::kCommitted, position[t], offset, offset};
    if (position[t] == -1) {
      routes[t].target = Target::kZero;
    } else {
      check_position(check, w.positions, t, position[t]);
    }
  }
  const KvDestination out = kv_destination(k, v);
  launch(features, w, marks, routes, out, out);
  return {k, v};
}

void commit_and_carry(const Tensor& features, const Tensor& positions, const Tensor& row_start,
                      const Tensor& num_accepted, const Tensor& slot_mapping, const Tensor& k_cache,
                      const Tensor& v_cache, const Tensor& k_segment, const Tensor& v_segment,
                      const Tensor& segment_lens, const Tensor& fc_weight, const Tensor& norm_weight,
                      const Tensor& kv_weight, const Tensor& k_norm_weight, const Tensor& cos_sin,
                      std::optional<Tensor> carry_embedding, double eps, bool carry_pre_norm, bool carry) {
  const Checker check("commit_and_carry");
  const ProjectionWeights w(check, features, fc_weight, norm_weight, kv_weight, k_norm_weight, cos_sin,
                            carry_embedding, eps, carry_pre_norm);
  const int64_t total = features.size(0);
  const int32_t* position = checked_positions(check, positions, total);
  const RaggedBatch batch(check, row_start, num_accepted, total);
  const CommitArguments a(check, w, features, batch.requests, slot_mapping, k_cache, v_cache, k_segment,
                          v_segment, segment_lens);
  // Nothing is written before the last check has passed.
  const CommitRouting r =
      route(check, position, w.positions, batch, a.slots, total, a.pages, a.page, a.room, carry,
            {k_cache.stride(1), k_cache.stride(2), k_segment.stride(1), k_segment.stride(2)},
            {v_cache.stride(1), v_cache.stride(2), v_segment.stride(1), v_segment.stride(2)});
  if (r.any)
    launch(features, w, r.carried.data(), r.routes, kv_destination(k_cache, v_cache),
           kv_destination(k_segment, v_segment));
  // Last, so that no length speaks of rows that were not written, should memory run out.
  for (int64_t i = 0; i < batch.requests; ++i) a.segment_lens[i] = r.lens[i];
}

void check_project_kv(const Tensor& positions, int64_t positions_end) {
  const Checker check("project_kv");
  check.require(positions.dim() == 1, "positions must have shape [T], got ", shape_text(positions));
  const int64_t total = positions.size(0);
  const int32_t* position = checked_positions(check, positions, total);
  for (int64_t t = 0; t < total; ++t)
    if (position[t] != -1) check_position(check, positions_end, t, position[t]);
}

void check_commit_and_carry(const Tensor& positions, const Tensor& row_start, const Tensor& num_accepted,
                            const Tensor& slot_mapping, int64_t pages, int64_t page_size, int64_t room,
                            int64_t positions_end, bool carry) {
  const Checker check("commit_and_carry");
  check.require(positions.dim() == 1, "positions must have shape [T], got ", shape_text(positions));
  const int64_t total = positions.size(0);
  const int32_t* position = checked_positions(check, positions, total);
  const RaggedBatch batch(check, row_start, num_accepted, total);
  route(check, position, positions_end, batch, checked_slots(check, slot_mapping, total), total, pages,
        page_size, room, carry, {}, {});
}

}  // namespace carryover
