"""The wheel, outside any checkout; `make wheel` runs its commands in full."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# Runs them in one process, since importing torch takes longer than most of them, and prints what
# they import.
COMMANDS = """
import json, sys
from pathlib import Path
import hybrid_kv
from hybrid_kv.cli import main

config = Path(hybrid_kv.__path__[0], "check", "guard_model", "config.json")
codes = []
for command in (
    ["plan", str(config), "--gpu-memory", "1GiB"],
    ["generate", "--max-tokens", "1", "Question:"],
    ["guard", "--quick", "-k", "eviction"],
    ["report", "--results", "out"],
    ["red", "--results", "out"],
    ["compare"],
):
    try:
        main(command)
    except SystemExit as left:
        codes.append(left.code)
files = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
files = [file for file in files if file]
Path("found.json").write_text(json.dumps({"codes": codes, "files": files}))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, because setuptools writes beside what it builds."""
    source = tmp_path_factory.mktemp("source")
    for name in (
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "MANIFEST.in",
        "CHANGELOG.md",
        "constraints.txt",
    ):
        shutil.copy(ROOT / name, source)
    for name in ("hybrid_kv", "bench", "accuracy", "tests"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    out = tmp_path_factory.mktemp("dist")
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        out,
        source,
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (made,) = out.glob("*.whl")
    return made


def test_the_wheel_installs_one_name_with_all_that_it_reads(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    about = next(name for name in names if "METADATA" in name).split("/")[0]
    assert {name.split("/")[0] for name in names} == {"hybrid_kv", about}
    data = {
        str(file.relative_to(ROOT))
        for file in (ROOT / "hybrid_kv").rglob("*")
        if file.is_file()
        and not file.name.endswith((".py", "ruff.toml"))
        and file.parent.name != "__pycache__"
    }
    assert data <= names
    assert "hybrid_kv/check/guard_model/model.safetensors" in data


def test_its_commands_work_outside_a_checkout(wheel: Path, tmp_path: Path) -> None:
    packages, work = tmp_path / "packages", tmp_path / "work"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    work.mkdir()
    path = os.pathsep.join(
        [str(packages), *sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})]
    )
    # -S: the environment's packages without its .pth files, one of which leads to this checkout.
    done = subprocess.run(
        [sys.executable, "-S", "-c", COMMANDS],
        cwd=work,
        # `make wheel` has numba compile the loops, too: here that would be most of the time.
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "NUMBA_DISABLE_JIT": "1"},
        capture_output=True,
        text=True,
    )
    found = json.loads((work / "found.json").read_text())
    assert found["codes"] == [0, 0, 0, 0, 0, 2], done.stdout + done.stderr
    assert "`hybrid-kv compare` needs a checkout of hybrid-kv: run it inside one" in done.stderr
    assert not [
        file for file in found["files"] if Path(file).is_relative_to(ROOT) and ".venv" not in file
    ]
    assert sorted(file.name for file in work.iterdir()) == ["found.json", "out", "site"]
    assert "✓ HEAD is right\nright? ✓ yes: 1 of 1 check passed\n" in done.stdout
