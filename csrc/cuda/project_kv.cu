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

template <class T, int kRows>
cudaError_t launch_fc(const ProjectParams& p, cudaStream_t stream) {
  using Tile = GemmTile<T, kRows, 128>;
  return launch(fc_kernel<T, kRows>, grid_of(p.fc_plan), dim3(Tile::kThreads), Tile::kBytes + 16, stream, p);
}

template <class T, int kRows, int kCols>
cudaError_t launch_kv(const ProjectParams& p, cudaStream_t stream) {
  using Tile = GemmTile<T, kRows, kCols>;
  return launch(kv_kernel<T, kRows, kCols>, grid_of(p.kv_plan), dim3(Tile::kThreads),
                Tile::kBytes + 5 * kRows + 16, stream, p);
}

template <class T>
cudaError_t launch_both(const ProjectParams& p, cudaStream_t stream) {
  const int fc_rows = p.fc_plan.tile_rows, kv_rows = p.kv_plan.tile_rows;
  const cudaError_t error = fc_rows == 16   ? launch_fc<T, 16>(p, stream)
                            : fc_rows == 64 ? launch_fc<T, 64>(p, stream)
                                            : launch_fc<T, 128>(p, stream);
  if (error != cudaSuccess) return error;
  if (p.kv_plan.tile_cols == 256)
    return kv_rows == 16 ? launch_kv<T, 16, 256>(p, stream) : launch_kv<T, 64, 256>(p, stream);
  return kv_rows == 16   ? launch_kv<T, 16, 128>(p, stream)
         : kv_rows == 64 ? launch_kv<T, 64, 128>(p, stream)
                         : launch_kv<T, 128, 128>(p, stream);
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
