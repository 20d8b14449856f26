#include "bind.h"
#include "cuda/gather_rejected.h"

PYBIND11_MODULE(SIMT_MODULE, m) {
  bind_options(m);
  m.def("gather_rejected", [](Array hidden, Array row_start, Array num_accepted, int64_t max_rejected,
                              Array rows, Array index, Array lens) {
    carryover::cuda::GatherParams p = {};
    p.hidden = raw(hidden);
    p.row_start = data<int32_t>(row_start, "row_start");
    p.num_accepted = data<int32_t>(num_accepted, "num_accepted");
    p.rows = raw(rows);
    p.index = data<int32_t>(index, "index");
    p.lens = data<int32_t>(lens, "lens");
    p.total = hidden.shape(0);
    p.requests = num_accepted.shape(0);
    p.max_rejected = max_rejected;
    p.width_bytes = hidden.shape(1) * hidden.itemsize();
    p.stride_bytes = hidden.strides(0);
    check(carryover::cuda::gather_rejected(p, nullptr));
  });
}
