"""A block drafter's drafts are those of a drafter without a cache, and change no token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid_kv import LLM, SamplingParams
from hybrid_kv.attention.paged import AttentionPart
from hybrid_kv.check.guard.poison import poison
from hybrid_kv.check.guard.scenario import AnswerBook, answer_book
from hybrid_kv.config import ConfigError
from hybrid_kv.engine.block_drafter import BlockDrafter, BlockDrafting
from hybrid_kv.models.exact import ExactBlockHead
from hybrid_kv.models.layers import ForwardContext
from hybrid_kv.request import ScheduledRequest
from hybrid_kv.sanitizer import Sanitizer, SanitizerError

MAX_MODEL_LEN = 90
BASE = [(5 + 7 * i) % 97 for i in range(60)]
# Of one token, of several chunks, with beginnings in common; one ends at the model's limit.
PROMPTS = [BASE[:3], BASE, [*BASE[:36], 1, 2, 3], [9, *BASE[:39]], BASE[:1], BASE[:33]]
PARAMS = [SamplingParams(max_tokens=n) for n in (30, 20, 25, 50, 40, 30)]


@dataclass
class Drafted:
    """A run's drafts: those of the engine next to those without a cache, and what came of them."""

    pairs: list[tuple[list[int], list[int]]] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)
    accepted: int = 0
    proposed: int = 0
    preemptions: int = 0


def engine(layers: str, num_drafts: int, **options: Any) -> LLM:
    defaults: dict[str, Any] = {
        "device": "cpu",
        "speculative_method": "dflash",
        "num_speculative_tokens": num_drafts,
        "block_size": 16,
        "num_blocks": 400,
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 24,
        "mamba_cache_mode": "align",
    }
    return LLM(answer_book(layers).model, **{**defaults, **options})


def run(llm: LLM, book: AnswerBook, disturb: Callable[[LLM], None] | None = None) -> Drafted:
    """Send all requests twice; their tokens must be those of the model alone."""
    poison(llm)
    drafted = Drafted()
    requests = zip(PROMPTS, PARAMS, strict=True)
    texts = [[*prompt, *book.answer(prompt, params, MAX_MODEL_LEN)] for prompt, params in requests]
    execute = llm.runner.execute

    def watched(scheduled: Sequence[ScheduledRequest]) -> Any:
        output = execute(scheduled)
        for item in output.batch:
            drafts = output.drafts.get(item.request.request_id)
            known = int(llm.runner.num_tokens[item.request.row])
            number = int(item.request.request_id) % len(PROMPTS)
            # Queries after the last position have no place to write to.
            fits = known + len(drafts or ()) <= MAX_MODEL_LEN
            if drafts and fits and known <= len(texts[number]):
                drafted.pairs.append((drafts, book.drafts(texts[number], known, len(drafts))))
        return output

    llm.runner.execute = watched  # type: ignore[method-assign]
    for _ in range(2):
        outputs = llm.generate(PROMPTS, PARAMS, progress=False, on_step=disturb)
        for prompt, params, output in zip(PROMPTS, PARAMS, outputs, strict=True):
            assert output.token_ids == book.answer(prompt, params, MAX_MODEL_LEN)
        drafted.cached += [output.cached_tokens for output in outputs]
        drafted.accepted += sum(output.num_accepted_draft_tokens for output in outputs)
        drafted.proposed += sum(output.num_draft_tokens for output in outputs)
        drafted.preemptions += sum(output.num_preemptions for output in outputs)
    llm.manager.check_integrity()
    return drafted


def check(layers: str, num_drafts: int, **options: Any) -> Drafted:
    drafted = run(engine(layers, num_drafts, **options), answer_book(layers))
    assert len(drafted.pairs) > 20
    assert [got for got, _ in drafted.pairs] == [due for _, due in drafted.pairs]
    assert drafted.accepted > 0
    return drafted


# Windows of 6 and 19 tokens: shorter and longer than K, and than a block of the drafter's group.
@pytest.mark.parametrize("layers", ["M*>", "M*}", "M~*>", "*}"])
@pytest.mark.parametrize("num_drafts", [1, 4, 8])
def test_drafts_are_those_of_a_drafter_without_a_cache(layers: str, num_drafts: int) -> None:
    """With prompts in chunks, hits, waiting requests and rows that change owners."""
    drafted = check(layers, num_drafts)
    assert max(drafted.cached) >= 32
    if num_drafts == 1:
        assert drafted.accepted / drafted.proposed > 0.6


