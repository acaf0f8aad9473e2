"""One measurement, and no timing without proof that its result was right.

A row's `params` is compact JSON with sorted keys. A timing (a unit of time, or a ratio of times)
can only be built by `timing_row`, which takes a `Receipt` and stores it in `params` under
`receipt`; `Row` refuses a timing without one, so "fast but wrong" cannot be written, and the proof
travels with the number.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hybrid_kv.measure.results.schema import KINDS, TIME_UNITS, check_params

_CHECKED = (
    "suite",
    "benchmark",
    "metric",
    "value",
    "unit",
    "n",
    "better",
    "verdict",
    "baseline_commit",
)


def metric_key(name: str) -> str:
    """Return a stable key of a metric's name: `all/mtp_3` of `all, mtp 3: hits 70 %`.

    The rest after a colon is a metric.
    """
    return re.sub(r"[^a-z0-9./]+", "_", name.partition(": ")[0].lower().replace(", ", "/")).strip(
        "_"
    )


@dataclass(frozen=True)
class Receipt:
    """Proof that a timed result was right: compared with its reference before and after timing.

    `max_error` is None where only that it lies within its tolerance was kept.
    """

    checked_before: bool
    checked_after: bool
    max_error: float | None

    def __post_init__(self) -> None:
        if not (self.checked_before and self.checked_after):
            raise ValueError("a timing must be checked before and after it was taken")
        if self.max_error is not None and not 0 <= self.max_error < math.inf:
            raise ValueError(f"max_error={self.max_error} proves nothing")


@dataclass(frozen=True)
class Row:
    """One measurement.

    `better` is `lower`, `higher` or `equal`; `verdict` is `pass`, `fail`, `void` or empty.
    """

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
        if any(bound is not None and math.isinf(bound) for bound in (self.ci_low, self.ci_high)):
            raise ValueError(
                f"{self.benchmark} {self.metric}: {self.ci_low} to {self.ci_high} is not an "
                "interval"
            )
        for name in _CHECKED:
            value = getattr(self, name)
            try:
                KINDS[name].parse(str(value))
            except (ValueError, KeyError):
                raise ValueError(
                    f"{name}={value!r} does not fit; it takes {KINDS[name].takes}"
                ) from None
        # What no reader could hold is refused now, not when the row is read.
        check_params(self.params_json)
        if self.unit in TIME_UNITS:
            proof = self.params.get("receipt")
            if not isinstance(proof, Mapping):
                raise ValueError(
                    f"{self.benchmark} {self.metric} is a timing without a receipt; use timing_row"
                )
            Receipt(**proof)

    @property
    def params_json(self) -> str:
        return json.dumps(self.params, sort_keys=True, separators=(",", ":"), allow_nan=False)


def timing_row(*, receipt: Receipt, params: Mapping[str, Any] | None = None, **values: Any) -> Row:
    """Return a `Row` with a unit of time or `time ratio`, with a proof in `params`."""
    if values.get("unit") not in TIME_UNITS:
        raise ValueError(
            f"unit={values.get('unit')!r} is not a timing; use one of {', '.join(TIME_UNITS)}"
        )
    return Row(params={**(params or {}), "receipt": {**vars(receipt)}}, **values)
