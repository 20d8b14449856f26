"""The binary: one small abi3 library, linked against libtorch_cpu and libc10 only, no build paths."""

from __future__ import annotations

import os
import re
import runpy
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


HAS_CUDA = torch._C._dispatch_has_kernel_for_dispatch_key("carryover_ext::accept", "CUDA")


def test_links_no_python_and_no_cuda():
    """CUDA's run time is inside, PyTorch's CUDA libraries are looked up when a GPU is used."""
    needed = _elf_strings("NEEDED")
    assert {"libtorch_cpu.so", "libc10.so"} <= set(needed)
    allowed = ("libtorch_cpu.", "libc10.", "libstdc++.", "libm.", "libgcc_s.", "libc.", "ld-linux")
    if HAS_CUDA:
        allowed += ("libdl.", "librt.", "libpthread.")
    assert all(name.startswith(allowed) for name in needed), needed


def test_size():
    """A wheel stays under 10 MB, 30 MB with CUDA kernels: the library and the package's own data; trained
    drafters are not packed."""
    config = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    patterns = re.findall(r'"(.*?)"', re.search(r"^carryover_ext = \[(.*?)\]", config, re.M).group(1))
    data = {p for pattern in patterns for p in (ROOT / "carryover_ext").glob(pattern) if p.is_file()}
    assert {p.name for p in data} >= {"demo_prompts.jsonl", "py.typed"}
    assert LIBRARY.stat().st_size + sum(p.stat().st_size for p in data) < (30e6 if HAS_CUDA else 10e6)


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


@pytest.mark.skipif(not HAS_CUDA, reason="built without CUDA kernels (CARRYOVER_CUDA=1)")
def test_every_op_has_a_cuda_kernel():
    names = (
        "gather_rejected",
        "project_kv",
        "commit_and_carry",
        "segment_attention",
        "accept",
        "markov_sample",
    )
    for name in names:
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"carryover_ext::{name}", "CUDA"), name


def _build(path: str | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **environment}
    env.pop("CUDA_HOME", None)
    if path is not None:
        env["PATH"] = path
    return subprocess.run(
        [sys.executable, "setup.py", "build_ext"], cwd=ROOT, env=env, capture_output=True, text=True
    )


IN_SOURCE_TREE = pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="needs the source tree")


@IN_SOURCE_TREE
def test_unknown_value_of_carryover_cuda():
    result = _build(CARRYOVER_CUDA="yes")
    assert result.returncode != 0
    assert "CARRYOVER_CUDA='yes' is not one of auto, 0, 1" in result.stdout + result.stderr


@IN_SOURCE_TREE
def test_cuda_without_a_compiler_is_refused_clearly(tmp_path):
    result = _build(path=str(tmp_path), CARRYOVER_CUDA="1")
    assert result.returncode != 0
    assert "CARRYOVER_CUDA=1: nvcc was not found; put it on PATH" in result.stdout + result.stderr


@IN_SOURCE_TREE
@pytest.mark.parametrize("tools,wanted", [((), 0), (("nvcc",), 0), (("nvcc", "nvidia-smi"), 1)])
def test_auto_wants_a_compiler_and_a_gpu(tools, wanted, tmp_path, monkeypatch):
    for tool in tools:
        (tmp_path / tool).write_text("#!/bin/sh\n")
        (tmp_path / tool).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CARRYOVER_CUDA", "auto")
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setattr("setuptools.setup", lambda **_: None)
    assert runpy.run_path(str(ROOT / "setup.py"))["_cuda_wanted"]() == wanted
