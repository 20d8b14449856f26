#include <pybind11/stl.h>

#include "bind.h"
#include "cuda/markov_sample.h"
#include "philox.h"

PYBIND11_MODULE(SIMT_MODULE, m) {
  bind_options(m);
  m.def("workspace", &carryover::cuda::markov_workspace);
  m.def("request_tiles", &carryover::cuda::markov_request_tiles);
  m.def("smem", &carryover::cuda::markov_smem);
  m.def("philox4x32", [](std::array<uint32_t, 4> c, std::array<uint32_t, 2> key) {
    const carryover::PhiloxBlock block = carryover::philox4x32({{c[0], c[1], c[2], c[3]}}, key[0], key[1]);
    return std::array<uint32_t, 4>{block.word[0], block.word[1], block.word[2], block.word[3]};
  });
  m.def("markov_sample",
        [](Array logits, Array prev, Array w1, Array w2, MaybeArray d2t, MaybeArray uniforms,
           MaybeArray seeds, MaybeArray offsets, double temperature, bool bfloat16, int multiprocessors,
           Array tokens, Array token_probs, MaybeArray probs, Array workspace) {
          carryover::cuda::MarkovParams p = {};
          p.dtype = bfloat16 ? carryover::DType::kBFloat16 : carryover::DType::kFloat16;
          p.batch = logits.shape(0), p.steps = logits.shape(1), p.vocab = logits.shape(2);
          p.tokens = w1.shape(0), p.rank = w1.shape(1);
          p.logits = raw(logits);
          p.logits_batch = stride(logits, 0), p.logits_step = stride(logits, 1);
          p.prev = data<int64_t>(prev, "prev");
          p.w1 = raw(w1), p.w2 = raw(w2);
          p.d2t = data_or_null<int64_t>(d2t, "d2t");
          p.uniforms = data_or_null<float>(uniforms, "uniforms");
          p.seeds = data_or_null<int64_t>(seeds, "seeds");
          p.offsets = data_or_null<int64_t>(offsets, "offsets");
          p.inverse = temperature > 0 ? static_cast<float>(1 / temperature) : 0;
          p.out_tokens = data<int64_t>(tokens, "tokens");
          p.token_probs = data<float>(token_probs, "token_probs");
          p.probs = data_or_null<float>(probs, "probs");
          p.partials = static_cast<carryover::cuda::MarkovPartial*>(raw(workspace));
          p.scales = reinterpret_cast<carryover::cuda::MarkovScale*>(
              p.partials + p.batch * carryover::cuda::markov_segments(p.vocab));
          check(carryover::cuda::markov_sample(p, multiprocessors, nullptr));
        });
}
