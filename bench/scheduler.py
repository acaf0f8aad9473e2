"""A step of the scheduler and the cache manager: which tokens run, and which blocks they get."""

from __future__ import annotations

from collections.abc import Callable

from bench._reference import equal
from bench._requests import BLOCK_SIZE, manager, prompts, requests, scheduler, step
from bench.harness.cells import Case, Cell, WrongResultError, grid
from hybrid_kv.engine.scheduler import Scheduler

PROMPT = 72
BLOCKS = 8  # that a request decodes at most


def _prepared(seed: int, mode: str, K: int, num_reqs: int) -> Callable[[], Scheduler]:
    """Return a function that makes a scheduler with `num_reqs` requests waiting."""
    tokens = prompts(seed, num_reqs, PROMPT)
    max_tokens = (BLOCKS + 1) * BLOCK_SIZE
    num_blocks = 1 + num_reqs * 5 * ((PROMPT + max_tokens) // BLOCK_SIZE + 2 + K)

    def build() -> Scheduler:
        subject = scheduler(manager(mode, K, num_blocks), mode, K, num_reqs)
        for request in requests(tokens, max_tokens):
            subject.add(request)
        return subject

    return build


def decode(seed: int, mode: str, K: int, num_reqs: int) -> Case:
    """Build decodes of a block of tokens by every request, so that every call completes one.

    All drafts are accepted.
    """
    build = _prepared(seed, mode, K, num_reqs)
    subject = build()

    def reset() -> None:
        nonlocal subject
        subject = build()
        while any(request.num_tokens == PROMPT for request in (*subject.waiting, *subject.running)):
            step(subject, K)

    def run() -> None:
        for _ in range(BLOCK_SIZE // (1 + K)):
            step(subject, K)

    def check() -> float:
        reset()
        for _ in range(BLOCKS):
            run()
        end = PROMPT + BLOCKS * BLOCK_SIZE  # tokens of the last step included
        equal("tokens", [r.num_tokens for r in subject.running], [end + 1] * num_reqs)
        logical_blocks = -(-end // BLOCK_SIZE)
        most = {"none": 1, "align": 2, "all": logical_blocks}[mode] + K
        for request in subject.running:
            *states, attention = (len(ids) for ids in subject.manager.block_ids(request.request_id))
            equal("blocks of attention", attention, logical_blocks)
            # A Mamba row never gives up the logical block that its drafts once needed.
            if not all(
                most - 1 - (K if mode == "align" else 0) <= count <= most for count in states
            ):
                raise WrongResultError(
                    f"Mamba groups hold {states} blocks, mode {mode} has at most {most}"
                )
        subject.check_integrity()
        return 0.0

    reset()
    return Case(run, check, reset, BLOCKS)


def admit(seed: int, mode: str, K: int, num_reqs: int) -> Case:
    """Build the admission of all requests in one step: lookup, blocks of the whole prompt, rows."""
    build = _prepared(seed, mode, K, num_reqs)
    subject = build()

    def reset() -> None:
        nonlocal subject
        subject = build()

    def run() -> int:
        return len(subject.schedule())

    def check() -> float:
        reset()
        equal("admitted", run(), num_reqs)
        for request in subject.running:
            attention = subject.manager.block_ids(request.request_id)[-1]
            equal(
                "blocks of attention", len(attention), -(-PROMPT // BLOCK_SIZE) - (mode == "align")
            )
        subject.check_integrity()
        return 0.0

    return Case(run, check, reset, 1)


def cells() -> list[Cell]:
    """Return cells by modes, drafts and batch sizes."""
    modes = ("none", "align", "all")
    return [
        *grid(
            "scheduler",
            "decode",
            "cpu",
            decode,
            {"mode": modes, "K": (0, 3), "num_reqs": (16, 64)},
            [("none", 0, 16), ("all", 3, 16)],
        ),
        *grid(
            "scheduler",
            "admit",
            "cpu",
            admit,
            {"mode": modes, "K": (3,), "num_reqs": (16, 64)},
            [("all", 3, 16)],
        ),
    ]
