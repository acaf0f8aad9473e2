"""The trained models' shares of correct answers, against the recorded ones."""

from __future__ import annotations

import json
from collections.abc import Iterator

from hybrid_kv.check.guard.registry import CheckResult, Run, check
from hybrid_kv.check.guard.trained import TRAINED, Trained

LEAST = 25  # questions: with fewer the floor would let a quarter of them go


@check(
    "accuracy",
    quick=100,
    full=250,
    seconds=0.033,
    place=60,
    needs="safetensors tokenizers transformers lm_eval scipy",
)
def check_accuracy(run: Run) -> Iterator[CheckResult]:
    """Hold each guard model's answers to `gsm8k_synth` against its recorded share.

    An alarm needs a count of correct answers that the lower end of the recorded share's 95 %
    interval would give less than once in 1000 runs (one-sided binomial).
    """
    for model in TRAINED.values():
        yield from _check(model, model.amount(run.amount, LEAST))
    run.progress(run.amount)


def _check(model: Trained, limit: int) -> Iterator[CheckResult]:
    from scipy.stats import binom

    from hybrid_kv.measure.accuracy.run import evaluate

    # Written by `hybrid-kv accuracy --model NAME --limit 500 --out FOLDER/recorded.json`.
    recorded = json.loads((model.folder / "recorded.json").read_text())
    result = evaluate(model.folder, limit=limit, seed=recorded["params"]["seed"], progress=False)
    correct = sum(record.correct for record in result.records)
    invalid = sum(record.invalid for record in result.records)
    floor = int(binom.ppf(0.001, limit, recorded["accuracy_ci"][0]))
    params = {"seed": recorded["params"]["seed"], **model.params}
    metrics = {
        "recorded_accuracy": recorded["accuracy"],
        "recorded_n": recorded["n"],
        "floor": floor,
    }
    loss = f"{correct} of {limit} correct, recorded were {recorded['accuracy']:.1%}"
    yield CheckResult(
        f"correct answers to gsm8k_synth{model.suffix}",
        correct / limit,
        "share",
        f">= {floor / limit:.3f}",
        limit,
        loss if correct < floor else "",
        params,
        metrics,
    )
    yield CheckResult(
        f"answers without a number{model.suffix}",
        invalid / limit,
        "share",
        f"<= {1 - floor / limit:.3f}",
        limit,
        f"{invalid} invalid answers" if invalid > limit - floor else "",
        params,
        metrics,
    )
