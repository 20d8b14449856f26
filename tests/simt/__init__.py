"""Runs CUDA kernels of csrc/cuda on the CPU: the same source, compiled by g++, every CUDA thread a fiber.

    from simt import SCHEDULES, call, unavailable

    pytestmark = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))
    call("gather_rejected", hidden, ..., rows, schedule=SCHEDULES[0])

An op is csrc/cuda/<op>.cu and its binding, tests/simt/bind_<op>.cpp.
"""

from .build import KINDS, unavailable
from .call import SCHEDULES, KernelFault, Schedule, call

__all__ = ["KINDS", "SCHEDULES", "KernelFault", "Schedule", "call", "unavailable"]
