"""The trained model's share of correct answers, against the recorded one."""

from __future__ import annotations

import json
import time

from hybrid_kv.guard.registry import CheckResult, Run, check


@check(
    "accuracy", quick=100, full=250, seconds=0.026, place=60, needs="safetensors tokenizers transformers lm_eval scipy"
)
def check_accuracy(run: Run) -> list[CheckResult]:
    """The guard model on `gsm8k_synth`, against the recorded share of correct answers.

    An alarm needs a count of correct answers that the lower end of the recorded share's 95 % interval would give less
    than once in 1000 runs (one-sided binomial).
    """
    from scipy.stats import binom

    from hybrid_kv.accuracy.guard_model import FOLDER
    from hybrid_kv.accuracy.run import evaluate_guard_model

    # Written by `hybrid-kv accuracy --limit 500 --json hybrid_kv/accuracy/guard_model/recorded.json`.
    limit = run.amount
    recorded = json.loads((FOLDER / "recorded.json").read_text())
    begin = time.perf_counter()
    result = evaluate_guard_model(limit=limit, seed=recorded["params"]["seed"])
    seconds = time.perf_counter() - begin
    run.progress(limit)
    correct = sum(record.correct for record in result.records)
    invalid = sum(record.invalid for record in result.records)
    floor = int(binom.ppf(0.001, limit, recorded["accuracy_ci"][0]))
    params = {"seed": recorded["params"]["seed"]}
    figures = {"recorded_accuracy": recorded["accuracy"], "recorded_n": recorded["n"], "floor": floor}
    wrong = f"{correct} of {limit} correct, recorded were {recorded['accuracy']:.1%}"
    return [
        CheckResult(
            "accuracy", "correct answers to gsm8k_synth", correct >= floor, correct / limit, "share",
            f">= {floor / limit:.3f}", limit, seconds, "" if correct >= floor else wrong, params,
            figures,
        ),
        CheckResult(
            "accuracy", "answers without a number", invalid <= limit - floor, invalid / limit, "share",
            f"<= {1 - floor / limit:.3f}", limit, 0.0, f"{invalid} invalid answers" if invalid > limit - floor else "",
            params, figures,
        ),
    ]  # fmt: skip
