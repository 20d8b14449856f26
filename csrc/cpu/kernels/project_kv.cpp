// Epilogues of the two GEMMs of project_kv and commit_and_carry.
#include "cpu/vec.h"
#include "params.h"

namespace carryover {
namespace CARRYOVER_LEVEL {
namespace {

// u: one row, in place. Everything between the load and the one rounding store is float32.
template <class T>
void norm_row(T* u, const T* weight, const T* embedding, int64_t n, float eps, bool pre_norm) {
  constexpr int W = Vec::kWidth;
  const T* before = pre_norm ? embedding : nullptr;
  const T* after = pre_norm ? nullptr : embedding;
  Vec sum = Vec::zero();
  for (int64_t i = 0; i < n; i += W) {
    const int k = n - i < W ? static_cast<int>(n - i) : W;
    Vec x = Vec::load(u + i, k);
    if (before) x = x + Vec::load(before + i, k);
    sum = fmadd(x, x, sum);
  }
  const Vec scale = Vec::set1(1.0f / __builtin_sqrtf(reduce_add(sum) / static_cast<float>(n) + eps));
  for (int64_t i = 0; i < n; i += W) {
    const int k = n - i < W ? static_cast<int>(n - i) : W;
    Vec x = Vec::load(u + i, k);
    if (before) x = x + Vec::load(before + i, k);
    x = x * scale * Vec::load(weight + i, k);
    if (after) x = x + Vec::load(after + i, k);
    x.store(u + i, k);
  }
}

// float64: the plain path, for gradcheck.
void norm_row(double* u, const double* weight, const double* embedding, int64_t n, double eps,
              bool pre_norm) {
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (embedding && pre_norm) u[i] += embedding[i];
    sum += u[i] * u[i];
  }
  const double scale = 1.0 / __builtin_sqrt(sum / static_cast<double>(n) + eps);
  for (int64_t i = 0; i < n; ++i) {
    u[i] = u[i] * scale * weight[i] + (embedding && !pre_norm ? embedding[i] : 0.0);
  }
}

// K of one head: RMS norm, weight, then RoPE (neox: i pairs with i + rot/2) on the first `rot` elements.
template <class T>
void k_head(const T* x, T* out, const T* weight, const float* cos_sin, int64_t dim, int64_t rot, float eps) {
  constexpr int W = Vec::kWidth;
  Vec sum = Vec::zero();
  for (int64_t i = 0; i < dim; i += W) {
    const int k = dim - i < W ? static_cast<int>(dim - i) : W;
    const Vec v = Vec::load(x + i, k);
    sum = fmadd(v, v, sum);
  }
  const Vec scale = Vec::set1(1.0f / __builtin_sqrtf(reduce_add(sum) / static_cast<float>(dim) + eps));
  const int64_t half = rot / 2;
  for (int64_t i = 0; i < half; i += W) {
    const int k = half - i < W ? static_cast<int>(half - i) : W;
    const Vec a = Vec::load(x + i, k) * scale * Vec::load(weight + i, k);
    const Vec b = Vec::load(x + half + i, k) * scale * Vec::load(weight + half + i, k);
    const Vec c = Vec::load(cos_sin + i, k), s = Vec::load(cos_sin + half + i, k);
    (a * c - b * s).store(out + i, k);
    (b * c + a * s).store(out + half + i, k);
  }
  for (int64_t i = rot; i < dim; i += W) {
    const int k = dim - i < W ? static_cast<int>(dim - i) : W;
    (Vec::load(x + i, k) * scale * Vec::load(weight + i, k)).store(out + i, k);
  }
}

void k_head(const double* x, double* out, const double* weight, const float* cos_sin, int64_t dim,
            int64_t rot, double eps) {
  double sum = 0;
  for (int64_t i = 0; i < dim; ++i) sum += x[i] * x[i];
  const double scale = 1.0 / __builtin_sqrt(sum / static_cast<double>(dim) + eps);
  const int64_t half = rot / 2;
  for (int64_t i = 0; i < half; ++i) {
    const double a = x[i] * scale * weight[i], b = x[half + i] * scale * weight[half + i];
    const double c = cos_sin[i], s = cos_sin[half + i];
    out[i] = a * c - b * s;
    out[half + i] = b * c + a * s;
  }
  for (int64_t i = rot; i < dim; ++i) out[i] = x[i] * scale * weight[i];
}

template <class T, class F>
void norm_rows(const NormParams& p, int64_t begin, int64_t end) {
  for (int64_t t = begin; t < end; ++t) {
    norm_row(static_cast<T*>(p.u) + t * p.hidden, static_cast<const T*>(p.weight),
             p.carried[t] ? static_cast<const T*>(p.embedding) : nullptr, p.hidden, static_cast<F>(p.eps),
             p.pre_norm);
  }
}

template <class T, class F>
void route_rows(const KvParams& p, int64_t begin, int64_t end) {
  for (int64_t item = begin; item < end; ++item) {
    const int64_t t = item / p.layers, layer = item % p.layers;
    const RowRoute& route = p.routes[t];
    if (route.target == Target::kNowhere) continue;
    const KvDestination& to = p.dest[route.target == Target::kCarried ? 1 : 0];
    const T* k = static_cast<const T*>(p.kv) + item * 2 * p.heads * p.dim;
    const T* v = k + p.heads * p.dim;
    T* k_out = static_cast<T*>(to.k) + route.k_offset + layer * to.k_layer;
    T* v_out = static_cast<T*>(to.v) + route.v_offset + layer * to.v_layer;
    const size_t bytes = static_cast<size_t>(p.dim) * sizeof(T);
    for (int64_t h = 0; h < p.heads; ++h) {
      if (route.target == Target::kZero) {
        memset(k_out + h * to.k_head, 0, bytes);
        memset(v_out + h * to.v_head, 0, bytes);
        continue;
      }
      k_head(k + h * p.dim, k_out + h * to.k_head, static_cast<const T*>(p.k_weight) + layer * p.dim,
             p.cos_sin + route.position * p.rot, p.dim, p.rot, static_cast<F>(p.eps));
      memcpy(v_out + h * to.v_head, v + h * p.dim, bytes);
    }
  }
}

}  // namespace

void carry_norm(const NormParams& p, int64_t begin, int64_t end) {
  switch (p.dtype) {
    case DType::kFloat32:
      return norm_rows<float, float>(p, begin, end);
    case DType::kBFloat16:
      return norm_rows<bf16, float>(p, begin, end);
    case DType::kFloat64:
      return norm_rows<double, double>(p, begin, end);
    case DType::kFloat16:  // of GPUs only; refused by the checks
      return;
  }
}

void route_kv(const KvParams& p, int64_t begin, int64_t end) {
  switch (p.dtype) {
    case DType::kFloat32:
      return route_rows<float, float>(p, begin, end);
    case DType::kBFloat16:
      return route_rows<bf16, float>(p, begin, end);
    case DType::kFloat64:
      return route_rows<double, double>(p, begin, end);
    case DType::kFloat16:
      return;
  }
}

}  // namespace CARRYOVER_LEVEL
}  // namespace carryover
