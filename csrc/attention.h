// Arguments of segment_attention: what every device checks of them without reading their values.
#pragma once

#include <algorithm>
#include <cmath>
#include <optional>

#include "checks.h"
#include "params.h"

namespace carryover {

struct AttentionArguments {
  const Tensor &q, &k_cache, &v_cache, &context_lens;
  const std::optional<Tensor>&k_segment, &v_segment, &segment_lens;
  const Tensor &k_block, &v_block;
  const std::optional<Tensor>&block_table, &sinks, &block_lens;
  double scale;
  bool causal;
  int64_t window;
  double soft_cap;

  int64_t batch = 0, rows = 0, heads = 0, d = 0, pages = 0, page = 0, kv_heads = 0;
  int64_t max_pages = 1;     // without a block_table
  int64_t capacity = 0;      // context rows of a request at most
  int64_t segment_rows = 0;  // R; 0 without a segment

  // `head_max` is the largest head size of the device's kernels.
  void check(const Checker& c, int64_t head_max) {
    c.floating(q, "q");
    c.rank(q, "q", 4, "[B, b, nh, d]");
    c.dense_rows(q, "q");
    batch = q.size(0), rows = q.size(1), heads = q.size(2), d = q.size(3);
    c.require(d >= 1 && d <= head_max, "q has head size ", d, "; it must be 1..", head_max);
    c.rank(k_cache, "k_cache", 4, "[N, page, nkv, d]");
    pages = k_cache.size(0), page = k_cache.size(1), kv_heads = k_cache.size(2);
    c.require(kv_heads >= 1 && heads % kv_heads == 0, "q has ", heads, " heads, which is no multiple of the ",
              kv_heads, " KV heads of k_cache");
    keys(c, k_cache, "k_cache", v_cache, "v_cache", {-1, -1, kv_heads, d}, "[N, page, nkv, d]");
    keys(c, k_block, "k_block", v_block, "v_block", {batch, rows, kv_heads, d}, "[B, b, nkv, d]");
    c.require(scale > 0 && std::isfinite(scale), "scale must be a finite number above 0, got ", scale,
              "; the usual value is 1 / sqrt(d)");
    c.require(window >= 0, "window must be 0 (no window) or the number of visible positions, got ", window);
    c.require(soft_cap >= 0 && std::isfinite(soft_cap),
              "soft_cap must be 0 (none) or a finite number above 0, got ", soft_cap);
    if (block_table) {
      c.dtype(*block_table, "block_table", ScalarType::Int);
      c.shape(*block_table, "block_table", {batch, -1}, "[B, max_pages]");
      c.contiguous(*block_table, "block_table");
      max_pages = block_table->size(1);
    } else {
      c.require(pages >= batch, "k_cache has room for ", pages, " requests, q has ", batch,
                "; give one contiguous row of the cache a request, or a block_table");
    }
    capacity = std::min<int64_t>(page * max_pages, 1 << 30);
    lengths(c, context_lens, "context_lens");
    c.require(
        k_segment.has_value() == v_segment.has_value() && k_segment.has_value() == segment_lens.has_value(),
        "k_segment, v_segment and segment_lens belong together, got ", k_segment ? "" : "no ", "k_segment, ",
        v_segment ? "" : "no ", "v_segment, ", segment_lens ? "" : "no ",
        "segment_lens; give all three or none");
    if (k_segment) {
      keys(c, *k_segment, "k_segment", *v_segment, "v_segment", {batch, -1, kv_heads, d}, "[B, R, nkv, d]");
      lengths(c, *segment_lens, "segment_lens");
      segment_rows = k_segment->size(1);
    }
    if (block_lens) lengths(c, *block_lens, "block_lens");
    if (sinks) {
      c.dtype(*sinks, "sinks", ScalarType::Float);
      c.shape(*sinks, "sinks", {heads}, "[nh]");
      c.contiguous(*sinks, "sinks");
    }
  }

  // What both kinds of kernels take under the same names. Pointers to lengths included.
  template <class Params>
  void fill(Params& p) const {
    p.batch = batch, p.rows = rows, p.heads = heads, p.kv_heads = kv_heads, p.head_size = d;
    p.page_size = page, p.max_pages = max_pages;
    p.q = q.const_data_ptr(), p.q_batch = q.stride(0), p.q_row = q.stride(1), p.q_head = q.stride(2);
    p.context = rows_of(k_cache, v_cache);
    p.context_lens = context_lens.const_data_ptr<int32_t>();
    if (block_table) p.block_table = block_table->const_data_ptr<int32_t>();
    if (k_segment) {
      p.segment = rows_of(*k_segment, *v_segment);
      p.segment_lens = segment_lens->const_data_ptr<int32_t>();
    }
    p.block = rows_of(k_block, v_block);
    if (block_lens) p.block_lens = block_lens->const_data_ptr<int32_t>();
    if (sinks) p.sinks = sinks->const_data_ptr<float>();
    p.scale = scale, p.soft_cap = soft_cap, p.causal = causal;
    p.window = std::min<int64_t>(window, 1 << 30);
  }

 private:
  static KeyRows rows_of(const Tensor& k, const Tensor& v) {
    return {k.const_data_ptr(), v.const_data_ptr(), k.stride(0), k.stride(1),
            k.stride(2),        v.stride(0),        v.stride(1), v.stride(2)};
  }

  void keys(const Checker& c, const Tensor& k, const char* k_name, const Tensor& v, const char* v_name,
            std::initializer_list<int64_t> shape, const char* layout) const {
    const Tensor* tensors[] = {&k, &v};
    const char* names[] = {k_name, v_name};
    for (int i = 0; i < 2; ++i) {
      c.same_dtype(*tensors[i], names[i], q, "q");
      c.shape(*tensors[i], names[i], shape, layout);
      c.dense_rows(*tensors[i], names[i]);
    }
    c.require(k.size(0) == v.size(0) && k.size(1) == v.size(1), v_name, " must have the shape of ", k_name,
              ", ", shape_text(k), ", got ", shape_text(v));
  }

  void lengths(const Checker& c, const Tensor& t, const char* name) const {
    c.dtype(t, name, ScalarType::Int);
    c.shape(t, name, {batch}, "[B]");
    c.contiguous(t, name);
  }
};

}  // namespace carryover
