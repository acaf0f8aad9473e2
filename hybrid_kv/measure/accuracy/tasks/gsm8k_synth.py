"""The documents of gsm8k_synth, made on the spot from a seed."""

from __future__ import annotations

from typing import Any

import datasets

# A task named by its file makes the model known to a plain `lm_eval`.
import hybrid_kv.measure.accuracy.lm_eval_model  # noqa: F401 - see above
from hybrid_kv.check.guard_model import problems

NUM_SHOTS = 5


def load(dataset_seed: int = 0, num_docs: int = 1319, **_: Any) -> dict[str, datasets.Dataset]:
    """Return the splits train (the shots) and test.

    lm-eval calls this with the task's metadata, into which it mixes the model's arguments: the rest
    is ignored. A smaller `num_docs` gives the first documents of a larger one.
    """
    made = problems.dataset(int(dataset_seed), int(num_docs), shots=NUM_SHOTS)
    return {
        "train": datasets.Dataset.from_list(made.shots),
        "test": datasets.Dataset.from_list(made.docs),
    }
