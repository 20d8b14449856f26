"""The plugin's signature check on vLLM's sources, which need not be installed.

    python tests_vllm/signatures.py FOLDER [FOLDER ...]

Each FOLDER holds a ``vllm`` package, for instance a wheel that was unpacked. Status 1 when the plugin would
fall back to plain DFlash there.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

from carryover_ext.integrations.vllm import compat


def read(source: str) -> dict[str, tuple[str, ...]]:
    """Parameters of all functions and methods of a module, by dotted name."""
    found: dict[str, tuple[str, ...]] = {}

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef):
                visit(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.FunctionDef):
                a = node.args
                parts = [*a.posonlyargs, *a.args, a.vararg, *a.kwonlyargs, a.kwarg]
                found[prefix + node.name] = tuple(part.arg for part in parts if part)

    visit(ast.parse(source).body, "")
    return found


def problems(root: Path) -> dict[str, str | None]:
    """What the check says about each module of ``SIGNATURES`` below ``root``; None: all as expected."""
    out: dict[str, str | None] = {}
    for module in compat.SIGNATURES:
        path = root / (module.replace(".", "/") + ".py")
        out[module] = compat.compare(module, read(path.read_text())) if path.is_file() else "is not there"
    return out


def main() -> int:
    worst = 0
    for folder in map(Path, sys.argv[1:]):
        text = (folder / "vllm" / "_version.py").read_text()
        number = re.search(r"^__version__ = .*'([\w.+]+)'", text, re.MULTILINE)
        version = number[1] if number else "unknown"
        known = compat.version_problem(version)
        wrong = {module: why for module, why in problems(folder).items() if why}
        worst |= bool(known or wrong)
        print(f"{folder}: {version}: {known or 'version known'}")
        for module in compat.SIGNATURES:
            print(f"  {module}: {wrong.get(module, 'as expected')}")
    return worst


if __name__ == "__main__":
    sys.exit(main())
