// How the launches of a process are simulated.
#pragma once

#include "simt.h"

namespace simt {

struct Options {
  enum Schedule { kFifo, kRandom, kPriority };
  Schedule schedule = kFifo;
  uint64_t seed = 0;
  bool eager = false;  // cp.async copies at once (true) or when it is waited for
};

void configure(const Options& options);

}  // namespace simt
