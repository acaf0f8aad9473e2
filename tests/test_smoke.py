"""`make smoke`: nothing that the project tells people to run is left out unnamed."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from tests.support.options import check_options

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / ".ci/smoke"
RULES = {
    "needs": {"a GPU": ["make gpu-.*"]},
    "elsewhere": {"ci.yml": ["make test"]},
    "instead": {"sleep 9": "echo slept"},
    "servers": {"sleep 77": 0.1},
    "verdicts": {"false": [1], "sleep 77": [130, -2]},
}


@pytest.fixture
def smoke(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module, in a folder of its own."""
    loader = SourceFileLoader("smoke", str(SCRIPT))
    spec = spec_from_loader("smoke", loader)
    assert spec is not None
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "smoke", module)
    loader.exec_module(module)
    for name in ("ROOT", "OUT"):
        monkeypatch.setattr(module, name, tmp_path)
    monkeypatch.setattr(module, "TREE", tmp_path / "tree")
    subprocess.run(["git", "init", "-q", module.TREE], check=True)
    return module


def test_every_target_is_listed_and_every_rule_is_used() -> None:
    done = subprocess.run(
        [sys.executable, SCRIPT, "--list"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    targets = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE)) - {
        "clean"
    }
    assert len(re.findall(r"^Makefile: ", done.stdout, re.MULTILINE)) == len(targets)


def test_what_is_run_instead_has_options_that_exist() -> None:
    for line in yaml.safe_load((ROOT / ".ci/smoke.yaml").read_text())["instead"].values():
        program, *words = shlex.split(line)
        if program == "hybrid-kv":
            check_options(words, line)


def test_what_is_left_to_a_workflow_is_run_by_it() -> None:
    """`peers` is a job of the smoke test's own workflow."""
    rules = yaml.safe_load((ROOT / ".ci/smoke.yaml").read_text())
    for place, patterns in rules["elsewhere"].items():
        workflow = ROOT / ".github/workflows" / ("nightly-smoke.yml" if place == "peers" else place)
        text = workflow.read_text()
        assert f"--only={place}" in text or any(
            re.search(f"run: {pattern}", text) for pattern in patterns
        ), place


def commands(smoke: ModuleType, *lines: str) -> list[Any]:
    return [smoke.Command("page", number, line) for number, line in enumerate(lines)]


def test_each_command_has_a_row_and_one_that_fails_is_named(
    smoke: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = commands(
        smoke, "false", "make gpu-test", "make test", "sleep 9", "sleep 77", "exit 3"
    )
    table = smoke.Table(tmp_path / "table.md")
    failed = smoke.run_all(written, smoke.Rules(RULES), table)
    assert failed == ["exit 3: exit code 3, 005.log"]
    rows = [
        line.strip("| ").split(" | ")
        for line in (tmp_path / "table.md").read_text().splitlines()[2:]
    ]
    assert rows[0] == ["page", "`false`", "", "1", "0", "0"]
    assert [row[2] for row in rows] == ["", "needs a GPU", "run by ci.yml", "`echo slept`", "", ""]
    assert rows[1][3:] == ["–", "–", "–"] and rows[4][3] in ("130", "-2")
    assert capsys.readouterr().out.count("\n") == 9


def test_a_page_begins_without_the_files_of_the_one_before(
    smoke: ModuleType, tmp_path: Path
) -> None:
    written = [smoke.Command(page, 0, "mkdir made") for page in ("first", "second")]
    assert not smoke.run_all(written, smoke.Rules(RULES), smoke.Table(tmp_path / "table.md"))


def test_in_reverse_the_commands_of_a_block_keep_their_order(smoke: ModuleType) -> None:
    first, second = commands(smoke, "a", "b")
    third = smoke.Command("page", 1, "c")
    assert smoke.ordered([first, second, third], reverse=True) == [second, third, first]


def test_one_place_alone_is_run(smoke: ModuleType) -> None:
    rules = smoke.Rules(RULES, only="ci.yml")
    assert rules.plan("make test").reason == "" and rules.plan("false").reason == "not of ci.yml"
    assert "make gpu-.*" in rules.unused()


def test_a_command_ends_with_the_run_that_is_terminated(smoke: ModuleType, tmp_path: Path) -> None:
    """Its session is its own: without care it would go on alone."""
    before = signal.signal(signal.SIGTERM, smoke.leave)
    try:
        with pytest.raises(SystemExit):
            smoke.run(
                smoke.Command("page", 0, ""),
                smoke.Plan("echo $$; mkfifo held; kill -TERM $PPID; read < held"),
                tmp_path / "log",
            )
    finally:
        signal.signal(signal.SIGTERM, before)
    child = int((tmp_path / "log").read_text())
    with pytest.raises(ProcessLookupError):
        os.killpg(child, 0)


def test_a_command_ends_with_the_run_that_is_terminated_as_it_starts(
    smoke: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run doesn't know the command's id yet."""
    children: list[int] = []

    class Popen(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            children.append(self.pid)
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(smoke.subprocess, "Popen", Popen)
    before = signal.signal(signal.SIGTERM, smoke.leave)
    try:
        os.mkfifo(smoke.TREE / "held")  # a process that makes it would be killed, too, unwaited for
        with pytest.raises(SystemExit):
            smoke.run(smoke.Command("page", 0, ""), smoke.Plan("read < held"), tmp_path / "log")
    finally:
        signal.signal(signal.SIGTERM, before)
    with pytest.raises(ProcessLookupError):
        os.killpg(children[0], 0)


def test_a_server_that_ignores_ctrl_c_is_killed(
    smoke: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smoke, "LIMIT", 0.1)
    plan = smoke.Plan("trap '' INT; mkfifo held; read < held", seconds=0.1)
    code, _ = smoke.run(smoke.Command("page", 0, ""), plan, tmp_path / "log")
    assert code == 124


def test_the_commands_are_found_with_a_parser_of_yaml_alone() -> None:
    """`make smoke` runs the script in an environment that has nothing else."""
    absent = ("hybrid_kv", "numpy", "pytest", "torch", "typer")
    code = (
        f"import runpy, sys; sys.modules.update(dict.fromkeys({absent})); "
        "sys.argv = ['smoke', '--list']; runpy.run_path('.ci/smoke', run_name='__main__')"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert "README.md: make guard" in done.stdout
