"""What machine and which versions a result comes from."""

from __future__ import annotations

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from . import __version__

CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16")


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"


def _cpu() -> tuple[str, list[str]]:
    """Name and the vector extensions that matter here; on systems without /proc/cpuinfo only what Python
    knows."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or platform.machine(), []
    fields = [line.split(":", 1) for line in text.splitlines() if ":" in line]
    values = {key.strip().lower(): value.strip() for key, value in fields}
    flags = set((values.get("flags") or values.get("features") or "").split())
    return values.get("model name") or platform.machine(), [flag for flag in CPU_FLAGS if flag in flags]


def cached_targets() -> list[str]:
    """Targets that were fetched and converted before."""
    from .pretrained import cache_home

    return sorted(path.parent.name for path in (cache_home() / "targets").glob("*/config.json"))


def carried_checkpoints() -> list[str]:
    """Drafters that come with a checkout of the repository (a wheel has none), as ``target/kind/name``."""
    root = Path(__file__).with_name("checkpoints")
    return sorted(str(path.parent.relative_to(root)) for path in root.glob("*/*/*/config.json"))


def environment() -> dict[str, Any]:
    """Versions, CPU, threads and CUDA, with ``summary``: all of it that matters in one line."""
    import torch

    from .ops import cpu_capability
    from .packing import dtype_name

    name, flags = _cpu()
    cuda = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
    found: dict[str, Any] = {
        "carryover_ext": __version__,
        "torch": torch.__version__,
        "transformers": _installed("transformers"),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": name,
        "cpu_flags": flags,
        "kernels": cpu_capability(),
        "torch_cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "dtype auto": dtype_name("auto", "cpu"),
        "cores": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cuda": cuda,
    }
    found["summary"] = (
        f"carryover_ext {__version__}, torch {found['torch']}, transformers {found['transformers']}, {name}, "
        f"{found['kernels']} kernels, {found['threads']} thread{'s' * (found['threads'] != 1)}, "
        f"{cuda or 'no CUDA'}"
    )
    return found
