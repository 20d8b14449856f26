// project_kv and commit_and_carry: GEMM, epilogue 1 (embedding, RMS norm), GEMM, epilogue 2 (k_norm, RoPE,
// routing). The two GEMMs see every row in both ops and whatever `carry` says, so the bits of a committed row
// never depend on what happens to the other rows. The GEMMs are aten::linear (oneDNN, MKL); only the
// epilogues are ours.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <array>
#include <vector>

#include "checks.h"
#include "cpu/dispatch.h"
#include "cpu/ragged.h"
#include "ops.h"

CARRYOVER_KERNEL(carry_norm, NormParams)
CARRYOVER_KERNEL(route_kv, KvParams)

namespace carryover {
namespace {

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

Tensor linear(const Tensor& x, const Tensor& weight) {
  using torch::stable::detail::from;
  std::array<StableIValue, 3> stack{from(x), from(weight), from(std::optional<Tensor>())};
  STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::linear", "", stack.data(), TORCH_ABI_VERSION));
  Tensor out = torch::stable::detail::to<Tensor>(stack[0]);
  return out.is_contiguous() ? out
                             : torch::stable::contiguous(out);  // it always is; the epilogues rely on it
}

struct Weights {
  const Tensor &fc, &norm, &kv, &k_norm, &cos_sin;
  const std::optional<Tensor>& embedding;
  double eps;
  bool pre_norm;
  int64_t hidden, layers, heads, dim, rot, positions;

  Weights(const Checker& check, const Tensor& features, const Tensor& fc_weight, const Tensor& norm_weight,
          const Tensor& kv_weight, const Tensor& k_norm_weight, const Tensor& cos_sin_table,
          const std::optional<Tensor>& carry_embedding, double eps_arg, bool carry_pre_norm)
      : fc(fc_weight),
        norm(norm_weight),
        kv(kv_weight),
        k_norm(k_norm_weight),
        cos_sin(cos_sin_table),
        embedding(carry_embedding),
        eps(eps_arg),
        pre_norm(carry_pre_norm) {
    check.floating(features, "features");
    check.rank(features, "features", 2, "[T, F]");
    check.same_dtype(fc, "fc_weight", features, "features");
    check.shape(fc, "fc_weight", {-1, features.size(1)}, "[H, F]");
    hidden = fc.size(0);
    check.require(hidden > 0, "fc_weight must have at least one row, got ", shape_text(fc));
    vector(check, norm, "norm_weight", features);
    check.same_dtype(k_norm, "k_norm_weight", features, "features");
    check.rank(k_norm, "k_norm_weight", 2, "[L, d]");
    check.contiguous(k_norm, "k_norm_weight");
    layers = k_norm.size(0);
    dim = k_norm.size(1);
    check.require(layers > 0 && dim > 0, "k_norm_weight must have shape [L, d] with L, d > 0, got ",
                  shape_text(k_norm));
    check.same_dtype(kv, "kv_weight", features, "features");
    check.shape(kv, "kv_weight", {-1, hidden}, "[L*2*nkv*d, H]");
    heads = kv.size(0) / (2 * layers * dim);
    check.require(heads > 0 && kv.size(0) == 2 * layers * heads * dim,
                  "kv_weight must have L*2*nkv*d rows with L = ", layers, " and d = ", dim,
                  " (from k_norm_weight), got ", shape_text(kv));
    check.dtype(cos_sin, "cos_sin", ScalarType::Float);
    check.rank(cos_sin, "cos_sin", 2, "[P, rot]");
    check.contiguous(cos_sin, "cos_sin");
    positions = cos_sin.size(0);
    rot = cos_sin.size(1);
    check.require(rot % 2 == 0 && rot <= dim,
                  "cos_sin must have an even number of columns, at most d = ", dim, ", got ",
                  shape_text(cos_sin));
    if (embedding) vector(check, *embedding, "carry_embedding", features);
    check.require(eps >= 0, "eps must be >= 0, got ", eps);
  }

  void vector(const Checker& check, const Tensor& t, const char* name, const Tensor& features) const {
    check.same_dtype(t, name, features, "features");
    check.shape(t, name, {hidden}, "[H]");
    check.contiguous(t, name);
  }

