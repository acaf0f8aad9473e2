"""Tiny models with random weights, one per family: a shared change is seen in all of them.

And the trained heads of the guard models: a wrong slot of a draft changes no token, only the next
draft, and the head of a random model is hardly ever right.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hybrid_kv.check.checkout import changed_modules
from hybrid_kv.check.guard.exactness import (
    FLOAT32_LIMIT,
    FLOAT64_LIMIT,
    MTP_CELLS,
    Alone,
    Compared,
    describe,
)
from hybrid_kv.check.guard.logits import LogitCase, from_transformers, to_json
from hybrid_kv.check.guard.narrow import LIMIT, compare_paths
from hybrid_kv.check.guard.registry import CheckResult, Run, check
from hybrid_kv.check.guard.trained import TRAINED, Trained
from hybrid_kv.models import registry
from hybrid_kv.models.config_file import ConfigFile


def known() -> list[str]:
    """Return the families that have a tiny checkpoint."""
    import hybrid_kv.models.families  # noqa: F401  (registers them)

    return sorted(name for name, sizes in registry.sized().items() if "tiny" in sizes)


@check(
    "families",
    quick=2,
    full=6,
    long=99,
    seconds=7.0,
    place=45,
    needs="safetensors tokenizers transformers",
    factors=lambda: {"family": known()},
)
def check_families(run: Run) -> Iterator[CheckResult]:
    """Compare logits in engines of every kind with each request alone, in float64.

    Only a long guard takes all families. Of those that are not drawn one engine is compared with
    transformers, and each path's states in bfloat16.
    """
    from hybrid_kv.models.random_checkpoint import quiet, write_checkpoint

    drawn = [run.only["family"]] if run.only else draw(run)
    every = drawn if run.only else known()
    for model_type in every:
        with tempfile.TemporaryDirectory() as folder, quiet():
            reference = write_checkpoint(model_type, Path(folder), "tiny")
            if model_type in drawn:
                yield _beside_itself(model_type, folder, run.seed)
            yield _beside_transformers(model_type, folder, reference)
            yield from _in_bfloat16(model_type, folder, run.seed)
        run.progress(run.amount / len(every))
    for model in () if run.only else TRAINED.values():
        yield _trained_head(model, run.seed)


def draw(run: Run) -> list[str]:
    """Return the families of a run, as many as its amount.

    Those whose files have changed since the last commit come first, then any.
    """
    names = known()
    rng = random.Random(run.seed)
    drawn = rng.sample(names, min(run.amount, len(names)))
    changed = [name for name in names if not _modules(name).isdisjoint(changed_modules())]
    return sorted([*dict.fromkeys(rng.sample(changed, len(changed)) + drawn)][: len(drawn)])


def _modules(model_type: str) -> set[str]:
    """Return the modules in which a family and its draft head are defined."""
    file = ConfigFile({"model_type": model_type}, "the guard")
    family = registry.family_of(file)
    head = registry.head_of(file)
    functions = family.kinds, family.build, family.convert_weights, head and head.build
    return {
        getattr(function, "func", function).__module__
        for function in functions
        if function is not None
    }


def _beside_itself(model_type: str, folder: str, seed: int) -> CheckResult:
    alone = Alone(folder, seed)
    compared = [alone.check(cell) for cell in alone.cells()]
    problem, case = _first_problem(model_type, alone, compared)
    metrics: dict[str, float] = {
        **{
            describe(result.cell).replace(", ", "_").replace(" ", "_"): result.worst
            for result in compared
        },
        "cached_tokens": sum(result.cached_tokens for result in compared),
        "accepted": sum(result.accepted for result in compared),
        "preemptions": sum(result.preemptions for result in compared),
    }
    return CheckResult(
        f"largest logit difference, {model_type}",
        max(result.worst for result in compared),
        "logit",
        f"{FLOAT64_LIMIT:.0g}",
        sum(result.num_tokens for result in compared),
        problem,
        {"family": model_type, "seed": seed},
        metrics,
        case=case,
    )


def _beside_transformers(model_type: str, folder: str, reference: Any) -> CheckResult:
    whole = LogitCase("transformers", model_type, {"max_num_batched_tokens": 37}, _texts())
    far, num_tokens = from_transformers(reference, folder, whole)
    detail = "" if far <= FLOAT32_LIMIT else "logits of whole texts differ in float32"
    return CheckResult(
        f"distance from transformers, {model_type}",
        far,
        "share",
        f"<= {FLOAT32_LIMIT:.0e}",
        num_tokens,
        detail,
        {"family": model_type},
        case=to_json(whole, "logits") if detail else "",
    )


def _in_bfloat16(model_type: str, folder: str, seed: int) -> Iterator[CheckResult]:
    furthest = compare_paths(folder, seed)
    if furthest.num_paths:
        detail = (
            f"states behind {furthest.path} are {furthest.worst:.2g} away from those of one prefill"
        )
        yield CheckResult(
            f"states in float32 beside bfloat16, {model_type}",
            furthest.worst,
            "share",
            f"<= {LIMIT:.0g}",
            furthest.num_paths,
            detail if furthest.worst > LIMIT else "",
            {"family": model_type, "seed": seed},
        )


def _texts() -> list[list[int]]:
    """Token ids that every tiny vocabulary has."""
    rng = random.Random(0)
    return [[rng.randrange(1, 100) for _ in range(length)] for length in (100, 61, 1, 33)]


def _first_problem(model: str, alone: Alone, compared: Sequence[Compared]) -> tuple[str, str]:
    """Return what is wrong in the first cell that failed, and its case."""
    for result in compared:
        if result.problem:
            case = LogitCase("alone", model, result.cell, alone.prompts, alone.again)
            rule, _ = result.broken
            return f"{describe(result.cell)}: {result.problem}", to_json(case, rule) if rule else ""
    return "", ""


def _trained_head(model: Trained, seed: int) -> CheckResult:
    alone = Alone(model.folder, seed)
    # All but the first model get one of the cells, by the seed.
    cells = MTP_CELLS if model.share == 1.0 else MTP_CELLS[seed % len(MTP_CELLS) :][:1]
    compared = [alone.check(cell) for cell in cells]
    problem, case = _first_problem(model.folder.name, alone, compared)
    accepted = {"accepted": sum(result.accepted for result in compared), "cells": len(compared)}
    return CheckResult(
        f"wrong drafts, trained head{model.suffix}",
        sum(result.wrong_drafts for result in compared),
        "drafts",
        "0",
        sum(result.num_drafts for result in compared),
        problem,
        {"seed": seed, **model.params},
        accepted,
        case=case,
    )
