"""The other end of simt.call in a sanitizer build: no PyTorch here, numpy only, so that it starts quickly.

Usage: worker.py OP MODULE; calls come on stdin, answers go to stdout.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import pickle
import struct
import sys

import numpy as np


def exact(memory: np.ndarray) -> np.ndarray:
    """A copy in an allocation of its own, as large as its content: what lies behind it is the sanitizer's."""
    copy = np.empty_like(memory)
    copy[...] = memory
    return copy


def main() -> None:
    op, path = sys.argv[1:]
    loader = importlib.machinery.ExtensionFileLoader(op, path)
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(op, loader))
    loader.exec_module(module)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    while head := sys.stdin.buffer.read(8):
        function, packed, options = pickle.loads(sys.stdin.buffer.read(struct.unpack("<Q", head)[0]))
        module.configure(*options)
        memory = [exact(item[1]) for item in packed if item[0] == "tensor"]
        left = iter(memory)
        args = [
            np.lib.stride_tricks.as_strided(next(left), *item[2]) if item[0] == "tensor" else item[1]
            for item in packed
        ]
        try:
            result = (None, getattr(module, function)(*args), memory)
        except RuntimeError as error:
            result = (str(error), None, [])
        data = pickle.dumps(result, protocol=5)
        answers.write(struct.pack("<Q", len(data)) + data)
        answers.flush()


main()
