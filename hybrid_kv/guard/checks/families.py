"""One tiny model with random weights per family: a change to what they share is seen in all of them.

And the trained head of the guard model: a wrong slot of a draft changes no token, only the next draft, and the head of
a random model is hardly ever right.
"""

from __future__ import annotations

import random
import tempfile
import time
from pathlib import Path

from hybrid_kv.guard.exactness import LIMIT, MTP_CELLS, Alone, describe
from hybrid_kv.guard.registry import CheckResult, Run, check
from hybrid_kv.models import registry


@check("families", quick=2, full=99, seconds=2.5, place=45, needs="safetensors tokenizers transformers")
def check_families(run: Run) -> list[CheckResult]:
    """Logits in engines of every kind against each request alone, in float64; the quick guard draws its families."""
    from hybrid_kv.models.random_checkpoint import write_checkpoint

    results, chosen = [], draw(run)
    for model_type in chosen:
        begin = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            write_checkpoint(model_type, Path(folder), "tiny", run.seed)
            alone = Alone(folder, run.seed)
            found = [alone.check(cell) for cell in alone.cells()]
        problem = next((f"{describe(one.cell)}: {one.problem}" for one in found if one.problem), "")
        figures: dict[str, float] = {
            **{describe(one.cell): one.worst for one in found},
            "cached_tokens": sum(one.cached_tokens for one in found),
            "accepted": sum(one.accepted for one in found),
            "preemptions": sum(one.preemptions for one in found),
        }
        results.append(
            CheckResult(
                "families", f"largest logit difference, {model_type}", not problem,
                max(one.worst for one in found), "logit", f"{LIMIT:.0g}", sum(one.num_tokens for one in found),
                time.perf_counter() - begin, problem, {"family": model_type, "seed": run.seed}, figures,
            )
        )  # fmt: skip
        run.progress(run.amount / len(chosen))
    return [*results, _trained_head(run.seed)]


def draw(run: Run) -> list[str]:
    """The families of a run, as many as its amount."""
    known = sorted(name for name, sizes in registry.sized().items() if "tiny" in sizes)
    return sorted(random.Random(run.seed).sample(known, min(run.amount, len(known))))


def _trained_head(seed: int) -> CheckResult:
    from hybrid_kv.accuracy.guard_model import FOLDER

    begin = time.perf_counter()
    alone = Alone(FOLDER, seed)
    found = [alone.check(cell) for cell in MTP_CELLS]
    problem = next((f"{describe(one.cell)}: {one.problem}" for one in found if one.problem), "")
    accepted = {"accepted": sum(one.accepted for one in found), "cells": len(found)}
    return CheckResult(
        "families", "drafts of the trained head unlike those alone", not problem,
        sum(one.wrong_drafts for one in found), "drafts", "0", sum(one.num_drafts for one in found),
        time.perf_counter() - begin, problem, {"seed": seed}, accepted,
    )  # fmt: skip
