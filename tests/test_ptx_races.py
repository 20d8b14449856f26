"""Races on shared memory in the PTX of the CUDA kernels (tests/ptx_races.py). Needs nvcc, no GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from cuda_build import compile_ptx, short_name, unavailable
from ptx_races import Instruction, Kernel, Race, parse

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
    "accept": Memory(redundant=("// scratch is free again",)),  # of a kernel's last block_reduce
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

PLANTED = Path(__file__).with_name("planted_races.cu")
QUIET = dict.fromkeys(("store", "warp", "branch", "uniform", "loop", "copy", "ring"), "")
FAULTS = {
    "right": QUIET,
    "no-barrier": QUIET
    | {"store": "barrier", "warp": "warp", "loop": "barrier", "copy": "async", "ring": "async barrier"},
    "no-wait": QUIET | {"copy": "async", "ring": "async"},
    "wait-for-less": QUIET | {"copy": "async", "ring": "async"},
    "arms": QUIET | {"branch": "barrier"},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found_and_nothing_else(fault: str) -> None:
    define = f"FAULT_{fault.upper().replace('-', '_')}"
    found = {}
    for kernel in parse(compile_ptx(str(PLANTED), defines=(define,))):
        name = short_name(kernel.name).removesuffix("_kernel")
        kernel.stages = 3 if name == "ring" else 1
        races = kernel.races()
        assert not races or any("// load" in r.first + r.second for r in races), races
        found[name] = " ".join(sorted({r.kind for r in races}))
    assert found == FAULTS[fault]


@pytest.mark.parametrize(
    "number,message", [(1, "address of unknown kind"), (2, "only barriers of the whole block")]
)
def test_what_is_not_understood_is_said(number: int, message: str) -> None:
    (kernel,) = parse(compile_ptx(str(PLANTED), defines=(f"NOT_UNDERSTOOD={number}",)))
    with pytest.raises(ValueError, match=message):
        kernel.races()


@pytest.mark.parametrize("text", ["bar.sync 0", "cp.async.wait_group 0", "cp.async.commit_group"])
def test_a_predicate_on_what_orders_accesses_is_refused(text: str) -> None:
    nothing: frozenset[str] = frozenset()
    assert Instruction(text, None, "line", nothing, nothing).kind in ("barrier", "wait", "commit")
    with pytest.raises(ValueError, match=r"@%p1 .* under a predicate"):
        _ = Instruction(text, "%p1", "line", nothing, nothing).kind


def test_a_matrix_load_from_an_unknown_address_is_refused() -> None:
    nothing: frozenset[str] = frozenset()
    with pytest.raises(ValueError, match="address of unknown kind"):
        _ = Instruction("ldmatrix.sync.aligned.m8n8.x4.b16 {%r1}, [%rd1]", None, "x", nothing, nothing).kind
