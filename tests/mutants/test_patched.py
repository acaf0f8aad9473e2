"""Patches of engines' sources: each has a runnable head and changes a file into other Python."""

from __future__ import annotations

import csv
import json
import re
import sys
from pathlib import Path

import pytest

from hybrid_kv.check.exports.traffic import PACKAGE
from hybrid_kv.check.probes.judge import AnswerJudgement
from hybrid_kv.check.probes.run import matrix_of
from hybrid_kv.check.probes.session import Failure, Outcome
from hybrid_kv.check.targets.exact import PATTERNS, write_exact_checkpoint
from hybrid_kv.check.targets.kinds import for_model, kind_of
from hybrid_kv.check.targets.target import Answer
from mutants.runner.exported import ExportedSearch
from mutants.runner.patched import HEALTHY, UNREACHED, Before, PatchedEngine, head, tables
from mutants.runner.sglang import SGLANG
from mutants.runner.vllm import VLLM

ENGINES = (VLLM, SGLANG)
ROOT = Path(__file__).parents[2]
PATCHES = [
    pytest.param(engine, name, id=f"{engine.name}-{name}")
    for engine in ENGINES
    for name in engine.names()
]
MOST = 12  # changed lines
RUN = """
import json, sys, vllm.core
for name in sys.argv[1:]:
    wrong = f"tiles: x is {vllm.core.x}" if vllm.core.x != 1 else ""
    print(json.dumps({"setting": name, "problem": wrong}), flush=True)
"""


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("exact")
    write_exact_checkpoint("mixed", folder)
    return str(folder)


@pytest.mark.parametrize(("engine", "name"), PATCHES)
def test_a_patch_is_small_and_says_where_it_shows(
    engine: PatchedEngine, name: str, exact: str
) -> None:
    patch = engine.patches_of(name)[-1]
    id, what, cells = head(patch)
    assert what and re.fullmatch(r"[A-L]\d\d" if name != HEALTHY else HEALTHY, id)
    changed = re.findall(r"(?m)^[-+](?!-- a/|\+\+ b/)", patch.read_text())
    is_one_bug = name != HEALTHY and not name.startswith(UNREACHED)
    assert changed and (not is_one_bug or len(changed) <= MOST)
    assert not is_one_bug or len(engine.files_of(patch)) == 1
    if (engine.folder / f"{HEALTHY}.patch").is_file():
        assert {*cells} <= {*head(engine.patches_of(HEALTHY)[-1])[2]}
    for model, text in map(engine.cell_of, cells):
        assert model in PATTERNS and matrix_of(for_model(kind_of(engine.name), exact), [text])


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.name)
def test_the_tables_of_the_readme_are_made_of_the_rows(engine: PatchedEngine) -> None:
    with (engine.folder / "found.csv").open(newline="", encoding="utf-8") as file:
        rows = [*csv.DictReader(file)]
    assert {row["name"] for row in rows} == {*engine.names()} - {HEALTHY}
    readme = (engine.folder / "README.md").read_text(encoding="utf-8")
    assert readme.endswith(tables(engine, rows))


@pytest.mark.parametrize(("engine", "name"), PATCHES)
def test_a_patch_applies_to_the_file_that_it_names(
    engine: PatchedEngine, name: str, tmp_path: Path
) -> None:
    pattern = f".venv-{engine.name}/lib/python*/site-packages/{engine.name}"
    installed = next(ROOT.glob(pattern), None)
    if installed is None:
        pytest.skip(f"{engine.title} is not installed in .venv-{engine.name}")
    engine.overlay(installed, engine.patches_of(name), tmp_path)
    for file in engine.files_of(engine.patches_of(name)[-1]):
        text = (tmp_path / engine.name / file).read_text()
        compile(text, file, "exec")
        assert text != (installed / file).read_text()


def test_a_patch_has_to_do_what_the_release_does_not() -> None:
    def outcome(probe: str, *tokens: int) -> Outcome:
        judgement = AnswerJudgement("wrong", position=len(tokens) - 1)
        failure = Failure(probe, {}, (), 0, Answer(tokens), judgement)
        failures, verdict = ([failure], "wrong") if tokens else ([], "right")
        return Outcome(probe, {}, verdict, failures=failures)

    before, cell = Before(), ("mixed", "prefix=on")
    runs = iter(
        {"alone": outcome("alone"), "tiles": outcome("tiles", 7), "traffic": outcome("traffic", i)}
        for i in (1, 2)
    )
    before.note(cell, lambda: next(runs))
    assert cell in before and ("mixed", "") not in before
    assert before.expects(cell, outcome("tiles", 7)) and not before.expects(
        cell, outcome("tiles", 8)
    )
    assert not before.expects(cell, outcome("tiles", 7, 7))
    assert before.expects(cell, outcome("traffic", 3))  # it differs from run to run
    assert not before.expects(cell, outcome("alone", 7))
    assert not before.expects(("mixed", ""), outcome("tiles", 7))


def test_the_exported_test_is_run_in_the_patched_package(tmp_path: Path) -> None:
    package = tmp_path / "site" / "vllm"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "core.py").write_text("x = 1\n")
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\nPYTHONPATH="$PYTHONPATH:{tmp_path}/site" exec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)

    test = tmp_path / "test"
    (test / PACKAGE).mkdir(parents=True)
    settings = {"runner=v2": {}, "runner=v1 prefix=on": {}}
    (test / PACKAGE / "cases.json").write_text(json.dumps({"settings": settings}))
    (test / PACKAGE / "run.py").write_text(RUN)
    patches = tmp_path / "mutants" / "vllm"
    patches.mkdir(parents=True)
    change = "--- a/vllm/core.py\n+++ b/vllm/core.py\n@@ -1 +1 @@\n-x = 1\n+x = 2\n"
    (patches / "one.patch").write_text(f"# A01: one\n# settings: prefix=on\n{change}")
    engine = type("Engine", (PatchedEngine,), {"folder": patches})("vllm", "vLLM")
    found = ExportedSearch(engine, str(python), test, "runner=v1").run("one")
    assert (found.setting, found.probe) == ("runner=v1 prefix=on", "tiles")  # the likelier one
    assert found.detail == "x is 2"


def test_an_overlay_copies_what_it_changes_alone(tmp_path: Path) -> None:
    real = tmp_path / "real/vllm"
    for name in ("core/b.py", "core/c.py", "core/__pycache__/b.pyc"):
        (real / name).parent.mkdir(parents=True, exist_ok=True)
        (real / name).write_text("x = 1\n")
    patch = tmp_path / "one.patch"
    patch.write_text("--- a/vllm/core/b.py\n+++ b/vllm/core/b.py\n@@ -1 +1 @@\n-x = 1\n+x = 2\n")
    VLLM.overlay(real, [patch], tmp_path)
    assert [(tmp_path / "vllm/core/b.py").read_text(), (real / "core/b.py").read_text()] == [
        "x = 2\n",
        "x = 1\n",
    ]
    links = {one.name: one.is_symlink() for one in (tmp_path / "vllm").rglob("*")}
    assert links == {"core": False, "b.py": False, "__pycache__": False, "c.py": True}
