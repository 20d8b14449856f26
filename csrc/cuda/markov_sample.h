// What the host hands to the kernels of markov_sample, and their plan. Plain C++: no CUDA code, no torch
// header.
//
// Each step of the block is two launches, three when all probabilities are asked for: logits with their bias,
// a tile of columns at a time for all requests (largest logit and sum of exponentials of every 32 columns);
// one block a request that takes the next token; the scaling of q. No logits are written without with_probs:
// the draw computes the 32 columns that it falls into again, by the same instructions and so to the same
// bits.
//
// Bytes of a step: 2 * Vd * r (markov_w2, once for 32 requests) + 2 * B * Vd (base_logits) + 8 * B * Vd / 32
// (partial results, out and in) [+ 12 * B * Vd for q: out, in, out]. Operations: 2 * B * Vd * r.
#pragma once

#include <cuda_runtime_api.h>
#include <stdint.h>

#include "params.h"

namespace carryover {
namespace cuda {

constexpr int kMarkovThreads = 128;
constexpr int kMarkovColumns = 128;  // of a tile, 32 for each warp
constexpr int kMarkovSegment = 32;   // columns whose partial results are kept together
constexpr int kMarkovDepth = 64;     // of a stage of the pipeline
constexpr int kMarkovStages = 3;
constexpr int kMarkovPad = 8;  // elements behind each row in shared memory: ldmatrix without bank conflicts
constexpr int64_t kMarkovRankMax = 2048;

struct MarkovPartial {
  float top;  // largest logit of the segment; -inf: none
  union {
    int32_t at;  // greedy: its column
    float sum;   // sampled: of e^((x - top) / T)
  };
};

// What the draw leaves for the scaling.
struct MarkovScale {
  float top, inverse_total;  // inverse_total 0: no column is left, the first one is taken for certain
};

struct MarkovParams {
  DType dtype;                                // of logits, w1 and w2: bfloat16 or float16
  int64_t batch, steps, vocab, tokens, rank;  // tokens: rows of w1
  const void* logits;                         // [B, K, Vd]
  int64_t logits_batch, logits_step;
  const int64_t* prev;      // [B], -1: padding
  const void* w1;           // [V, r]
  const void* w2;           // [Vd, r]
  const int64_t* d2t;       // [Vd] or null
  const float* uniforms;    // [B, K] or null: greedy, or seeds
  const int64_t* seeds;     // [B] or null; u_k is number offsets + k of the seed's stream (philox.h)
  const int64_t* offsets;   // [B] or null: 0
  float inverse;            // 1 / T; 0: greedy
  int64_t* out_tokens;      // [B, K]
  float* token_probs;       // [B, K]
  float* probs;             // [B, K, Vd] or null
  MarkovPartial* partials;  // workspace [B, segments]
  MarkovScale* scales;      // workspace [B]
  int64_t step;             // set by the launcher
};

constexpr int64_t markov_segments(int64_t vocab) {
  return (vocab + kMarkovSegment - 1) / kMarkovSegment;
}

// Bytes: `partials`, then `scales`.
constexpr int64_t markov_workspace(int64_t batch, int64_t vocab) {
  return batch * (markov_segments(vocab) * int64_t(sizeof(MarkovPartial)) + int64_t(sizeof(MarkovScale)));
}

// Requests of a block, 8 for each of its tiles: more tiles read markov_w2 less often and take more shared
// memory.
constexpr int markov_request_tiles(int64_t batch, int64_t rank) {
  return batch <= 8 || rank > 1024 ? 1 : batch <= 16 || rank > 512 ? 2 : 4;
}

constexpr int64_t markov_smem(int request_tiles, int64_t rank) {
  const int64_t depth = (rank + 15) / 16 * 16 + kMarkovPad;
  return 2 *
         (int64_t(kMarkovStages) * kMarkovColumns * (kMarkovDepth + kMarkovPad) + request_tiles * 8 * depth);
}

cudaError_t markov_sample(const MarkovParams& p, int multiprocessors, cudaStream_t stream);

}  // namespace cuda
}  // namespace carryover
