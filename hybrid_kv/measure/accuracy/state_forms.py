"""The answers with each cheap form of states next to those with states in float32.

The same model answers the same questions with each, so every answer has a pair: how many have other
tokens, from which token on, and of those that are right, how many were lost and gained (`compare`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from hybrid_kv.check.ci import Verdict
from hybrid_kv.config import ConfigError
from hybrid_kv.measure.accuracy.compare import Comparison, compare
from hybrid_kv.measure.accuracy.run import AccuracyResult, evaluate, table_of
from hybrid_kv.measure.accuracy.samples import answers_of
from hybrid_kv.measure.results import Row

WIDE = "float32"
_STOCHASTIC = {"enable_mamba_cache_stochastic_rounding": True, "mamba_cache_philox_rounds": 5}
# Options of the engine, by the form's name.
FORMS: Mapping[str, Mapping[str, Any]] = {
    f"{dtype}{', stochastic' if options else ''}": {"mamba_ssm_cache_dtype": dtype, **options}
    for dtype, options in (
        ("float16", _STOCHASTIC),
        ("int8", {}),
        ("int8", _STOCHASTIC),
        ("fp8", {}),
        ("fp8", _STOCHASTIC),
    )
}
_CHOSEN = {name for options in FORMS.values() for name in options}


@dataclass(frozen=True)
class FormAnswers:
    """The answers with a form, each with its pair.

    `first_others`: of each answer that has other tokens, the place of the first, from 0.
    """

    form: str
    pairs: Comparison
    first_others: tuple[int, ...]

    def summary(self) -> dict[str, Any]:
        """Return everything, ready for JSON."""
        first = median(self.first_others) if self.first_others else None
        return {**self.pairs.summary(), "form": self.form, "median_first_other_token": first}


@dataclass(frozen=True)
class StateForms:
    """The answers with each form."""

    of_forms: tuple[FormAnswers, ...]

    @property
    def verdicts(self) -> list[Verdict]:
        """A verdict for each form."""
        return [
            replace(verdict, name=f"{verdict.name}, {answers.form}")
            for answers in self.of_forms
            for verdict in answers.pairs.verdicts
        ]

    def summary(self) -> dict[str, Any]:
        """Return everything, ready for JSON."""
        return {"baseline": WIDE, "forms": [answers.summary() for answers in self.of_forms]}

    def rows(self) -> list[Row]:
        """Return rows of the results file, those of `Comparison` for each form."""
        return [row for answers in self.of_forms for row in answers.pairs.rows()]

    def print(self) -> None:
        """Print a table for people: a row for each form."""
        pairs = self.of_forms[0].pairs
        right = sum(before.correct for before, _ in pairs.pairs.values())
        columns = "right", "other tokens", "first of them", "lost", "gained", "p"
        console, table = table_of(f"{pairs.task}, states in", *columns)
        table.add_row(WIDE, f"{right} of {pairs.n}", *[""] * 5)
        for answers in self.of_forms:
            document = answers.summary()
            first = document["median_first_other_token"]
            table.add_row(
                answers.form,
                str(document["candidate"]["correct"]),
                str(document["outputs_changed"]),
                "" if first is None else f"{first:g}",
                str(document["lost"]),
                str(document["gained"]),
                f"{document['p']:.3g}",
            )
        console.print(table)
        console.print(
            "first of them: the median place of an answer's first other token, from 0; p: of "
            f"McNemar's exact one-sided test, worse if <= {pairs.alpha:g}",
            soft_wrap=True,
        )


def evaluate_forms(
    *run: Any, answer: Callable[..., AccuracyResult] = evaluate, **options: Any
) -> StateForms:
    """Answer the questions with states in float32, and then in each form.

    Args:
        run, options: those of `run.evaluate`, but for the dtype and rounding of states.
        answer: called with them.

    Raises:
        ConfigError: an option says how states are stored.
        HybridKVError: as `run.evaluate`.
    """
    given = sorted(_CHOSEN & options.keys())
    if given:
        raise ConfigError(f"{given[0]} is what is compared here; leave it out")
    wide = answer(*run, mamba_ssm_cache_dtype=WIDE, **options)
    made = []
    for form, chosen in FORMS.items():
        cheap = answer(*run, **chosen, **options)
        pairs = compare(answers_of(wide), answers_of(cheap))
        made.append(FormAnswers(form, pairs, _first_others(wide, cheap)))
    return StateForms(tuple(made))


def _first_others(wide: AccuracyResult, cheap: AccuracyResult) -> tuple[int, ...]:
    """Return the place of the first other token in each answer that has one."""
    return tuple(
        _common(before, after)
        for before, after in zip(wide.token_ids, cheap.token_ids, strict=True)
        if before != after
    )


def _common(before: tuple[int, ...], after: tuple[int, ...]) -> int:
    """Return how many tokens two answers have in common before they part."""
    shorter = min(len(before), len(after))
    return next((i for i in range(shorter) if before[i] != after[i]), shorter)
