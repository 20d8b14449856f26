// Arguments of project_kv and commit_and_carry: what every device checks of them without reading their
// values.
#pragma once

#include <optional>

#include "checks.h"
#include "params.h"

namespace carryover {

// Weights of one projection with the sizes that they imply.
struct ProjectionWeights {
  const Tensor &fc, &norm, &kv, &k_norm, &cos_sin;
  const std::optional<Tensor>& embedding;
  double eps;
  bool pre_norm;
  int64_t hidden, layers, heads, dim, rot, positions;

  ProjectionWeights(const Checker& check, const Tensor& features, const Tensor& fc_weight,
                    const Tensor& norm_weight, const Tensor& kv_weight, const Tensor& k_norm_weight,
                    const Tensor& cos_sin_table, const std::optional<Tensor>& carry_embedding, double eps_arg,
                    bool carry_pre_norm)
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

 private:
  void vector(const Checker& check, const Tensor& t, const char* name, const Tensor& features) const {
    check.same_dtype(t, name, features, "features");
    check.shape(t, name, {hidden}, "[H]");
    check.contiguous(t, name);
  }
};

inline const int32_t* checked_positions(const Checker& check, const Tensor& positions, int64_t total) {
  check.dtype(positions, "positions", ScalarType::Int);
  check.shape(positions, "positions", {total}, "[T]");
  check.contiguous(positions, "positions");
  return positions.const_data_ptr<int32_t>();
}

// Null when no row is marked.
inline const uint8_t* checked_marks(const Checker& check, const std::optional<Tensor>& carried,
                                    const std::optional<Tensor>& embedding, int64_t total) {
  if (!carried) return nullptr;
  check.dtype(*carried, "carried", ScalarType::Bool);
  check.shape(*carried, "carried", {total}, "[T]");
  check.contiguous(*carried, "carried");
  check.require(embedding.has_value(), "carried marks rows but carry_embedding is None; pass both or none");
  return static_cast<const uint8_t*>(carried->const_data_ptr());
}

inline const int64_t* checked_slots(const Checker& check, const Tensor& slot_mapping, int64_t total) {
  check.dtype(slot_mapping, "slot_mapping", ScalarType::Long);
  check.shape(slot_mapping, "slot_mapping", {total}, "[T]");
  check.contiguous(slot_mapping, "slot_mapping");
  return slot_mapping.const_data_ptr<int64_t>();
}

// Slots, caches and segments of commit_and_carry.
struct CommitArguments {
  const int64_t* slots;
  int64_t pages, page, room;
  int32_t* segment_lens;

  CommitArguments(const Checker& check, const ProjectionWeights& w, const Tensor& features, int64_t requests,
                  const Tensor& slot_mapping, const Tensor& k_cache, const Tensor& v_cache,
                  const Tensor& k_segment, const Tensor& v_segment, const Tensor& lens) {
    slots = checked_slots(check, slot_mapping, features.size(0));
    check.same_dtype(k_cache, "k_cache", features, "features");
    check.shape(k_cache, "k_cache", {w.layers, -1, -1, w.heads, w.dim}, "[L, N, page, nkv, d]");
    check.dense_rows(k_cache, "k_cache");
    pages = k_cache.size(1), page = k_cache.size(2);
    check.same_dtype(v_cache, "v_cache", features, "features");
    check.shape(v_cache, "v_cache", {w.layers, pages, page, w.heads, w.dim}, "[L, N, page, nkv, d]");
    check.dense_rows(v_cache, "v_cache");
    check.same_dtype(k_segment, "k_segment", features, "features");
    check.shape(k_segment, "k_segment", {w.layers, requests, -1, w.heads, w.dim}, "[L, B, R, nkv, d]");
    check.dense_rows(k_segment, "k_segment");
    room = k_segment.size(2);
    check.same_dtype(v_segment, "v_segment", features, "features");
    check.shape(v_segment, "v_segment", {w.layers, requests, room, w.heads, w.dim}, "[L, B, R, nkv, d]");
    check.dense_rows(v_segment, "v_segment");
    check.dtype(lens, "segment_lens", ScalarType::Int);
    check.shape(lens, "segment_lens", {requests}, "[B]");
    check.contiguous(lens, "segment_lens");
    segment_lens = lens.mutable_data_ptr<int32_t>();
  }
};

// Strides of a [L, ..., nkv, d] pair.
inline KvDestination kv_destination(const Tensor& k, const Tensor& v) {
  const int64_t head = k.dim() - 2;
  return {k.mutable_data_ptr(), v.mutable_data_ptr(), k.stride(0),
          v.stride(0),          k.stride(head),       v.stride(head)};
}

}  // namespace carryover
