"""Runs of ours (`--samples`) and of lm-eval (`samples_*.jsonl`): a line per question."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hybrid_kv.config import HybridKVError
from hybrid_kv.measure.accuracy.acceptance import DraftCounts
from hybrid_kv.measure.accuracy.answers import (
    HASHES,
    Answers,
    Protocol,
    QuestionAnswer,
    digest_of,
    json_document,
    json_lines,
    read_text,
)
from hybrid_kv.measure.accuracy.run import STRICT, AccuracyResult, question_digest, sample_lines
from hybrid_kv.measure.accuracy.tasks import NO_ANSWER

LM_EVAL_MAX_TOKENS = 256  # where a task gives no limit


def answers_of(result: AccuracyResult, answer_filter: str = STRICT) -> Answers:
    """Return the answers of a run that has just ended."""
    return answers_in("this run", "this run", sample_lines(result), answer_filter)


def answers_in(
    name: str, place: str, text: str, answer_filter: str, results: Mapping[str, Any] | None = None
) -> Answers:
    """Return the answers in the lines of a file of ours or of lm-eval's.

    Args:
        results: lm-eval's results_*.json of that run.

    Raises:
        HybridKVError: as `read_run`.
    """
    lines = list(json_lines(text, place))
    filters = {repr(line["filter"]) for _, line in lines if "filter" in line}
    _refuse_errors(
        place, [line["error"] for _, line in lines if line.get("error") is not None], len(lines)
    )
    by_doc: dict[int, QuestionAnswer] = {}
    for number, line in lines:
        if ("filter" in line) != bool(filters):
            raise HybridKVError(
                f"{place} line {number} is of another format than others: one file, one run"
            )
        if filters and line["filter"] != answer_filter:
            continue
        doc_id, answer = _answer(line, answer_filter, f"{place} line {number}")
        if doc_id in by_doc:
            raise HybridKVError(
                f"{place} line {number}: question {doc_id} is there twice; two runs in one file?"
            )
        by_doc[doc_id] = answer
    if not by_doc:
        reason = f"its filters are {', '.join(sorted(filters))}" if filters else "the file is empty"
        raise HybridKVError(f"{place} has no answers of filter {answer_filter!r}: {reason}")
    first = lines[0][1]
    noted = first.get("params")
    params: dict[str, Any] = noted if isinstance(noted, dict) else {}
    commit = str(first.get("commit") or "")
    if not re.fullmatch(r"([0-9a-f]{40}(-dirty)?)?", commit):
        raise HybridKVError(f"{place}: commit {commit!r} is not a full hash of a commit")
    task = str(params.get("task") or _task_in(name))
    return Answers(
        name=name,
        digest=digest_of(text),
        task=task,
        params=params,
        commit=commit,
        by_doc=by_doc,
        chosen=first.get("chosen") is True,
        protocol=_lm_eval_protocol(first, task, results or {})
        if filters
        else _own_protocol(params),
    )


def _refuse_errors(place: str, errors: Sequence[Any], total: int) -> None:
    if errors:
        raise HybridKVError(
            f"{place}: {len(errors)} of {total} questions were refused by the engine, which says "
            f"nothing about accuracy; the first: {errors[0]}"
        )


def _answer(line: Mapping[str, Any], answer_filter: str, place: str) -> tuple[int, QuestionAnswer]:
    try:
        doc_id = line["doc_id"]
        hashes = tuple(line[name] for name in HASHES)
        made = (
            _lm_eval_answer(line, hashes)
            if "filter" in line
            else _own_answer(line, hashes, answer_filter)
        )
    except (KeyError, IndexError, TypeError) as error:
        raise HybridKVError(
            f"{place} is not an answer of hybrid-kv or lm-eval: {error!r} is missing or odd"
        ) from None
    drafts = (made.drafts.num_verifications, made.drafts.num_accepted)
    kinds = [
        (doc_id, int),
        *((value, str) for value in hashes),
        *((count, int) for count in drafts),
    ]
    kinds += [(made.correct, bool), (made.invalid, bool), (made.question, str)]
    wrong = [value for value, kind in kinds if type(value) is not kind]
    if wrong:
        raise HybridKVError(
            f"{place} is not an answer of hybrid-kv or lm-eval: {wrong[0]!r} has the wrong type"
        )
    return doc_id, made


def _lm_eval_answer(line: Mapping[str, Any], hashes: tuple[str, ...]) -> QuestionAnswer:
    document = line.get("doc")
    question = document.get("question") if isinstance(document, dict) else None
    return QuestionAnswer(
        hashes=hashes,
        correct={0: False, 1: True}[line["exact_match"]],
        invalid=line["filtered_resps"][0] == NO_ANSWER,
        output_sha=None,
        question=question_digest(question) if isinstance(question, str) else "",
    )


def _own_answer(
    line: Mapping[str, Any], hashes: tuple[str, ...], answer_filter: str
) -> QuestionAnswer:
    correct = line["correct" if answer_filter == STRICT else "correct_flexible"]
    return QuestionAnswer(
        hashes=hashes,
        correct=correct,
        # Ours notes an answer that the strict filter missed; one that the flexible one got right
        # was found.
        invalid=line["invalid"] and not correct,
        output_sha=line["output_sha"],
        drafts=DraftCounts(line.get("n_verifications", 0), line.get("n_accepted", 0)),
        question=line.get("question_sha", ""),
    )


def _own_protocol(params: Mapping[str, Any]) -> Protocol:
    shots = params.get("num_fewshot")
    tokens = params.get("max_gen_toks", LM_EVAL_MAX_TOKENS)
    return Protocol(
        endpoint="chat" if params.get("apply_chat_template") else "completions",
        num_shots=shots if type(shots) is int else None,
        max_tokens=tokens if type(tokens) is int else None,
        thinking=True if params.get("think_end_token") else None,
    )


def _lm_eval_protocol(line: Mapping[str, Any], task: str, results: Mapping[str, Any]) -> Protocol:
    """Return the protocol that a sample and the file of results next to it record."""
    arguments = line.get("arguments")
    request = arguments.get("gen_args_0", {}) if isinstance(arguments, dict) else {}
    options = request.get("arg_1", {}) if isinstance(request, dict) else {}
    tokens = (
        options.get("max_gen_toks", LM_EVAL_MAX_TOKENS)
        if isinstance(options, dict) and options
        else None
    )
    shots = results.get("n-shot", {})
    number = shots.get(task) if isinstance(shots, dict) else None
    return Protocol(
        endpoint=("chat" if results.get("chat_template") else "completions") if results else None,
        num_shots=number if type(number) is int else None,
        max_tokens=tokens if type(tokens) is int else None,
    )


def results_beside(path: Path) -> dict[str, Any] | None:
    """Return lm-eval's results of the run whose samples these are."""
    match = re.fullmatch(r"samples_.+_(\d{4}-\d\d-\d\dT.*)\.jsonl", path.name)
    other = path.with_name(f"results_{match[1]}.json") if match else path
    if other == path or not other.exists():
        return None
    return json_document(read_text(other), str(other))


def _task_in(name: str) -> str:
    match = re.fullmatch(r"samples_(.+)_\d{4}-\d\d-\d\dT.*", name)
    return match[1] if match else ""
