"""Races on shared memory in the PTX of the CUDA kernels (tests/ptx_races.py). Needs nvcc, no GPU."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from cuda_build import compile_ptx, short_name, unavailable
from ptx_races import Kernel, Race, parse

# ---- what the tool does not know of the kernels -----------------------------------------------------


@dataclass(frozen=True)
class Allowed:
    """A pair of lines (parts of their text) that cannot race, and why."""

    kinds: str
    first: str
    second: str
    why: str

    def covers(self, race: Race) -> bool:
        return race.kind in self.kinds.split() and (
            (self.first in race.first and self.second in race.second)
            or (self.first in race.second and self.second in race.first)
        )


@dataclass(frozen=True)
class Memory:
    """The shared memory of a source's kernels: which arrays a line touches, by a part of its text, the first
    match counting; arrays of different names do not overlap. `redundant`: barriers and waits, by a part of
    their line, without which nothing would be wrong in shared memory."""

    arrays: tuple[tuple[str, str], ...] = ()
    stages: tuple[tuple[str, int], ...] = ()
    allowed: tuple[Allowed, ...] = ()
    redundant: tuple[str, ...] = ()

    def touched(self, line: str) -> set[str] | None:
        return next((set(names.split()) for part, names in self.arrays if part in line), None)

    def apart(self, race: Race) -> bool:
        first, second = self.touched(race.first), self.touched(race.second)
        return first is not None and second is not None and not first & second


OWN = "each thread has elements of its own"
RING = "another stage of the ring: a barrier lies between the use of a stage and that of the next but one"
MEMORY = {
    "gather_rejected": Memory(),
    "accept": Memory(redundant=("__syncthreads();",)),  # the second barrier of a kernel's last block_reduce
    "markov_sample": Memory(
        arrays=(
            ("segment_logits<T>(p, s, latent", "choice"),
            ("s.before", "choice"),
            ("s.segment", "choice"),
            ("s.x[", "x"),
            ("stage[", "stage"),
            ("latent", "latent"),
        ),
        stages=(("markov_step_kernel", 3),),
        allowed=(
            Allowed("async barrier", "cp_async_16(&stage", "stage[r][c] = valid",
                    "one of the two for the whole kernel: the rank and the address of w2 decide"),
            Allowed("barrier", "stage[r][c] = valid", "ldmatrix_x4(a[m], &stage", RING),
            Allowed("warp", "s.x[at] =", "s.x[lane]", "the first warp writes and reads"),
        ),
    ),
    "project_kv": Memory(
        arrays=(
            ("scale[r", "scale"),
            ("embed[r", "embed"),
            ("flag", "flag"),
            ("at_a(", "a"),
            ("read_a", "a"),
            ("quad[h]", "a"),
            ("at_b(", "b"),
            ("read_b", "b"),
            ("copy(acc, mine)", "a b"),
        ),
        stages=(("project_kernel", 4),),
        allowed=(
            Allowed("barrier async", "quad[h]", "quad[h]", OWN),
            Allowed("barrier", "read_a", "quad[h] = q", RING),
        ),
        redundant=(
            "cp_async_wait<0>",  # behind the loop only empty groups are left
            "all threads have written and fenced",  # it orders global memory
        ),
    ),
    "segment_attention": Memory(
        arrays=(
            ("q_tile", "q"),
            ("ldmatrix_x4(a,", "q"),
            ("cp_async_16(k", "k"),
            ("ldmatrix_x4(b, k", "k"),
            ("cp_async_16(v", "v"),
            ("ldmatrix_x4_trans(b, v", "v"),
            ("to[", "k v"),
            ("from[", "k v"),
        ),
        stages=(("segment_attention_kernel", 2),),
        allowed=(Allowed("barrier", "to[(", "to[(", OWN),),
    ),
}  # fmt: skip


def report(source: str, kernel: Kernel) -> set[Race]:
    """What remains when everything that is known has been taken away."""
    memory = MEMORY[source]
    kernel.stages = dict(memory.stages).get(short_name(kernel.name), 1)
    return {r for r in kernel.races() if not memory.apart(r) and not any(a.covers(r) for a in memory.allowed)}


@pytest.fixture(autouse=True)
def _has_nvcc(request: pytest.FixtureRequest) -> None:
    source = request.getfixturevalue("source") if "source" in request.fixturenames else "accept"
    if reason := unavailable(source):
        pytest.skip(reason)


def compiled(source: str) -> list[Kernel]:
    """In bfloat16: the kernels for float16 are the same templates. One tile of project_kv, because nvcc takes
    minutes for all."""
    return parse(compile_ptx(source, defines=("CARRYOVER_ONE_TILE",)), skip="6__half")


SOURCES = [pytest.param(s, marks=[pytest.mark.slow] if s == "segment_attention" else []) for s in MEMORY]


@pytest.mark.parametrize("source", SOURCES)
def test_kernels_have_no_race(source: str) -> None:
    kernels = compiled(source)
    for kernel in kernels:
        assert report(source, kernel) == set(), kernel.name
    memory, races = MEMORY[source], {r for k in kernels for r in k.races()}
    for allowed in memory.allowed:
        assert any(allowed.covers(r) for r in races), f"nothing is left that needs {allowed}"


@pytest.mark.parametrize("source", SOURCES)
def test_no_barrier_and_no_wait_can_be_left_out(source: str) -> None:
    """The tool sees what each of them is for: one by one they are taken away, or made to wait for less."""
    memory = MEMORY[source]
    tried, quiet = 0, set()
    for kernel in compiled(source):
        for i, x in enumerate(kernel.code):
            if x.kind not in ("barrier", "wait"):
                continue
            weaker = [f"cp.async.wait_group {x.group + 1}"] if x.kind == "wait" else []
            for text in ("mov.u32 %r0, %r0", *weaker):
                code = [*kernel.code]
                code[i] = replace(x, text=text)
                tried += 1
                if not report(source, Kernel(kernel.name, code, kernel.labels)):
                    quiet.add(x.where)
    assert tried > 0 or source == "gather_rejected"  # which has no shared memory
    assert {part for part in memory.redundant for line in quiet if part in line} == set(memory.redundant)
    assert [line for line in quiet if not any(part in line for part in memory.redundant)] == []


# ---- planted faults ---------------------------------------------------------------------------------

PLANTED = """
#define COPY(to, from) asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: \
    "r"(static_cast<unsigned>(__cvta_generic_to_shared(to))), "l"(from) : "memory")
