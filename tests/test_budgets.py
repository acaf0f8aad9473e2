"""No folder grows: code lines, without docstrings, comments and blank lines, against the table in pyproject.toml.

A name of the table is one path or several, joined by ` + `; a value with `files` bounds their number, too.
"""

from __future__ import annotations

import io
import subprocess
import tokenize
from functools import cache
from pathlib import Path

import pytest

tomllib = pytest.importorskip("tomllib", reason="Python < 3.11 cannot read TOML")

ROOT = Path(__file__).resolve().parents[1]
BUDGETS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hybrid-kv"]["budgets"]
SILENT = (tokenize.COMMENT, tokenize.NL, tokenize.ENDMARKER)


def code_lines(text: str) -> int:
    """Lines with code; a string that begins a statement is a docstring."""
    lines: set[int] = set()
    begins = True
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT):
            begins = True
        elif token.type == tokenize.STRING and begins:
            begins = False
        elif token.type not in SILENT:
            lines.update(range(token.start[0], token.end[0] + 1))
            begins = False
    return len(lines)


@cache
def files() -> dict[str, int]:
    """Code lines of each file of the repository."""
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("this is not a git checkout")
    found = [name for name in listed.stdout.split() if (ROOT / name).exists()]
    return {name: code_lines((ROOT / name).read_text(encoding="utf-8")) for name in found}


def test_only_code_counts() -> None:
    text = '"""A docstring."""\n\n# A comment.\nX = """one\ntwo"""\n\n\ndef f():\n    "What it does."\n    return X\n'
    assert code_lines(text) == 4


@pytest.mark.parametrize("name", BUDGETS)
def test_a_folder_stays_in_its_budget(name: str) -> None:
    most = BUDGETS[name]
    most = most if isinstance(most, dict) else {"lines": most}
    parts = name.split(" + ")
    own = {file: n for file, n in files().items() if any(file == part or file.startswith(f"{part}/") for part in parts)}
    assert all(any(file == part or file.startswith(f"{part}/") for file in own) for part in parts), "no such path"
    total = sum(own.values())
    assert total <= most["lines"], f"{name} has {total} code lines, {total - most['lines']} more than its budget"
    assert len(own) <= most.get("files", len(own)), f"{name} has {len(own)} files, its budget is {most['files']}"
