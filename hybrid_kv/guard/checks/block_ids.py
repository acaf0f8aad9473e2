"""The cost of the engine's block-id path, against the alternatives in the same run."""

from __future__ import annotations

import json
import time

from hybrid_kv.guard.registry import CheckResult, Run, check


@check("block ids", quick=1, full=1, seconds=2.2, place=70, runs="alone")
def check_expansion(run: Run) -> list[CheckResult]:
    """The engine's block-id path against the alternatives, as ratios in one run.

    A ratio must reach what the benchmark requires, and half of the best that `results/microbench.csv` has for this
    kind of machine: the other half is left to a busy one. What a machine says that is unfit for times carries the mark.
    """
    from hybrid_kv.timing.block_ids import quick_ratios, recorded_ratios, required_ratio
    from hybrid_kv.timing.fitness import MARK_SECONDS, examine

    begin = time.perf_counter()
    all_recorded = recorded_ratios()
    cells = []
    for benchmark, params, ratio, low, high in quick_ratios():
        recorded = all_recorded.get((benchmark, json.dumps(params, sort_keys=True)), 0.0)
        required = max(required_ratio(benchmark, params), recorded / 2)
        rival = f"{params['scenario']}, {params['subject']}" if benchmark == "step" else "one append, fastest rival"
        cells.append((rival, ratio / required, ratio, low, high, required, params))
    run.progress(1)
    unfit = examine(MARK_SECONDS).unfit
    seconds = time.perf_counter() - begin
    results = []
    for name in dict.fromkeys(cell[0] for cell in cells):
        own = [cell for cell in cells if cell[0] == name]
        _, _, ratio, low, high, required, params = min(own, key=lambda cell: cell[1])
        where = ", ".join(f"{key}={value}" for key, value in params.items())
        detail = "" if high >= required else f"{where}: interval {low:.2f} to {high:.2f} is below {required:.3g}"
        results.append(
            CheckResult(
                "block ids", f"{name}, over the engine", not detail, ratio, "time ratio", f">= {required:.3g}",
                len(own), seconds, detail, {"unfit": unfit} if unfit else {}, params, (low, high),
            )
        )  # fmt: skip
        seconds = 0.0
    return results
