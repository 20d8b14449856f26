// What the host hands to the kernels of markov_sample.
#pragma once
#include <stdint.h>

#include "params.h"

namespace carryover {

constexpr int64_t kMarkovBlock = 512;  // rows of markov_w2 in a work item

// One step of the block for all requests. `request` lists the B live ones; arrays marked [B] follow that
// list.
struct MarkovParams {
  DType dtype;  // of logits, w2 and latent
  int64_t batch, vocab, rank;
  const int64_t* request;    // [B] row of the logits
  const void* logits;        // row of request i at logits + request[i] * logits_batch: [Vd]
  int64_t logits_batch;      // stride
  const void* w2;            // [Vd, r]
  const void* latent;        // [B, r], rows of w1
  float inverse;             // 1 / temperature, 0: greedy
  float* weights;            // sampled: row of request i at weights + request[i] * weights_batch: [Vd]
  int64_t weights_batch;     // stride
  float* block_top;          // [blocks, B] largest logit of each block
  double* block_sum;         // sampled: [blocks, B] sums of e^((x - top) / T)
  int64_t* block_index;      // greedy: [blocks, B] where the largest logit is, -1: nowhere
  const float* block_scale;  // [blocks, B] what turns weights into probabilities
};

}  // namespace carryover
