"""A new benchmark is one file: no list, no registration. Here it lies in a folder of its own."""

import sys

import pytest

import bench
from bench.harness import registry

SUITE = """
from hybrid_kv.timing.cases import Case, Cell, grid


def total(seed: int, count: int) -> Case:
    numbers = range(seed, seed + count)

    return Case(lambda: sum(numbers), lambda: 0.0)


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


def test_a_new_benchmark_is_found_by_being_there(add_file):
    assert "toy" not in registry.suites()
    add_file(SUITE)
    assert "toy" in registry.suites()
    assert [cell.key for cell in registry.cells() if cell.suite == "toy"] == [
        "toy/total[count=10]",
        "toy/total[count=1000]",
    ]


def test_a_module_without_cells_is_no_suite(add_file):
    add_file("from bench.memory import cells\n")
    assert "toy" not in registry.suites()
