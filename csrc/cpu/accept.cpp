#include "checks.h"
#include "ops.h"

namespace carryover {

std::tuple<Tensor, Tensor> accept(const Tensor&, const Tensor&, std::optional<Tensor>, std::optional<Tensor>,
                                  double) {
  Checker("accept").fail("not built yet");
}

}  // namespace carryover
