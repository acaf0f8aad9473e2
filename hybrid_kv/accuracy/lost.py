"""The questions that a comparison lost, as a baseline of their own: as few as lose an answer again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from hybrid_kv.accuracy.compare import Answers, Comparison, answers_of, compare, json_lines, read_text
from hybrid_kv.accuracy.run import AccuracyResult
from hybrid_kv.files import write_whole
from hybrid_kv.minimize import minimize


def fewest(
    baseline: Answers, comparison: Comparison, texts: Mapping[int, str], ask: Callable[[Sequence[int]], AccuracyResult]
) -> list[int]:
    """As few questions as lose an answer again when sent alone; short ones stay.

    All that were lost, if none of them is lost without the others around it.

    Args:
        texts: of the questions.
        ask: questions by number, with a fresh engine.
    """

    def loses(questions: Sequence[int]) -> bool:
        if not questions:
            return False
        candidate = answers_of(ask(questions), comparison.answer_filter)
        return compare(baseline.only(questions), candidate, answer_filter=comparison.answer_filter).lost > 0

    # What comes first is left out first.
    lost = sorted(comparison.lost_questions, key=lambda number: -len(texts[number]))
    return sorted(minimize(lost, loses)) if loses(lost) else sorted(lost)


def write_lost(file: str | Path, questions: Sequence[int], texts: Mapping[int, str], folder: Path) -> Path:
    """The lines of a baseline's file that are about these questions, each with its text: a file for `--against`.

    Raises:
        HybridKVError: it cannot be written.
    """
    lines = [
        json.dumps({**line, "chosen": True, "question": texts[line["doc_id"]]}) + "\n"
        for _, line in json_lines(read_text(file), str(file))
        if line["doc_id"] in questions
    ]
    text = "".join(lines)
    made = folder / f"lost-{hashlib.sha256(text.encode()).hexdigest()[:8]}.jsonl"
    write_whole(made, text)
    return made
