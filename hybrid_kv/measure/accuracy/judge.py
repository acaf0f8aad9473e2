"""A run and what it is compared with: the answers of an earlier run, or a recorded floor.

What can be known before the first question is checked before it: that the earlier run had the same
questions, and that the task has as many questions as the floor is for.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybrid_kv.check.ci import Verdict
from hybrid_kv.check.guard_model import embedded
from hybrid_kv.check.minimize import minimize
from hybrid_kv.config import ConfigError
from hybrid_kv.files import write_whole
from hybrid_kv.measure.accuracy import acceptance, answers, compare, run, threshold
from hybrid_kv.measure.accuracy.answers import Answers
from hybrid_kv.measure.accuracy.chat import PLAIN, ChatMode, Template, mode_of, template_of
from hybrid_kv.measure.accuracy.compare import Comparison
from hybrid_kv.measure.accuracy.read import read_answers
from hybrid_kv.measure.accuracy.run import STRICT, AccuracyResult
from hybrid_kv.measure.accuracy.samples import answers_of
from hybrid_kv.measure.accuracy.tasks import load_task, question_hashes
from hybrid_kv.measure.accuracy.threshold import Floor
from hybrid_kv.measure.results.row import Row
from hybrid_kv.models.loader import load_tokenizer

QUESTIONS = 250  # as many as a first look at two runs takes (`paired.looks`)


@dataclass(frozen=True)
class JudgedRun:
    """A run, and the comparison or the floors that it was compared with, if any."""

    result: AccuracyResult
    comparison: Comparison | None = None
    floor: Floor | None = None
    min_acceptance_length: float | None = None
    # Where the questions that lost an answer were written, and the command that repeats them
    lost: str = ""

    @property
    def verdicts(self) -> list[Verdict]:
        """Verdicts on the answers, and on the acceptance length where there is a reference."""
        verdicts = [Verdict(self.result.task, "ok")]
        if self.comparison is not None:
            verdicts = self.comparison.verdicts
        elif self.floor is not None:
            passed, reason = threshold.check(self.result, self.floor)
            verdicts = [Verdict(self.result.task, "ok" if passed else "failed", reason)]
        return verdicts if self.drafts_verdict is None else [*verdicts, self.drafts_verdict]

    @property
    def drafts_verdict(self) -> Verdict | None:
        """The verdict of the acceptance length's floor."""
        if self.min_acceptance_length is None:
            return None
        return acceptance.floor_verdict(self.result.drafts, self.min_acceptance_length)

    def rows(self) -> list[Row]:
        """Return the rows of the run, and of the comparison."""
        rows = run.rows(self.result)
        if self.comparison is not None:
            rows += self.comparison.rows()
        if self.drafts_verdict is not None:
            rows = acceptance.mark(rows, self.drafts_verdict)
        return (
            rows
            if self.floor is None
            else threshold.mark(rows, self.floor, self.verdicts[0].word == "ok")
        )

    def summary(self) -> dict[str, Any]:
        """Return everything but the questions, ready for JSON."""
        summary = self.result.summary()
        if self.comparison is not None:
            summary["comparison"] = self.comparison.summary()
        return summary

    def print(self) -> None:
        """Print the tables for people."""
        run.print_result(self.result)
        if self.comparison is not None:
            self.comparison.print()
        if self.lost:
            print(self.lost)
        if self.floor is not None:
            print(self.verdicts[0].message)
        if self.drafts_verdict is not None:
            print(self.drafts_verdict.message)


