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
void check_position(const Checker& check, const ProjectionWeights& w, int64_t t, int32_t position) {
  check.require(position >= 0 && position < w.positions, "positions[", t, "] = ", position,
                " is out of range: cos_sin has ", w.positions, " rows, so it must be -1 (padding) or 0..",
                w.positions - 1);
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
      check_position(check, w, t, position[t]);
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
  const int64_t pages = a.pages, page = a.page;

  // Route every row, checking as we go; nothing is written before the last check has passed.
  const int64_t* slot = a.slots;
  std::vector<RowRoute> routes(static_cast<size_t>(total), RowRoute{Target::kNowhere, -1, 0, 0});
  std::vector<uint8_t> carried(static_cast<size_t>(total), 0);
  std::vector<int32_t> lens(static_cast<size_t>(batch.requests), 0);
  bool any = false;
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
        routes[t] = {Target::kCommitted, position[t], n * k_cache.stride(1) + offset * k_cache.stride(2),
                     n * v_cache.stride(1) + offset * v_cache.stride(2)};
      } else if (carry && lens[i] < a.room) {
        const int64_t j = lens[i]++;
        routes[t] = {Target::kCarried, position[t], i * k_segment.stride(1) + j * k_segment.stride(2),
                     i * v_segment.stride(1) + j * v_segment.stride(2)};
        carried[t] = 1;
      } else {
        continue;
      }
      check_position(check, w, t, position[t]);
      any = true;
    }
  }
  for (int64_t i = 0; i < batch.requests; ++i) a.segment_lens[i] = lens[i];
  if (!any) return;
  launch(features, w, carried.data(), routes, kv_destination(k_cache, v_cache),
         kv_destination(k_segment, v_segment));
}

}  // namespace carryover
