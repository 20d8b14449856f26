#include "checks.h"
#include "ops.h"

namespace carryover {

Tensor segment_attention(const Tensor&, const Tensor&, const Tensor&, const Tensor&, std::optional<Tensor>,
                         std::optional<Tensor>, std::optional<Tensor>, const Tensor&, const Tensor&,
                         std::optional<Tensor>, double, bool, int64_t, double, std::optional<Tensor>,
                         std::optional<Tensor>) {
  Checker("segment_attention").fail("not built yet");
}

}  // namespace carryover
