"""Two runs of which one has the score alone: two shares, compared without pairs.

Fisher's exact one-sided test keeps its level for runs over the same questions, too, where the
chance of an alarm is even smaller. It sees less than pairs do: which questions were lost is not
known.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from scipy.stats import fisher_exact, norm

from hybrid_kv.check.ci import Verdict
from hybrid_kv.config import HybridKVError
from hybrid_kv.measure.accuracy import compare, paired
from hybrid_kv.measure.accuracy.answers import Answers, Totals
from hybrid_kv.measure.accuracy.read import read_run
from hybrid_kv.measure.accuracy.run import table_of, wilson_interval
from hybrid_kv.measure.results import Row


@dataclass(frozen=True)
class UnpairedComparison:
    """Baseline against candidate, of as many questions; `notes` as in `compare.Comparison`."""

    baseline: Totals
    candidate: Totals
    notes: tuple[str, ...]

    @property
    def n(self) -> int:
        return self.baseline.num_questions

    @property
    def task(self) -> str:
        return self.candidate.task or self.baseline.task or "unknown"

    @property
    def difference(self) -> float:
        """Accuracy of the candidate minus that of the baseline."""
        return (self.candidate.num_right - self.baseline.num_right) / self.n

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of the difference: Newcombe's hybrid score (1998, method 10)."""
        ends = [wilson_interval(run.num_right, self.n) for run in (self.baseline, self.candidate)]
        shares = [run.num_right / self.n for run in (self.baseline, self.candidate)]
        down = math.hypot(shares[1] - ends[1][0], ends[0][1] - shares[0])
        up = math.hypot(ends[1][1] - shares[1], shares[0] - ends[0][0])
        return self.difference - down, self.difference + up

    @cached_property
    def p(self) -> float:
        """The chance of a table like this one, or a worse one, if both runs were equally good."""
        table = [[run.num_right, self.n - run.num_right] for run in (self.baseline, self.candidate)]
        return float(fisher_exact(np.array(table), alternative="greater").pvalue)

    @property
    def detectable_loss(self) -> float:
        """The smallest true loss that is noticed with 80 % power, by the normal approximation."""
        share = min(max(self.baseline.num_right, 1), self.n - 1) / self.n
        reach = norm.isf(paired.ALPHA) + norm.isf(1 - paired.POWER)
        return float(reach * math.sqrt(2 * share * (1 - share) / self.n))

    @property
    def verdict(self) -> paired.Verdict:
        return "worse" if self.p <= paired.ALPHA else "no loss shown"

    @property
    def verdicts(self) -> list[Verdict]:
        """The one that there is."""
        reason = (
            f"{self.verdict}: {self.baseline.num_right} of {self.n} right before, "
            f"{self.candidate.num_right} now, unpaired p = {self.p:.3g}"
        )
        return [Verdict(self.task, "failed" if self.verdict == "worse" else "ok", reason)]

    def summary(self) -> dict[str, Any]:
        """Return everything, ready for JSON; shares are of the questions, intervals 95 %."""
        return {
            "task": self.task,
            "n": self.n,
            "baseline": self._run(self.baseline),
            "candidate": self._run(self.candidate),
            "difference": self.difference,
            "difference_ci": self.interval,
            "difference_method": "Newcombe's hybrid score interval, 95 %",
            "p": self.p,
            "p_method": "Fisher, exact, one-sided",
            "alpha": paired.ALPHA,
            "detectable_loss": self.detectable_loss,
            "verdict": self.verdict,
            "evidence": "two scores, unpaired",
            "notes": list(self.notes),
        }

    def _run(self, run: Totals) -> dict[str, Any]:
        return {
            **{name: getattr(run, name) for name in ("name", "digest", "commit")},
            "params": dict(run.params),
            "correct": run.num_right,
            "accuracy": run.num_right / self.n,
            "accuracy_ci": wilson_interval(run.num_right, self.n),
            "invalid": run.num_invalid,
        }

    def rows(self) -> list[Row]:
        """Return the comparison as rows of the results file."""
        params = dict(self.candidate.params)
        params["baseline"] = f"{self.baseline.name} {self.baseline.digest}"
        params["candidate"] = f"{self.candidate.name} {self.candidate.digest}"
        low, high = self.interval
        verdict = "fail" if self.verdict == "worse" else "pass"
        shared: dict[str, Any] = {
            "params": params,
            "n": self.n,
            "baseline_commit": self.baseline.commit,
        }
        try:
            return [
                Row(
                    "accuracy",
                    self.task,
                    "unpaired_difference",
                    self.difference,
                    ci_low=low,
                    ci_high=high,
                    better="higher",
                    verdict=verdict,
                    **shared,
                ),
                Row("accuracy", self.task, "fisher_p", self.p, better="higher", **shared),
            ]
        except ValueError as error:
            raise HybridKVError(f"{self.candidate.name} cannot become rows: {error}") from None

    def print(self) -> None:
        """Print the table for people."""
        console, table = table_of(self.task, "right", "accuracy", "95 % interval", "invalid")
        for run in (self.baseline, self.candidate):
            low, high = wilson_interval(run.num_right, self.n)
            shares = (f"{run.num_right / self.n:.1%}", f"{low:.1%} to {high:.1%}")
            table.add_row(run.name, f"{run.num_right} of {self.n}", *shares, str(run.num_invalid))
        console.print(table)
        low, high = self.interval
        lines = [
            f"evidence: two scores of {self.n:,} questions, unpaired: a file has no answers by "
            "question",
            *(f"note: {note}" for note in self.notes),
            f"difference {100 * self.difference:+.2f} points, 95 % interval {100 * low:+.2f} to "
            f"{100 * high:+.2f} (Newcombe); one-sided exact Fisher p = {self.p:.3g}, worse if <= "
            f"{paired.ALPHA:g}",
            f"detectable with 80 % power: a loss of {100 * self.detectable_loss:.1f} points; pairs "
            "see less",
            f"verdict: {self.verdict}",
        ]
        for line in lines:
            console.print(line, soft_wrap=True)


