// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011): random bits are a
// function of a key and a counter, with no state to keep. The CPU and the CUDA kernels share this file, so
// that they draw the same numbers bit by bit. Twin: carryover_ext.reference.philox_uniforms.
#pragma once

#include <stdint.h>

#ifdef __CUDACC__
#define CARRYOVER_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define CARRYOVER_HOST_DEVICE inline
#endif

namespace carryover {

struct PhiloxBlock {
  uint32_t word[4];
};

CARRYOVER_HOST_DEVICE PhiloxBlock philox4x32(PhiloxBlock counter, uint32_t key0, uint32_t key1) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t(0xD2511F53u) * counter.word[0];
    const uint64_t b = uint64_t(0xCD9E8D57u) * counter.word[2];
    counter = {{static_cast<uint32_t>(b >> 32) ^ counter.word[1] ^ key0, static_cast<uint32_t>(b),
                static_cast<uint32_t>(a >> 32) ^ counter.word[3] ^ key1, static_cast<uint32_t>(a)}};
    key0 += 0x9E3779B9u, key1 += 0xBB67AE85u;
  }
  return counter;
}

// Number `at` of a seed's stream, in [0, 1): the upper 24 bits of the first word, all that a float can hold.
CARRYOVER_HOST_DEVICE float philox_uniform(uint64_t seed, uint64_t at) {
  const PhiloxBlock counter = {{static_cast<uint32_t>(at), static_cast<uint32_t>(at >> 32), 0, 0}};
  const PhiloxBlock block =
      philox4x32(counter, static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32));
  return static_cast<float>(block.word[0] >> 8) * 0x1p-24f;
}

}  // namespace carryover
