#include "bind.h"
#include "faults.h"

PYBIND11_MODULE(SIMT_MODULE, m) {
  bind_options(m);
  m.def("faults", [](Array a, Array b, Array c, Array partial, Array top, Array finished, int fault) {
    faults::Params p = {};
    p.a = data<__nv_bfloat16>(a, "a");
    p.b = data<__nv_bfloat16>(b, "b");
    p.c = data<float>(c, "c");
    p.partial = data<float>(partial, "partial");
    p.top = data<float>(top, "top");
    p.finished = data<unsigned>(finished, "finished");
    p.m = static_cast<int>(a.shape(0)), p.n = static_cast<int>(b.shape(0)),
    p.k = static_cast<int>(a.shape(1));
    check(faults::run(p, fault));
  });
}
