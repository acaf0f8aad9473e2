"""A new benchmark is one file: no list, no registration. Here it lies in a folder of its own."""

import sys

import pytest

import bench
from bench.__main__ import main
from bench.harness import registry
from hybrid_kv.results import read_rows

SUITE = """
from hybrid_kv.timing.cases import Case, Cell, WrongResultError, grid


def total(seed: int, count: int) -> Case:
    numbers = range(seed, seed + count)

    def check() -> float:
        if sum(numbers) != count * seed + count * (count - 1) // 2 + WRONG_BY:
            raise WrongResultError("another total")
        return 0.0

    return Case(lambda: sum(numbers), check)


def cells() -> list[Cell]:
    return [*grid("toy", "total", "cpu", total, {"count": (10, 1000)}, [(10,)])]
"""


@pytest.fixture
def add_file(tmp_path, monkeypatch):
    """Lets a file of this text be `bench/toy.py`."""

    def add(text):
        (tmp_path / "toy.py").write_text(text)
        monkeypatch.setattr(bench, "__path__", [*bench.__path__, str(tmp_path)])
        monkeypatch.delitem(sys.modules, "bench.toy", raising=False)
        monkeypatch.delattr(bench, "toy", raising=False)

    return add


def test_a_new_benchmark_is_one_file(add_file, tmp_path, capsys):
    assert "toy" not in registry.suites()
    add_file(SUITE.replace("WRONG_BY", "0"))
    assert "toy" in registry.suites()
    assert [cell.key for cell in registry.cells() if cell.suite == "toy"] == [
        "toy/total[count=10]",
        "toy/total[count=1000]",
    ]
    assert main(["--suite", "toy", "--out", str(tmp_path / "rows.csv")]) == 0
    assert "toy/total, cpu time" in capsys.readouterr().out
    assert list(read_rows(tmp_path / "rows.csv")["params"].str.contains("checked_after")) == [True, True]


def test_a_new_benchmark_that_is_wrong_is_not_timed(add_file, capsys):
    add_file(SUITE.replace("WRONG_BY", "1"))
    assert main(["--suite", "toy"]) == 1
    assert capsys.readouterr().err == "error: toy/total[count=10]: another total; nothing was timed\n"


def test_a_module_without_cells_is_no_suite(add_file):
    add_file("from bench.memory import cells\n")
    assert "toy" not in registry.suites()
