"""Two runs over the same questions, paired: is the second one worse?

A run is a file with a line per question: ours (`hybrid-kv accuracy --samples`) or lm-eval's `samples_*.jsonl` of any
backend (`lm_eval --log_samples`). lm-eval's hashes of document, prompt and target say whether the questions are the
same; where they differ there is nothing to compare.

The rule. Two files: one look at all questions; worse if McNemar's exact one-sided p is at most 5 %. A live run against
a longer baseline: 250 questions first, worse at p <= 0.1 %, no loss if not one question was lost; otherwise all
questions are sent (again: the shots of a question may depend on the ones before it), worse at p <= 4.9 %.
"""

from __future__ import annotations

import hashlib
import json
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from hybrid_kv import files
from hybrid_kv.accuracy import paired
from hybrid_kv.accuracy.run import STRICT, AccuracyResult, sample_lines, table_of, wilson_interval
from hybrid_kv.accuracy.tasks import NO_ANSWER
from hybrid_kv.config import HybridKVError
from hybrid_kv.results import Row

_HASHES = {
    "doc_hash": ("documents", "another data set or seed"),
    "prompt_hash": ("prompts", "other shots, another template or seed"),
    "target_hash": ("targets", "other reference answers"),
}


@dataclass(frozen=True)
class Answer:
    """One question of one run. `invalid`: no answer was found in the text; then it is not correct either."""

    hashes: tuple[str, ...]
    correct: bool
    invalid: bool
    output_sha: str | None


@dataclass(frozen=True)
class Answers:
    """A run: its answers by doc_id. `digest` distinguishes files of one name; `commit` is empty where unknown.

    `chosen`: its questions are those that another run lost, see `lost`.
    """

    name: str
    digest: str
    task: str
    params: dict[str, Any]
    commit: str
    by_doc: dict[int, Answer]
    chosen: bool = False

    def only(self, questions: Sequence[int]) -> Answers:
        """The same run, cut to these questions."""
        return replace(self, by_doc={doc_id: self.by_doc[doc_id] for doc_id in questions}, chosen=True)

    def first(self, questions: int) -> Answers:
        """The same run, cut to its first questions."""
        kept = {doc_id: self.by_doc[doc_id] for doc_id in sorted(self.by_doc)[:questions]}
        return replace(self, by_doc=kept)


def read_answers(file: str | Path, answer_filter: str = STRICT) -> Answers:
    """Read a file of ours or of lm-eval's; `.gz` is decompressed.

    Raises:
        HybridKVError: the file is broken, has no answers of the filter, or questions that the engine refused.
    """
    return _answers(Path(file).name, str(file), read_text(file), answer_filter)


def read_text(file: str | Path) -> str:
    """The lines of such a file.

    Raises:
        HybridKVError: it cannot be read.
    """
    file = Path(file)
    try:
        return files.read_text(file, unpack=file.suffix == ".gz")
    except (OSError, EOFError, zlib.error) as error:
        raise HybridKVError(f"{file} cannot be read: {getattr(error, 'strerror', None) or error}") from None


def answers_of(result: AccuracyResult, answer_filter: str = STRICT) -> Answers:
    """The answers of a run that has just ended."""
    return _answers("this run", "this run", sample_lines(result), answer_filter)


def _answers(name: str, place: str, text: str, answer_filter: str) -> Answers:
    by_doc: dict[int, Answer] = {}
    lines = list(json_lines(text, place))
    filters = {repr(line["filter"]) for _, line in lines if "filter" in line}
    refused = [line["error"] for _, line in lines if line.get("error") is not None]
    if refused:
        raise HybridKVError(
            f"{place}: {len(refused)} of {len(lines)} questions were refused by the engine, which says nothing about "
            f"accuracy; the first: {refused[0]}"
        )
    for number, line in lines:
        if ("filter" in line) != bool(filters):
            raise HybridKVError(f"{place} line {number} is of another format than others: one file, one run")
        if filters and line["filter"] != answer_filter:
            continue
        doc_id, answer = _answer(line, answer_filter, f"{place} line {number}")
        if doc_id in by_doc:
            raise HybridKVError(f"{place} line {number}: question {doc_id} is there twice; two runs in one file?")
        by_doc[doc_id] = answer
    if not by_doc:
        found = f"its filters are {', '.join(sorted(filters))}" if filters else "the file is empty"
        raise HybridKVError(f"{place} has no answers of filter {answer_filter!r}: {found}")
    first = lines[0][1]
    noted = first.get("params")
    params: dict[str, Any] = noted if isinstance(noted, dict) else {}
    commit = str(first.get("commit") or "")
    if not re.fullmatch(r"([0-9a-f]{40}(-dirty)?)?", commit):
        raise HybridKVError(f"{place}: commit {commit!r} is not a full hash of a commit")
    return Answers(
        name=name,
        digest=hashlib.sha256(text.encode()).hexdigest()[:12],
        task=str(params.get("task") or _task_in(name)),
        params=params,
        commit=commit,
        by_doc=by_doc,
        chosen=first.get("chosen") is True,
    )


