// What the host hands to the kernel of accept.
#pragma once
#include <stdint.h>

#include "params.h"

namespace carryover {

constexpr int64_t kAcceptBlock = 1024;  // vocabulary entries whose weights are summed at a time

struct AcceptParams {
  DType dtype;  // of the logits
  int64_t batch, drafts, vocab;
  const int64_t* draft_tokens;  // [B, K]
  const void* logits;           // [B, K + 1, V]
  int64_t logits_batch, logits_row;
  const float* draft_probs;  // [B, K, V] or null: one-hot
  int64_t probs_batch, probs_row;
  const float* uniforms;  // [B, K + 1] or null (greedy)
  double temperature;
  int32_t* num_accepted;  // [B]
  int64_t* next_token;    // [B]
  int64_t* next;          // shared counter of requests taken
  float* scratch;        // one for each worker: weights [V], then block sums [V / kAcceptBlock + 1] as double
  int64_t scratch_size;  // floats
};

}  // namespace carryover