@pytest.mark.parametrize("mode", ["none", "align", "all"])
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_every_mode_and_schedule(mode: str, async_scheduling: bool) -> None:
    options = {"async_scheduling": async_scheduling, "sanitize": True}
    drafted = check("M*M>", 5, mamba_cache_mode=mode, **options)
    assert (max(drafted.cached) > 0) == (mode != "none")


def test_sixteen_drafts_at_once() -> None:
    """They are more than either window sees, and fill blocks of their own."""
    drafted = check("M*>", 16, block_size=32, sanitize=True)
    assert max(len(drafts) for drafts, _ in drafted.pairs) == 16


def test_drafts_after_preemptions_and_steps_that_propose_none() -> None:
    """What a request computes again is written again; a step with K = 0 writes as any other."""
    llm = engine("M*}", 6, num_speculative_tokens_per_batch_size=[[1, 1, 6], [2, 2, 3], [3, 4, 0]])

    def preempt(llm: LLM) -> None:
        running = llm.scheduler.running
        if llm.num_steps % 7 == 3 and len(running) > 1:
            llm.scheduler.preempt(running[-1])

    drafted = run(llm, answer_book("M*}"), preempt)
    assert drafted.preemptions > 2
    assert {len(drafts) for drafts, _ in drafted.pairs} == {3, 6}
    assert [got for got, _ in drafted.pairs] == [due for _, due in drafted.pairs]


def never_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step with K = 0 writes nothing."""
    plain = BlockDrafter.propose

    def propose(self: BlockDrafter, step: BlockDrafting, *rest: Any) -> Any:
        return plain(self, step, *rest) if step.num_drafts else None

    monkeypatch.setattr(BlockDrafter, "propose", propose)


def before_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head that keeps the target's hidden states of a token one position further."""
    plain = ExactBlockHead.store

    def store(self: ExactBlockHead, hidden: torch.Tensor, context: ForwardContext) -> None:
        plain(self, hidden.roll(1, 0), context)

    monkeypatch.setattr(ExactBlockHead, "store", store)


@pytest.mark.parametrize("plant", [never_stored, before_the_last_one])
def test_a_wrong_row_of_the_cache_gives_other_drafts_and_the_same_tokens(
    monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None]
) -> None:
    plant(monkeypatch)
    ranges = [[1, 1, 6], [2, 4, 0]]
    llm = engine("M*}", 6, num_speculative_tokens_per_batch_size=ranges)
    drafted = run(llm, answer_book("M*}"))
    assert [got for got, _ in drafted.pairs] != [due for _, due in drafted.pairs]


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (lambda segment: replace(segment, window=12), "window-start"),
        (lambda segment: replace(segment, window=None), "window-start"),
        (
            lambda segment: replace(segment, block_table=segment.block_table.roll(1, 0)),
            "read-slot",
        ),
    ],
    ids=["a window off by K", "all tokens", "another row"],
)
def test_the_sanitizer_knows_what_a_block_drafter_may_read(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[AttentionPart], AttentionPart], rule: str
) -> None:
    plain = Sanitizer.on_block

    def on_block(self: Sanitizer, group: int, rows: Any, segment: AttentionPart) -> None:
        plain(self, group, rows, change(segment))

    monkeypatch.setattr(Sanitizer, "on_block", on_block)
    with pytest.raises(SanitizerError) as caught:
        run(engine("M*>", 6, sanitize=True), answer_book("M*>"))
    assert caught.value.rule == rule


def test_a_model_without_a_block_drafter_is_refused() -> None:
    options: dict[str, Any] = {"speculative_method": "dflash", "num_speculative_tokens": 4}
    with pytest.raises(ConfigError, match="this ExactModel has no block drafter"):
        LLM(answer_book("M*").model, **options)
    folder = Path(__file__).parents[2] / "hybrid_kv" / "check" / "guard_model"
    with pytest.raises(ConfigError, match=r"guard_model has no block drafter .* n-grams instead"):
        LLM(folder, **options)
    with pytest.raises(ConfigError, match=r"num_speculative_tokens=17 must be in \[0, 16\]"):
        engine("M*>", 17)
