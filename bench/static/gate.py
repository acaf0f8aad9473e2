"""Comparing with a baseline: what must not get worse, and what is appended when it may.

Hard gates: a spill, a kernel that no longer compiles or fits an SM, state accessed in less than 128
bit, fewer blocks per SM than the baseline, narrower state access than the baseline. Soft gate: 5 %
more instructions per byte. The metrics see no trip counts, no latency inside a block, no cache hits
and no launches: equal metrics do not mean equal speed, worse ones nearly always mean slower.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.static.compile import UNITS, Measured, Measurement, jobs, measure
from hybrid_kv.check.progress import progress_bar
from hybrid_kv.config import HybridKVError
from hybrid_kv.measure.results import Row, provenance, read_rows

STATE_BITS = 128
SOFT_LIMIT = 1.05
Baseline = Mapping[tuple[str, str, str, str], Mapping[str, float]]


def read_baseline(path: Path, triton: str) -> Baseline:
    """Return the newest values of each (kernel, shape, dtype, target) under this version of Triton.

    They are empty without a file.
    """
    found: dict[tuple[str, str, str, str], dict[str, float]] = {}
    if path.exists():
        frame = read_rows(path)
        frame = frame[(frame["suite"] == "kernels") & (frame["triton"] == triton)]
        for row in frame[["benchmark", "params", "metric", "value"]].to_dict("records"):
            params = json.loads(row["params"])
            key = row["benchmark"], params["shape"], params["dtype"], params["target"]
            found.setdefault(key, {})[row["metric"]] = float(row["value"])
    return found


@dataclass
class Verdict:
    """A measurement with what is wrong with it: `failures` are hard, `warnings` soft.

    Others' kernels are not gated.
    """

    measurement: Measurement
    failures: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    is_new: bool = False
    is_gated: bool = True

    @property
    def word(self) -> str:
        if self.failures:
            return "FAILED"
        if not self.is_gated:
            return ""
        return "warning" if self.warnings else ("new" if self.is_new else "ok")


def judge(measurement: Measurement, baseline: Baseline, accept: bool = False) -> Verdict:
    """Apply the gates; with `accept` only those that need no baseline."""
    verdict = Verdict(measurement)
    metrics, then = measurement.metrics, baseline.get(measurement.key)
    if metrics is None:
        verdict.failures.append(measurement.error)
        return verdict
    if metrics.spill_bytes:
        verdict.failures.append(
            f"spills {metrics.spill_bytes} bytes per thread; fewer rows per program, or more warps"
        )
    if not metrics.blocks_per_sm:
        verdict.failures.append(
            f"no block fits: {metrics.registers} registers, {metrics.shared_bytes} bytes shared"
        )
    width = max(metrics.load_bits, metrics.store_bits)
    if measurement.state_access and width < STATE_BITS:
        verdict.failures.append(f"accesses state in {width} bit, not {STATE_BITS}")
    verdict.is_new = then is None
    if then is None or accept:
        return verdict
    now = measurement.values()
    for name, what in (
        ("blocks_per_sm", "blocks per SM"),
        ("load_bits", "bit loads"),
        ("store_bits", "bit stores"),
    ):
        relevant = name == "blocks_per_sm" or measurement.state_access
        if relevant and now[name] < then.get(name, 0):
            verdict.failures.append(f"{now[name]:.0f} {what} instead of {then[name]:.0f}")
    count = f"{metrics.isa}_instructions"
    name = f"{count}_per_byte" if f"{count}_per_byte" in now else count
    if now[name] > SOFT_LIMIT * then.get(name, float("inf")):
        verdict.warnings.append(
            f"{name.replace('_', ' ')} {now[name]:.4g} instead of {then[name]:.4g}"
        )
    return verdict


def run(
    modules: Sequence[str],
    targets: Sequence[str],
    baseline: Path,
    accept: bool,
    select: Sequence[str] | None = None,
) -> list[Verdict]:
    """Measure and judge every case whose kernel has one of `select` in its name.

    A progress bar is shown.

    Raises:
        HybridKVError: there is none.
    """
    known = read_baseline(baseline, provenance().triton)
    total = len(jobs(modules, targets, select))
    if not total:
        raise HybridKVError(f"no kernel has {' or '.join(select or ())!r} in its name")
    bar = progress_bar(measure(modules, targets, select), "kernels", total)
    return [judge(one, known, accept) for one in bar]


def run_peers(targets: Sequence[str]) -> list[Verdict]:
    """Measure the kernels of other packages.

    One that does not compile has a warning, and nothing else is judged.
    """
    found = measure(["bench.peers.kernels"], targets)
    return [
        Verdict(one, warnings=[one.error] if one.error else [], is_gated=False) for one in found
    ]


def result_rows(one: Measured) -> list[Row]:
    """Return one row per metric."""
    rows, units = [], {**UNITS, "bytes": ("B", "lower")}
    for name, value in one.values().items():
        unit, better = units[name.split("_", 1)[1] if "instructions" in name else name]
        params: dict[str, Any] = {name: getattr(one, name) for name in ("shape", "dtype", "target")}
        rows.append(
            Row("kernels", one.kernel, name, value, unit, params, better=better, verdict="pass")
        )
    return rows


def changed_rows(measured: Iterable[Measured], baseline: Path) -> list[Row]:
    """Return the rows of those that the baseline does not hold already."""
    known = read_baseline(baseline, provenance().triton)
    return [
        row for one in measured if one.values() != known.get(one.key) for row in result_rows(one)
    ]
