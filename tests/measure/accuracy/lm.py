"""Parts of lm-eval, imported when a test needs them, as every process collects all tests."""

from __future__ import annotations

from typing import Any


def engine_model(*arguments: Any, **options: Any) -> Any:
    from hybrid_kv.measure.accuracy.lm_eval_model import HybridKVLM

    return HybridKVLM(*arguments, **options)


def instance(kind: str, arguments: tuple[Any, ...], number: int = 0, task: str = "toy") -> Any:
    """A request of lm-eval, for question `number` of a task."""
    from lm_eval.api.instance import Instance

    return Instance(kind, {}, arguments, number, metadata=(task, number, 1))  # type: ignore[arg-type]
