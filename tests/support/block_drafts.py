"""Runs of an engine with a block drafter, next to a drafter without a cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from hybrid_kv import LLM, SamplingParams
from hybrid_kv.check.guard.poison import poison
from hybrid_kv.request import ScheduledRequest

MAX_MODEL_LEN = 90
BASE = [(5 + 7 * i) % 97 for i in range(60)]
# Of one token, of several chunks, with beginnings in common; one ends at the model's limit.
PROMPTS = [BASE[:3], BASE, [*BASE[:36], 1, 2, 3], [9, *BASE[:39]], BASE[:1], BASE[:33]]
PARAMS = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (30, 20, 25, 50, 40, 30)]
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "speculative_method": "dflash",
    "block_size": 16,
    "num_blocks": 400,
    "max_model_len": MAX_MODEL_LEN,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 24,
    "mamba_cache_mode": "align",
}


class Book(Protocol):
    """The right answers and drafts."""

    def answer(
        self, prompt: Sequence[int], params: SamplingParams, max_model_len: int
    ) -> list[int]:
        """Return the answer of the model alone."""

    def drafts(self, sequence: Sequence[int], num_tokens: int, num_drafts: int) -> list[int]:
        """Return the drafts after the first `num_tokens` of a sequence."""


@dataclass
class Drafted:
    """A run's drafts: those of the engine next to those without a cache, and what came of them."""

    pairs: list[tuple[list[int], list[int]]] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)
    accepted: int = 0
    proposed: int = 0
    preemptions: int = 0

    def check(self, least: int = 20) -> None:
        """Require that so many drafts were seen, and that all of them are right."""
        assert len(self.pairs) > least
        assert [got for got, _ in self.pairs] == [due for _, due in self.pairs]


def run(
    llm: LLM,
    book: Book,
    disturb: Callable[[LLM], None] | None = None,
    prompts: Sequence[list[int]] = PROMPTS,
) -> Drafted:
    """Send all requests twice; their tokens must be those of the model alone."""
    poison(llm)
    drafted = Drafted()
    requests = zip(prompts, PARAMS, strict=True)
    texts = [[*prompt, *book.answer(prompt, params, MAX_MODEL_LEN)] for prompt, params in requests]
    execute = llm.runner.execute

    def watched(scheduled: Sequence[ScheduledRequest]) -> Any:
        output = execute(scheduled)
        for item in output.batch:
            drafts = output.drafts.get(item.request.request_id)
            known = int(llm.runner.num_tokens[item.request.row])
            number = int(item.request.request_id) % len(prompts)
            # Queries after the last position have no place to write to.
            fits = known + len(drafts or ()) <= MAX_MODEL_LEN
            if drafts and fits and known <= len(texts[number]):
                drafted.pairs.append((drafts, book.drafts(texts[number], known, len(drafts))))
        return output

    llm.runner.execute = watched  # type: ignore[method-assign]
    for _ in range(2):
        outputs = llm.generate(prompts, PARAMS, progress=False, on_step=disturb)
        for prompt, params, output in zip(prompts, PARAMS, outputs, strict=True):
            assert output.token_ids == book.answer(prompt, params, MAX_MODEL_LEN)
        drafted.cached += [output.cached_tokens for output in outputs]
        drafted.accepted += sum(output.num_accepted_draft_tokens for output in outputs)
        drafted.proposed += sum(output.num_draft_tokens for output in outputs)
        drafted.preemptions += sum(output.num_preemptions for output in outputs)
    llm.manager.check_integrity()
    return drafted


def preempt_some(llm: LLM) -> None:
    """Preempt a request in each seventh step."""
    running = llm.scheduler.running
    if llm.num_steps % 7 == 3 and len(running) > 1:
        llm.scheduler.preempt(running[-1])