def _task_in(name: str) -> str:
    match = re.fullmatch(r"samples_(.+)_\d{4}-\d\d-\d\dT.*", name)
    return match[1] if match else ""


def json_lines(text: str, place: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """The JSON object of each line, with its number.

    Raises:
        HybridKVError: a line is not an object.
    """
    # Not splitlines: lm-eval writes other separators, such as U+2028, into its strings as they are.
    for number, line in enumerate(text.split("\n"), 1):
        if not line:
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):  # the latter of 100,000 nested brackets
            value = None
        if not isinstance(value, dict):
            raise HybridKVError(f"{place} line {number} is not a JSON object; was the file cut off?")
        yield number, value


def _answer(line: dict[str, Any], answer_filter: str, place: str) -> tuple[int, Answer]:
    try:
        doc_id, hashes = line["doc_id"], tuple(line[name] for name in _HASHES)
        if "filter" in line:  # lm-eval's
            correct, output = {0: False, 1: True}[line["exact_match"]], None
            invalid = line["filtered_resps"][0] == NO_ANSWER
        else:
            correct = line["correct" if answer_filter == STRICT else "correct_flexible"]
            # Ours notes an answer that the strict filter missed; one that the flexible one got right was found.
            invalid, output = line["invalid"] and not correct, line["output_sha"]
    except (KeyError, IndexError, TypeError) as error:
        raise HybridKVError(f"{place} is not an answer of hybrid-kv or lm-eval: {error!r} is missing or odd") from None
    kinds = [(doc_id, int), *((value, str) for value in hashes), (correct, bool), (invalid, bool)]
    if wrong := [value for value, kind in kinds if type(value) is not kind]:
        raise HybridKVError(f"{place} is not an answer of hybrid-kv or lm-eval: {wrong[0]!r} has the wrong type")
    return doc_id, Answer(hashes, correct, invalid, output)


@dataclass(frozen=True)
class Comparison:
    """Baseline against candidate, question by question. `alpha` is this look's; `final`: there is no later look."""

    baseline: Answers
    candidate: Answers
    answer_filter: str = STRICT
    alpha: float = paired.ALPHA
    final: bool = True

    @cached_property
    def pairs(self) -> dict[int, tuple[Answer, Answer]]:
        """Both answers to every question, by doc_id."""
        return {i: (self.baseline.by_doc[i], self.candidate.by_doc[i]) for i in sorted(self.baseline.by_doc)}

    def _count(self, holds: Callable[[Answer, Answer], bool]) -> int:
        return sum(holds(*pair) for pair in self.pairs.values())

    @property
    def n(self) -> int:
        return len(self.pairs)

    @property
    def lost_questions(self) -> list[int]:
        """The numbers of the questions that only the baseline has right."""
        return [i for i, (before, after) in self.pairs.items() if before.correct and not after.correct]

    @property
    def lost(self) -> int:
        return len(self.lost_questions)

    @property
    def lost_to_invalid(self) -> int:
        """Of the lost ones, those that have no answer at all now."""
        return self._count(lambda before, after: before.correct and after.invalid)

    @property
    def gained(self) -> int:
        return self._count(lambda before, after: after.correct and not before.correct)

    @property
    def gained_from_invalid(self) -> int:
        return self._count(lambda before, after: after.correct and before.invalid)

    @property
    def outputs_changed(self) -> int | None:
        """Answers whose tokens differ, right or wrong; None where a file does not record the tokens."""
        if any(one.output_sha is None for pair in self.pairs.values() for one in pair):
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
        """Questions that were chosen because they were lost say nothing about a rate: one that is lost is enough."""
        if self.baseline.chosen:
            return "worse" if self.lost else "no loss shown"
        return paired.decide(self.lost, self.gained, self.alpha, self.final)

    @property
    def task(self) -> str:
        return self.candidate.task or self.baseline.task or "unknown"

    @property
    def reason(self) -> str:
        """Of the verdict, in one line."""
        return f"{self.verdict}: lost {self.lost}, gained {self.gained} of {self.n} questions, p = {self.p:.3g}"

    def summary(self) -> dict[str, Any]:
        """Everything, ready for JSON; shares are of the questions, intervals 95 %."""
        counts = {
            name: getattr(self, name)
            for name in ("lost", "lost_questions", "lost_to_invalid", "gained", "gained_from_invalid")
        }
        return {
            "task": self.task,
            "filter": self.answer_filter,
            "n": self.n,
            "baseline": self._run(self.baseline),
            "candidate": self._run(self.candidate),
            **counts,
            "outputs_changed": self.outputs_changed,
            "difference": self.difference,
            "difference_ci": paired.difference_interval(self.lost, self.gained, self.n),
            "difference_method": "Tango's score interval, 95 %",
            "p": self.p,
            "p_method": "McNemar, exact, one-sided",
            "alpha": self.alpha,
            "detectable_loss": paired.detectable_loss(self.lost + self.gained, self.n, self.alpha),
            "verdict": self.verdict,
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


def compare(baseline: Answers, candidate: Answers, **look: Any) -> Comparison:
    """Pair two runs question by question.

    Args:
        look: `answer_filter`, `alpha` and `final` of `Comparison`.

    Raises:
        HybridKVError: they did not answer the same questions, put in the same words.
    """
    check_questions(baseline, candidate.name, {doc_id: answer.hashes for doc_id, answer in candidate.by_doc.items()})
    return Comparison(baseline, candidate, **look)


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
            f"{baseline.name} has {len(ours)} questions, {name} {len(hashes)}, {len(ours.keys() & hashes)} "
            "are in both; ask both runs the same (--limit)"
        )
    for place, (hash_name, (what, why)) in enumerate(_HASHES.items()):
        here = slice(place, place + 1)
        if differ := [i for i in sorted(ours) if hashes[i][here] not in ((), ours[i].hashes[here])]:
            raise HybridKVError(
                f"the {what} of {len(differ)} of {len(ours)} questions differ ({hash_name} of question {differ[0]}): "
                f"{why}; {baseline.name} and {name} cannot be compared"
            )


