// Kernels of accept (to come).
#include "cpu/vec.h"
#include "params.h"
