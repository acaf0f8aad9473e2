"""Runs of sgl-eval, SGLang's own: `output-rs*.jsonl` per repeat, next to `metrics.json`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hybrid_kv.config import HybridKVError
from hybrid_kv.measure.accuracy.answers import (
    Answers,
    Protocol,
    QuestionAnswer,
    Totals,
    digest_of,
    json_document,
    json_lines,
    read_text,
    thinks,
)
from hybrid_kv.measure.accuracy.run import question_digest

METRICS = "metrics.json"
REPEATS = "output-rs*.jsonl"


def is_metrics(document: Mapping[str, Any]) -> bool:
    """Return whether this is a metrics.json."""
    return {"name", "num_examples", "aggregate"} <= document.keys()


def is_answer(line: Mapping[str, Any]) -> bool:
    """Return whether this is a line of an output-rs*.jsonl."""
    return {"id", "expected_answer", "symbolic_correct"} <= line.keys()


def read_folder(folder: Path) -> Answers | Totals:
    """Read the run of a folder, with every answer if they were kept.

    Raises:
        HybridKVError: it holds no run of sgl-eval, or one that is not complete.
    """
    repeats = sorted(folder.glob(REPEATS))
    if repeats:
        return _answers(folder.name, repeats, _metrics_in(folder))
    metrics = _metrics_in(folder)
    if metrics is None:
        raise HybridKVError(
            f"{folder} has neither {REPEATS} nor {METRICS}: it is no folder of sgl-eval"
        )
    return _totals(folder / METRICS, metrics)


def read_repeat(file: Path) -> Answers:
    """Read a repeat of a run.

    Raises:
        HybridKVError: as `read_folder`.
    """
    return _answers(file.name, [file], _metrics_in(file.parent))


def read_metrics(file: Path, document: Mapping[str, Any]) -> Answers | Totals:
    """Read the run of a metrics.json, with every answer if they lie next to it.

    Raises:
        HybridKVError: as `read_folder`.
    """
    repeats = sorted(file.parent.glob(REPEATS))
    if repeats:
        return _answers(file.parent.name or file.name, repeats, document)
    return _totals(file, document)


def _metrics_in(folder: Path) -> dict[str, Any] | None:
    file = folder / METRICS
    return json_document(read_text(file), str(file)) if file.exists() else None


def _answers(name: str, repeats: Sequence[Path], metrics: Mapping[str, Any] | None) -> Answers:
    texts = [read_text(file) for file in repeats]
    asked = [_lines(str(file), text) for file, text in zip(repeats, texts, strict=True)]
    odd = [
        file.name
        for file, lines in zip(repeats, asked, strict=True)
        if lines.keys() != asked[0].keys()
    ]
    if odd:
        raise HybridKVError(
            f"{odd[0]} has other questions than {repeats[0].name}: the run is not complete"
        )
    _refuse_partial(name, metrics or {})
    numbers = _numbers(list(asked[0]))
    by_doc = {number: _majority([lines[key] for lines in asked]) for key, number in numbers.items()}
    task = str((metrics or {}).get("name") or next(iter(asked[0])).rpartition("-")[0])
    return Answers(
        name=name,
        digest=digest_of("\n".join(texts)),
        task=task,
        params=_params(task, metrics or {}, len(by_doc)),
        commit="",
        by_doc=by_doc,
        protocol=_protocol(metrics or {}),
        repeats=len(repeats),
    )


def _lines(place: str, text: str) -> dict[str, dict[str, Any]]:
    """Return the answers of a repeat by id."""
    lines: dict[str, dict[str, Any]] = {}
    for number, line in json_lines(text, place):
        if (
            not is_answer(line)
            or type(line["symbolic_correct"]) is not bool
            or not isinstance(line["id"], str)
        ):
            raise HybridKVError(f"{place} line {number} is not an answer of sgl-eval")
        if line.get("finish_reason") == "error":
            raise HybridKVError(
                f"{place} line {number}: the engine refused question {line['id']}, which says "
                "nothing about accuracy"
            )
        if line["id"] in lines:
            raise HybridKVError(
                f"{place} line {number}: question {line['id']} is there twice; two runs in one "
                "file?"
            )
        lines[line["id"]] = line
    if not lines:
        raise HybridKVError(f"{place} has no answers: the file is empty")
    return lines


def _numbers(ids: Sequence[str]) -> dict[str, int]:
    """Return the number of each question by id.

    `gsm8k-17` is the 17th; lines come in the order in which answers ended.
    """
    ends = [re.fullmatch(r".+-(\d+)", name) for name in ids]
    if all(ends):
        return {name: int(end[1]) for name, end in zip(ids, ends, strict=True) if end}
    return {name: number for number, name in enumerate(sorted(ids))}


def _majority(lines: Sequence[Mapping[str, Any]]) -> QuestionAnswer:
    """Return an answer for all repeats: right or invalid if more than half are."""
    right = sum(line["symbolic_correct"] for line in lines)
    none = sum(line.get("predicted_answer") is None for line in lines)
    problem = lines[0].get("problem")
    return QuestionAnswer(
        hashes=("", "", ""),
        correct=2 * right > len(lines),
        invalid=2 * none > len(lines) and not 2 * right > len(lines),
        output_sha=None,
        question=question_digest(problem) if isinstance(problem, str) and problem else "",
    )


def _totals(file: Path, metrics: Mapping[str, Any]) -> Totals:
    _refuse_partial(str(file), metrics)
    try:
        questions = metrics["num_examples"]
        score = float(metrics["aggregate"]["score"])
        invalid = float(metrics["aggregate"].get("no_answer", 0.0))
        if (
            type(questions) is not int
            or questions < 1
            or not 0 <= score <= 1
            or not 0 <= invalid <= 1
        ):
            raise ValueError
    except (KeyError, TypeError, ValueError):
        raise HybridKVError(
            f"{file}: num_examples and aggregate.score do not make a score of questions"
        ) from None
    return Totals(
        name=file.name,
        digest=digest_of(str(sorted(metrics.items()))),
        task=str(metrics["name"]),
        protocol=_protocol(metrics),
        num_questions=questions,
        num_right=round(score * questions),
        num_invalid=round(invalid * questions),
        params=_params(str(metrics["name"]), metrics, questions),
    )


def _refuse_partial(place: str, metrics: Mapping[str, Any]) -> None:
    if metrics.get("partial"):
        raise HybridKVError(f"{place}: sgl-eval says that the run is partial; let it end")


def _protocol(metrics: Mapping[str, Any]) -> Protocol:
    """Return the protocol: always chat, without shots.

    sgl-eval keeps a user's prompt in `prompt`.
    """
    given = metrics.get("gen")
    settings: dict[str, Any] = given if isinstance(given, dict) else {}
    tokens = settings.get("max_tokens")
    return Protocol(
        endpoint="chat",
        num_shots=None if metrics.get("prompt") else 0,
        max_tokens=tokens if type(tokens) is int else None,
        thinking=thinks(settings),
    )


def _params(task: str, metrics: Mapping[str, Any], questions: int) -> dict[str, Any]:
    model = metrics.get("model")
    return {"task": task, "limit": questions} | (
        {"model": Path(model).name} if isinstance(model, str) else {}
    )
