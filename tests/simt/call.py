"""Calls of simulated ops: plain builds in this process, sanitizer builds in a worker of their own."""

from __future__ import annotations

import atexit
import functools
import importlib.machinery
import importlib.util
import os
import pickle
import struct
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from .build import build, sanitizer_library


@dataclass(frozen=True)
class Schedule:
    """Which thread runs next (`fifo`, `random`, `priority`: one warp far ahead), and when cp.async copies:
    at once (`eager`) or as late as its wait allows."""

    order: str = "fifo"
    eager: bool = False
    seed: int = 0

    def __str__(self) -> str:
        return f"{self.order}-{'eager' if self.eager else 'late'}"


SCHEDULES = (
    Schedule("fifo", eager=False),
    Schedule("random", eager=True),
    Schedule("priority", eager=False),
    Schedule("priority", eager=True),
)


class KernelFault(RuntimeError):
    """The simulator or a sanitizer stopped the kernel."""


@functools.cache
def _module(op: str, defines: tuple[str, ...]) -> ModuleType:
    return load(op, build(op, "plain", defines))


def load(op: str, path: str | Path) -> ModuleType:
    # A name of its own for each variant: pybind11 hands out the module that it has under a name already.
    name = f"{Path(path).stem}.{op}"
    loader = importlib.machinery.ExtensionFileLoader(name, str(path))
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def _memory(t: Tensor) -> np.ndarray:
    """The memory from the tensor's first to its last element, as numpy, shared."""
    t = t.detach()
    span = 0 if t.numel() == 0 else 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    flat = torch.as_strided(t, (span,), (1,))
    return (flat.view(torch.int16) if t.dtype in (torch.bfloat16, torch.float16) else flat).numpy()


def _layout(t: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(t.shape), tuple(s * t.element_size() for s in t.stride())


def strided(memory: np.ndarray, layout: tuple[tuple[int, ...], tuple[int, ...]]) -> np.ndarray:
    return np.lib.stride_tricks.as_strided(memory, *layout)


def call(
    op: str,
    *args: Any,
    function: str | None = None,
    kind: str | None = None,
    schedule: Schedule = SCHEDULES[0],
    defines: tuple[str, ...] = (),
) -> Any:
    """Calls `function` (default: the op's name) of the op's module; tensors are handed over as they are,
    written in place. In a sanitizer build they are copied to exactly as much memory as they need, and back.

    Raises :class:`KernelFault` when the simulator or the sanitizer found something.
    """
    kind = kind or os.environ.get("CARRYOVER_SIMT_KIND", "plain")
    function = function or op
    if kind != "plain":
        return _Worker.of(op, kind, defines).call(function, args, schedule)
    module = _module(op, defines)
    module.configure(schedule.order, schedule.seed, schedule.eager)
    arrays = [strided(_memory(a), _layout(a)) if isinstance(a, Tensor) else a for a in args]
    try:
        return getattr(module, function)(*arrays)
    except RuntimeError as error:
        raise KernelFault(str(error)) from None


class _Worker:
    """A Python with a preloaded sanitizer. It dies of what that finds, and the next call starts anew."""

    _all: dict[tuple[Any, ...], _Worker] = {}  # noqa: RUF012

    @classmethod
    def of(cls, op: str, kind: str, defines: tuple[str, ...]) -> _Worker:
        key = (op, kind, defines)
        if key not in cls._all:
            cls._all[key] = cls(op, kind, defines)
        return cls._all[key]

    def __init__(self, op: str, kind: str, defines: tuple[str, ...]) -> None:
        self.op, self.kind = op, kind
        self.library = build(op, kind, defines)
        self.process: subprocess.Popen[bytes] | None = None
        atexit.register(self.stop)

    def start(self) -> None:
        options = "detect_leaks=0:halt_on_error=1:exitcode=66:abort_on_error=0:report_signal_unsafe=0"
        environment = {
            **os.environ,
            "LD_PRELOAD": sanitizer_library(self.kind),
            "PYTHONMALLOC": "malloc",  # numpy's memory comes from the sanitizer's malloc
            "ASAN_OPTIONS": options,
            "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
            "TSAN_OPTIONS": "halt_on_error=1:exitcode=66:report_signal_unsafe=0:history_size=1",
        }
        self.errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("worker.py")), self.op, str(self.library)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, env=environment,
        )  # fmt: skip

    def stop(self) -> None:
        if self.process is not None and self.process.stdin is not None:
            self.process.stdin.close()
            self.process.wait()
            self.process = None

    def call(self, function: str, args: tuple[Any, ...], schedule: Schedule) -> Any:
        if self.process is None:
            self.start()
        assert self.process is not None and self.process.stdin is not None
        packed = [("tensor", _memory(a), _layout(a)) if isinstance(a, Tensor) else ("value", a) for a in args]
        options = (schedule.order, schedule.seed, schedule.eager)
        try:
            send(self.process.stdin, (function, packed, options))
            error, value, arrays = receive(self.process.stdout)
        except (EOFError, BrokenPipeError):
            self.process.wait()
            self.errors.seek(0)
            report = self.errors.read().decode(errors="replace")
            self.process = None
            raise KernelFault(f"{self.kind}: {report[:6000]}") from None
        if error is not None:
            raise KernelFault(error)
        for a, memory in zip((a for a in args if isinstance(a, Tensor)), arrays, strict=True):
            _memory(a)[...] = memory
        return value


def send(stream: Any, value: Any) -> None:
    data = pickle.dumps(value, protocol=5)
    stream.write(struct.pack("<Q", len(data)) + data)
    stream.flush()


def receive(stream: Any) -> Any:
    head = stream.read(8)
    if len(head) < 8:
        raise EOFError
    return pickle.loads(stream.read(struct.unpack("<Q", head)[0]))
