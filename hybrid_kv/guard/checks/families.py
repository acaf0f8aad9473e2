"""One tiny model with random weights per family: a change to what they share is seen in all of them."""

from __future__ import annotations

import random
import tempfile
import time
from pathlib import Path

from hybrid_kv.guard.exactness import LIMIT, Alone, describe
from hybrid_kv.guard.registry import CheckResult, Run, check


@check("families", quick=2, full=99, seconds=2.5, place=45, needs="safetensors tokenizers transformers")
def check_families(run: Run) -> list[CheckResult]:
    """Logits in engines of every kind against each request alone, in float64; the quick guard draws its families."""
    from hybrid_kv.models.random_checkpoint import write_checkpoint
    from hybrid_kv.models.registry import sized

    known = sorted(name for name, sizes in sized().items() if "tiny" in sizes)
    chosen = sorted(random.Random(run.seed).sample(known, min(run.amount, len(known))))
    results = []
    for model_type in chosen:
        begin = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            write_checkpoint(model_type, Path(folder), "tiny", run.seed)
            alone = Alone(folder, run.seed)
            found = [alone.check(cell) for cell in alone.cells()]
        problem = next((f"{describe(one.cell)}: {one.problem}" for one in found if one.problem), "")
        figures = {
            "cells": len(found),
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
    return results
