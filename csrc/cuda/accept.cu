#include "cuda/accept.cuh"

namespace carryover {
namespace cuda {
namespace {

constexpr size_t kSmem = kAcceptThreads / 32 * sizeof(double);

template <class T>
cudaError_t run(const AcceptParams& p, cudaStream_t stream) {
  const dim3 block(kAcceptThreads), requests(p.batch);
  const unsigned chunks = static_cast<unsigned>(accept_chunks(p.vocab));
  const dim3 rows(chunks, static_cast<unsigned>(p.drafts + 1), static_cast<unsigned>(p.batch));
  cudaError_t status = launch(accept_chunk_kernel<T>, rows, block, kSmem, stream, p);
  if (status != cudaSuccess) return status;
  status = launch(accept_judge_kernel<T>, requests, block, kSmem, stream, p);
  if (status != cudaSuccess || !(p.inverse > 0)) return status;
  status = launch(accept_residual_kernel<T>, dim3(chunks, static_cast<unsigned>(p.batch)), block, kSmem,
                  stream, p);
  if (status != cudaSuccess) return status;
  return launch(accept_draw_kernel<T>, requests, block, kSmem, stream, p);
}

}  // namespace

cudaError_t accept(const AcceptParams& p, cudaStream_t stream) {
  if (p.batch == 0) return cudaSuccess;
  if (p.dtype == DType::kBFloat16) return run<bf16>(p, stream);
  if (p.dtype == DType::kFloat16) return run<fp16>(p, stream);
  return run<float>(p, stream);
}

}  // namespace cuda
}  // namespace carryover
