"""Looks for races on shared memory in the PTX that nvcc makes of a kernel, without running it.

Two accesses of which one writes, of different threads, are a race when no barrier lies between them. What is
reported, as the source lines of both:

- ``barrier``: a path leads from one to the other without a ``bar.sync``, or they lie in the two arms of a
  branch that threads may take differently. ``warp``: the same, with ``bar.warp.sync`` on every such path.
- ``async``: a ``cp.async`` is followed by an access on a path without a ``cp.async.wait_group`` that covers
  it and a ``bar.sync`` behind that. A ring of n stages reads other stages while a copy is under way: `stages`
  says so, and accesses before the n-th commit since the copy are then not of its stage.

Addresses are not looked at, but for this: a line does not race with itself as long as it only stores (each
thread fills its own elements). So the report holds pairs that are no races; the tests name each with the
reason. A branch on a value that all threads of the block share is taken by all or none.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

WRAPPERS = ("ptx.cuh", "common.cuh", "cute_atoms.cuh")  # not the lines that a reader wants to see
COMMITS = 8  # counted up to here

FILE = re.compile(r'^\s*\.file\s+(\d+)\s+"([^"]+)"', re.M)
ENTRY = re.compile(r"^(?:\.visible |\.weak )*\.entry (\w+)", re.M)
LOC = re.compile(r"\.loc\s+(\d+) (\d+) (\d+)(?:.*inlined_at (\d+) (\d+) (\d+))?")
LABEL = re.compile(r"^([$\w]+):")
REGISTER = re.compile(r"%[a-z]+\d+|%(?:tid|laneid|warpid)\b")
SOURCES_OF_DIVERGENCE = re.compile(
    r"%tid|%laneid|%warpid|^(shfl|vote|match|activemask|atom|ldmatrix|mma|elect)\b"
)


class Place(NamedTuple):
    file: int
    line: int
    column: int


class Race(NamedTuple):
    kind: str  # barrier, warp, async
    first: str  # source lines
    second: str


@dataclass
class Instruction:
    text: str
    predicate: str | None
    where: str  # source line
    reads: frozenset[str]
    writes: frozenset[str]

    @cached_property
    def kind(self) -> str:
        """barrier, warp, load, store, copy, commit, wait, or nothing."""
        op, _, operands = self.text.partition(" ")
        if op.startswith("bar.warp.sync"):
            return "warp"
        if op.startswith(("bar.", "barrier.", "mbarrier.")):
            if self.predicate:
                raise ValueError(
                    f"@{self.predicate} {self.text}: a barrier under a predicate is not understood"
                )
            if op in ("bar.sync", "barrier.sync", "barrier.sync.aligned") and operands == "0":
                return "barrier"
            raise ValueError(f"{self.text}: only barriers of the whole block are understood")
        if op.startswith("cp."):
            for kind in ("commit", "wait"):
                if op.startswith(f"cp.async.{kind}_"):
                    if self.predicate:
                        raise ValueError(f"@{self.predicate} {self.text}: not understood under a predicate")
                    return kind
            if op.startswith(("cp.async.ca.shared", "cp.async.cg.shared")):
                return "copy"
            raise ValueError(f"{self.text}: only cp.async in groups is understood")
        if op.startswith(("ldmatrix", "stmatrix")) and ".shared" not in op:
            raise ValueError(f"{self.text}: an access to an address of unknown kind")
        if ".shared" in op and not op.startswith("cvta"):
            return "load" if op.startswith(("ld.", "ldmatrix")) else "store"
        if re.match(r"(ld|st|atom|red)\.(?!param|global|shared|local|const)", op) and "global" not in op:
            raise ValueError(f"{self.text}: an access to an address of unknown kind")
        return ""

    @property
    def group(self) -> int:
        """Of a wait: so many groups may stay under way; -1 for wait_all, which asks for no commit."""
        return -1 if "wait_all" in self.text else int(self.text.split()[1].strip(","))


@dataclass
class Kernel:
    name: str
    code: list[Instruction]
    labels: dict[str, int]
    stages: int = 1
    next: list[tuple[int, ...]] = field(init=False)

    def __post_init__(self) -> None:
        self.next = []
        for i, x in enumerate(self.code):
            after = (i + 1,) if i + 1 < len(self.code) else ()
            op = x.text.split()[0]
            if op.startswith("bra"):
                target = (self.labels[x.text.split()[1]],)
                self.next.append(target + after if x.predicate else target)
            elif op in ("ret", "exit", "trap"):
                self.next.append(after if x.predicate else ())
            elif op.startswith(("brx", "call")):
                raise ValueError(f"{self.name}: {x.text}: jumps by table and calls are not understood")
            else:
                self.next.append(after)

    # ---- what is the same for all threads ----

    @cached_property
    def region(self) -> dict[int, tuple[set[int], ...]]:
        """Of each branch that threads may take differently: what each arm passes before the arms meet."""
        divergent: set[str] = set()
        branches = [i for i, n in enumerate(self.next) if len(n) > 1]
        arms = {i: self._arms(i) for i in branches}
        found: dict[int, tuple[set[int], ...]] = {}
        while True:
            before = len(divergent), len(found)
            changed = True
            while changed:
                changed = False
                for x in self.code:
                    if x.writes <= divergent:
                        continue
                    used = x.reads | ({x.predicate} if x.predicate else set())
                    if used & divergent or SOURCES_OF_DIVERGENCE.search(x.text):
                        divergent |= x.writes
                        changed = True
            for i in branches:
                if i in found or self.code[i].predicate not in divergent:
                    continue
                found[i] = arms[i]
                loop = any(i in arm for arm in arms[i])
                for j in set().union(*arms[i]):  # values that depend on the way taken
                    for register in self.code[j].writes:
                        if loop or self._definitions[register] > 1:
                            divergent.add(register)
            if before == (len(divergent), len(found)):
                return found

    @cached_property
    def _definitions(self) -> dict[str, int]:
        count: dict[str, int] = defaultdict(int)
        for x in self.code:
            for register in x.writes:
                count[register] += 1
        return count

    def _arms(self, branch: int) -> tuple[set[int], ...]:
        """Instructions on the way from each side of a branch to where all ways meet again."""
        meet = self._postdominator[branch]
        arms = []
        for start in self.next[branch]:
            seen: set[int] = set()
            todo = [start]
            while todo:
                i = todo.pop()
                if i in seen or i == meet:
                    continue
                seen.add(i)
                todo += self.next[i]
            arms.append(seen)
        return tuple(arms)

    @cached_property
    def _postdominator(self) -> list[int]:
        """Immediate postdominator of each instruction, len(code) being the end (Cooper, Harvey, Kennedy)."""
        end = len(self.code)
        back: list[list[int]] = [[] for _ in range(end + 1)]
        for i, following in enumerate(self.next):
            for j in following or (end,):
                back[j].append(i)
        order: list[int] = []  # postorder of the reversed graph
        seen = {end}
        stack: list[tuple[int, Iterator[int]]] = [(end, iter(back[end]))]
        while stack:
            node, rest = stack[-1]
            for j in rest:
                if j not in seen:
                    seen.add(j)
                    stack.append((j, iter(back[j])))
                    break
            else:
                order.append(node)
                stack.pop()
        rank = {node: n for n, node in enumerate(order)}
        above = [-1] * (end + 1)
        above[end] = end
        changed = True
        while changed:
            changed = False
            for node in reversed(order[:-1]):
                new = -1
                for j in self.next[node] or (end,):
                    if above[j] < 0:
                        continue
                    if new < 0:
                        new = j
                        continue
                    a, b = j, new
                    while a != b:
                        if rank[a] < rank[b]:
                            a = above[a]
                        else:
                            b = above[b]
                    new = a
                if above[node] != new:
                    above[node] = new
                    changed = True
        return above

    # ---- races ----

    @cached_property
    def _blocks(self) -> tuple[list[range], list[int]]:
        """Runs of instructions with one way in and out, cut behind every instruction that matters here."""
        heads = {0, *self.labels.values()}
        for i, x in enumerate(self.code):
            if len(self.next[i]) != 1 or self.next[i][0] != i + 1 or x.kind:
                heads.add(i + 1)
                heads.update(self.next[i])
                if x.kind:
                    heads.add(i)
        cuts = sorted(h for h in heads if h < len(self.code))
        runs = [range(a, b) for a, b in zip(cuts, [*cuts[1:], len(self.code)], strict=True)]
        of = [0] * len(self.code)
        for n, run in enumerate(runs):
            for i in run:
                of[i] = n
        return runs, of

    @cached_property
    def _steps(self) -> tuple[list[str], list[int], list[tuple[int, ...]]]:
        """Of each run: what it does, its first instruction, the runs behind it."""
        runs, of = self._blocks
        kinds = [self.code[r.start].kind for r in runs]
        return kinds, [r.start for r in runs], [tuple(of[j] for j in self.next[r[-1]]) for r in runs]

    def races(self) -> set[Race]:
        found: set[Race] = set()
        kinds, starts, after = self._steps
        accesses = [n for n, k in enumerate(kinds) if k in ("load", "store", "copy")]

        def conflict(a: int, b: int) -> tuple[str, str] | None:
            x, y = self.code[starts[a]].where, self.code[starts[b]].where
            if kinds[a] == kinds[b] == "load" or (x == y and "load" not in (kinds[a], kinds[b])):
                return None
            return x, y

        for a in accesses:
            # A copy is judged by its wait below; here it counts as what comes last.
            if kinds[a] != "copy":
                for warp, reached in self._reach(after[a]):
                    for b in reached:
                        if pair := conflict(a, b):
                            found.add(Race("warp" if warp else "barrier", *pair))
            else:
                for b in self._under_way(a):
                    if pair := conflict(a, b):
                        found.add(Race("async", *pair))
        _, of = self._blocks
        for branch, arms in self.region.items():
            one, other = (
                {n for _, reached in self._reach((of[start],)) for n in reached} & {of[i] for i in arm}
                for start, arm in zip(self.next[branch], arms, strict=True)
            )
            for a in one - other:
                for b in other - one:
                    if pair := conflict(a, b):
                        found.add(Race("barrier", *pair))
        return {r for r in found if r.kind != "warp" or Race("barrier", r.first, r.second) not in found}

    def _reach(self, starts: tuple[int, ...]) -> list[tuple[bool, set[int]]]:
        """Accesses that are reached without a barrier: with a warp's barrier on the way, or without."""
        kinds, _, after = self._steps
        seen: set[tuple[int, bool]] = set()
        todo = [(n, False) for n in starts]
        while todo:
            n, warp = todo.pop()
            if (n, warp) in seen or kinds[n] == "barrier":
                continue
            seen.add((n, warp))
            warp = warp or kinds[n] == "warp"
            todo += [(m, warp) for m in after[n]]
        plain = {n for n, warp in seen if not warp and kinds[n] in ("load", "store", "copy")}
        late = {n for n, warp in seen if warp and kinds[n] in ("load", "store", "copy")}
        return [(False, plain), (True, late - plain)]

    def _under_way(self, copy: int) -> set[int]:
        """Accesses that are reached before the copy is complete and a barrier has been passed since."""
        kinds, starts, after = self._steps
        found: set[int] = set()
        seen: set[tuple[int, int, bool]] = set()
        todo = [(n, 0, False) for n in after[copy]]
        while todo:
            n, commits, complete = state = todo.pop()
            if state in seen:
                continue
            seen.add(state)
            kind = kinds[n]
            if kind == "barrier" and complete:
                continue
            if kind == "commit":
                commits = min(commits + 1, COMMITS)
            elif kind == "wait":
                group = self.code[starts[n]].group
                complete = complete or commits > group
            elif kind in ("load", "store", "copy") and (self.stages == 1 or commits >= self.stages):
                found.add(n)
            todo += [(m, commits, complete) for m in after[n]]
        return found


