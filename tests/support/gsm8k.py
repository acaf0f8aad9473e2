"""A folder with GSM8K as the hub has it, of a few questions."""

from __future__ import annotations

from pathlib import Path

from hybrid_kv.check.guard_model import problems


def write_gsm8k(folder: Path, num_train: int = 8, num_test: int = 3) -> Path:
    """A folder in the format of GSM8K, with documents of our own."""
    import json

    docs = problems.dataset(1, num_train + num_test).docs
    lines = [json.dumps({"question": doc["question"], "answer": doc["answer"]}) for doc in docs]
    (folder / "train.jsonl").write_text("\n".join(lines[:num_train]) + "\n")
    (folder / "test.jsonl").write_text("\n".join(lines[num_train:]) + "\n")
    return folder
