"""Acceptance length: the tokens of a step with drafts, one and the drafts that were right.

A fall is a loss of speed, and often the first sign of a wrong state. A rise proves nothing: a
verifier that accepts wrong drafts raises it, too, and then the answers have other tokens. So it is
judged both ways, never as a gain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from hybrid_kv.check.ci import Verdict
from hybrid_kv.measure.results import Row

ALPHA = 0.01  # how often an unchanged engine is said to have fallen, and as often to have risen
DRAWS = 9_999
NAME = "acceptance length"
METRIC = "acceptance_length"
PASSED = {"ok": "pass", "failed": "fail", "void": "void"}  # as a row has it


@dataclass(frozen=True)
class DraftCounts:
    """Counts of drafts.

    `num_verifications` counts the steps of a request that verified some.
    """

    num_verifications: int
    num_accepted: int

    @property
    def acceptance_length(self) -> float | None:
        """1 + accepted drafts / verifications, as vLLM has it; None where nothing was drafted."""
        return 1 + self.num_accepted / self.num_verifications if self.num_verifications else None


NO_DRAFTS = DraftCounts(0, 0)


@dataclass(frozen=True)
class AcceptanceChange:
    """Baseline against candidate, paired by question.

    Attributes:
        baseline, candidate: of each question.
        num_changed_answers: that have other tokens, right or wrong; None where that is not known.
    """

    baseline: Sequence[DraftCounts]
    candidate: Sequence[DraftCounts]
    num_changed_answers: int | None

    @cached_property
    def lengths(self) -> tuple[float, float]:
        """Acceptance length of all questions, before and after."""
        totals = self._totals
        before, after = 1 + totals[:, :, 1].sum(axis=1) / totals[:, :, 0].sum(axis=1)
        return float(before), float(after)

    @cached_property
    def _totals(self) -> npt.NDArray[np.float64]:
        """[2, num_questions, 2]: verifications and accepted drafts."""
        runs = (self.baseline, self.candidate)
        return np.array(
            [[(drafts.num_verifications, drafts.num_accepted) for drafts in run] for run in runs],
            dtype=np.float64,
        )

    @cached_property
    def p_values(self) -> tuple[float, float]:
        """Chances of such a fall and of such a rise if each question's answers swap at random.

        Without a difference between the engines each question could as well have been answered by
        the other one.
        """
        swapped = np.random.default_rng(0).random((DRAWS, len(self.baseline))) < 0.5
        change = self._totals[1] - self._totals[0]  # [num_questions, 2]
        kept = ~swapped @ self._totals[0] + swapped @ self._totals[1]  # [DRAWS, 2]
        other = kept + (1 - 2 * swapped) @ change
        drawn = other[:, 1] / other[:, 0] - kept[:, 1] / kept[:, 0]
        before, after = self.lengths
        observed = after - before
        rounding = 1e-12
        fall = (1 + np.count_nonzero(drawn <= observed + rounding)) / (DRAWS + 1)
        rise = (1 + np.count_nonzero(drawn >= observed - rounding)) / (DRAWS + 1)
        return float(fall), float(rise)

    @property
    def verdict(self) -> Verdict:
        """The verdict: failed after a fall, void after a rise with changed answers.

        A broken verifier raises the acceptance length and changes answers.
        """
        before, after = self.lengths
        fall, rise = self.p_values
        change = f"{before:.3f} before, {after:.3f} now"
        if fall <= ALPHA:
            return Verdict(NAME, "failed", f"{NAME} fell: {change}, p = {fall:.2g}")
        if rise <= ALPHA and self.num_changed_answers != 0:
            count = (
                "an unknown number of"
                if self.num_changed_answers is None
                else str(self.num_changed_answers)
            )
            return Verdict(
                NAME,
                "void",
                f"{NAME} rose, which is no gain by itself: {change}, p = {rise:.2g}, and {count} "
                "answers have other tokens, as after a verifier that accepts wrong drafts; "
                "hybrid-kv accuracy divergence tells",
            )
        return Verdict(NAME, "ok", f"{NAME}: {change}")

    def rows(self, task: str, params: dict[str, Any], baseline_commit: str) -> list[Row]:
        """Return the change as a row of the results file."""
        before, after = self.lengths
        change = Row(
            "accuracy",
            task,
            f"{METRIC}_change",
            after - before,
            "tokens",
            params,
            n=len(self.baseline),
            verdict=PASSED[self.verdict.word],
            baseline_commit=baseline_commit,
        )
        return [change]


def mark(rows: Sequence[Row], verdict: Verdict) -> list[Row]:
    """Return the rows of a run, with a floor's verdict on its acceptance length."""
    return [
        replace(row, verdict=PASSED[verdict.word]) if row.metric == METRIC else row for row in rows
    ]


def floor_verdict(drafts: DraftCounts, minimum: float) -> Verdict:
    """Return whether a run is at or above a floor; void where nothing was drafted."""
    length = drafts.acceptance_length
    if length is None:
        return Verdict(
            NAME,
            "void",
            f"{NAME}: nothing was drafted, so the floor of {minimum:g} was not checked",
        )
    word, relation = ("ok", ">=") if length >= minimum else ("failed", "<")
    message = (
        f"{NAME} {length:.3f} {relation} floor {minimum:g} ({drafts.num_verifications:,} steps "
        "with drafts)"
    )
    return Verdict(NAME, word, message)  # type: ignore[arg-type]
