"""Patches of vLLM's source: each has a runnable head and changes a file into other Python."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest

from hybrid_kv.check.probes.run import matrix_of
from hybrid_kv.check.targets.exact import PATTERNS, write_exact_checkpoint
from hybrid_kv.check.targets.kinds import for_model
from hybrid_kv.check.targets.vllm import KIND
from mutants.runner.vllm import (
    FOLDER,
    HEALTHY,
    cell_of,
    files_of,
    head,
    overlay,
    patches_of,
    tables,
)

INSTALLED = [*Path(__file__).parents[2].glob(".venv-vllm/lib/python*/site-packages/vllm")]
NAMES = sorted(one.stem for one in FOLDER.glob("*.patch"))
MOST = 12  # changed lines


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("exact")
    write_exact_checkpoint("mixed", folder)
    return str(folder)


@pytest.mark.parametrize("name", NAMES)
def test_a_patch_is_small_and_says_where_it_shows(name: str, exact: str) -> None:
    patch = patches_of(name)[-1]
    id, what, cells = head(patch)
    assert what and re.fullmatch(r"[A-L]\d\d" if name != HEALTHY else HEALTHY, id)
    assert name == HEALTHY or len(files_of(patch)) == 1
    changed = re.findall(r"(?m)^[-+](?!-- a/|\+\+ b/)", patch.read_text())
    assert changed and (name == HEALTHY or len(changed) <= MOST)
    assert {*cells} <= {*head(patches_of(HEALTHY)[-1])[2]}
    for model, text in map(cell_of, cells):
        assert model in PATTERNS and matrix_of(for_model(KIND, exact), [text])


def test_the_tables_of_the_readme_are_made_of_the_rows() -> None:
    with (FOLDER / "found.csv").open(newline="", encoding="utf-8") as file:
        rows = [*csv.DictReader(file)]
    assert {row["name"] for row in rows} == {*NAMES} - {HEALTHY}
    assert (FOLDER / "README.md").read_text(encoding="utf-8").endswith(tables(rows))


@pytest.mark.skipif(not INSTALLED, reason="vLLM is not installed: make peers")
@pytest.mark.parametrize("name", NAMES)
def test_a_patch_applies_to_the_file_that_it_names(name: str, tmp_path: Path) -> None:
    overlay(INSTALLED[0], patches_of(name), tmp_path)
    for file in files_of(patches_of(name)[-1]):
        text = (tmp_path / "vllm" / file).read_text()
        compile(text, file, "exec")
        assert text != (INSTALLED[0] / file).read_text()


def test_an_overlay_copies_what_it_changes_alone(tmp_path: Path) -> None:
    real = tmp_path / "real/vllm"
    for name in ("core/b.py", "core/c.py", "core/__pycache__/b.pyc"):
        (real / name).parent.mkdir(parents=True, exist_ok=True)
        (real / name).write_text("x = 1\n")
    patch = tmp_path / "one.patch"
    patch.write_text("--- a/vllm/core/b.py\n+++ b/vllm/core/b.py\n@@ -1 +1 @@\n-x = 1\n+x = 2\n")
    overlay(real, [patch], tmp_path)
    assert [(tmp_path / "vllm/core/b.py").read_text(), (real / "core/b.py").read_text()] == [
        "x = 2\n",
        "x = 1\n",
    ]
    links = {one.name: one.is_symlink() for one in (tmp_path / "vllm").rglob("*")}
    assert links == {"core": False, "b.py": False, "__pycache__": False, "c.py": True}
