#include <atomic>
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "cpu/dispatch.h"

namespace carryover {
namespace {

const char* const kNames[] = {"default", "avx2", "avx512", "avx512_bf16"};

Level detect() {
#ifdef CARRYOVER_X86
  __builtin_cpu_init();
  const bool avx2 =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (avx512 && __builtin_cpu_supports("avx512bf16")) return Level::kAvx512Bf16;
  if (avx512) return Level::kAvx512;
  if (avx2) return Level::kAvx2;
#endif
  return Level::kPlain;
}

Level checked(int64_t value) {
  const int64_t best = static_cast<int64_t>(detect());
  if (value < 0 || value > best) {
    throw std::runtime_error(
        "CARRYOVER_CPU_CAPABILITY: this machine does not have " +
        (value >= 0 && value < 4 ? std::string(kNames[value]) : "level " + std::to_string(value)) +
        "; the best it has is " + kNames[best]);
  }
  return static_cast<Level>(value);
}

Level from_environment() {
  const char* text = std::getenv("CARRYOVER_CPU_CAPABILITY");
  if (text == nullptr || *text == '\0') return detect();
  for (int64_t i = 0; i < 4; ++i) {
    if (std::string(text) == kNames[i]) return checked(i);
  }
  throw std::runtime_error(std::string("CARRYOVER_CPU_CAPABILITY=") + text +
                           " is not one of default, avx2, avx512, avx512_bf16");
}

std::atomic<int>& current() {
  static std::atomic<int> value{static_cast<int>(from_environment())};
  return value;
}

}  // namespace

Level level() {
  return static_cast<Level>(current().load(std::memory_order_relaxed));
}
int64_t cpu_level() {
  return static_cast<int64_t>(level());
}
int64_t max_cpu_level() {
  return static_cast<int64_t>(detect());
}
void set_cpu_level(int64_t value) {
  current().store(static_cast<int>(checked(value)));
}

}  // namespace carryover
