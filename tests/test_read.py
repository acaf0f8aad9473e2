"""`docs/read.md` names existing files, says how long they take, and answers as the code does."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "hybrid_kv"
PAGE = (ROOT / "docs/read.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| \d+ \| `([\w/]+\.py)` \| (\d+) \| (\d+) \|", re.MULTILINE)
FILES = {file: (int(lines), int(minutes)) for file, lines, minutes in ROW.findall(PAGE)}
LINES_AN_HOUR = 250
WHERE = re.compile(r"`([\w/]+\.py)`:((?:\s+`[\w.]+`,?)+)")


def lines_of_code(file: str) -> list[int]:
    """Numbers of the lines that are neither blank nor a comment nor of a docstring."""
    text = (PACKAGE / file).read_text(encoding="utf-8")
    prose: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if (
            isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
            and ast.get_docstring(node) is not None
        ):
            first = node.body[0]
            prose |= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    lines = enumerate(text.splitlines(), 1)
    return [
        n
        for n, line in lines
        if n not in prose and line.strip() != "" and not line.lstrip().startswith("#")
    ]


def definitions_in(file: str) -> dict[str, range]:
    """Lines of functions, classes, and methods, these both with and without their class."""
    places: dict[str, range] = {}
    for node in ast.walk(ast.parse((PACKAGE / file).read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            places[node.name] = range(node.lineno, (node.end_lineno or node.lineno) + 1)
        if isinstance(node, ast.ClassDef):
            methods = [child for child in node.body if isinstance(child, ast.FunctionDef)]
            places |= {
                f"{node.name}.{m.name}": range(m.lineno, (m.end_lineno or m.lineno) + 1)
                for m in methods
            }
    return places


@pytest.mark.parametrize("file", FILES)
def test_a_file_is_as_long_as_the_page_says(file: str) -> None:
    lines, minutes = FILES[file]
    assert abs(len(lines_of_code(file)) - lines) <= max(3, lines // 10)
    assert minutes == round(lines * 60 / LINES_AN_HOUR)


def test_the_sum_is_that_of_the_files() -> None:
    stated = re.search(
        r"files of ([\d,]+) lines of code: at 250 lines an hour ([\d.]+) hours", PAGE
    )
    assert stated is not None
    total = sum(lines for lines, _ in FILES.values())
    assert int(stated[1].replace(",", "")) == total
    assert float(stated[2]) == pytest.approx(total / LINES_AN_HOUR, abs=0.25)


def test_the_first_reading_is_as_long_as_the_page_says() -> None:
    section = PAGE.partition("## In a first reading")[2].partition("## A block")[0]
    stated = re.search(r"([\d,]+) lines, ([\d.]+) hours", section)
    assert stated is not None
    total = 0
    for file, names in WHERE.findall(section):
        assert file in FILES
        places = definitions_in(file)
        total += sum(
            line in places[name]
            for name in re.findall(r"[\w.]+", names)
            for line in lines_of_code(file)
        )
    assert abs(int(stated[1].replace(",", "")) - total) <= total // 20
    assert float(stated[2]) == pytest.approx(total / LINES_AN_HOUR, abs=0.2)


def test_each_answer_names_code_that_is_there() -> None:
    questions, _, answers = PAGE.partition("## Eleven questions")[2].partition("<details")
    numbers = [str(n) for n in range(1, 12)]
    assert re.findall(r"^(\d+)\. ", questions, re.MULTILINE) == numbers
    each = re.split(r"^\d+\. ", answers.partition("</details>")[0], flags=re.MULTILINE)[1:]
    assert len(each) == len(numbers)
    for answer in each:
        places = WHERE.findall(answer)
        assert places, answer
        for file, names in places:
            assert file in FILES
            assert set(re.findall(r"[\w.]+", names)) <= set(definitions_in(file)), (file, names)
