// The state of a running block. Included by simt_rt.cpp alone.
#pragma once

#include <string>
#include <vector>

#include "fiber.h"
#include "simt_rt.h"

namespace simt {
namespace {

constexpr size_t kStack = 256 << 10;
constexpr int kMaxMeetings = 32;

enum class State { kReady, kBarrier, kMeeting, kDone };

struct Copy {
  void* shared;
  const void* global;
  int bytes;
};

struct Group {
  std::vector<Copy> copies;
};

struct Fiber {
  Context context;
  Machine machine;
  char* stack = nullptr;
  State state = State::kDone;
  int index = 0;
  void* fake_stack = nullptr;  // ASan
  void* tsan = nullptr;        // TSan
  std::vector<Copy> open;      // copies of the group that is not committed yet
  std::vector<Group> groups;   // oldest first
};

// No code below moves arrays that several fibers touch: memmove is intercepted by ThreadSanitizer, which
// would take the simulator's own bookkeeping for the kernel's.
struct Meeting {
  uint32_t mask = 0, arrived = 0;  // mask 0: free
  Collective op{};
  int phase = 0;  // of the warp when the first lane came
  void* args[32];
};

struct Warp {
  Meeting meetings[kMaxMeetings];
  uint32_t priority = 0;
  int phase = 0;
};

// Fibers that can run, oldest first unless one was taken out of turn.
struct Ready {
  int index[1024];
  uint32_t head, count;
  int& at(uint32_t i) { return index[(head + i) % 1024]; }
  void push(int fiber) { at(count++) = fiber; }
  int take(uint32_t i) {
    const int fiber = at(i);
    at(i) = at(0);
    ++head, --count;
    return fiber;
  }
};

struct Block {
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  Ready ready;
  int alive = 0, waiting = 0, phase = 0;
  const char* file = nullptr;  // the barrier that the first thread waits at
  int line = 0;
  char* order = nullptr;  // addresses stand for what the barrier [0, 1] and each warp's __syncwarp order
  unsigned char* smem = nullptr;
  Body body = nullptr;
  const void* capture = nullptr;
  Machine main;
  void* main_fake = nullptr;
  void* main_tsan = nullptr;
  const void* main_bottom = nullptr;
  size_t main_size = 0;
  std::string error;
  int culprit = 0;
};

}  // namespace
}  // namespace simt
