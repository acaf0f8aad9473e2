"""The trained models of the guard: their names, their share of a check, their prompts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hybrid_kv.check.guard_model import FOLDERS

# Per model, proposer and K: share of drafts that are accepted, and its standard deviation for one
# question, both of the questions of `five_shot(77, N)` in mode align: N = 1,000 of the first model,
# 200 of the second. The other modes and the other scheme must give equal counts.
ACCEPTANCE = {
    "guard_model": {
        ("ngram", 3): (0.0875, 0.0712),
        ("mtp", 1): (0.9999, 0.0026),
        ("mtp", 3): (0.9177, 0.0583),
        ("mtp", 5): (0.7455, 0.0840),
    },
    "guard_model_qwen3_5": {
        ("ngram", 3): (0.0776, 0.0635),
        ("mtp", 1): (0.9956, 0.0197),
        ("mtp", 3): (0.9436, 0.0628),
        ("mtp", 5): (0.8080, 0.0887),
    },
}
SIGMAS = 6  # below the recorded share: one false alarm in 10^9


@dataclass(frozen=True)
class Trained:
    """A trained model.

    Attributes:
        suffix: after the name of a line.
        params: what its rows have besides. The first model has neither suffix nor params: its rows
            go back to the time when it was the only one.
        share: of the first model's amount of a check.
        block_size: tokens of an attention block that hold a state with the window of any K: with
            fewer the number of drafts would decide the block size, and with it the hits.
    """

    folder: Path
    suffix: str = ""
    share: float = 1.0
    block_size: int = 64

    @property
    def params(self) -> dict[str, str]:
        return {"model": self.folder.name} if self.suffix else {}

    def amount(self, amount: int, least: int) -> int:
        """Return its share of a check's amount, but no less than what shows anything."""
        return amount if self.share == 1.0 else max(least, round(amount * self.share))

    def least_acceptance(self, method: str, num_drafts: int, num_questions: int) -> float:
        """Return the least share of drafts that must be accepted, given the recorded share."""
        share, deviation = ACCEPTANCE[self.folder.name][method, num_drafts]
        return max(0.0, share - SIGMAS * deviation / num_questions**0.5)


# A delta net and experts cost about twice as much per token, and what is shared was checked with
# the first.
TRAINED = {
    "nemotron_h": Trained(FOLDERS["nemotron_h"]),
    "qwen3_5_moe_text": Trained(FOLDERS["qwen3_5_moe_text"], ", qwen3.5 moe", 0.1, block_size=96),
}


def five_shot(seed: int, count: int) -> list[str]:
    """Return questions after the same five worked examples."""
    from hybrid_kv.check.guard_model.problems import dataset

    data = dataset(seed, count)
    shots = "\n\n".join(
        f"Question: {shot['question']}\nAnswer: {shot['answer']}" for shot in data.shots
    )
    return [f"{shots}\n\nQuestion: {doc['question']}\nAnswer:" for doc in data.docs]
