"""Results of vLLM's GSM8K script (`gsm8k_eval.py --save-results FILE`): the score alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybrid_kv.config import HybridKVError
from hybrid_kv.measure.accuracy.answers import Protocol, Totals, digest_of, thinks

FIELDS = {"accuracy", "invalid_rate", "num_questions", "num_shots", "max_tokens"}
ROUNDING = 1e-6  # of a share of questions in JSON


def is_result(document: Mapping[str, Any]) -> bool:
    """Return whether this is such a result."""
    return document.keys() >= FIELDS


def totals(file: Path, text: str, document: Mapping[str, Any]) -> Totals:
    """Return the score of a result.

    Raises:
        HybridKVError: its numbers make no sense.
    """
    questions, shots, tokens = (
        document[name] for name in ("num_questions", "num_shots", "max_tokens")
    )
    request = document.get("request_params")
    request = request if isinstance(request, dict) else {}
    try:
        right = _count(document["accuracy"], questions)
        invalid = _count(document["invalid_rate"], questions)
    except (TypeError, ValueError):
        raise HybridKVError(
            f"{file}: accuracy and num_questions do not make a number of right answers"
        ) from None
    model = request.get("model")
    endpoint = request.get("endpoint")
    return Totals(
        name=file.name,
        digest=digest_of(text),
        task="gsm8k",
        protocol=Protocol(
            endpoint if isinstance(endpoint, str) else None, shots, tokens, thinks(request)
        ),
        num_questions=questions,
        num_right=right,
        num_invalid=invalid,
        params={"task": "gsm8k", "limit": questions}
        | ({"model": Path(model).name} if isinstance(model, str) else {}),
    )


def _count(share: float, questions: int) -> int:
    count = round(share * questions)
    if type(questions) is not int or questions < 1 or not 0 <= count <= questions:
        raise ValueError
    if abs(share * questions - count) > ROUNDING * questions:
        raise ValueError
    return count
