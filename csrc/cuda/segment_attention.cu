// Launch of segment_attention: the tile for the head size and the rows, the combine when there are pieces.
#include "cuda/segment_attention.cuh"

namespace carryover {
namespace cuda {
namespace {

template <class T, int kHead, int kRows>
cudaError_t launch_tile(const SegmentAttentionParams& p, cudaStream_t stream) {
  using Tile = AttentionTile<T, kHead, kRows>;
  const int row_tiles = ceil_div(p.rows * (p.heads / p.kv_heads), kRows);
  const int64_t blocks = int64_t(p.batch) * p.kv_heads * row_tiles * p.plan.pieces;
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  return launch(segment_attention_kernel<Tile>, dim3(unsigned(blocks)), dim3(Tile::kThreads), Tile::kSmem,
                stream, p, row_tiles);
}

template <class T, int kHead>
cudaError_t launch_head(const SegmentAttentionParams& p, cudaStream_t stream) {
  switch (attention_tile_rows(p.rows * (p.heads / p.kv_heads), p.head_size)) {
    case 16:
      return launch_tile<T, kHead, 16>(p, stream);
    case 32:
      return launch_tile<T, kHead, 32>(p, stream);
    case 64:
      return launch_tile<T, kHead, 64>(p, stream);
    default:
      if constexpr (kHead <= 128)
        return launch_tile<T, kHead, 128>(p, stream);
      else
        return cudaErrorInvalidConfiguration;
  }
}

template <class T>
cudaError_t launch_dtype(const SegmentAttentionParams& p, cudaStream_t stream) {
  cudaError_t error;
  switch (attention_tile_head(p.head_size)) {
    case 64:
      error = launch_head<T, 64>(p, stream);
      break;
    case 96:
      error = launch_head<T, 96>(p, stream);
      break;
    case 128:
      error = launch_head<T, 128>(p, stream);
      break;
    default:
      error = launch_head<T, 256>(p, stream);
  }
  if (error != cudaSuccess || p.plan.pieces == 1) return error;
  const int64_t rows = int64_t(p.batch) * p.rows * p.heads;
  return launch(segment_attention_combine_kernel<T>,
                dim3(unsigned(ceil_div(rows, int64_t(kCombineThreads / 32)))), dim3(kCombineThreads), 0,
                stream, p);
}

}  // namespace

cudaError_t segment_attention(const SegmentAttentionParams& p, cudaStream_t stream) {
  if (p.batch == 0 || p.rows == 0 || p.heads == 0) return cudaSuccess;
  return p.bf16 ? launch_dtype<bf16>(p, stream) : launch_dtype<fp16>(p, stream);
}

}  // namespace cuda
}  // namespace carryover
