"""The signature check against altered sources, and the watch over restored prefixes: without vLLM."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from carryover_ext.integrations.vllm import compat
from carryover_ext.integrations.vllm.prefix import NOBODY, PrefixWatch

HERE = Path(__file__).parents[1] / "tests_vllm" / "signatures.py"


@pytest.fixture(scope="module")
def signatures() -> ModuleType:
    spec = importlib.util.spec_from_file_location("signatures", HERE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write(root: Path, changes: dict[str, str | None] | None = None) -> Path:
    """A vllm package with functions of the expected signatures; ``changes``: path -> other parameters, None
    to leave the function out."""
    for module, functions in compat.SIGNATURES.items():
        lines: dict[str, list[str]] = {}
        for path, expected in functions.items():
            parameters = ", ".join((*expected, *compat.NAMED.get(path, ())))
            parameters = parameters if changes is None else changes.get(path, parameters)
            if parameters is None:
                continue
            owner, _, name = path.rpartition(".")
            lines.setdefault(owner, []).append(f"def {name}({parameters}): ...")
        text = ""
        for owner, methods in lines.items():
            text += (
                f"class {owner}:\n" + "".join(f"    {m}\n" for m in methods) if owner else "\n".join(methods)
            )
            text += "\n"
        file = root / (module.replace(".", "/") + ".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


def test_the_table_is_what_it_expects(tmp_path: Path, signatures: ModuleType) -> None:
    assert set(signatures.problems(write(tmp_path)).values()) == {None}


@pytest.mark.parametrize("path", [path for table in compat.SIGNATURES.values() for path in table])
def test_every_change_is_found(tmp_path: Path, signatures: ModuleType, path: str) -> None:
    """Each function that ours rely on: gone, with a parameter renamed, in another order, or with one more."""
    module = next(name for name, table in compat.SIGNATURES.items() if path in table)
    expected = (*compat.SIGNATURES[module][path], *compat.NAMED.get(path, ()))
    altered = {
        "gone": None,
        "renamed": ", ".join([*expected[:-1], "other"]),
        "swapped": ", ".join([expected[1], expected[0], *expected[2:]]),
        "more": ", ".join([*expected, "more=None"]),
    }
    for name, parameters in altered.items():
        found = signatures.problems(write(tmp_path / name, {path: parameters}))
        problem = found.pop(module)
        assert set(found.values()) == {None}
        if name == "more" and path in compat.NAMED:  # ours pass on what they do not know
            assert problem is None
        elif name == "gone":
            assert problem == f"{module}.{path} is not there"
        else:
            assert f"{module}.{path} takes " in problem and "expected " in problem, (name, problem)


def test_status(tmp_path: Path, signatures: ModuleType, monkeypatch, capsys) -> None:
    """Of the command: 0 only for a known version with the expected signatures."""
    for version, changes, status in (
        ("0.33.0", {}, 0),
        ("0.34.0", {}, 1),
        ("0.33.0", {"DSparkSpeculator.__init__": "self, config"}, 1),
    ):
        root = write(tmp_path / f"{version}-{status}-{len(changes)}", changes)
        (root / "vllm" / "_version.py").write_text(f"__version__ = version = '{version}'\n")
        monkeypatch.setattr("sys.argv", ["signatures.py", str(root)])
        assert signatures.main() == status
        said = capsys.readouterr().out
        assert ("knows vLLM 0.29 to 0.33" in said) == (version == "0.34.0")
        assert ("takes self, config" in said) == bool(changes)


# -- restored prefixes ---------------------------------------------------------------------------------


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    import carryover_ext.integrations.vllm.prefix as prefix

    lines: list[str] = []
    logger = SimpleNamespace(warning=lambda text, *values: lines.append(text % values))
    monkeypatch.setattr(prefix, "log", lambda: logger)
    return lines


def note(watch: PrefixWatch, slots: list[int], tokens: list[int], carried=(), query=()) -> None:
    mask = torch.tensor([i in carried for i in range(len(slots))])
    long = torch.int64
    columns = torch.tensor(slots, dtype=long), torch.tensor(tokens, dtype=long), mask.bool()
    watch.note(*columns, torch.tensor(query, dtype=long))


TABLE = torch.tensor([3, 5], dtype=torch.int32)  # blocks of 4: slots 12..15, 20..23
SLOTS, TOKENS = [12, 13, 14, 15, 20, 21, 22, 23], [7, 8, 9, 10, 11, 12, 13, 14]


def test_a_whole_prefix_is_silent(said: list[str]) -> None:
    watch = PrefixWatch(40, torch.device("cpu"))
    note(watch, [*SLOTS, -1], [*TOKENS, 99])
    assert watch.check("a", TABLE, TOKENS, 4) == 0
    assert watch.check("a", TABLE, [], 4) == 0  # nothing was restored
    assert watch.check("a", torch.tensor([0, 5]), [1, 1, 1, 1, *TOKENS[4:]], 4) == 0  # left by a window
    assert said == []


@pytest.mark.parametrize(
    ("how", "missing"), [("never", 4), ("other tokens", 2), ("carried", 1), ("query", 3)]
)
def test_a_hole_is_said_once(said: list[str], how: str, missing: int) -> None:
    watch = PrefixWatch(40, torch.device("cpu"))
    note(watch, SLOTS[: 4 if how == "never" else 8], TOKENS[: 4 if how == "never" else 8])
    if how == "other tokens":
        note(watch, [14, 15], [1, 2])
    elif how == "carried":
        note(watch, [22], [13], carried=[0])
    elif how == "query":
        note(watch, [], [], query=[21, 22, 23, -1])
    assert watch.check("r1", TABLE, TOKENS, 4) == missing
    assert len(said) == 1
    assert "request r1 starts behind 8 restored tokens" in said[0]
    assert f"context of {missing} of them" in said[0] and "issue 47930" in said[0]
    assert watch.check("r2", TABLE, TOKENS, 4) == 0 and len(said) == 1


def test_slots_outside_are_nowhere() -> None:
    watch = PrefixWatch(8, torch.device("cpu"))
    note(watch, [-1, 8, 100], [1, 2, 3])
    assert watch.tokens[:8].tolist() == [NOBODY] * 8


def test_a_watch_only_where_tokens_are_restored() -> None:
    groups = [SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=n)) for n in (16, 32)]
    cache = SimpleNamespace(num_blocks=3, kv_cache_groups=groups)

    def of(caching: bool, connector: object) -> PrefixWatch | None:
        config = SimpleNamespace(
            cache_config=SimpleNamespace(enable_prefix_caching=caching), kv_transfer_config=connector
        )
        return PrefixWatch.of(config, cache, torch.device("cpu"))

    assert of(False, None) is None
    for watch in (of(True, None), of(False, object())):
        assert watch is not None and watch.tokens.shape == (97,)
