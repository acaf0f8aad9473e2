"""A block drafter's drafts are those of a drafter without a cache, and change no token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid_kv import LLM
from hybrid_kv.attention.paged import AttentionPart
from hybrid_kv.check.guard.scenario import answer_book
from hybrid_kv.config import ConfigError
from hybrid_kv.engine.block_drafter import BlockDrafter, BlockDrafting
from hybrid_kv.models.exact import ExactBlockHead
from hybrid_kv.models.layers import ForwardContext
from hybrid_kv.sanitizer import Sanitizer, SanitizerError
from tests.support.block_drafts import OPTIONS, Drafted, preempt_some, run


def engine(layers: str, num_drafts: int, **options: Any) -> LLM:
    options = {**OPTIONS, "num_speculative_tokens": num_drafts, **options}
    return LLM(answer_book(layers).model, **options)


def check(layers: str, num_drafts: int, **options: Any) -> Drafted:
    drafted = run(engine(layers, num_drafts, **options), answer_book(layers))
    drafted.check()
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
    drafted = run(llm, answer_book("M*}"), preempt_some)
    assert drafted.preemptions > 2
    assert {len(drafts) for drafts, _ in drafted.pairs} == {3, 6}
    drafted.check(10)


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


@pytest.mark.parametrize("left_out", [0, 3])
@pytest.mark.parametrize(("mode", "rule"), [("none", "read-slot"), ("align", "publish-slots")])
def test_the_sanitizer_knows_what_a_block_drafter_has_stored(
    monkeypatch: pytest.MonkeyPatch, left_out: int, mode: str, rule: str
) -> None:
    """A step with this many drafts stores nothing, for later blocks or for other requests."""
    plain = BlockDrafter.propose

    def propose(self: BlockDrafter, step: BlockDrafting, *given: Any) -> torch.Tensor | None:
        return None if step.num_drafts == left_out else plain(self, step, *given)

    monkeypatch.setattr(BlockDrafter, "propose", propose)
    ranges = [[1, 1, 6], [2, 2, 3], [3, 4, 0]]
    options = {"num_speculative_tokens_per_batch_size": ranges, "mamba_cache_mode": mode}
    with pytest.raises(SanitizerError) as caught:
        run(engine("M*}", 6, sanitize=True, **options), answer_book("M*}"))
    assert caught.value.rule == rule


def test_a_model_without_a_block_drafter_is_refused() -> None:
    options: dict[str, Any] = {"speculative_method": "dflash", "num_speculative_tokens": 4}
    with pytest.raises(ConfigError, match="this ExactModel has no block drafter"):
        LLM(answer_book("M*").model, **options)
    folder = Path(__file__).parents[2] / "hybrid_kv" / "check" / "guard_model"
    with pytest.raises(ConfigError, match=r"guard_model has no block drafter .* speculative_model"):
        LLM(folder, **options)
    with pytest.raises(ConfigError, match=r"num_speculative_tokens=17 must be in \[0, 16\]"):
        engine("M*>", 17)
