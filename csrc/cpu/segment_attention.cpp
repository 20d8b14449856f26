// Host side of segment_attention: checks, the list of work, threads; and the plain float64 path.
#include "cpu/segment_attention.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "checks.h"
#include "cpu/dispatch.h"
#include "ops.h"

CARRYOVER_KERNEL(attention_units, AttentionParams)
CARRYOVER_KERNEL(attention_merge, AttentionParams)

namespace carryover {
namespace {

const Checker kCheck("segment_attention");

// Context rows in one piece of work. Fixed, so that neither the number of threads nor the batch changes a
// result.
constexpr int32_t kPiece = 512;

KeyRows key_rows(const Tensor& k, const Tensor& v) {
  return {k.const_data_ptr(), v.const_data_ptr(), k.stride(0), k.stride(1),
          k.stride(2),        v.stride(0),        v.stride(1), v.stride(2)};
}

void check_keys(const Tensor& k, const char* k_name, const Tensor& v, const char* v_name, const Tensor& q,
                std::initializer_list<int64_t> shape, const char* layout) {
  const Tensor* tensors[] = {&k, &v};
  const char* names[] = {k_name, v_name};
  for (int i = 0; i < 2; ++i) {
    kCheck.same_dtype(*tensors[i], names[i], q, "q");
    kCheck.shape(*tensors[i], names[i], shape, layout);
    kCheck.dense_rows(*tensors[i], names[i]);
  }
  kCheck.require(k.size(0) == v.size(0) && k.size(1) == v.size(1), v_name, " must have the shape of ", k_name,
                 ", ", shape_text(k), ", got ", shape_text(v));
}

const int32_t* lengths(const Tensor& t, const char* name, int64_t batch, int64_t least, int64_t most,
                       const char* of) {
  kCheck.dtype(t, name, ScalarType::Int);
  kCheck.shape(t, name, {batch}, "[B]");
  kCheck.contiguous(t, name);
  const int32_t* p = t.const_data_ptr<int32_t>();
  for (int64_t i = 0; i < batch; ++i)
    kCheck.require(p[i] >= least && p[i] <= most, name, "[", i, "] = ", p[i], " is out of range; it must be ",
                   least, "..", most, ", the capacity of ", of);
  return p;
}

// float64: one query at a time, everything in double. For gradcheck and for comparisons, not for speed.
void attend_double(const AttentionParams& p, int64_t request, int64_t head, std::vector<double>& weight) {
  const int64_t kv_head = head / (p.heads / p.kv_heads), d = p.head_size;
  const int64_t context = p.context_lens[request], segment = p.segment_lens ? p.segment_lens[request] : 0;
  const int64_t block = p.block_lens ? p.block_lens[request] : p.rows,
                keys = std::max<int64_t>(context, 0) + segment + block;
  weight.resize(keys);
  auto row = [&](int64_t j, bool values) {
    const KeyRows* rows = &p.context;
    int64_t batch = request, at = j;
    if (j >= context + segment)
      rows = &p.block, at = j - context - segment;
    else if (j >= context)
      rows = &p.segment, at = j - context;
    else if (p.block_table)
      batch = p.block_table[request * p.max_pages + j / p.page_size], at = j % p.page_size;
    return values ? static_cast<const double*>(rows->v) + batch * rows->v_batch + at * rows->v_row +
                        kv_head * rows->v_head
                  : static_cast<const double*>(rows->k) + batch * rows->k_batch + at * rows->k_row +
                        kv_head * rows->k_head;
  };
  for (int64_t i = 0; i < p.rows; ++i) {
    double* out = static_cast<double*>(p.out) + ((request * p.rows + i) * p.heads + head) * d;
    std::fill(out, out + d, 0.0);
    if (context < 0 || i >= block) continue;
    const double* q = static_cast<const double*>(p.q) + request * p.q_batch + i * p.q_row + head * p.q_head;
    const double none = -std::numeric_limits<double>::infinity();
    double top = none;
    for (int64_t j = 0; j < keys; ++j) {
      const bool in_block = j >= context + segment;
      const int64_t position = j < context ? j : j - (in_block ? segment : 0);
      weight[j] = none;
      if ((p.window > 0 && context + i - position >= p.window) ||
          (in_block && p.causal && position > context + i))
        continue;
      const double* k = row(j, false);
      double s = 0;
      for (int64_t c = 0; c < d; ++c) s += q[c] * k[c];
      s *= p.scale;
      if (p.soft_cap > 0) s = p.soft_cap * std::tanh(s / p.soft_cap);
      weight[j] = s;
      top = std::max(top, s);
    }
    if (top == none) continue;
    double total = 0;
    if (p.sinks) {
      top = std::max<double>(top, p.sinks[head]);
      total = std::exp(p.sinks[head] - top);
    }
    for (int64_t j = 0; j < keys; ++j) total += weight[j] = std::exp(weight[j] - top);
    for (int64_t j = 0; j < keys; ++j) {
      if (weight[j] == 0) continue;
      const double* v = row(j, true);
      for (int64_t c = 0; c < d; ++c) out[c] += weight[j] / total * v[c];
    }
  }
}

// Cuts every (request, KV head) into pieces of about kPiece context rows.
void plan(const AttentionParams& p, std::vector<AttentionUnit>& units, std::vector<AttentionMerge>& merges,
          int32_t& partials) {
  partials = 0;
  for (int32_t i = 0; i < p.batch; ++i) {
    const int32_t context = std::max(0, p.context_lens[i]);
    // A window hides the first rows even from the first query, which is at position `context`.
    const int32_t begin = p.window > 0 ? std::max(0, context - p.window + 1) : 0;
    const int32_t pieces = std::max(1, (context - begin + kPiece / 2) / kPiece);
    const int32_t length =
        (context - begin + pieces * kAttentionTile - 1) / (pieces * kAttentionTile) * kAttentionTile;
    for (int32_t h = 0; h < p.kv_heads; ++h) {
      const int32_t first = partials;
      int32_t count = 0;
      for (int32_t at = begin; count == 0 || at < context; at += length) {
        const int32_t end = std::min(context, at + length);
        units.push_back({i, h, at, end, end == context, first + count++});
      }
      if (count == 1)
        units.back().partial = -1;
      else
        merges.push_back({i, h, first, count}), partials += count;
    }
  }
}

}  // namespace

Tensor segment_attention(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache,
                         const Tensor& context_lens, std::optional<Tensor> k_segment,
                         std::optional<Tensor> v_segment, std::optional<Tensor> segment_lens,
                         const Tensor& k_block, const Tensor& v_block, std::optional<Tensor> block_table,
                         std::optional<Tensor> sinks, std::optional<Tensor> block_lens, double scale,
                         bool causal, int64_t window, double soft_cap) {
  kCheck.floating(q, "q");
  kCheck.rank(q, "q", 4, "[B, b, nh, d]");
  kCheck.dense_rows(q, "q");
  const int64_t batch = q.size(0), rows = q.size(1), heads = q.size(2), d = q.size(3);
  kCheck.require(d >= 1 && d <= kHeadSizeMax, "q has head size ", d, "; it must be 1..", kHeadSizeMax);
  kCheck.rank(k_cache, "k_cache", 4, "[N, page, nkv, d]");
  const int64_t pages = k_cache.size(0), page = k_cache.size(1), kv_heads = k_cache.size(2);
  kCheck.require(kv_heads >= 1 && heads % kv_heads == 0, "q has ", heads,
                 " heads, which is no multiple of the ", kv_heads, " KV heads of k_cache");
  check_keys(k_cache, "k_cache", v_cache, "v_cache", q, {-1, -1, kv_heads, d}, "[N, page, nkv, d]");
  check_keys(k_block, "k_block", v_block, "v_block", q, {batch, rows, kv_heads, d}, "[B, b, nkv, d]");
  kCheck.require(scale > 0 && std::isfinite(scale), "scale must be a finite number above 0, got ", scale,
                 "; the usual value is 1 / sqrt(d)");
  kCheck.require(window >= 0, "window must be 0 (no window) or the number of visible positions, got ",
                 window);
  kCheck.require(soft_cap >= 0 && std::isfinite(soft_cap),
                 "soft_cap must be 0 (none) or a finite number above 0, got ", soft_cap);

  AttentionParams p = {};
  p.dtype = kernel_dtype(q.scalar_type());
  p.batch = batch, p.rows = rows, p.heads = heads, p.kv_heads = kv_heads, p.head_size = d;
  p.page_size = page;
  int64_t capacity = page;
  if (block_table) {
    kCheck.dtype(*block_table, "block_table", ScalarType::Int);
    kCheck.shape(*block_table, "block_table", {batch, -1}, "[B, max_pages]");
    kCheck.contiguous(*block_table, "block_table");
    p.block_table = block_table->const_data_ptr<int32_t>();
    p.max_pages = block_table->size(1);
    capacity = page * p.max_pages;
  } else {
    kCheck.require(pages >= batch, "k_cache has room for ", pages, " requests, q has ", batch,
                   "; give one contiguous row of the cache a request, or a block_table");
  }
  capacity = std::min<int64_t>(capacity, 1 << 30);
  p.context_lens =
      lengths(context_lens, "context_lens", batch, -1, capacity, "the cache (-1: inactive request)");
  if (block_table) {
    for (int64_t i = 0; i < batch; ++i)
      for (int64_t j = 0; j * page < p.context_lens[i]; ++j) {
        const int32_t at = p.block_table[i * p.max_pages + j];
        kCheck.require(at >= 0 && at < pages, "block_table[", i, ", ", j, "] = ", at,
                       " is out of range: context_lens[", i, "] = ", p.context_lens[i],
                       " needs this page, so it must be 0..", pages - 1);
      }
  }
  kCheck.require(
      k_segment.has_value() == v_segment.has_value() && k_segment.has_value() == segment_lens.has_value(),
      "k_segment, v_segment and segment_lens belong together, got ", k_segment ? "" : "no ", "k_segment, ",
      v_segment ? "" : "no ", "v_segment, ", segment_lens ? "" : "no ",
      "segment_lens; give all three or none");
  if (k_segment) {
    check_keys(*k_segment, "k_segment", *v_segment, "v_segment", q, {batch, -1, kv_heads, d},
               "[B, R, nkv, d]");
    p.segment_lens = lengths(*segment_lens, "segment_lens", batch, 0, k_segment->size(1), "k_segment");
    p.segment = key_rows(*k_segment, *v_segment);
  }
  if (block_lens) p.block_lens = lengths(*block_lens, "block_lens", batch, 0, rows, "the block (b)");
  if (sinks) {
    kCheck.dtype(*sinks, "sinks", ScalarType::Float);
    kCheck.shape(*sinks, "sinks", {heads}, "[nh]");
    kCheck.contiguous(*sinks, "sinks");
    p.sinks = sinks->const_data_ptr<float>();
  }

  Tensor out = torch::stable::new_empty(q, {batch, rows, heads, d});
  if (out.numel() == 0) return out;
  p.q = q.const_data_ptr(), p.q_batch = q.stride(0), p.q_row = q.stride(1), p.q_head = q.stride(2);
  p.context = key_rows(k_cache, v_cache);
  p.block = key_rows(k_block, v_block);
  p.scale = scale, p.soft_cap = soft_cap, p.causal = causal;
  p.window = std::min<int64_t>(window, 1 << 30);
  p.out = out.mutable_data_ptr();

  if (p.dtype == DType::kFloat64) {
    torch::stable::parallel_for(0, batch * heads, 1, [&](int64_t begin, int64_t end) {
      std::vector<double> weight;
      for (int64_t i = begin; i < end; ++i) attend_double(p, i / heads, i % heads, weight);
    });
    return out;
  }

  // Buffers stay with the calling thread: a decoder calls with the same sizes again and again.
  static thread_local std::vector<AttentionUnit> units;
  static thread_local std::vector<AttentionMerge> merges;
  static thread_local std::vector<float> buffer;
  units.clear(), merges.clear();
  int32_t partials = 0;
  plan(p, units, merges, partials);
  const int64_t group_rows = rows * (heads / kv_heads);
  double work = 0;  // multiply-adds
  for (const AttentionUnit& u : units) work += double(u.end - u.begin + rows) * group_rows * d * 2;
  const int64_t threads = torch::stable::get_num_threads();
  // A second thread pays off from about 20 microseconds of work.
  const int64_t workers = std::min<int64_t>({threads, int64_t(units.size()), 1 + int64_t(work / 1e6)});
  p.scratch_size = cache_lines(attention_scratch_floats(group_rows, d));
  p.partial_size = cache_lines(attention_partial_floats(group_rows, d));
  const size_t floats = workers * p.scratch_size + partials * p.partial_size + 16;
  if (buffer.size() < floats) buffer.resize(floats);
  const uintptr_t misplaced = reinterpret_cast<uintptr_t>(buffer.data()) % 64;
  p.scratch = buffer.data() + (misplaced ? (64 - misplaced) / sizeof(float) : 0);
  p.partials = p.scratch + workers * p.scratch_size;
  int64_t next = 0;
  p.next = &next;
  p.units = units.data(), p.num_units = units.size(), p.merges = merges.data();
  if (workers == 1) {
    CARRYOVER_CALL(attention_units, p, 0, 1);
  } else {
    torch::stable::parallel_for(0, workers, 1,
                                [&](int64_t b, int64_t e) { CARRYOVER_CALL(attention_units, p, b, e); });
  }
  const int64_t num_merges = merges.size();
  if (num_merges > 0)
    torch::stable::parallel_for(0, num_merges, workers == 1 ? num_merges : 1,
                                [&](int64_t b, int64_t e) { CARRYOVER_CALL(attention_merge, p, b, e); });
  if (buffer.size() > (size_t(8) << 20))
    std::vector<float>().swap(buffer);  // an unusually large call: give it back
  return out;
}

}  // namespace carryover
