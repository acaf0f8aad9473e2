"""A step of the whole engine: what the host adds to a model.

The model is the exact one, two residues wide: its arithmetic is small, its cache and metadata are
those of a real one, and its tokens are known in advance, bit for bit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from bench._models import BLOCK_SIZE, Right, answers, exact_engine, tiny_engine
from bench._reference import equal
from bench._requests import prompts
from bench.harness.cells import Case, Cell, Count, Counts, grid
from hybrid_kv.sampling import SamplingParams

PROMPT, BLOCKS = 24, 4
OPERATIONS = {"operations": "operations"}


def decode_block(seed: int, mode: str, K: int, num_reqs: int) -> Case:
    """Build a case in which every request decodes one block of tokens.

    It takes `BLOCK_SIZE // (1 + K)` steps; all drafts are right.
    """
    texts = [[token % 97 for token in prompt] for prompt in prompts(seed, num_reqs, PROMPT)]
    length = (BLOCKS + 1) * BLOCK_SIZE
    wanted = answers(texts, length)
    llm = exact_engine(mode, K, num_reqs, Right(texts, wanted, K))
    params = SamplingParams(max_tokens=length)

    def reset() -> None:
        for request in [*llm.scheduler.running, *llm.scheduler.waiting]:
            llm.scheduler.finish(request)
        llm.reset_prefix_cache()
        llm._num_requests = 0  # the proposer knows requests by number
        for text in texts:
            llm.scheduler.add(llm.make_request(text, params))
        while any(
            not request.output_token_ids
            for request in (*llm.scheduler.waiting, *llm.scheduler.running)
        ):
            llm.step()

    def run() -> None:
        for _ in range(BLOCK_SIZE // (1 + K)):
            llm.step()

    def check() -> float:
        reset()
        for _ in range(BLOCKS):
            run()
        made = {request.request_id: request.output_token_ids for request in llm.scheduler.running}
        llm.scheduler.check_integrity()
        count = 1 + BLOCKS * BLOCK_SIZE
        return equal(
            "tokens", [made[str(i)] for i in range(num_reqs)], [answer[:count] for answer in wanted]
        )

    return Case(run, check, reset, BLOCKS)


class _Operations(TorchDispatchMode):
    """Counts the operations of torch, views left out: on a GPU each is a launch or a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if not func.is_view:
            self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def operations(seed: int, mode: str) -> Counts:
    """Count the torch operations of one decode step of 4 requests.

    The model is a NemotronH with two Mamba layers and one of attention.
    """
    llm = tiny_engine(seed, mode)
    for text in prompts(seed, 4, PROMPT):
        llm.scheduler.add(
            llm.make_request([token % 97 for token in text], SamplingParams(max_tokens=16))
        )
    while any(
        not request.output_token_ids for request in (*llm.scheduler.waiting, *llm.scheduler.running)
    ):
        llm.step()
    llm.step()
    with _Operations() as seen:
        llm.step()
    return {"operations": Count(seen.counts.total(), "operations")}


def cells() -> list[Cell]:
    """Return cells by modes, drafts and batch sizes, and those of a step's operations."""
    modes = ("none", "align", "all")
    return [
        *grid(
            "engine_step",
            "decode_block",
            "cpu",
            decode_block,
            {"mode": modes, "K": (0, 3), "num_reqs": (4, 16)},
            [("none", 0, 4), ("all", 3, 4)],
        ),
        *grid(
            "engine_step",
            "operations",
            "count",
            operations,
            {"mode": modes},
            [("all",)],
            units=OPERATIONS,
        ),
    ]
