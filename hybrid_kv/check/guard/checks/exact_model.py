"""Engine against oracle on the integer model; void unless every pattern and pair happened."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import closing
from typing import Any

from hybrid_kv.check.guard.forced import FORCED
from hybrid_kv.check.guard.patterns import REQUIRED
from hybrid_kv.check.guard.play import Differences, run_scenarios
from hybrid_kv.check.guard.registry import CheckResult, Run, check
from hybrid_kv.check.guard.replay import to_json
from hybrid_kv.check.guard.traffic import (
    FACTORS,
    SCENARIOS_PER_RUN,
    combinations_of,
    has_levels,
    required_combinations,
    rows_with,
)

Combination = tuple[tuple[str, Any], ...]  # two or three factors, with a level each
# Times. With some seeds a pair does not happen in its row of the design (no draft of it was
# rejected, say). All rows have 2,750 to 3,000 requests, by the seed: no size of guard runs fewer.
AGAIN = 8


@check(
    "exact model",
    quick=3100,
    full=3600,
    long=100_000,
    seconds=0.0066,
    place=30,
    factors=lambda: FACTORS,
    runs="spread",
)
def check_exact_model(run: Run) -> Iterator[CheckResult]:
    """Compare the engine with the oracle on the integer model, until `run.amount` requests ran.

    Tokens must be equal.

    A row of the design in which a pair of settings did not happen runs again with other traffic.

    With `run.only` the rows of the covering design that have these levels are run, all of them.
    Forced patterns are not required: these belong to scenarios with settings of their own.
    """
    begin = time.perf_counter()
    total = Differences()
    failed_after = None
    requests = dict[str, int]()
    numbers = rows_with(run.only) if run.only else range(SCENARIOS_PER_RUN)
    required = {chosen for chosen in required_combinations() if has_levels(dict(chosen), run.only)}
    for result in _results(run, numbers, total, required):
        run.progress(min(result.num_requests, max(0, run.amount - total.num_requests)))
        total += result
        if result.wrong and failed_after is None:
            failed_after = time.perf_counter() - begin
            requests = {"requests_to_failure": total.num_requests}
        if total.wrong and run.fail_fast:
            break
    wrong = total.wrong
    untried = _untried(total, required)
    missing = [name for name in REQUIRED if not total.seen[name]]
    params = {"seed": run.seed, **run.only}
    metrics = {"scenarios": total.num_scenarios}
    # Reduced soonest.
    shortest = min(wrong, key=lambda failure: failure.scenario.num_tokens, default=None)
    yield CheckResult(
        "wrong tokens, exact model",
        len(wrong),
        "requests",
        "0",
        total.num_requests,
        str(wrong[0]) if wrong else "",
        params,
        {**metrics, **requests},
        failed_after=failed_after,
        case=to_json(shortest.scenario, shortest.rule) if shortest else "",
    )
    if not run.only:
        yield CheckResult(
            "request patterns covered",
            len(REQUIRED) - len(missing),
            "patterns",
            str(len(REQUIRED)),
            total.num_scenarios,
            f"void: never happened: {', '.join(missing)}" if missing else "",
            params,
            {**metrics, "seen": {name: total.seen[name] for name in REQUIRED}},
        )
    void = f"void: {len(untried)} never ran, such as {dict(untried[0])}" if untried else ""
    if run.only and not total.cells:
        void = "void: no row of the design has all of these settings"
    yield CheckResult(
        "pairs and triples of settings covered",
        len(required) - len(untried),
        "settings",
        str(len(required)),
        total.num_scenarios,
        void,
        params,
        metrics | ({"seen": dict(total.seen)} if run.only else {}),
    )


def _results(
    run: Run, numbers: Iterable[int], total: Differences, required: Iterable[Combination]
) -> Iterator[Differences]:
    """Yield scenarios by number, until `total` has enough of them.

    Then follow the rows of the design that have shown too little.
    """
    first = run.seed * SCENARIOS_PER_RUN
    seeds = (first + number for number in numbers)
    with closing(run_scenarios(seeds, run.pool, run.workers)) as runs:
        for result in runs:
            yield result
            if total.num_requests >= run.amount and not run.only:
                break
    if total.num_scenarios < len(rows_with(run.only)) + len(FORCED) * (not run.only):
        return  # not all rows of the design ran
    for again in range(1, AGAIN + 1):
        rows = sorted({rows_with(dict(chosen))[0] for chosen in _untried(total, required)})
        yield from run_scenarios((first + again * SCENARIOS_PER_RUN + row for row in rows), None, 1)


def _untried(total: Differences, required: Iterable[Combination]) -> list[Combination]:
    return sorted(set(required).difference(*map(combinations_of, total.cells)), key=repr)