def compare_live(
    baseline: Answers, ask: Callable[[int], AccuracyResult], answer_filter: str = STRICT
) -> tuple[AccuracyResult, Comparison]:
    """Send a model the baseline's questions, as few as decide. `ask(n)` sends the first n to a fresh engine.

    Raises:
        HybridKVError: as `compare`; also a baseline that does not hold the first questions of its task.
    """
    total = len(baseline.by_doc)
    if set(baseline.by_doc) != set(range(total)):
        raise HybridKVError(f"{baseline.name} does not hold the first {total} questions of its task; make it anew")
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


def rows(comparison: Comparison) -> list[Row]:
    """The comparison as rows of the results file, under the candidate's parameters.

    Raises:
        HybridKVError: a file names its task or parameters in a way that a row cannot hold.
    """
    document = comparison.summary()
    params = dict(comparison.candidate.params)
    for name in ("baseline", "candidate"):
        params[name] = f"{document[name]['name']} {document[name]['digest']}"
    if comparison.candidate.commit:
        params["candidate_commit"] = comparison.candidate.commit
    params |= {"filter": comparison.answer_filter, "alpha": comparison.alpha}
    low, high = document["difference_ci"]
    verdict = "fail" if comparison.verdict == "worse" else "pass"
    made: dict[str, dict[str, Any]] = {
        "paired_difference": {"value": comparison.difference, "ci_low": low, "ci_high": high, "verdict": verdict},
        "mcnemar_p": {"value": comparison.p},
        "questions_lost": {"value": comparison.lost, "unit": "questions", "better": "lower"},
        "questions_gained": {"value": comparison.gained, "unit": "questions"},
    }
    if (loss := document["detectable_loss"]) is not None:
        made["detectable_loss"] = {"value": loss, "better": "lower"}
    shared = {"params": params, "n": comparison.n, "baseline_commit": comparison.baseline.commit, "better": "higher"}
    try:
        return [Row("accuracy", comparison.task, metric, **{**shared, **one}) for metric, one in made.items()]
    except ValueError as error:
        raise HybridKVError(f"{comparison.candidate.name} cannot become rows: {error}") from None


def print_comparison(comparison: Comparison) -> None:
    """The table for people, on stdout."""
    document = comparison.summary()
    console, table = table_of(comparison.task, "right", "accuracy", "95 % interval", "wrong", "invalid")
    for run in (document["baseline"], document["candidate"]):
        low, high = run["accuracy_ci"]
        table.add_row(
            run["name"],
            f"{run['correct']} of {comparison.n}",
            f"{run['accuracy']:.1%}",
            f"{low:.1%} to {high:.1%}",
            str(run["wrong"]),
            str(run["invalid"]),
        )
    console.print(table)
    low, high = document["difference_ci"]
    loss, changed = document["detectable_loss"], document["outputs_changed"]
    lines = [
        f"lost {comparison.lost} ({comparison.lost_to_invalid} of them invalid now), gained {comparison.gained} "
        f"({comparison.gained_from_invalid} invalid before)"
        + ("" if changed is None else f"; the tokens of {changed} answers differ"),
        f"difference {100 * comparison.difference:+.2f} points, 95 % interval {100 * low:+.2f} to {100 * high:+.2f} "
        f"(Tango); one-sided exact McNemar p = {comparison.p:.3g}, worse if <= {comparison.alpha:g}",
        f"detectable at {comparison.lost + comparison.gained} flips, with 80 % power: "
        + ("none, too many flips for so few questions" if loss is None else f"a loss of {100 * loss:.1f} points"),
    ]
    if comparison.verdict == "no loss shown" and not comparison.final:
        bound = paired.unseen_loss(comparison.n)
        lines.append(f"no question lost, so the run ends here: 95 % sure that fewer than {bound:.1%} are lost")
    for line in [*lines, f"verdict: {comparison.verdict}"]:
        console.print(line, soft_wrap=True)
