"""One measurement, and no timing without proof that its result was right.

A row's `params` is compact JSON with sorted keys. A timing (a unit of time, or a ratio of times) can only be built by
`timing_row`, which asks for a `Receipt` and stores it in `params` under `receipt`; `Row` refuses a timing without one,
so "fast but wrong" cannot be written, and the proof travels with the number.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from hybrid_kv.results.schema import BETTER, MAX_COUNT, TIME_UNITS, UNITS, VERDICTS, check_params


def metric_key(name: str) -> str:
    """A stable key of a metric's name: `all, mtp 3: hits 70 %` is `all/mtp_3`; what follows a colon is a figure."""
    return re.sub(r"[^a-z0-9./]+", "_", name.partition(": ")[0].lower().replace(", ", "/")).strip("_")


@dataclass(frozen=True)
class Receipt:
    """Proof that a timed result was right: compared with its reference before and after the timing."""

    checked_before: bool
    checked_after: bool
    max_error: float

    def __post_init__(self) -> None:
        if not (self.checked_before and self.checked_after):
            raise ValueError("a timing must be checked before and after it was taken")
        if not math.isfinite(self.max_error) or self.max_error < 0:
            raise ValueError(f"max_error={self.max_error} proves nothing")


@dataclass(frozen=True)
class Row:
    """One measurement. `better` is `lower`, `higher` or `equal`; `verdict` is `pass`, `fail`, `void` or empty."""

    suite: str
    benchmark: str
    metric: str
    value: float
    unit: str = ""
    params: Mapping[str, Any] = field(default_factory=dict)
    ci_low: float | None = None
    ci_high: float | None = None
    n: int = 1
    better: str = "equal"
    verdict: str = ""
    baseline_commit: str = ""

    def __post_init__(self) -> None:
        if not math.isfinite(self.value):
            raise ValueError(f"{self.benchmark} {self.metric}={self.value} is no measurement")
        if any(bound is not None and math.isinf(bound) for bound in (self.ci_low, self.ci_high)):
            raise ValueError(f"{self.benchmark} {self.metric}: {self.ci_low} to {self.ci_high} is no interval")
        if self.unit not in UNITS:
            raise ValueError(f"unit={self.unit!r} is unknown; add it to hybrid_kv.results.UNITS if it is no time")
        if self.better not in BETTER:
            raise ValueError(f"better={self.better!r}; use lower, higher or equal")
        if self.verdict not in VERDICTS:
            raise ValueError(f"verdict={self.verdict!r}; use pass, fail, void or nothing")
        if not 0 <= self.n <= MAX_COUNT:
            raise ValueError(f"n={self.n} must be 0 to {MAX_COUNT}")
        for name in ("suite", "benchmark", "metric", "baseline_commit"):
            if not (text := getattr(self, name)).isprintable():
                raise ValueError(f"{name}={text!r} holds a line break or another sign that cannot be printed")
        check_params(self.params_json)  # What no reader could hold is refused now, not when the row is read.
        if self.unit in TIME_UNITS:
            proof = self.params.get("receipt")
            if not isinstance(proof, Mapping):
                raise ValueError(f"{self.benchmark} {self.metric} is a timing without a receipt; use timing_row")
            Receipt(**proof)

    @property
    def params_json(self) -> str:
        return json.dumps(self.params, sort_keys=True, separators=(",", ":"), allow_nan=False)


def timing_row(*, receipt: Receipt, params: Mapping[str, Any] | None = None, **values: Any) -> Row:
    """A `Row` whose unit is a unit of time or `time ratio`, with the proof of its result in `params`."""
    proof = {f.name: getattr(receipt, f.name) for f in fields(receipt)}
    if values.get("unit") not in TIME_UNITS:
        raise ValueError(f"unit={values.get('unit')!r} is not a timing; use one of {', '.join(TIME_UNITS)}")
    return Row(params={**(params or {}), "receipt": proof}, **values)
