"""Import before vllm: the V2 model runner's Triton kernels run in Triton's interpreter, on the CPU and
slowly.

vLLM uses Triton when some backend of it says that it is active; one that only says so is enough, as the
interpreter needs no compiler.
"""

import os
import types

os.environ["TRITON_INTERPRET"] = "1"
os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"

import triton.backends


class _Driver:
    @staticmethod
    def is_active() -> bool:
        return True


triton.backends.backends["cpu"] = types.SimpleNamespace(compiler=None, driver=_Driver)
