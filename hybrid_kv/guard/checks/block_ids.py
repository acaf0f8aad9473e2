"""The cost of the engine's block-id path, against the alternatives in the same run."""

from __future__ import annotations

import time

from hybrid_kv.guard.registry import CheckResult, Run, check


@check("block ids", quick=1, full=1, seconds=2.2, place=70, runs="alone")
def check_expansion(run: Run) -> list[CheckResult]:
    """The engine's block-id path against models of vLLM's, as ratios in one run.

    A ratio must reach what the benchmark requires. Results of a machine that is unfit for timing carry the mark.
    """
    from hybrid_kv.timing.block_ids import BLOCKS_PER_KV_BLOCK, guarded_ratios, required_ratio
    from hybrid_kv.timing.fitness import MARK_SECONDS, examine

    begin = time.perf_counter()
    ratios = guarded_ratios()
    run.progress(1)
    unfit = examine(MARK_SECONDS).unfit
    seconds = time.perf_counter() - begin
    results = []
    for (scenario, subject), ratio in ratios.items():
        required = required_ratio(scenario, subject)
        detail = ""
        if ratio.high < required:
            detail = f"the interval {ratio.low:.2f} to {ratio.high:.2f} is below {required:.3g}"
        params = {"blocks_per_kv_block": BLOCKS_PER_KV_BLOCK, **({"unfit": unfit} if unfit else {})}
        results.append(
            CheckResult(
                "block ids", f"{scenario}, {subject}, over the engine", not detail, ratio.value, "time ratio",
                f">= {required:.3g}", 1, seconds, detail, params, {}, (ratio.low, ratio.high),
            )
        )  # fmt: skip
        seconds = 0.0
    return results
