"""Two runs over the same questions, paired question by question.

A run is what `answers.read_run` reads. lm-eval's hashes of document, prompt and target say whether
the questions are the same; between programs the question's own text does, and what each file tells
about how it was asked. Where they differ there is nothing to compare. Where a file has the score
alone, the comparison is `unpaired`.

The rule. Two files: one look at all questions; worse if McNemar's exact one-sided p is at most 5 %.
A live run against a longer baseline: 250 questions first, worse at p <= 0.1 %, no loss if not one
question was lost; otherwise all questions are sent (again: the shots of a question may depend on
the ones before it), worse at p <= 4.9 %.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from hybrid_kv.check.ci import Verdict
from hybrid_kv.config import HybridKVError
from hybrid_kv.measure.accuracy import paired
from hybrid_kv.measure.accuracy.acceptance import AcceptanceChange
from hybrid_kv.measure.accuracy.answers import HASHES, Answers, QuestionAnswer, Totals
from hybrid_kv.measure.accuracy.run import STRICT, AccuracyResult, table_of, wilson_interval
from hybrid_kv.measure.accuracy.samples import answers_of
from hybrid_kv.measure.results import Row

TOTAL_QUESTIONS = {"gsm8k": 1319}  # of the tasks whose files may hold fewer


@dataclass(frozen=True)
class Comparison:
    """A baseline against a candidate, question by question.

    `alpha` is this look's; `final`: there is no later look. `notes` are the reader's warnings.
    """

    baseline: Answers
    candidate: Answers
    answer_filter: str = STRICT
    alpha: float = paired.ALPHA
    final: bool = True
    notes: tuple[str, ...] = ()

    @cached_property
    def pairs(self) -> dict[int, tuple[QuestionAnswer, QuestionAnswer]]:
        """Both answers to every question, by doc_id."""
        return {
            i: (self.baseline.by_doc[i], self.candidate.by_doc[i])
            for i in sorted(self.baseline.by_doc)
        }

    def _count(self, holds: Callable[[QuestionAnswer, QuestionAnswer], bool]) -> int:
        return sum(holds(*pair) for pair in self.pairs.values())

    @property
    def n(self) -> int:
        return len(self.pairs)

    @property
    def lost_questions(self) -> list[int]:
        """The numbers of the questions that only the baseline has right."""
        return [
            i for i, (before, after) in self.pairs.items() if before.correct and not after.correct
        ]

    @property
    def lost(self) -> int:
        return len(self.lost_questions)

    @property
    def lost_to_invalid(self) -> int:
        """Number of lost questions that have no answer at all now."""
        return self._count(lambda before, after: before.correct and after.invalid)

    @property
    def gained(self) -> int:
        return self._count(lambda before, after: after.correct and not before.correct)

    @property
    def gained_from_invalid(self) -> int:
        return self._count(lambda before, after: after.correct and before.invalid)

    @property
    def outputs_changed(self) -> int | None:
        """Number of answers with other tokens; None where a file does not record the tokens."""
        if any(answer.output_sha is None for pair in self.pairs.values() for answer in pair):
            return None
        return self._count(lambda before, after: before.output_sha != after.output_sha)

    @property
    def difference(self) -> float:
        """Accuracy of the candidate minus that of the baseline."""
        return (self.gained - self.lost) / self.n

    @property
    def p(self) -> float:
        return paired.mcnemar_p(self.lost, self.gained)

    @property
    def verdict(self) -> paired.Verdict:
        """The verdict of this look.

        Questions that were chosen because they were lost say nothing about a rate: a single lost
        question is enough.
        """
        if self.baseline.chosen:
            return "worse" if self.lost else "no loss shown"
        return paired.decide(self.lost, self.gained, self.alpha, self.final)

    @cached_property
    def acceptance(self) -> AcceptanceChange | None:
        """The change of the acceptance length; None unless both runs record it by question."""
        before = [pair[0].drafts for pair in self.pairs.values()]
        after = [pair[1].drafts for pair in self.pairs.values()]
        if not all(any(drafts.num_verifications for drafts in run) for run in (before, after)):
            return None
        return AcceptanceChange(before, after, self.outputs_changed)

    @property
    def task(self) -> str:
        return self.candidate.task or self.baseline.task or "unknown"

    @property
    def reason(self) -> str:
        """The verdict and its figures in a line."""
        return (
            f"{self.verdict}: lost {self.lost}, gained {self.gained} of {self.n} questions, p = "
            f"{self.p:.3g}"
        )

    @property
    def verdicts(self) -> list[Verdict]:
        """Verdicts on the answers, and on the acceptance length where both runs record it."""
        verdicts = [Verdict(self.task, "failed" if self.verdict == "worse" else "ok", self.reason)]
        return verdicts if self.acceptance is None else [*verdicts, self.acceptance.verdict]

    def summary(self) -> dict[str, Any]:
        """Return everything, ready for JSON; shares are of the questions, intervals 95 %."""
        counts = {
            name: getattr(self, name)
            for name in (
                "lost",
                "lost_questions",
                "lost_to_invalid",
                "gained",
                "gained_from_invalid",
            )
        }
        return {
            "task": self.task,
            "filter": self.answer_filter,
            "n": self.n,
            "baseline": self._run(self.baseline),
            "candidate": self._run(self.candidate),
            **counts,
            "outputs_changed": self.outputs_changed,
            "acceptance_length": None if self.acceptance is None else self.acceptance.lengths,
            "difference": self.difference,
            "difference_ci": paired.difference_interval(self.lost, self.gained, self.n),
            "difference_method": "Tango's score interval, 95 %",
            "p": self.p,
            "p_method": "McNemar, exact, one-sided",
            "alpha": self.alpha,
            "detectable_loss": paired.detectable_loss(self.lost + self.gained, self.n, self.alpha),
            "verdict": self.verdict,
            "evidence": "paired by question",
            "notes": list(self.notes),
        }

    def _run(self, run: Answers) -> dict[str, Any]:
        right = sum(answer.correct for answer in run.by_doc.values())
        invalid = sum(answer.invalid for answer in run.by_doc.values())
        return {
            **{name: getattr(run, name) for name in ("name", "digest", "commit", "params")},
            "correct": right,
            "accuracy": right / self.n,
            "accuracy_ci": wilson_interval(right, self.n),
            "invalid": invalid,
            "wrong": self.n - right - invalid,
        }

    def rows(self) -> list[Row]:
        """Return rows of the results file, under the candidate's parameters.

        Raises:
            HybridKVError: a file names its task or parameters in a way that a row cannot hold.
        """
        document = self.summary()
        params = dict(self.candidate.params)
        for name in ("baseline", "candidate"):
            params[name] = f"{document[name]['name']} {document[name]['digest']}"
        if self.candidate.commit:
            params["candidate_commit"] = self.candidate.commit
        params |= {"filter": self.answer_filter, "alpha": self.alpha}
        low, high = document["difference_ci"]
        verdict = "fail" if self.verdict == "worse" else "pass"
        made: dict[str, dict[str, Any]] = {
            "paired_difference": {
                "value": self.difference,
                "ci_low": low,
                "ci_high": high,
                "verdict": verdict,
            },
            "mcnemar_p": {"value": self.p},
            "questions_lost": {"value": self.lost, "unit": "questions", "better": "lower"},
            "questions_gained": {"value": self.gained, "unit": "questions"},
        }
        loss = document["detectable_loss"]
        if loss is not None:
            made["detectable_loss"] = {"value": loss, "better": "lower"}
        shared = {
            "params": params,
            "n": self.n,
            "baseline_commit": self.baseline.commit,
            "better": "higher",
        }
        try:
            written = [
                Row("accuracy", self.task, metric, **{**shared, **fields})
                for metric, fields in made.items()
            ]
            if self.acceptance is not None:
                written += self.acceptance.rows(self.task, params, self.baseline.commit)
            return written
        except ValueError as error:
            raise HybridKVError(f"{self.candidate.name} cannot become rows: {error}") from None

    def print(self) -> None:
        """Print the table for people."""
        document = self.summary()
        console, table = table_of(
            self.task, "right", "accuracy", "95 % interval", "wrong", "invalid"
        )
        for run in (document["baseline"], document["candidate"]):
            low, high = run["accuracy_ci"]
            table.add_row(
                run["name"],
                f"{run['correct']} of {self.n}",
                f"{run['accuracy']:.1%}",
                f"{low:.1%} to {high:.1%}",
                str(run["wrong"]),
                str(run["invalid"]),
            )
        console.print(table)
        low, high = document["difference_ci"]
        loss = document["detectable_loss"]
        changed = document["outputs_changed"]
        lines = [
            f"evidence: {self.n:,} pairs of answers to the same questions",
            *(f"note: {note}" for note in self.notes),
            f"lost {self.lost} ({self.lost_to_invalid} of them invalid now), gained {self.gained} "
            f"({self.gained_from_invalid} invalid before)"
            + ("" if changed is None else f"; the tokens of {changed} answers differ"),
            f"difference {100 * self.difference:+.2f} points, 95 % interval {100 * low:+.2f} to "
            f"{100 * high:+.2f} (Tango); one-sided exact McNemar p = {self.p:.3g}, worse if <= "
            f"{self.alpha:g}",
            f"detectable at {self.lost + self.gained} flips, with 80 % power: "
            + (
                "none, too many flips for so few questions"
                if loss is None
                else f"a loss of {100 * loss:.1f} points"
            ),
        ]
        if self.verdict == "no loss shown" and not self.final:
            bound = paired.unseen_loss(self.n)
            lines.append(
                f"no question lost, so the run ends here: 95 % sure that fewer than {bound:.1%} "
                "are lost"
            )
        if self.acceptance is not None:
            lines.append(self.acceptance.verdict.message)
        for line in [*lines, f"verdict: {self.verdict}"]:
            console.print(line, soft_wrap=True)


def compare(baseline: Answers, candidate: Answers, **look: Any) -> Comparison:
    """Pair two runs question by question.

    Args:
        look: `answer_filter`, `alpha` and `final` of `Comparison`.

    Raises:
        HybridKVError: they did not answer the same questions, put in the same words.
    """
    check_protocols(baseline, candidate)
    if baseline.repeats != candidate.repeats:
        raise HybridKVError(
            f"{baseline.name} asked each question {baseline.repeats} times, {candidate.name} "
            f"{candidate.repeats}: the majority of more answers is another measure; compare runs "
            "with as many repeats"
        )
    baseline, candidate = _renumbered(baseline, candidate)
    notes = notes_on(baseline, candidate)
    questions = min(len(baseline.by_doc), len(candidate.by_doc))
    baseline = baseline.first(questions)
    candidate = candidate.first(questions)
    check_questions(
        baseline,
        candidate.name,
        {doc_id: answer.hashes for doc_id, answer in candidate.by_doc.items()},
    )
    return Comparison(baseline, candidate, notes=notes, **look)


def check_protocols(baseline: Answers | Totals, candidate: Answers | Totals) -> None:
    """Check that nothing known tells two runs' ways of asking apart.

    Raises:
        HybridKVError: something does.
    """
    if baseline.protocol.differs_from(candidate.protocol):
        raise HybridKVError(
            f"the prompts differ: {baseline.name} has {baseline.protocol}; {candidate.name} has "
            f"{candidate.protocol}. One model has two scores then, so nothing is compared; ask "
            "both runs the same way"
        )


def notes_on(baseline: Answers | Totals, candidate: Answers | Totals) -> tuple[str, ...]:
    """Return warnings for the reader of a comparison of two runs."""
    runs = (baseline, candidate)
    sizes = [_size(run) for run in runs]
    few = min(sizes)
    notes = []
    if sizes[0] != sizes[1]:
        short = runs[sizes.index(few)].name
        notes.append(
            f"{short} holds the first {few:,} of {max(sizes):,} questions; these are compared"
        )
    total = TOTAL_QUESTIONS.get(candidate.task or baseline.task, few)
    if few < total:
        notes.append(
            f"the first {few:,} of {total:,} questions are not the task: a model had .68 on the "
            "first 200 where it had .642 on all (sgl-project/sglang#31702)"
        )
    if isinstance(baseline, Answers) and isinstance(candidate, Answers) and baseline.repeats > 1:
        notes.append(
            f"{baseline.repeats} answers to a question are one vote, that of the majority, not so "
            "many"
        )
    if baseline.digest == candidate.digest:
        notes.append(
            "both files are equal, byte by byte: a copy or a retry of one run says nothing new"
        )
    if not all(_has_prompts(run) for run in runs):
        notes.append(
            "a file does not keep its prompts: that they are the same in both runs is not checked"
        )
    return tuple(notes)


def _size(run: Answers | Totals) -> int:
    return len(run.by_doc) if isinstance(run, Answers) else run.num_questions


def _has_prompts(run: Answers | Totals) -> bool:
    return isinstance(run, Answers) and all(all(answer.hashes) for answer in run.by_doc.values())


def _renumbered(baseline: Answers, candidate: Answers) -> tuple[Answers, Answers]:
    """Return both runs with the numbers of the longer one, if their questions' texts are known.

    Raises:
        HybridKVError: the questions of one run are not the first of the other.
    """
    runs = [baseline, candidate]
    texts = [[answer.question for answer in run.by_doc.values()] for run in runs]
    if all("" not in known and len(set(known)) == len(known) for known in texts):
        short = 0 if len(texts[0]) < len(texts[1]) else 1
        runs[short] = _with_numbers_of(runs[1 - short], runs[short])
    ids = sorted((sorted(run.by_doc) for run in runs), key=len)
    if ids[1][: len(ids[0])] != ids[0]:
        raise HybridKVError(
            f"{baseline.name} has {len(baseline.by_doc)} questions, {candidate.name} "
            f"{len(candidate.by_doc)}, {len(set(ids[0]) & set(ids[1]))} are in both; ask both runs "
            "the same (--limit)"
        )
    return runs[0], runs[1]


def _with_numbers_of(other: Answers, run: Answers) -> Answers:
    """Return a run with the other's numbers; new questions get numbers after them."""
    numbers = {answer.question: doc_id for doc_id, answer in other.by_doc.items()}
    beyond = max(other.by_doc) + 1
    by_doc = {
        numbers.get(answer.question, beyond + doc_id): answer
        for doc_id, answer in run.by_doc.items()
    }
    return replace(run, by_doc=by_doc)


