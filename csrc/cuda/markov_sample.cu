#include "cuda/markov_sample.cuh"

namespace carryover {
namespace cuda {
namespace {

template <class T>
cudaError_t launch_step(const MarkovParams& p, int request_tiles, dim3 grid, size_t smem,
                        cudaStream_t stream) {
  const dim3 block(kMarkovThreads);
  if (request_tiles == 1) return launch(markov_step_kernel<T, 1>, grid, block, smem, stream, p);
  if (request_tiles == 2) return launch(markov_step_kernel<T, 2>, grid, block, smem, stream, p);
  return launch(markov_step_kernel<T, 4>, grid, block, smem, stream, p);
}

template <class T>
cudaError_t run(MarkovParams p, int multiprocessors, cudaStream_t stream) {
  const int request_tiles = markov_request_tiles(p.batch, p.rank);
  const int64_t tiles = ceil_div<int64_t>(p.vocab, kMarkovColumns);
  const int64_t resident = int64_t(multiprocessors) * (request_tiles == 1 ? 3 : 2);
  const dim3 grid(static_cast<unsigned>(tiles < resident ? tiles : resident),
                  static_cast<unsigned>(ceil_div<int64_t>(p.batch, request_tiles * 8)));
  const size_t smem = static_cast<size_t>(markov_smem(request_tiles, p.rank));
  const size_t draw_smem = sizeof(MarkovDraw<T>) + 8 * (markov_depth(p.rank) + kMarkovPad) * sizeof(T);
  const dim3 block(kMarkovThreads), requests(static_cast<unsigned>(p.batch));
  const int64_t scale_blocks = ceil_div<int64_t>(p.vocab, kMarkovThreads * 8);
  for (p.step = 0; p.step < p.steps; ++p.step) {
    cudaError_t status = launch_step<T>(p, request_tiles, grid, smem, stream);
    if (status != cudaSuccess) return status;
    status = launch(markov_draw_kernel<T>, requests, block, draw_smem, stream, p);
    if (status != cudaSuccess) return status;
    if (!p.probs) continue;
    const dim3 columns(static_cast<unsigned>(scale_blocks), static_cast<unsigned>(p.batch));
    status = launch(markov_scale_kernel, columns, block, 0, stream, p);
    if (status != cudaSuccess) return status;
  }
  return cudaSuccess;
}

}  // namespace

cudaError_t markov_sample(const MarkovParams& p, int multiprocessors, cudaStream_t stream) {
  if (p.batch == 0 || p.steps == 0) return cudaSuccess;
  return p.dtype == DType::kBFloat16 ? run<bf16>(p, multiprocessors, stream)
                                     : run<fp16>(p, multiprocessors, stream);
}

}  // namespace cuda
}  // namespace carryover
