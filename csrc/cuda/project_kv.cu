#include "cuda/project_kv.cuh"

namespace carryover {
namespace cuda {
namespace {

dim3 grid_of(const GemmPlan& p) {
  return dim3(static_cast<unsigned>(p.row_blocks), static_cast<unsigned>(p.col_tiles),
              static_cast<unsigned>(p.splits));
}

dim3 route_grid(int64_t rows, int64_t requests) {
  const int64_t threads = rows > requests ? rows : requests;
  return dim3(static_cast<unsigned>(ceil_div<int64_t>(threads, kRouteThreads)));
}

template <class T, int kRows, int kCols>
cudaError_t launch_tile(const ProjectParams& p, bool second, cudaStream_t stream) {
  using Tile = GemmTile<T, kRows, kCols>;
  const size_t smem = Tile::kBytes + sizeof(float) * kRows + sizeof(int) + kRows;  // scales, a flag, marks
  return launch(project_kernel<T, kRows, kCols>, grid_of(second ? p.kv_plan : p.fc_plan),
                dim3(Tile::kThreads), smem, stream, p, second);
}

template <class T>
cudaError_t launch_gemm(const ProjectParams& p, bool second, cudaStream_t stream) {
  const GemmPlan& plan = second ? p.kv_plan : p.fc_plan;
  const bool few = plan.tile_rows == 16;
#ifdef CARRYOVER_ONE_TILE  // sanitizer builds of the simulator: CuTe takes minutes to instrument
  if (!p.bf16 || !few || plan.tile_cols == 256) return cudaErrorNotSupported;
  return launch_tile<bf16, 16, 128>(p, second, stream);
#else
  if (plan.tile_cols == 256)
    return few ? launch_tile<T, 16, 256>(p, second, stream) : launch_tile<T, 64, 256>(p, second, stream);
  return few ? launch_tile<T, 16, 128>(p, second, stream) : launch_tile<T, 64, 128>(p, second, stream);
#endif
}

template <class T>
cudaError_t launch_both(const ProjectParams& p, cudaStream_t stream) {
  const cudaError_t error = launch_gemm<T>(p, false, stream);
  return error == cudaSuccess ? launch_gemm<T>(p, true, stream) : error;
}

template <class T>
cudaError_t launch_norm(const ProjectParams& p, cudaStream_t stream) {
  return launch(carry_norm_kernel<T>, dim3(static_cast<unsigned>(p.rows)), dim3(kNormThreads),
                sizeof(float) * kNormThreads / 32, stream, p);
}

template <class T>
cudaError_t launch_route(const ProjectParams& p, cudaStream_t stream) {
  const int64_t warps = p.rows * p.layers * 2 * p.heads;
  return launch(route_kv_kernel<T>, dim3(static_cast<unsigned>(ceil_div<int64_t>(warps, kRouteThreads / 32))),
                dim3(kRouteThreads), 0, stream, p);
}

}  // namespace

cudaError_t route_rows(const CommitRoutes& p, cudaStream_t stream) {
  if (p.rows == 0 && p.requests == 0) return cudaSuccess;
  return launch(commit_routes_kernel, route_grid(p.rows, p.requests), dim3(kRouteThreads), 0, stream, p);
}

cudaError_t route_rows(const ProjectRoutes& p, cudaStream_t stream) {
  if (p.rows == 0) return cudaSuccess;
  return launch(project_routes_kernel, route_grid(p.rows, 0), dim3(kRouteThreads), 0, stream, p);
}

cudaError_t project_rows(const ProjectParams& p, cudaStream_t stream) {
  if (p.rows == 0) return cudaSuccess;
  return p.bf16 ? launch_both<bf16>(p, stream) : launch_both<fp16>(p, stream);
}

cudaError_t carry_norm(const ProjectParams& p, cudaStream_t stream) {
  if (p.rows == 0) return cudaSuccess;
  return p.bf16 ? launch_norm<bf16>(p, stream) : launch_norm<fp16>(p, stream);
}

cudaError_t route_kv(const ProjectParams& p, cudaStream_t stream) {
  if (p.rows == 0) return cudaSuccess;
  return p.bf16 ? launch_route<bf16>(p, stream) : launch_route<fp16>(p, stream);
}

}  // namespace cuda
}  // namespace carryover
