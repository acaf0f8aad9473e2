"""One tiny model with random weights per family: a change to what they share is seen in all of them.

And the trained head of the guard model: a wrong slot of a draft changes no token, only the next draft, and the head of
a random model is hardly ever right.
"""

from __future__ import annotations

import random
import tempfile
import time
from pathlib import Path

from hybrid_kv.guard.exactness import LIMIT, MTP_CELLS, Alone, describe, difference_from
from hybrid_kv.guard.registry import CheckResult, Run, check
from hybrid_kv.models import registry

# In float32, of the largest logit. Weights and texts are the same in every run: in some random models of delta nets
# rounding alone grows to 6e-5, here and in transformers alike, as the engine in float64 shows of both.
TRANSFORMERS_LIMIT = 2e-5


def known() -> list[str]:
    """The families that have a tiny checkpoint."""
    import hybrid_kv.models.families  # noqa: F401  (registers them)

    return sorted(name for name, sizes in registry.sized().items() if "tiny" in sizes)


@check(
    "families", quick=2, full=99, seconds=2.5, place=45, needs="safetensors tokenizers transformers",
    factors=lambda: {"family": known()},
)  # fmt: skip
def check_families(run: Run) -> list[CheckResult]:
    """Logits in engines of every kind against each request alone, in float64; the quick guard draws its families."""
    from hybrid_kv.models.random_checkpoint import quiet, write_checkpoint

    results, chosen = [], [run.only["family"]] if run.only else draw(run)
    for model_type in chosen:
        begin = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            reference = write_checkpoint(model_type, Path(folder), "tiny")
            alone = Alone(folder, run.seed)
            found = [alone.check(cell) for cell in alone.cells()]
            with quiet():
                far, num_tokens = difference_from(reference, folder, _texts())
        problem = next((f"{describe(one.cell)}: {one.problem}" for one in found if one.problem), "")
        figures: dict[str, float] = {
            **{describe(one.cell).replace(", ", "_").replace(" ", "_"): one.worst for one in found},
            "cached_tokens": sum(one.cached_tokens for one in found),
            "accepted": sum(one.accepted for one in found),
            "preemptions": sum(one.preemptions for one in found),
        }
        results += [
            CheckResult(
                "families", f"largest logit difference, {model_type}", not problem,
                max(one.worst for one in found), "logit", f"{LIMIT:.0g}", sum(one.num_tokens for one in found),
                time.perf_counter() - begin, problem, {"family": model_type, "seed": run.seed}, figures,
            ),
            CheckResult(
                "families", f"distance from transformers, {model_type}", far <= TRANSFORMERS_LIMIT,
                far, "share", f"<= {TRANSFORMERS_LIMIT:.0e}", num_tokens, 0.0,
                "" if far <= TRANSFORMERS_LIMIT else "logits of whole texts differ in float32",
                {"family": model_type},
            ),
        ]  # fmt: skip
        run.progress(run.amount / len(chosen))
    return results if run.only else [*results, _trained_head(run.seed)]


def draw(run: Run) -> list[str]:
    """The families of a run, as many as its amount."""
    names = known()
    return sorted(random.Random(run.seed).sample(names, min(run.amount, len(names))))


def _texts() -> list[list[int]]:
    """Token ids that every tiny vocabulary has."""
    rng = random.Random(0)
    return [[rng.randrange(1, 100) for _ in range(length)] for length in (100, 61, 1, 33)]


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
