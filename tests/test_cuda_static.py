"""What nvcc makes of the CUDA kernels: registers, spills, instructions. Needs nvcc, no GPU.

The budgets are in bench/kernel_table.py. One architecture by default, the others with the slow tests.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from cuda_build import kernels, sass, short_name, tool, unavailable

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "bench"))

import kernel_table
from kernel_table import BUDGETS, SOURCES

ARCHS = ("80", "90a", "100a", "120")
CASES = [
    pytest.param(source, arch, marks=[] if arch == "90a" else [pytest.mark.slow], id=f"{source}-sm_{arch}")
    for source in SOURCES
    for arch in ARCHS
]


@pytest.fixture(autouse=True)
def _has_tools(request: pytest.FixtureRequest) -> None:
    if "source" in request.fixturenames and (reason := unavailable(request.getfixturevalue("source"))):
        pytest.skip(reason)


@pytest.mark.parametrize("source,arch", CASES)
def test_registers_and_spills(source: str, arch: str) -> None:
    budgets = {b.kernel: b for b in BUDGETS if b.source == source}
    found = kernels(source, arch)
    assert {short_name(k.name) for k in found} == set(budgets)
    for kernel in found:
        assert kernel.spills == 0 and kernel.stack == 0, kernel
        assert kernel.registers <= budgets[short_name(kernel.name)].registers, kernel


@pytest.mark.parametrize("source,arch", CASES)
def test_instructions(source: str, arch: str) -> None:
    if tool("cuobjdump") is None or tool("nvdisasm") is None:
        pytest.skip("cuobjdump and nvdisasm are not installed")
    code = sass(source, arch)
    assert {short_name(name) for name in code} == {b.kernel for b in BUDGETS if b.source == source}
    for name, text in code.items():
        assert not re.search(r"\b(LDL|STL)\b", text), f"{name} uses local memory"
        budget = next(b for b in BUDGETS if b.kernel == short_name(name))
        for instruction in budget.sass if budget.only in name else ():
            assert instruction in text, f"{name} has no {instruction}"


SPILLS = """
__global__ void __launch_bounds__(1024) spill_kernel(float* x) {
  float y[200];
#pragma unroll
  for (int i = 0; i < 200; ++i) y[i] = x[i * 1024 + threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 200; ++i) x[i * 1024 + threadIdx.x] = y[199 - i] * y[i];
}
"""


def test_a_spill_is_found(tmp_path: Path) -> None:
    """The negative control: 200 values in the 64 registers of a thread."""
    if reason := unavailable("accept"):
        pytest.skip(reason)
    source = tmp_path / "spill.cu"
    source.write_text(SPILLS)
    (kernel,) = kernels(str(source), "90a")
    assert short_name(kernel.name) == "spill_kernel" and kernel.spills > 0


def test_every_source_is_in_the_table() -> None:
    folder = Path(__file__).resolve().parent.parent / "csrc" / "cuda"
    assert {path.stem for path in folder.glob("*.cu")} == set(SOURCES)
    text = "".join(path.read_text() for path in folder.glob("*.cuh"))
    assert set(re.findall(r"\b(\w+_kernel)\(const __grid_constant__", text)) == {b.kernel for b in BUDGETS}


def test_the_readme_shows_the_tables() -> None:
    readme = (Path(__file__).resolve().parent.parent / "bench" / "README.md").read_text(encoding="utf-8")
    assert kernel_table.text() in readme, "run bench/kernel_table.py --update"


def test_names_are_found_in_mangled_ones() -> None:
    name = "_ZN9carryover4cuda18markov_step_kernelI13__nv_bfloat16Li4EEEvNS0_12MarkovParamsE"
    assert short_name(name) == "markov_step_kernel"
