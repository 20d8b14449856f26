// Host side of segment_attention: checks, the list of work, threads; and the plain float64 path.
#include "cpu/segment_attention.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "attention.h"
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

// Lengths and pages must lie within their capacities.
void check_values(const AttentionArguments& a) {
  const auto within = [&](const Tensor& t, const char* name, int64_t least, int64_t most, const char* of) {
    const int32_t* n = t.const_data_ptr<int32_t>();
    for (int64_t i = 0; i < a.batch; ++i)
      kCheck.require(n[i] >= least && n[i] <= most, name, "[", i, "] = ", n[i],
                     " is out of range; it must be ", least, "..", most, ", the capacity of ", of);
  };
  within(a.context_lens, "context_lens", -1, a.capacity, "the cache (-1: inactive request)");
  if (a.block_table) {
    const int32_t* lens = a.context_lens.const_data_ptr<int32_t>();
    const int32_t* table = a.block_table->const_data_ptr<int32_t>();
    for (int64_t i = 0; i < a.batch; ++i)
      for (int64_t j = 0; j * a.page < lens[i]; ++j) {
        const int32_t at = table[i * a.max_pages + j];
        kCheck.require(at >= 0 && at < a.pages, "block_table[", i, ", ", j, "] = ", at,
                       " is out of range: context_lens[", i, "] = ", lens[i],
                       " needs this page, so it must be 0..", a.pages - 1);
      }
  }
  if (a.k_segment) within(*a.segment_lens, "segment_lens", 0, a.segment_rows, "k_segment");
  if (a.block_lens) within(*a.block_lens, "block_lens", 0, a.rows, "the block (b)");
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
  AttentionArguments a{q,       k_cache, v_cache,     context_lens, k_segment,  v_segment, segment_lens,
                       k_block, v_block, block_table, sinks,        block_lens, scale,     causal,
                       window,  soft_cap};
  a.check(kCheck, kHeadSizeMax);
  check_values(a);
  const int64_t batch = a.batch, rows = a.rows, heads = a.heads, kv_heads = a.kv_heads, d = a.d;

  Tensor out = torch::stable::new_empty(q, {batch, rows, heads, d});
  if (out.numel() == 0) return out;
  AttentionParams p = {};
  a.fill(p);
  p.dtype = kernel_dtype(q.scalar_type());
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
