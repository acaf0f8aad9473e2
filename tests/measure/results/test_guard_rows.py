"""Rows of the guard: what identifies them, and their units."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from hybrid_kv.check.guard import checks
from hybrid_kv.check.guard.registry import CheckResult
from hybrid_kv.measure import guard_checks
from hybrid_kv.measure.results import UNITS, Row
from hybrid_kv.measure.results.guard_rows import result_rows

FILES = sorted(
    file
    for package in (checks, guard_checks)
    for file in Path(package.__path__[0]).glob("[!_]*.py")
)


def units_of(source: str) -> list[str]:
    """The units of all lines that a check yields, as they are written."""
    calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    made = [call for call in calls if ast.unparse(call.func) == "CheckResult"]
    return [ast.unparse(call.args[2]) for call in made]


def test_the_unit_of_each_check_is_a_rows() -> None:
    units = {file.stem: units_of(file.read_text()) for file in FILES}
    assert not {
        name: made for name, made in units.items() if not {*map(ast.literal_eval, made)} <= UNITS
    }
    # its lines are made elsewhere
    assert {name for name, made in units.items() if not made} <= {"router", "rounded_states"}


def test_a_unit_that_no_row_may_have_is_refused() -> None:
    with pytest.raises(ValueError, match="unit='pools' does not fit"):
        result_rows([CheckResult("pools", 0, "pools", "0", 1, section="toy")])


def test_params_say_what_was_run_and_nothing_of_what_came_out() -> None:
    """They are the identity of a series: equal in every run."""

    def rows_of(value: float, seconds: float) -> list[Row]:
        params, metrics = (
            {"mode": "all", "K": 3},
            {"hit_rate": value, "loaded_blocks": None, "seen": {"a": 1}},
        )
        check = CheckResult(
            f"all, mtp 3: hits {value:.0%}",
            0,
            "answers",
            ">= 0.5",
            9,
            "",
            params,
            metrics,
            section="answers",
            seconds=seconds,
        )
        return result_rows([check])

    one, other = rows_of(0.7, 1.25), rows_of(0.8, 2.5)
    assert [(row.metric, row.params_json) for row in one] == [
        (row.metric, row.params_json) for row in other
    ]
    assert {row.metric: row.value for row in one} == {
        "all/mtp_3": 0,
        "all/mtp_3:at_least": 0.5,
        "all/mtp_3:seconds": 1.25,
        "all/mtp_3:hit_rate": 0.7,
    }
    assert json.loads(one[0].params_json) == {"K": 3, "mode": "all"}
