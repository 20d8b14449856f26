"""Fixtures shared by the tests: seeds from the test's id, every instruction set that the machine has."""

from __future__ import annotations

import os
import sys
import zlib
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
sys.path.insert(0, str(Path(__file__).parent))  # compare.py, cases.py

import pytest
import torch

from carryover_ext import ops


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--sample", type=int, help="at most this many tests of each file, evenly spread")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    limit = config.getoption("--sample")
    if limit is None:
        return
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    kept = {item for tests in files.values() for item in tests[:: max(1, -(-len(tests) // limit))]}
    items[:] = [item for item in items if item in kept]


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A number that depends on the test's id alone, so that a failing case can be run by itself."""
    return zlib.crc32(request.node.name.encode())


@pytest.fixture(autouse=True)
def _seeded(seed: int) -> None:
    torch.manual_seed(seed)


@pytest.fixture(params=ops.available_capabilities())
def level(request: pytest.FixtureRequest):
    """Runs the test once at each instruction set level that this machine has."""
    before = ops.cpu_capability()
    ops.set_cpu_capability(request.param)
    yield request.param
    ops.set_cpu_capability(before)
