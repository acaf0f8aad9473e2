"""A command with nothing to judge says so in one line, and never exits with 0."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from hybrid_kv.measure.results import COLUMNS
from tests.cli.run import commands, run

ROOT = Path(__file__).parents[2]
# By command, lines of arguments that leave nothing to judge; the files are those of `folder`.
NOTHING = {
    "accuracy": ["--against empty.jsonl", "--task gsm8k --gsm8k-dir empty", "--limit 0"],
    "accuracy compare": ["empty.jsonl empty.jsonl"],
    "accuracy divergence": ["--limit 1", "--task gsm8k --gsm8k-dir empty"],
    "accuracy states": ["--limit 0", "--task gsm8k --gsm8k-dir empty"],
    "check": ["ours -k nothing", "ours --matrix prefix=nothing", "nothing"],
    "checkpoint": ["", "--verify empty"],
    "bisect": [
        "HEAD HEAD --accuracy",
        "HEAD HEAD --benchmark nothing",
        "HEAD HEAD --replay empty.jsonl",
    ],
    "compare": ["-k nothing"],
    "doctor": ["--seconds 0"],
    "fuzz": ["--hours 0"],
    "guard": [
        "-k nothing",
        "--only mamba_cache_mode=nothing",
        "--quick --only costs --only family=nothing",
        "--replay empty.jsonl",
        "--swarm 0",
        "--target ours -k nothing",
        "--target ours --matrix prefix=nothing",
        "--target nothing",
    ],
    "kernels": ["-k nothing", "--targets nothing", "--peers"],
    "mutants": ["--generated 4 --changed-since NOW", "--id nothing", "--folder empty"],
    "red": ["--results empty", "--results no-row"],
    "replay": ["empty.jsonl"],
    "results list": ["--check empty", "--check no-row"],
    "study": ["empty.yaml", "no-cell.yaml"],
}
MODULES = {
    "bench": ["-k nothing", "--suite nothing", "--tier gpu -k nothing"],
    "bench.families": ["--family nothing", "--family guard --rival nothing"],
    "bench.recipes": ["-k nothing", "--page nothing.md"],
    "bench.peers.hits": ["nothing", "vllm --prompts 0", "vllm --setting nothing"],
}
# They take no choice of what they judge, or measure and judge nothing.
WHOLE = {"bench.device", "bench.generate", "bench.proofs", "bench.harness.history", "bench.predict"}


def leaves(group: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Every function behind the command line, by the words that call it."""
    for name, command in group.items():
        if command.callback is not None:
            yield before + name, inspect.unwrap(command.callback)
        yield from leaves(getattr(command, "commands", {}), f"{before}{name} ")


def chooses_exit_code(function: Any) -> bool:
    return "typer.Exit(" in inspect.getsource(function)


def judging_modules() -> set[str]:
    """Modules of `bench` that `python -m` runs and whose `main` returns an exit code."""
    found = set()
    for file in (ROOT / "bench").rglob("*.py"):
        text = file.read_text()
        if "__main__" not in text:
            continue
        tree = ast.parse(text)
        mains = [
            node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "main"
        ]
        if mains and isinstance(mains[0].returns, ast.Name) and mains[0].returns.id == "int":
            found.add(
                ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__")
            )
    return found


def test_every_command_that_chooses_its_exit_code_is_here() -> None:
    assert {name for name, function in leaves(commands()) if chooses_exit_code(function)} == set(
        NOTHING
    )
    assert judging_modules() == {*MODULES, *WHOLE}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Fill the current folder with empty files and folders, a CSV without rows, an empty study."""
    monkeypatch.chdir(tmp_path)
    for name in ("empty", "no-row"):
        (tmp_path / name).mkdir()
    for name in ("empty.jsonl", "empty.yaml"):
        (tmp_path / name).touch()
    (tmp_path / "no-row/guard.csv").write_text(",".join(COLUMNS) + "\n")
    (tmp_path / "no-cell.yaml").write_text("runs:\n  - command: guard\n    axes: {seed: []}\n")
    return tmp_path


def here_and_now() -> str:
    """A commit of the checkout with the changes of its files, so that nothing differs from it."""
    made = subprocess.run(
        ["git", "stash", "create"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return made.stdout.strip() or "HEAD"


CASES = [(name, line) for name, lines in NOTHING.items() for line in lines]


@pytest.mark.parametrize(("name", "line"), CASES, ids=[" ".join(case) for case in CASES])
@pytest.mark.usefixtures("folder")
def test_a_command_without_anything_to_judge_says_so(
    name: str, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if name in ("bisect", "compare", "mutants") and not (ROOT / ".git").exists():
        pytest.skip("this is not a git checkout")
    if name == "kernels" and find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    words = [here_and_now() if word == "NOW" else word for word in f"{name} {line}".split()]
    code, out, err = run(capsys, *words)
    assert code in (1, 2, 3) and len((out + err).splitlines()) == 1, (code, out, err)


CASES = [(name, line) for name, lines in MODULES.items() for line in lines]


@pytest.mark.parametrize(("name", "line"), CASES, ids=[" ".join(case) for case in CASES])
def test_a_module_without_anything_to_judge_says_so(name: str, line: str) -> None:
    command = [sys.executable, "-m", name, *line.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode in (1, 2, 3) and not done.stdout, done
    assert len(done.stderr.splitlines()) == 1, done.stderr
