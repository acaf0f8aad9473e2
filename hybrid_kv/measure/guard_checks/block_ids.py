"""The cost of the engine's block-id path, against the alternatives in the same run."""

from __future__ import annotations

from collections.abc import Iterator

from hybrid_kv.check.guard.registry import CheckResult, Run, check


@check("block ids", quick=1, full=1, seconds=2.2, place=70, runs="alone")
def check_expansion(run: Run) -> Iterator[CheckResult]:
    """Compare the engine's block-id path with models of vLLM's, as ratios in one run.

    A ratio must reach what the benchmark requires. Results of a machine that is unfit for timing
    carry the mark.
    """
    from hybrid_kv.measure.timing.block_ids import (
        BLOCKS_PER_KV_BLOCK,
        guarded_ratios,
        required_ratio,
    )
    from hybrid_kv.measure.timing.fitness import MARK_SECONDS, examine

    ratios = guarded_ratios()
    run.progress(1)
    unfit = examine(MARK_SECONDS).unfit
    params = {"blocks_per_kv_block": BLOCKS_PER_KV_BLOCK, **({"unfit": unfit} if unfit else {})}
    for (scenario, subject), ratio in ratios.items():
        required = required_ratio(scenario, subject)
        detail = f"the interval {ratio.low:.2f} to {ratio.high:.2f} is below {required:.3g}"
        yield CheckResult(
            f"{scenario}, {subject}, over the engine",
            ratio.value,
            "time ratio",
            f">= {required:.3g}",
            1,
            detail if ratio.high < required else "",
            params,
            interval=(ratio.low, ratio.high),
        )
