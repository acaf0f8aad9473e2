"""Files of answers, and calls of `hybrid-kv accuracy`."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hybrid_kv.measure.accuracy import run
from tests.cli.run import run as run_command

COMMIT = "ab" * 20


PARAMS = {"model": "guard_model", "task": "gsm8k_synth", "seed": 3, "limit": 250, "num_fewshot": 5}


def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def record(doc_id: int, outcome: str = "right", **changes: Any) -> dict[str, Any]:
    """Return a line of ours: right, wrong, invalid, or flexible (right by that filter only)."""
    return {
        "doc_id": doc_id,
        "doc_hash": sha(f"doc {doc_id}"),
        "prompt_hash": sha(f"prompt {doc_id}"),
        "target_hash": sha(f"target {doc_id}"),
        "correct": outcome == "right",
        "correct_flexible": outcome in ("right", "flexible"),
        "invalid": outcome in ("invalid", "flexible"),
        "error": None,
        "n_tokens": 7,
        "output_sha": sha(f"{doc_id} {outcome}"),
        "steps": None,
        "needs_latch": None,
        "question_sha": run.question_digest(f"doc {doc_id}"),
        "n_verifications": 0,
        "n_accepted": 0,
        "params": PARAMS,
        "commit": COMMIT,
        **changes,
    }


def logged(doc_id: int, outcome: str = "right", **changes: Any) -> list[dict[str, Any]]:
    """Return the two lines that lm-eval's evaluation tracker logs for a question, one a filter."""
    answers = {
        "right": ("18", "18"),
        "wrong": ("17", "17"),
        "invalid": ("[invalid]", "[invalid]"),
        "flexible": ("[invalid]", "18"),
    }[outcome]
    shared = {
        "doc_id": doc_id,
        "doc": {"question": f"doc {doc_id}", "answer": f"target {doc_id}"},
        "target": f"target {doc_id}",
        "resps": [[f" text\u2028of {outcome}"]],  # lm-eval leaves such separators as they are
        "metrics": ["exact_match"],
        "doc_hash": sha(f"doc {doc_id}"),
        "prompt_hash": sha(f"prompt {doc_id}"),
        "target_hash": sha(f"target {doc_id}"),
    }
    return [
        {
            **shared,
            "filtered_resps": [answer],
            "filter": name,
            "exact_match": float(answer == "18"),
            **changes,
        }
        for name, answer in zip((run.STRICT, run.FLEXIBLE), answers, strict=True)
    ]


def write(file: Path, lines: list[dict[str, Any]]) -> Path:
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    file.write_bytes(gzip.compress(text.encode()) if file.suffix == ".gz" else text.encode())
    return file


def call(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    return run_command(capsys, "accuracy", *arguments)


def result_of(
    outcomes: list[str], questions: Sequence[int] | None = None, **params: Any
) -> run.AccuracyResult:
    names = [field.name for field in dataclasses.fields(run.QuestionRecord)]
    records = [
        record(i, outcomes[i])
        for i in (range(len(outcomes)) if questions is None else sorted(questions))
    ]
    kept = tuple(run.QuestionRecord(**{name: one[name] for name in names}) for one in records)
    return run.AccuracyResult(
        "gsm8k_synth", {**PARAMS, "limit": len(kept), **params}, kept, 100, 0, 1.0
    )
