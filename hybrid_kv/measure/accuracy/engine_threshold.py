"""Thresholds for the gates of vLLM, SGLang and TensorRT-LLM, from equal runs.

What varies between the runs is what the threshold allows for: it holds for the same questions,
prompts, options and hardware, and for no others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from scipy.stats import norm

from hybrid_kv.config import HybridKVError
from hybrid_kv.measure.accuracy.acceptance import DraftCounts
from hybrid_kv.measure.accuracy.answers import Answers, Protocol, Totals
from hybrid_kv.measure.accuracy.noise import (
    FALSE_ALARMS,
    MIN_RUNS,
    POWER,
    Noise,
    noise_of,
    tensorrt_llm_theta,
    tensorrt_llm_threshold,
)
from hybrid_kv.measure.accuracy.read import read_run

DIGITS = 4


@dataclass(frozen=True)
class EngineThreshold:
    """A threshold from equal runs.

    `min_acceptance_length` is None where the runs do not record it.

    Attributes:
        repeated: how many files were a copy or a retry of another, and did not count.
    """

    task: str
    model: str
    protocol: Protocol
    noise: Noise
    false_alarms: float
    min_acceptance_length: float | None
    repeated: int

    @property
    def threshold(self) -> float:
        """A run passes at it or above."""
        return round(self.noise.threshold(self.false_alarms), DIGITS)

    @property
    def loss(self) -> float:
        """The smallest that is seen with a chance of 80 %."""
        return self.noise.loss_below(self.threshold)

    def comment(self) -> list[str]:
        """Return the comment lines on the runs that made the threshold."""
        noise = self.noise
        counted = (
            f"{noise.runs} runs of {noise.questions:,} questions: mean {noise.mean:.4f}, sd "
            f"{noise.sd:.4f}"
        )
        if self.repeated:
            counted += f"; {self.repeated} more were copies of these"
        return [
            f"{self.task}, {counted}.",
            f"An unchanged engine is below {self.threshold:.4f} in at most {self.false_alarms:.3g} "
            f"of runs; a loss of {100 * self.loss:.1f} points is seen with a chance of "
            f"{POWER:.0%}.",
        ]

    def summary(self) -> dict[str, Any]:
        """Return everything, ready for JSON."""
        return {
            "task": self.task,
            "model": self.model,
            "runs": self.noise.runs,
            "repeated": self.repeated,
            "questions": self.noise.questions,
            "mean": self.noise.mean,
            "sd": self.noise.sd,
            "false_alarms": self.false_alarms,
            "threshold": self.threshold,
            "detectable_loss": self.loss,
            "min_acceptance_length": self.min_acceptance_length,
        }


def threshold_from_files(
    files: Sequence[str], false_alarms: float = FALSE_ALARMS
) -> EngineThreshold:
    """Compute the threshold of equal runs, from any files that `accuracy compare` reads.

    Raises:
        HybridKVError: a file cannot be read, the runs are not equal, or there are too few different
            ones.
    """
    runs = [read_run(file) for file in files]
    by_digest = {run.digest: run for run in runs}
    distinct = list(by_digest.values())
    if len(distinct) < MIN_RUNS:
        copies = len(runs) - len(distinct)
        note = (
            f" ({copies} of {len(runs)} files are copies or retries of another)" if copies else ""
        )
        raise HybridKVError(
            f"{len(distinct)} different runs{note} are too few for a threshold; it takes {MIN_RUNS}"
        )
    totals = [run.totals if isinstance(run, Answers) else run for run in distinct]
    _check_equal(totals)
    noise = noise_of([run.num_right / run.num_questions for run in totals], totals[0].num_questions)
    if noise.sd == 0:
        raise HybridKVError(
            f"all {noise.runs} runs have the same score, so nothing tells how often the next one "
            "is lower; an engine without noise is compared by question: hybrid-kv accuracy compare"
        )
    return EngineThreshold(
        task=totals[0].task,
        model=str(totals[0].params.get("model", "")),
        protocol=totals[0].protocol,
        noise=noise,
        false_alarms=false_alarms,
        min_acceptance_length=_min_acceptance_length(distinct, false_alarms),
        repeated=len(runs) - len(distinct),
    )


def _check_equal(totals: Sequence[Totals]) -> None:
    first = totals[0]
    for other in totals[1:]:
        if other.num_questions != first.num_questions or other.task != first.task:
            raise HybridKVError(
                f"{first.name} has {first.num_questions} questions of {first.task}, {other.name} "
                f"{other.num_questions} of {other.task}; a threshold is of equal runs"
            )
        if first.protocol.differs_from(other.protocol):
            raise HybridKVError(
                f"the prompts differ: {first.name} has {first.protocol}; {other.name} has "
                f"{other.protocol}; a threshold is of equal runs"
            )


def _min_acceptance_length(runs: Sequence[Answers | Totals], false_alarms: float) -> float | None:
    lengths = []
    for run in runs:
        drafts = (
            [answer.drafts for answer in run.by_doc.values()] if isinstance(run, Answers) else []
        )
        verifications = sum(counts.num_verifications for counts in drafts)
        accepted = sum(counts.num_accepted for counts in drafts)
        lengths.append(DraftCounts(verifications, accepted).acceptance_length)
    known = [length for length in lengths if length is not None]
    if len(known) < len(runs):
        return None
    return math.floor(1000 * noise_of(known, 1).limit(false_alarms)) / 1000


def vllm_lines(made: EngineThreshold) -> list[str]:
    """Return lines for a file of tests/evals/gsm8k/configs.

    A run passes at accuracy_threshold - tolerance or above.
    """
    mean = round(made.noise.mean, DIGITS)
    lines = [*(f"# {line}" for line in made.comment()), f"accuracy_threshold: {mean:.4f}"]
    lines.append(f"tolerance: {mean - made.threshold:.4f}")
    lines.append(f"num_questions: {made.noise.questions}")
    if made.protocol.num_shots is not None:
        lines.append(f"num_fewshot: {made.protocol.num_shots}")
    if made.min_acceptance_length is not None:
        lines.append(f"min_acceptance_length: {made.min_acceptance_length:.3f}")
    return lines


def sglang_lines(made: EngineThreshold) -> list[str]:
    """Return lines for a class with `GSM8KMixin` (sglang/test/kits/eval_accuracy_kit.py)."""
    lines = [
        *(f"# {line}" for line in made.comment()),
        f"gsm8k_score_threshold = {made.threshold:.4f}",
    ]
    lines.append(f"gsm8k_num_examples = {made.noise.questions}")
    if made.min_acceptance_length is not None:
        lines.append(f"gsm8k_accept_length_thres = {made.min_acceptance_length:.3f}")
    return lines


def tensorrt_llm_lines(made: EngineThreshold) -> list[str]:
    """Return lines for tests/integration/defs/accuracy/references/gsm8k.yaml.

    Its harness makes the threshold of sigma and alpha. Sigma is the value that gives ours; a
    comment names what its defaults would give.
    """
    noise = made.noise
    scale = float(norm.isf(made.false_alarms)) * math.sqrt(2 / noise.questions)
    sigma = 100 * (noise.mean - made.threshold) / scale
    theirs = tensorrt_llm_threshold(noise.mean, noise.questions)
    theta = tensorrt_llm_theta(noise.questions)
    return [
        *(f"# {line}" for line in made.comment()),
        f"# Of the defaults alpha 0.05, beta 0.2, sigma 50: threshold {100 * theirs:.2f}, theta "
        f"{100 * theta:.2f}.",
        f"{made.model or 'MODEL'}:",
        f"  - accuracy: {100 * noise.mean:.2f}",
        f"    num_samples: {noise.questions}",
        f"    alpha: {made.false_alarms:g}",
        f"    beta: {1 - POWER:.1f}",
        f"    sigma: {sigma:.2f}",
    ]


ENGINES: dict[str, Callable[[EngineThreshold], list[str]]] = {
    "vllm": vllm_lines,
    "sglang": sglang_lines,
    "trtllm": tensorrt_llm_lines,
}
