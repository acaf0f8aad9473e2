"""The cost of drafts and caching to each other: none, as counts of one traffic run three times."""

from __future__ import annotations

from collections.abc import Iterator

from hybrid_kv.check.guard.play import play
from hybrid_kv.check.guard.registry import CheckResult, Run, check
from hybrid_kv.check.guard.traffic import SCENARIOS_PER_RUN, draw_trio


@check("costs", quick=12, full=24, long=48, seconds=0.3, place=35)
def check_costs(run: Run) -> Iterator[CheckResult]:
    """Send the same requests with and without drafts, and with and without a cache.

    Drafts must not cost a cached token, caching must not cost an accepted draft.
    """
    wrong: list[str] = []
    num_cached = num_accepted = 0
    for trial in range(run.amount):
        trio = draw_trio(run.seed * SCENARIOS_PER_RUN + trial)
        results, outputs = zip(*map(play, trio), strict=True)
        errors = [str(error) for result in results for error in result.wrong]
        for i, (both, cached, drafted) in enumerate(zip(*outputs, strict=not errors)):
            num_cached += both.cached_tokens
            num_accepted += both.num_accepted_draft_tokens
            metrics = (both.cached_tokens, both.num_accepted_draft_tokens)
            due = (cached.cached_tokens, drafted.num_accepted_draft_tokens)
            if metrics != due:
                errors.append(
                    f"{trio[0]}: request {i} has {metrics[0]} cached tokens "
                    f"and {metrics[1]} accepted drafts; without drafts "
                    f"{due[0]} are cached, without a cache {due[1]} are accepted"
                )
        wrong += errors
        run.progress(1)
    detail = (
        wrong[0]
        if wrong
        else ""
        if num_cached and num_accepted
        else "void: no hit, or no accepted draft"
    )
    counted = {"cached_tokens": num_cached, "accepted_drafts": num_accepted}
    yield CheckResult(
        "hits lost to drafts, drafts lost to caching",
        len(wrong),
        "requests",
        "0",
        run.amount,
        detail,
        {"seed": run.seed},
        counted,
        section="exact model",
    )
