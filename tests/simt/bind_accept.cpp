#include "bind.h"
#include "cuda/accept.h"

PYBIND11_MODULE(SIMT_MODULE, m) {
  bind_options(m);
  m.def("workspace", &carryover::cuda::accept_workspace);
  m.def("accept",
        [](Array draft_tokens, Array logits, MaybeArray draft_probs, MaybeArray uniforms, double temperature,
           std::string dtype, Array num_accepted, Array next_token, Array workspace) {
          carryover::cuda::AcceptParams p = {};
          p.dtype = dtype == "bfloat16"  ? carryover::DType::kBFloat16
                    : dtype == "float16" ? carryover::DType::kFloat16
                                         : carryover::DType::kFloat32;
          p.batch = draft_tokens.shape(0), p.drafts = draft_tokens.shape(1), p.vocab = logits.shape(2);
          p.draft_tokens = data<int64_t>(draft_tokens, "draft_tokens");
          p.logits = raw(logits);
          p.logits_batch = stride(logits, 0), p.logits_row = stride(logits, 1);
          if (!draft_probs.is_none()) {
            const auto probs = draft_probs.cast<Array>();
            p.draft_probs = data<float>(probs, "draft_probs");
            p.probs_batch = stride(probs, 0), p.probs_row = stride(probs, 1);
          }
          p.uniforms = data_or_null<float>(uniforms, "uniforms");
          p.inverse = temperature > 0 ? static_cast<float>(1 / temperature) : 0;
          p.num_accepted = data<int32_t>(num_accepted, "num_accepted");
          p.next_token = data<int64_t>(next_token, "next_token");
          p.chunks = static_cast<carryover::cuda::AcceptChunk*>(raw(workspace));
          p.residual = reinterpret_cast<double*>(p.chunks + p.batch * (p.drafts + 1) *
                                                                carryover::cuda::accept_chunks(p.vocab));
          check(carryover::cuda::accept(p, nullptr));
        });
}