#define COMMIT asm volatile("cp.async.commit_group;" ::: "memory")
#define WAIT(n) asm volatile("cp.async.wait_group %0;" :: "n"(n) : "memory")
extern __shared__ float4 s[];

__global__ void store_kernel(float4* x) {
  s[threadIdx.x] = x[threadIdx.x];  // store
  BARRIER_A
  x[threadIdx.x] = s[blockDim.x - 1 - threadIdx.x];  // load
}

__global__ void warp_kernel(float4* x) {
  s[threadIdx.x] = x[threadIdx.x];  // store
  __syncwarp();
  BARRIER_A
  x[threadIdx.x] = s[threadIdx.x ^ 1];  // load
}

__global__ void branch_kernel(float4* x, int n) {
  if (threadIdx.x < 32) {
    s[threadIdx.x] = x[threadIdx.x];  // store
  ELSE
    x[threadIdx.x] = s[threadIdx.x - 32];  // load
  }
}

__global__ void uniform_kernel(float4* x, int n) {
  if (n > 3)
    s[threadIdx.x] = x[threadIdx.x];  // store
  else
    x[threadIdx.x] = s[threadIdx.x ^ 1];  // load
}

__global__ void loop_kernel(float4* x, int n) {
  float4 sum = {};
  for (int i = 0; i < n; ++i) {
    s[threadIdx.x] = x[i * blockDim.x + threadIdx.x];  // store
    __syncthreads();
    sum.x += s[blockDim.x - 1 - threadIdx.x].x;  // load
    BARRIER_A
  }
  x[threadIdx.x] = sum;
}

__global__ void copy_kernel(float4* x) {
  COPY(&s[threadIdx.x], &x[threadIdx.x]);  // copy
  COMMIT;
  WAIT_A
  BARRIER_B
  x[threadIdx.x] = s[blockDim.x - 1 - threadIdx.x];  // load
}

__global__ void ring_kernel(float4* x, int n) {
  const int t = threadIdx.x, size = blockDim.x;
  float sum = 0;
  for (int i = 0; i < 2; ++i) {
    COPY(&s[i * size + t], &x[i * size + t]);  // copy
    COMMIT;
  }
#pragma unroll 1
  for (int i = 0; i < n; ++i) {
    WAIT_B
    BARRIER_B
    if (i + 2 < n) COPY(&s[(i + 2) % 3 * size + t], &x[(i + 2) * size + t]);  // copy
    COMMIT;
    sum += s[i % 3 * size + (size - 1 - t)].x;  // load
  }
  x[t].x = sum;
}
"""
SYNC = "__syncthreads();"
RIGHT = {
    "BARRIER_A": SYNC,
    "BARRIER_B": SYNC,
    "ELSE": "} __syncthreads(); if (threadIdx.x >= 32) {",
    "WAIT_A": "WAIT(0);",
    "WAIT_B": "WAIT(1);",
}
QUIET = dict.fromkeys(("store", "warp", "branch", "uniform", "loop", "copy", "ring"), "")
FAULTS = {
    "right": ({}, QUIET),
    "no-barrier": (
        {"BARRIER_A": "", "BARRIER_B": ""},
        QUIET
        | {"store": "barrier", "warp": "warp", "loop": "barrier", "copy": "async", "ring": "async barrier"},
    ),
    "no-wait": ({"WAIT_A": "", "WAIT_B": ""}, QUIET | {"copy": "async", "ring": "async"}),
    "wait-for-less": (
        {"WAIT_A": "WAIT(1);", "WAIT_B": "WAIT(2);"},
        QUIET | {"copy": "async", "ring": "async"},
    ),
    "arms": ({"ELSE": "} else {"}, QUIET | {"branch": "barrier"}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found_and_nothing_else(fault: str, tmp_path: Path) -> None:
    changes, expected = FAULTS[fault]
    text = PLANTED
    for name, code in (RIGHT | changes).items():
        text = re.sub(rf"\b{name}\b", code, text)
    source = tmp_path / "planted.cu"
    source.write_text(text)
    found = {}
    for kernel in parse(compile_ptx(str(source))):
        name = short_name(kernel.name).removesuffix("_kernel")
        kernel.stages = 3 if name == "ring" else 1
        races = kernel.races()
        assert not races or any("// load" in r.first + r.second for r in races), races
        found[name] = " ".join(sorted({r.kind for r in races}))
    assert found == expected


def test_what_is_not_understood_is_said(tmp_path: Path) -> None:
    source = tmp_path / "generic.cu"
    source.write_text("__global__ void generic_kernel(float* x, int n) { extern __shared__ float s[];"
                      " float* to = n > 3 ? s : x; to[threadIdx.x] = 1; }")  # fmt: skip
    (kernel,) = parse(compile_ptx(str(source)))
    with pytest.raises(ValueError, match="address of unknown kind"):
        kernel.races()
