// What the host hands to the kernels of accept, and their workspace. Plain C++: no CUDA code, no torch
// header.
//
// Greedy is two launches: each chunk of each row (largest logit and where), then one block a request that
// compares and takes the next token. Sampling is four: chunks (largest logit, sum of exponentials), one block
// a request that judges its drafts, chunks of the residual of the row that decides, one block a request that
// draws.
//
// Bytes: every row is read once, B * (K + 1) * V * e; sampling reads the deciding row again and its q,
// B * V * (e + 4). What is behind the first rejection is read, too: the host does not wait to know where that
// is.
#pragma once

#include <cuda_runtime_api.h>
#include <stdint.h>

#include "params.h"

namespace carryover {
namespace cuda {

constexpr int64_t kAcceptChunk = 8192;  // entries of the vocabulary that a block reduces
constexpr int kAcceptThreads = 256;

// Of one chunk of a row.
struct AcceptChunk {
  float top;   // largest logit, -inf: none
  int32_t at;  // its index, the lowest of equals; INT32_MAX: none
  double sum;  // of e^((x - top) / T)
};

struct AcceptParams {
  DType dtype;  // of the logits: float32, bfloat16 or float16
  int64_t batch, drafts, vocab;
  const int64_t* draft_tokens;  // [B, K]
  const void* logits;           // [B, K + 1, V]
  int64_t logits_batch, logits_row;
  const float* draft_probs;  // [B, K, V] or null: one-hot
  int64_t probs_batch, probs_row;
  const float* uniforms;  // [B, K + 1] or null (greedy)
  float inverse;          // 1 / T; 0: greedy
  int32_t* num_accepted;  // [B]
  int64_t* next_token;    // [B]
  AcceptChunk* chunks;    // workspace [B, K + 1, chunks of a row]
  double* residual;       // workspace [B, chunks of a row], sampling only
};

constexpr int64_t accept_chunks(int64_t vocab) {
  return (vocab + kAcceptChunk - 1) / kAcceptChunk;
}

// Bytes: `chunks`, then `residual`.
inline int64_t accept_workspace(int64_t batch, int64_t drafts, int64_t vocab) {
  return batch * accept_chunks(vocab) *
         ((drafts + 1) * int64_t(sizeof(AcceptChunk)) + int64_t(sizeof(double)));
}

cudaError_t accept(const AcceptParams& p, cudaStream_t stream);

}  // namespace cuda
}  // namespace carryover