def judge(
    model: str | None = None,
    *,
    task: str | None = None,
    limit: int | None = None,
    seed: int | None = None,
    gsm8k_dir: str | None = None,
    against: str | None = None,
    check_floor: bool = False,
    answer_filter: str = STRICT,
    repro: Path | None = None,
    mode: ChatMode = PLAIN,
    **engine_options: Any,
) -> JudgedRun:
    """Run a task and compare its answers with what is known.

    Args:
        model, gsm8k_dir, engine_options: as for `run.evaluate`.
        task, seed: default: the baseline's, else gsm8k_synth and 0.
        limit: the number of questions; default: 250, with a baseline all of its own, as few as
            decide.
        against: the baseline, a file of `run.write_samples`.
        check_floor: compare the score with the floor recorded for so many questions.
        answer_filter: decides for both what is right.
        mode: as for `run.evaluate`; default: the baseline's.
        repro: folder for the questions that lost their answers, as few as lose one again; None
            writes none.

    Raises:
        ConfigError: the task, the model or an option cannot be used, or there is no such floor.
        HybridKVError: the baseline cannot be read or has other questions; the engine rejected every
            question.
    """
    if against is not None and check_floor:
        raise ConfigError(
            "--check-floor and --against exclude each other: a floor is for a fixed number of "
            "questions"
        )
    baseline = None if against is None else read_answers(against, answer_filter)
    if baseline is not None:
        task = _same("task", task, baseline.task or None)
        seed = _same("seed", seed, _seed_of(baseline))
        mode = _same_mode(mode, baseline)
    task = task or "gsm8k_synth"
    seed = seed or 0

    def ask(questions: int, only: Sequence[int] | None = None) -> AccuracyResult:
        return run.evaluate(
            model,
            task,
            limit=questions,
            questions=only,
            seed=seed,
            gsm8k_dir=gsm8k_dir,
            mode=mode,
            **engine_options,
        )

    if against is not None and baseline is not None:
        baseline = baseline.first(len(baseline.by_doc) if limit is None else limit)
        total = max(baseline.by_doc) + 1 if baseline.chosen else len(baseline.by_doc)
        template = _template(model) if mode.apply_chat_template else None
        hashes = question_hashes(task, seed, total, gsm8k_dir, template)
        if baseline.chosen:
            hashes = {
                number: known for number, known in hashes.items() if number in baseline.by_doc
            }
        compare.check_questions(baseline, "this run", hashes)
        if baseline.chosen:
            result = ask(total, sorted(baseline.by_doc))
            ours = answers_of(result, answer_filter)
            return JudgedRun(result, compare.compare(baseline, ours, answer_filter=answer_filter))
        result, comparison = compare.compare_live(baseline, ask, answer_filter)
        if repro is None or comparison.verdict != "worse":
            return JudgedRun(result, comparison)
        docs = load_task(task, seed, total, gsm8k_dir).eval_docs
        texts = {number: docs[number]["question"] for number in comparison.lost_questions}
        few = fewest(baseline, comparison, texts, lambda only: ask(total, only))
        file = write_lost(against, few, texts, repro)
        report = (
            f"alone, {len(few)} of them lose an answer again: hybrid-kv accuracy --against {file}, "
            "same options"
        )
        return JudgedRun(result, comparison, lost=f"{report}\n{texts[few[0]]}")
    count = limit or QUESTIONS
    floor = None
    if check_floor:
        floor = threshold.find_floor(Path(model or "guard_model").name, task, answer_filter, count)
        there = len(load_task(task, seed, count, gsm8k_dir).eval_docs)
        if there < count:
            raise ConfigError(f"the floor is for {count} questions, the task has {there}")
    return JudgedRun(ask(count), floor=floor)


def _same(name: str, given: Any, recorded: Any) -> Any:
    if given is not None and recorded is not None and given != recorded:
        raise ConfigError(
            f"--{name} {given} does not fit --against, whose run had {recorded}; leave --{name} out"
        )
    return recorded if given is None else given


def _same_mode(given: ChatMode, baseline: Answers) -> ChatMode:
    recorded = mode_of(baseline.params)
    if given not in (PLAIN, recorded):
        raise ConfigError(
            f"the prompts or answers would differ: {given} does not fit --against, whose run had "
            f"{recorded}; leave --apply-chat-template, --think-end-token and --max-gen-toks out"
        )
    return recorded


def _template(model: str | None) -> Template:
    folder = embedded(model)
    return template_of(load_tokenizer(folder), Path(folder).name)


def _seed_of(baseline: Answers) -> int | None:
    seed = baseline.params.get("seed")
    if seed is not None and type(seed) is not int:
        raise ConfigError(f"{baseline.name}: seed {seed!r} is not an integer; write the file again")
    return seed


def fewest(
    baseline: Answers,
    comparison: Comparison,
    texts: Mapping[int, str],
    ask: Callable[[Sequence[int]], AccuracyResult],
) -> list[int]:
    """Return as few questions as lose an answer again when sent alone; short ones stay.

    All that were lost, if none of them is lost without the others around it.

    Args:
        texts: of the questions.
        ask: questions by number, with a fresh engine.
    """

    def loses(questions: Sequence[int]) -> bool:
        if not questions:
            return False
        candidate = answers_of(ask(questions), comparison.answer_filter)
        return (
            compare.compare(
                baseline.only(questions), candidate, answer_filter=comparison.answer_filter
            ).lost
            > 0
        )

    # What comes first is left out first.
    lost = sorted(comparison.lost_questions, key=lambda number: -len(texts[number]))
    return sorted(minimize(lost, loses)) if loses(lost) else sorted(lost)


def write_lost(
    file: str | Path, questions: Sequence[int], texts: Mapping[int, str], folder: Path
) -> Path:
    """Write a baseline's lines about these questions, each with its text, for `--against`.

    Raises:
        HybridKVError: it cannot be written.
    """
    lines = [
        json.dumps({**line, "chosen": True, "question": texts[line["doc_id"]]}) + "\n"
        for _, line in answers.json_lines(answers.read_text(file), str(file))
        if line["doc_id"] in questions
    ]
    text = "".join(lines)
    made = folder / f"lost-{hashlib.sha256(text.encode()).hexdigest()[:8]}.jsonl"
    write_whole(made, text)
    return made
