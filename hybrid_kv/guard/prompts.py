"""Prompts for the guard model that begin alike."""

from __future__ import annotations


def five_shot(seed: int, count: int) -> list[str]:
    """Questions behind the same five worked examples."""
    from hybrid_kv.accuracy.guard_model.problems import dataset

    data = dataset(seed, count)
    shots = "\n\n".join(f"Question: {shot['question']}\nAnswer: {shot['answer']}" for shot in data.shots)
    return [f"{shots}\n\nQuestion: {doc['question']}\nAnswer:" for doc in data.docs]