  // Checks that `position` of row t may be used; -1 is padding and never gets here.
  void position(const Checker& check, int64_t t, int32_t position) const {
    check.require(position >= 0 && position < positions, "positions[", t, "] = ", position,
                  " is out of range: cos_sin has ", positions, " rows, so it must be -1 (padding) or 0..",
                  positions - 1);
  }
};

const int32_t* checked_positions(const Checker& check, const Tensor& positions, int64_t total) {
  check.dtype(positions, "positions", ScalarType::Int);
  check.shape(positions, "positions", {total}, "[T]");
  check.contiguous(positions, "positions");
  return positions.const_data_ptr<int32_t>();
}

// Both GEMMs with their epilogues. `carried` marks the rows that get the embedding.
void launch(const Tensor& features, const Weights& w, const uint8_t* carried,
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

// Strides of a [L, ..., nkv, d] pair.
KvDestination destination(const Tensor& k, const Tensor& v) {
  const int64_t head = k.dim() - 2;
  return {k.mutable_data_ptr(), v.mutable_data_ptr(), k.stride(0),
          v.stride(0),          k.stride(head),       v.stride(head)};
}

}  // namespace

std::tuple<Tensor, Tensor> project_kv(const Tensor& features, const Tensor& positions,
                                      const Tensor& fc_weight, const Tensor& norm_weight,
                                      const Tensor& kv_weight, const Tensor& k_norm_weight,
                                      const Tensor& cos_sin, std::optional<Tensor> carry_embedding,
                                      std::optional<Tensor> carried, double eps, bool carry_pre_norm) {
  const Checker check("project_kv");
  const Weights w(check, features, fc_weight, norm_weight, kv_weight, k_norm_weight, cos_sin, carry_embedding,
                  eps, carry_pre_norm);
  const int64_t total = features.size(0);
  const int32_t* position = checked_positions(check, positions, total);
  std::vector<uint8_t> none;
  const uint8_t* marks = nullptr;
  if (carried) {
    check.dtype(*carried, "carried", ScalarType::Bool);
    check.shape(*carried, "carried", {total}, "[T]");
    check.contiguous(*carried, "carried");
    check.require(carry_embedding.has_value(),
                  "carried marks rows but carry_embedding is None; pass both or none");
    marks = static_cast<const uint8_t*>(carried->const_data_ptr());
  } else {
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
      w.position(check, t, position[t]);
    }
  }
  const KvDestination out = destination(k, v);
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
  const Weights w(check, features, fc_weight, norm_weight, kv_weight, k_norm_weight, cos_sin, carry_embedding,
                  eps, carry_pre_norm);
  const int64_t total = features.size(0);
  const int32_t* position = checked_positions(check, positions, total);
  const RaggedBatch batch(check, row_start, num_accepted, total);
  check.dtype(slot_mapping, "slot_mapping", ScalarType::Long);
  check.shape(slot_mapping, "slot_mapping", {total}, "[T]");
  check.contiguous(slot_mapping, "slot_mapping");
  check.same_dtype(k_cache, "k_cache", features, "features");
  check.shape(k_cache, "k_cache", {w.layers, -1, -1, w.heads, w.dim}, "[L, N, page, nkv, d]");
  check.dense_rows(k_cache, "k_cache");
  const int64_t pages = k_cache.size(1), page = k_cache.size(2);
  check.same_dtype(v_cache, "v_cache", features, "features");
  check.shape(v_cache, "v_cache", {w.layers, pages, page, w.heads, w.dim}, "[L, N, page, nkv, d]");
  check.dense_rows(v_cache, "v_cache");
  check.same_dtype(k_segment, "k_segment", features, "features");
  check.shape(k_segment, "k_segment", {w.layers, batch.requests, -1, w.heads, w.dim}, "[L, B, R, nkv, d]");
  check.dense_rows(k_segment, "k_segment");
  const int64_t room = k_segment.size(2);
  check.same_dtype(v_segment, "v_segment", features, "features");
  check.shape(v_segment, "v_segment", {w.layers, batch.requests, room, w.heads, w.dim}, "[L, B, R, nkv, d]");
  check.dense_rows(v_segment, "v_segment");
  check.dtype(segment_lens, "segment_lens", ScalarType::Int);
  check.shape(segment_lens, "segment_lens", {batch.requests}, "[B]");
  check.contiguous(segment_lens, "segment_lens");

  // Route every row, checking as we go; nothing is written before the last check has passed.
  const int64_t* slot = slot_mapping.const_data_ptr<int64_t>();
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
      } else if (carry && lens[i] < room) {
        const int64_t j = lens[i]++;
        routes[t] = {Target::kCarried, position[t], i * k_segment.stride(1) + j * k_segment.stride(2),
                     i * v_segment.stride(1) + j * v_segment.stride(2)};
        carried[t] = 1;
      } else {
        continue;
      }
      w.position(check, t, position[t]);
      any = true;
    }
  }
  int32_t* lens_out = segment_lens.mutable_data_ptr<int32_t>();
  for (int64_t i = 0; i < batch.requests; ++i) lens_out[i] = lens[i];
  if (!any) return;
  launch(features, w, carried.data(), routes, destination(k_cache, v_cache),
         destination(k_segment, v_segment));
}

}  // namespace carryover
