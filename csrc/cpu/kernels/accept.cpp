// Greedy matching and exact rejection sampling, one request after the other; a request stops at its first
// rejection, so rows behind it are never read. Probabilities are float32, sums that decide a draw are double.
#include "cpu/accept.h"

#include "cpu/vec.h"

namespace carryover {
namespace CARRYOVER_LEVEL {
namespace {

constexpr float kInfinity = __builtin_inff();

// Index of the largest logit, the lowest one on ties. NaN never wins.
template <class T>
int64_t argmax(const T* x, int64_t n) {
  float best = -kInfinity;
  int64_t block = 0;
  for (int64_t b = 0; b < n; b += kAcceptBlock) {
    const int64_t end = b + kAcceptBlock < n ? b + kAcceptBlock : n;
    Vec top = Vec::set1(-kInfinity);
    int64_t i = b;
    for (; i + Vec::kWidth <= end; i += Vec::kWidth) top = max(Vec::load(x + i), top);
    float here = reduce_max(top);
    for (; i < end; ++i) here = to_float(x[i]) > here ? to_float(x[i]) : here;
    if (here > best) best = here, block = b;
  }
  for (int64_t i = block; i < n; ++i)
    if (to_float(x[i]) == best) return i;
  return 0;
}

struct Weights {
  float* w;        // [V]
  double* blocks;  // sums of kAcceptBlock weights
  double total;
};

// w = e^((x - max x) / T), its block sums and total.
template <class T>
void exponentials(const T* x, int64_t n, float inverse, Weights& out) {
  Vec top = Vec::set1(-kInfinity);
  int64_t i = 0;
  for (; i + Vec::kWidth <= n; i += Vec::kWidth) top = max(Vec::load(x + i), top);
  float peak = reduce_max(top);
  for (; i < n; ++i) peak = to_float(x[i]) > peak ? to_float(x[i]) : peak;
  const Vec shift = Vec::set1(peak), factor = Vec::set1(inverse);
  out.total = 0;
  int64_t block = 0;
  for (int64_t b = 0; b < n; b += kAcceptBlock, ++block) {
    const int64_t end = b + kAcceptBlock < n ? b + kAcceptBlock : n;
    Vec sum = Vec::zero();
    for (i = b; i + Vec::kWidth <= end; i += Vec::kWidth) {
      const Vec e = exp((Vec::load(x + i) - shift) * factor);
      e.store(out.w + i);
      sum = sum + e;
    }
    double here = reduce_add(sum);
    if (i < end) {
      const int rest = static_cast<int>(end - i);
      exp((Vec::load(x + i, rest) - shift) * factor).store(out.w + i, rest);
      for (; i < end; ++i) here += out.w[i];
    }
    out.blocks[block] = here;
    out.total += here;
  }
}

// w = max(w / total - q, 0) and its sums. Returns false, and leaves w alone, when nothing is left.
bool residual(Weights& out, const float* q, int64_t n) {
  const float inverse = static_cast<float>(1.0 / out.total);
  const Vec factor = Vec::set1(inverse), zero = Vec::zero();
  auto weight = [&](int64_t i) {
    const float r = out.w[i] * inverse - q[i];
    return r > 0 ? r : 0.0f;
  };
  // Sums first: w is overwritten only when the residual is used.
  double total = 0;
  for (int pass = 0; pass < 2; ++pass) {
    int64_t block = 0;
    for (int64_t b = 0; b < n; b += kAcceptBlock, ++block) {
      const int64_t end = b + kAcceptBlock < n ? b + kAcceptBlock : n;
      Vec sum = zero;
      int64_t i = b;
      for (; i + Vec::kWidth <= end; i += Vec::kWidth) {
        const Vec r = max(Vec::load(out.w + i) * factor - Vec::load(q + i), zero);
        if (pass == 1) r.store(out.w + i);
        sum = sum + r;
      }
      double here = reduce_add(sum);
      for (; i < end; ++i) {
        const float r = weight(i);
        if (pass == 1) out.w[i] = r;
        here += r;
      }
      if (pass == 0)
        total += here;
      else
        out.blocks[block] = here;
    }
    if (total <= 0) return false;
  }
  out.total = total;
  return true;
}

// The first index whose cumulated weight is above u * total; never one of weight 0 unless all are.
int64_t draw(const Weights& p, int64_t n, float u) {
  const double target = static_cast<double>(u) * p.total;
  double cumulated = 0;
  int64_t last = 0, block = 0;
  for (int64_t b = 0; b < n; b += kAcceptBlock, ++block) {
    const int64_t end = b + kAcceptBlock < n ? b + kAcceptBlock : n;
    if (cumulated + p.blocks[block] <= target && end < n) {
      cumulated += p.blocks[block];
      continue;
    }
    double inside = cumulated;
    bool any = false;
    for (int64_t i = b; i < end; ++i) {
      if (!(p.w[i] > 0)) continue;
      last = i, any = true;
      inside += p.w[i];
      if (inside > target) return i;
    }
    // The block's sum and this one differ by rounding: the last entry of the block is the one meant.
    if (any && end < n) return last;
    cumulated += p.blocks[block];
  }
  if (last == 0)  // u at its very end, and the last block weighs nothing
    for (int64_t i = n - 1; i > 0; --i)
      if (p.w[i] > 0) return i;
  return last;
}

template <class T>
void sampled(const AcceptParams& p, int64_t r, Weights& s) {
  const float inverse = static_cast<float>(1.0 / p.temperature);
  const float* u = p.uniforms + r * (p.drafts + 1);
  int64_t k = 0;
  for (;; ++k) {
    exponentials(static_cast<const T*>(p.logits) + r * p.logits_batch + k * p.logits_row, p.vocab, inverse,
                 s);
    const int64_t x = k < p.drafts ? p.draft_tokens[r * p.drafts + k] : -1;
    if (x < 0) break;  // behind the last draft: the full distribution
    const float* q = p.draft_probs ? p.draft_probs + r * p.probs_batch + k * p.probs_row : nullptr;
    const float px = s.w[x] * static_cast<float>(1.0 / s.total);
    if (u[k] * (q ? q[x] : 1.0f) < px) continue;
    if (q) {
      residual(s, q, p.vocab);
    } else if (s.total > s.w[x]) {  // one-hot q: p without x
      const int64_t block = x / kAcceptBlock;
      s.w[x] = 0;
      s.blocks[block] = 0;
      const int64_t end = (block + 1) * kAcceptBlock < p.vocab ? (block + 1) * kAcceptBlock : p.vocab;
      for (int64_t i = block * kAcceptBlock; i < end; ++i) s.blocks[block] += s.w[i];
      s.total = 0;
      for (int64_t b = 0; b * kAcceptBlock < p.vocab; ++b) s.total += s.blocks[b];
    }
    break;
  }
  p.num_accepted[r] = static_cast<int32_t>(k);
  p.next_token[r] = draw(s, p.vocab, u[p.drafts]);
}

template <class T>
void greedy(const AcceptParams& p, int64_t r) {
  int64_t k = 0;
  for (;; ++k) {
    p.next_token[r] =
        argmax(static_cast<const T*>(p.logits) + r * p.logits_batch + k * p.logits_row, p.vocab);
    if (k == p.drafts || p.draft_tokens[r * p.drafts + k] != p.next_token[r]) break;
  }
  p.num_accepted[r] = static_cast<int32_t>(k);
}

template <class T>
void request(const AcceptParams& p, int64_t r, Weights& s) {
  if (p.temperature > 0)
    sampled<T>(p, r, s);
  else
    greedy<T>(p, r);
}

}  // namespace

// Worker threads take requests from a shared counter: they stop at different rows.
void accept_requests(const AcceptParams& p, int64_t begin, int64_t end) {
  if (begin >= end) return;
  Weights s;
  s.w = p.scratch + begin * p.scratch_size;
  s.blocks = reinterpret_cast<double*>(s.w + (p.vocab + 15) / 16 * 16);
  s.total = 0;
  for (;;) {
    const int64_t r = __atomic_fetch_add(p.next, 1, __ATOMIC_RELAXED);
    if (r >= p.batch) return;
    if (p.dtype == DType::kBFloat16)
      request<bf16>(p, r, s);
    else
      request<float>(p, r, s);
  }
}

}  // namespace CARRYOVER_LEVEL
}  // namespace carryover