def _registers(text: str) -> tuple[frozenset[str], frozenset[str]]:
    """Read and written registers of an instruction: the first operand is the result, unless it is a store."""
    op, _, operands = text.partition(" ")
    names = REGISTER.findall(operands)
    if op.startswith(
        ("st.", "red.", "bar", "cp.", "bra", "ret", "exit", "stmatrix", "fence", "membar", "prefetch")
    ):
        return frozenset(names), frozenset()
    head, depth = operands, 0
    for at, c in enumerate(operands):
        depth += (c in "{[(") - (c in "}])")
        if c == "," and depth == 0:
            head = operands[:at]
            break
    written = REGISTER.findall(head)
    return frozenset(REGISTER.findall(operands[len(head) :])), frozenset(written)


def parse(ptx: str, skip: str = "no such name") -> list[Kernel]:
    """The kernels of a PTX file that was made with -lineinfo, but for those with `skip` in their names."""
    files = {int(n): Path(path) for n, path in FILE.findall(ptx)}
    lines: dict[Path, list[str]] = {}

    def source(place: Place | None, parents: dict[Place, Place]) -> str:
        """The text of the innermost line that is not a wrapper's."""
        for _ in range(64):
            if place is None:
                break
            path = files[place.file]
            if path.suffix in (".cu", ".cuh") and path.name not in WRAPPERS:
                break
            place = parents.get(place)
        if place is None or place.line == 0:
            return "?"
        path = files[place.file]
        text = lines.setdefault(path, path.read_text().splitlines())
        return text[place.line - 1].strip()

    found = []
    parts = ENTRY.split(ptx)
    for name, body in zip(parts[1::2], parts[2::2], strict=True):
        if skip in name:
            continue
        code: list[Instruction] = []
        labels: dict[str, int] = {}
        parents: dict[Place, Place] = {}
        place: Place | None = None
        pending = ""
        body = body[body.index("\n{") + 2 : body.index("\n}")]
        for line in body.splitlines():
            line = line.split("//")[0].strip()
            if match := LOC.match(line):
                here = Place(*map(int, match.groups()[:3]))
                place = here if here.line else place
                if match[4]:
                    parents[here] = Place(*map(int, match.groups()[3:]))
                continue
            while match := LABEL.match(line):
                labels[match[1]] = len(code)
                line = line[match.end() :].strip()
            pending = f"{pending} {line}".strip()
            if not pending.endswith((";", "}")):
                continue
            for text in pending.split(";"):
                text = re.sub(r"\s+", " ", text).strip(" ").removeprefix("{").strip()  # of an asm statement
                if not text or text.startswith((".", "}")):
                    continue
                predicate = None
                if match := re.match(r"@!?(%\w+) ", text):
                    predicate, text = match[1], text[match.end() :]
                code.append(Instruction(text, predicate, source(place, parents), *_registers(text)))
            pending = ""
        found.append(Kernel(name, code, {k: v for k, v in labels.items() if v < len(code)}))
    return found
