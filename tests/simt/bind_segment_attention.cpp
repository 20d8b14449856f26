#include "bind.h"
#include "cuda/segment_attention.cuh"

using carryover::KeyRows;
using namespace carryover::cuda;

static KeyRows key_rows(const MaybeArray& k, const MaybeArray& v) {
  if (k.is_none()) return {};
  const auto a = k.cast<Array>(), b = v.cast<Array>();
  return {raw(a), raw(b), stride(a, 0), stride(a, 1), stride(a, 2), stride(b, 0), stride(b, 1), stride(b, 2)};
}

PYBIND11_MODULE(SIMT_MODULE, m) {
  bind_options(m);
  m.def("plan", [](int32_t batch, int32_t rows, int32_t heads, int32_t kv_heads, int32_t d, int64_t capacity,
                   int32_t multiprocessors) {
    const AttentionPlan plan = attention_plan(batch, rows, heads, kv_heads, d, capacity, multiprocessors);
    return py::make_tuple(plan.pieces, plan.fill, plan.least);
  });
  m.def("tile", [](int32_t rows, int32_t d) {  // head size, rows, keys, threads, bytes of shared memory
    py::tuple found;
    const auto match = [&](auto tile) {
      using Tile = decltype(tile);
      if (Tile::kHead == attention_tile_head(d) && Tile::kRows == attention_tile_rows(rows, d))
        found = py::make_tuple(int(Tile::kHead), int(Tile::kRows), int(Tile::kKeys), int(Tile::kThreads),
                               int(Tile::kSmem));
    };
    match(AttentionTile<bf16, 64, 16>()), match(AttentionTile<bf16, 64, 32>());
    match(AttentionTile<bf16, 64, 64>()), match(AttentionTile<bf16, 64, 128>());
    match(AttentionTile<bf16, 96, 16>()), match(AttentionTile<bf16, 96, 32>());
    match(AttentionTile<bf16, 96, 64>()), match(AttentionTile<bf16, 96, 128>());
    match(AttentionTile<bf16, 128, 16>()), match(AttentionTile<bf16, 128, 32>());
    match(AttentionTile<bf16, 128, 64>()), match(AttentionTile<bf16, 128, 128>());
    match(AttentionTile<bf16, 256, 16>()), match(AttentionTile<bf16, 256, 32>());
    match(AttentionTile<bf16, 256, 64>());
    return found;
  });
  m.def("workspace", &attention_workspace);
  m.def("exp2", &carryover::ptx::exp2_approx);
  m.def("swizzle", [](int head, int row, int chunk) {
    switch (head) {
      case 64:
        return attention_swizzle<64>(row, chunk);
      case 96:
        return attention_swizzle<96>(row, chunk);
      case 128:
        return attention_swizzle<128>(row, chunk);
      default:
        return attention_swizzle<256>(row, chunk);
    }
  });
  m.def(
      "segment_attention",
      [](Array q, Array k_cache, Array v_cache, Array context_lens, MaybeArray k_segment,
         MaybeArray v_segment, MaybeArray segment_lens, Array k_block, Array v_block, MaybeArray block_table,
         MaybeArray sinks, MaybeArray block_lens, double scale, bool causal, int64_t window, double soft_cap,
         bool bf16, std::tuple<int, int, int> plan, MaybeArray workspace, Array out) {
        SegmentAttentionParams p = {};
        p.bf16 = bf16;
        p.batch = q.shape(0), p.rows = q.shape(1), p.heads = q.shape(2), p.kv_heads = k_cache.shape(2);
        p.head_size = q.shape(3);
        p.page_size = k_cache.shape(1), p.pages = k_cache.shape(0);
        p.block_table = data_or_null<int32_t>(block_table, "block_table");
        p.max_pages = block_table.is_none() ? 1 : block_table.cast<Array>().shape(1);
        p.capacity = p.page_size * p.max_pages;
        p.q = raw(q), p.q_batch = stride(q, 0), p.q_row = stride(q, 1), p.q_head = stride(q, 2);
        p.context = key_rows(k_cache, v_cache);
        p.context_lens = data<int32_t>(context_lens, "context_lens");
        p.segment = key_rows(k_segment, v_segment);
        p.segment_rows = k_segment.is_none() ? 0 : k_segment.cast<Array>().shape(1);
        p.segment_lens = data_or_null<int32_t>(segment_lens, "segment_lens");
        p.block = key_rows(k_block, v_block);
        p.block_lens = data_or_null<int32_t>(block_lens, "block_lens");
        p.sinks = data_or_null<float>(sinks, "sinks");
        p.scale = scale, p.soft_cap = soft_cap, p.causal = causal, p.window = window;
        p.out = raw(out);
        p.plan = {std::get<0>(plan), std::get<1>(plan), std::get<2>(plan)};
        p.partial_out = data_or_null<float>(workspace, "workspace");
        if (p.partial_out != nullptr)
          p.partial_stats = p.partial_out + int64_t(p.plan.pieces) * p.batch * p.rows * p.heads * p.head_size;
        check(segment_attention(p, nullptr));
      });
}
