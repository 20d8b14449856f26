"""Import before vllm: the V2 model runner's Triton kernels run in Triton's interpreter, on the CPU and
slowly.

vLLM uses Triton when some backend of it says that it is active; one that only says so is enough, as the
interpreter needs no compiler.

Its masked loads and stores want masks of bool; ``mask & scalar`` gives it integers, in DFlash2's kernels and
in those that draw drafts. There masks are converted.
"""

import os
import types
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"
os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"

import numpy as np
import triton.backends
from triton.runtime import interpreter


class _Driver:
    @staticmethod
    def is_active() -> bool:
        return True


triton.backends.backends["cpu"] = types.SimpleNamespace(compiler=None, driver=_Driver)


def _as_bool(mask: Any) -> Any:
    if mask.data.dtype != np.bool_:
        mask = interpreter.TensorHandle(mask.data.astype(np.bool_), mask.dtype)
    return mask


class _Builder(interpreter.InterpreterBuilder):
    def create_masked_load(self, ptrs: Any, mask: Any, *rest: Any) -> Any:
        return super().create_masked_load(ptrs, _as_bool(mask), *rest)

    def create_masked_store(self, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        return super().create_masked_store(ptrs, value, _as_bool(mask), *rest)


interpreter.interpreter_builder.__class__ = _Builder
