"""No folder grows: code lines, without docstrings, comments and blank lines, against the table in pyproject.toml.

A name of the table is one path or several, joined by ` + `; a value with `files` bounds their number, too.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

tomllib = pytest.importorskip("tomllib", reason="Python < 3.11 cannot read TOML")

ROOT = Path(__file__).resolve().parents[1]
BUDGETS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hybrid-kv"]["budgets"]
# What can hide or end a line's code: a comment, a string, a bracket.
PIECE = re.compile(r"""#[^\n]*|("{3}|'{3})(?:\\.|.)*?\1|(["'])(?:\\.|[^\\\n])*?\2|[][(){}]""", re.DOTALL)


def code_lines(text: str) -> int:
    """Lines with code; a string that begins a statement is a docstring."""
    depth = 0

    def code(piece: re.Match[str]) -> str:
        nonlocal depth
        found = piece[0]
        depth += (found in "([{") - (found in ")]}")
        if found[0] == "#":
            return ""
        begins = not depth and not text[text.rfind("\n", 0, piece.start()) + 1 : piece.start()].strip()
        return re.sub("[^\n]+|(?<=\n)(?=\n)", "" if begins and found[-1] in "\"'" else "x", found)

    return sum(bool(line.strip()) for line in PIECE.sub(code, text).split("\n"))


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


def test_no_folder_outgrows_its_budget() -> None:
    problems, counted = [], files()
    for name, most in BUDGETS.items():
        most = most if isinstance(most, dict) else {"lines": most}
        by_part = [
            {file: n for file, n in counted.items() if file == part or file.startswith(f"{part}/")}
            for part in name.split(" + ")
        ]
        assert all(by_part), f"{name}: no such path"
        own = {file: n for found in by_part for file, n in found.items()}
        for what, has in {"lines": sum(own.values()), "files": len(own)}.items():
            if has > most.get(what, has):
                problems.append(f"{name} has {has} {what}, {has - most[what]} more than its budget")
    assert not problems