def compare_totals(baseline: Answers | Totals, candidate: Answers | Totals) -> UnpairedComparison:
    """Compare two scores.

    A run whose answers are known is cut to the first questions that the other one has.

    Raises:
        HybridKVError: the tasks, the prompts or the numbers of questions differ.
    """
    compare.check_protocols(baseline, candidate)
    notes = compare.notes_on(baseline, candidate)
    few = min(
        run.num_questions if isinstance(run, Totals) else len(run.by_doc)
        for run in (baseline, candidate)
    )
    runs = [
        run if isinstance(run, Totals) else run.first(few).totals for run in (baseline, candidate)
    ]
    tasks = {run.task for run in runs if run.task}
    if len(tasks) > 1:
        raise HybridKVError(
            f"{runs[0].name} is of task {runs[0].task}, {runs[1].name} of {runs[1].task}"
        )
    if runs[0].num_questions != runs[1].num_questions:
        counts = (
            f"{runs[0].name} has {runs[0].num_questions} questions, {runs[1].name} "
            f"{runs[1].num_questions}"
        )
        raise HybridKVError(
            f"{counts}, and the longer one no answers by question; ask both the same"
        )
    return UnpairedComparison(runs[0], runs[1], notes)


def compare_files(
    baseline: str, candidate: str, answer_filter: str
) -> compare.Comparison | UnpairedComparison:
    """Compare two files, by question where both have every answer.

    Raises:
        HybridKVError: a file cannot be read, or the runs cannot be compared.
    """
    before = read_run(baseline, answer_filter)
    after = read_run(candidate, answer_filter)
    if isinstance(before, Answers) and isinstance(after, Answers):
        return compare.compare(before, after, answer_filter=answer_filter)
    return compare_totals(before, after)
