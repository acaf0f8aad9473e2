"""Files of answers as sgl-eval and vLLM write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def sgl_metrics(questions: int, score: float, repeats: int = 1, **changes: Any) -> dict[str, Any]:
    """sgl-eval 0.1.3's metrics.json."""
    gen = {
        "temperature": 0.6,
        "top_p": 0.95,
        "max_tokens": 16384,
        "chat_template_kwargs": {"thinking": True},
    }
    return {
        "name": "gsm8k",
        "num_examples": questions,
        "n_repeats": repeats,
        "latency_seconds": 3.0,
        "output_throughput_tps": 100.0,
        "total_completion_tokens": 40 * questions,
        "total_prompt_tokens": 90 * questions,
        "token_usage": {"completion_tokens": {"mean": 40.0, "count": questions}},
        "aggregate": {
            "score": score,
            "no_answer": 0.0,
            "stop_rate": 1.0,
            "truncated_rate": 0.0,
            "error_rate": 0.0,
        },
        "timestamp": "20261128-120000",
        "model": "org/Model",
        "base_url": "http://localhost:30000/v1",
        "num_threads": 64,
        "gen": gen,
        "sgl_eval_version": "0.1.3",
        **changes,
    }


def vllm_result(file: Path, right: int, questions: int = 1319, **request: Any) -> Path:
    """What vLLM's gsm8k_eval.py saves."""
    document: dict[str, Any] = {
        "accuracy": right / questions,
        "invalid_rate": 0.0,
        "latency": 30.0,
        "questions_per_second": questions / 30,
        "total_output_tokens": 100 * questions,
        "tokens_per_second": 100 * questions / 30,
        "num_questions": questions,
        "num_shots": 5,
        "max_tokens": 256,
        "timestamp": 1.0 + right,
    }
    if request:
        document["request_params"] = {
            "endpoint": "completions",
            "model": None,
            "temperature": 0.0,
            **request,
        }
    file.write_text(json.dumps(document, indent=2))
    return file
