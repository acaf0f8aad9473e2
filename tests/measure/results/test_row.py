"""A row refuses nonsense, and a timing what has not been proved."""

from __future__ import annotations

from typing import Any

import pytest

from hybrid_kv.measure.results import TIME_UNITS, Receipt, Row, timing_row
from tests.measure.results.rows import PROOF


@pytest.mark.parametrize("unit", TIME_UNITS)
def test_a_timing_needs_a_receipt(unit: str) -> None:
    values = {"suite": "s", "benchmark": "b", "metric": "m", "value": 1.0, "unit": unit}
    with pytest.raises(ValueError, match="without a receipt"):
        Row(**values)
    with pytest.raises(ValueError, match="before and after"):
        Row(
            **values,
            params={"receipt": {"checked_before": True, "checked_after": False, "max_error": 0.0}},
        )
    assert timing_row(**values, receipt=PROOF).params["receipt"]["checked_after"] is True


@pytest.mark.parametrize("error", [float("nan"), float("inf"), -1.0])
def test_a_receipt_proves_something(error: float) -> None:
    with pytest.raises(ValueError, match="proves nothing"):
        Receipt(checked_before=True, checked_after=True, max_error=error)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"value": float("nan")}, "value"),
        ({"better": "up"}, "better"),
        ({"verdict": "ok"}, "verdict"),
        ({"metric": "a\nb"}, "metric"),
        ({"benchmark": "a\r"}, "benchmark"),
        ({"ci_low": 0.0, "ci_high": float("inf")}, "0.0 to inf is not an interval"),
        ({"params": {"limit": float("nan")}}, "JSON"),
        ({"params": {"limit": 2**63}}, "64 bits"),
        ({"unit": "seconds"}, "unit='seconds' does not fit"),
        ({"n": -1}, "n=-1 does not fit"),
    ],
)
def test_rows_refuse_nonsense(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Row(**{"suite": "s", "benchmark": "b", "metric": "value", "value": 1.0, **wrong})
