"""The binary: one small abi3 library, linked against libtorch_cpu and libc10 only, no build paths."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import carryover_ext
from carryover_ext import ops

LIBRARY = Path(carryover_ext.__file__).with_name("_C.abi3.so")
ROOT = Path(__file__).resolve().parent.parent


def _elf_strings(tag: str) -> list[str]:
    try:
        out = subprocess.run(
            ["readelf", "-d", str(LIBRARY)], capture_output=True, text=True, check=True
        ).stdout
    except FileNotFoundError:
        pytest.skip("readelf is not installed")
    return re.findall(rf"\({tag}\).*\[(.*?)\]", out)


def test_one_extension():
    assert [p.name for p in LIBRARY.parent.rglob("*.so")] == ["_C.abi3.so"]


def test_links_no_python_and_no_cuda():
    needed = _elf_strings("NEEDED")
    assert {"libtorch_cpu.so", "libc10.so"} <= set(needed)
    allowed = ("libtorch_cpu.", "libc10.", "libstdc++.", "libm.", "libgcc_s.", "libc.", "ld-linux")
    assert all(name.startswith(allowed) for name in needed), needed


def test_size():
    """A wheel stays under 10 MB: the library and the package's own data; trained drafters are not packed."""
    config = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    patterns = re.findall(r'"(.*?)"', re.search(r"^carryover_ext = \[(.*?)\]", config, re.M).group(1))
    data = {p for pattern in patterns for p in (ROOT / "carryover_ext").glob(pattern) if p.is_file()}
    assert {p.name for p in data} >= {"demo_prompts.jsonl", "py.typed"}
    assert LIBRARY.stat().st_size + sum(p.stat().st_size for p in data) < 10e6


def test_exports_nothing_of_its_own():
    """All code is hidden: two extensions in one process cannot mix up their functions."""
    try:
        out = subprocess.run(
            ["nm", "-DC", "--defined-only", str(LIBRARY)], capture_output=True, text=True, check=True
        )
    except FileNotFoundError:
        pytest.skip("nm is not installed")
    assert "carryover::" not in out.stdout, out.stdout


def test_no_path_of_the_building_machine():
    data = LIBRARY.read_bytes()
    for path in (str(ROOT), str(Path(torch.__file__).parent)):
        assert path.encode() not in data, f"{path} is in the binary"


def test_uses_only_stable_symbols():
    """Everything that comes from PyTorch is a C function: no C++ symbol of at::, c10:: or torch::."""
    try:
        out = subprocess.run(
            ["nm", "-DC", "--undefined-only", str(LIBRARY)], capture_output=True, text=True, check=True
        )
    except FileNotFoundError:
        pytest.skip("nm is not installed")
    unstable = [line for line in out.stdout.splitlines() if re.search(r"\b(at|c10|torch)::", line)]
    assert not unstable, unstable


def _run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **environment}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)


@pytest.mark.parametrize("name", ops.available_capabilities())
def test_capability_from_the_environment(name):
    code = "from carryover_ext import ops; print(ops.cpu_capability())"
    result = _run(code, CARRYOVER_CPU_CAPABILITY=name)
    assert result.stdout.strip() == name, result.stderr


def test_unknown_capability_in_the_environment():
    result = _run("from carryover_ext import ops; ops.cpu_capability()", CARRYOVER_CPU_CAPABILITY="sse9")
    assert result.returncode != 0
    assert "CARRYOVER_CPU_CAPABILITY=sse9 is not one of default, avx2, avx512, avx512_bf16" in result.stderr


@pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="needs the source tree")
@pytest.mark.parametrize(
    "value,message", [("1", "no CUDA kernels yet"), ("yes", "CARRYOVER_CUDA='yes' is not one of auto, 0, 1")]
)
def test_cuda_request_is_refused_clearly(value, message, tmp_path):
    result = subprocess.run(
        [sys.executable, "setup.py", "build_ext", "--build-lib", str(tmp_path / "lib")],
        cwd=ROOT, env={**os.environ, "CARRYOVER_CUDA": value}, capture_output=True, text=True,
    )  # fmt: skip
    assert result.returncode != 0
    assert message in " ".join((result.stdout + result.stderr).split())