def check_questions(baseline: Answers, name: str, hashes: Mapping[int, tuple[str, ...]]) -> None:
    """Check that another run has the baseline's questions.

    Args:
        name: of the other run, for the message.
        hashes: of its questions by doc_id, as many as are known: of document, prompt and target.

    Raises:
        HybridKVError: it is not.
    """
    ours = baseline.by_doc
    if ours.keys() != hashes.keys():
        raise HybridKVError(
            f"{baseline.name} has {len(ours)} questions, {name} {len(hashes)}, "
            f"{len(ours.keys() & hashes)} are in both; ask both runs the same (--limit)"
        )
    for place, (hash_name, (things, why)) in enumerate(HASHES.items()):
        differ = [i for i in sorted(ours) if _differs(ours[i].hashes, hashes[i], place)]
        if differ:
            raise HybridKVError(
                f"the {things} of {len(differ)} of {len(ours)} questions differ ({hash_name} of "
                f"question {differ[0]}): {why}; {baseline.name} and {name} cannot be compared"
            )


def _differs(ours: Sequence[str], theirs: Sequence[str], place: int) -> bool:
    """Return whether both are known, and not the same."""
    pair = (ours[place], theirs[place] if place < len(theirs) else "")
    return "" not in pair and pair[0] != pair[1]


def compare_live(
    baseline: Answers, ask: Callable[[int], AccuracyResult], answer_filter: str = STRICT
) -> tuple[AccuracyResult, Comparison]:
    """Send a model the baseline's questions, as few as decide.

    `ask(n)` sends the first n to a fresh engine.

    Raises:
        HybridKVError: as `compare`; also a baseline that does not hold the first questions of its
            task.
    """
    total = len(baseline.by_doc)
    if set(baseline.by_doc) != set(range(total)):
        raise HybridKVError(
            f"{baseline.name} does not hold the first {total} questions of its task; make it anew"
        )
    for questions, alpha in paired.looks(total):
        result = ask(questions)
        comparison = compare(
            baseline.first(questions),
            answers_of(result, answer_filter),
            answer_filter=answer_filter,
            alpha=alpha,
            final=questions == total,
        )
        if comparison.verdict != "undecided":
            break
    return result, comparison
