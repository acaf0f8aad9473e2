"""The MTP head's drafts depend neither on the rest of the batch nor on a prompt's chunks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid_kv.engine import drafter
from hybrid_kv.engine.llm import LLM
from hybrid_kv.engine.runner import StepOutput
from hybrid_kv.request import ScheduledRequest
from hybrid_kv.sampling import SamplingParams
from hybrid_kv.sanitizer import SanitizerError
from tests.models.tiny_nemotron import Characters

FOLDER = Path(__file__).parents[2] / "hybrid_kv" / "check" / "guard_model"
PROMPTS = [
    [5 + (7 * i + 3 * start) % 83 for i in range(length)]
    for start, length in enumerate((3, 60, 9, 100, 1))
]
NUM_TOKENS = (14, 9, 20, 50, 16)
MAX_MODEL_LEN = 112  # where the fourth request ends: its last passes have no slot
BLOCK_SIZE = 48  # the smallest that pays for a state of the guard model with three drafts


def drafts_of(
    prompts: list[list[int]],
    num_tokens: Sequence[int],
    disturb: Callable[[LLM], None] | None = None,
    **options: Any,
) -> tuple[list[dict[int, list[int]]], list[list[int]]]:
    """Each request's proposals, by the number of its tokens that were known, and its tokens."""
    llm = LLM(
        FOLDER,
        tokenizer=Characters(),
        device="cpu",
        dtype="float64",
        speculative_method="mtp",
        num_speculative_tokens=3,
        block_size=BLOCK_SIZE,
        max_model_len=MAX_MODEL_LEN,
        **options,
    )
    found, execute = defaultdict(dict), llm.runner.execute

    def watched(scheduled: Sequence[ScheduledRequest]) -> StepOutput:
        output = execute(scheduled)
        for request in (
            item.request for item in output.batch if item.request.request_id in output.drafts
        ):
            known = int(llm.runner.num_tokens[request.row])
            found[int(request.request_id)][known] = output.drafts[request.request_id]
        return output

    llm.runner.execute = watched
    params = [SamplingParams(max_tokens=count, ignore_eos=True) for count in num_tokens]
    outputs = llm.generate(prompts, params, progress=False, on_step=disturb)
    return [found[i] for i in range(len(prompts))], [output.token_ids for output in outputs]


# it says which keys the head may not see
@pytest.mark.parametrize("mode", ["none", "align", "all"])
def test_a_request_gets_the_drafts_that_it_gets_alone(mode: str) -> None:
    """Some prompts wait, some run in chunks beside verify steps, rows change owners."""
    each = [
        drafts_of([prompt], [count], mamba_cache_mode=mode)
        for prompt, count in zip(PROMPTS, NUM_TOKENS, strict=True)
    ]
    expected = [proposals for (proposals,), _ in each]
    proposals, got = drafts_of(
        PROMPTS, NUM_TOKENS, mamba_cache_mode=mode, max_num_seqs=3, max_num_batched_tokens=12
    )
    assert got == [tokens for _, (tokens,) in each] and sum(map(len, expected)) > 20
    # A step without room for every draft gains fewer tokens: from there on other numbers of tokens
    # are known.
    shared = [(i, known) for i, mine in enumerate(proposals) for known in mine.keys() & expected[i]]
    assert [proposals[i][known] for i, known in shared] == [
        expected[i][known] for i, known in shared
    ]
    assert len(shared) > sum(map(len, expected)) / 2


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_fewer_drafts_are_the_first_of_those_that_a_request_gets_alone(
    async_scheduling: bool,
) -> None:
    """A step of three proposes none, and later drafts read what the head wrote in it."""
    prompts = PROMPTS[1:4]
    counts = 9, 20, 12
    alone = [
        drafts_of([prompt], [count])[0][0] for prompt, count in zip(prompts, counts, strict=True)
    ]
    proposals, _ = drafts_of(
        prompts,
        counts,
        num_speculative_tokens_per_batch_size=[[1, 1, 3], [2, 2, 1], [3, 3, 0]],
        max_num_batched_tokens=64,
        async_scheduling=async_scheduling,
        sanitize=True,
    )
    shared = [
        (drafts, alone[i][known])
        for i, mine in enumerate(proposals)
        for known, drafts in mine.items()
        if known in alone[i]
    ]
    assert {len(drafts) for drafts, _ in shared} == {1, 3}
    assert all(drafts == first[: len(drafts)] for drafts, first in shared)


def swapped(place: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two computed tokens of one request, at the same place of two of its blocks."""
    i = next(
        i for i in range(len(place) - BLOCK_SIZE) if place[i + BLOCK_SIZE] - place[i] == BLOCK_SIZE
    )
    slots = slots.clone()
    slots[[i, i + BLOCK_SIZE]] = slots[[i + BLOCK_SIZE, i]]
    return place, slots


def beside(place: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The last draft, whose token is not known yet, one place off in its own block."""
    slots = slots.clone()
    slots[-1] ^= 1
    return place, slots


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (lambda place, slots: (place, slots.roll(1)), "draft-slot write-unheld"),
        (lambda place, slots: (place, slots + 1), "draft-slot write-unheld"),
        (
            lambda place, slots: (place, slots + (slots >= 0) * BLOCK_SIZE),
            "draft-slot write-unheld",
        ),
        (lambda place, slots: (place, slots * 0 + 2**20), "index-range"),
        (swapped, "draft-slot"),
        (beside, "draft-slot"),
    ],
    ids=[
        "of another token",
        "one further",
        "a block further",
        "nowhere",
        "in another block",
        "beside",
    ],
)
def test_the_sanitizer_knows_where_the_head_may_write(
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
    rule: str,
) -> None:
    plain = drafter.MTPDrafter.write_slots
    monkeypatch.setattr(
        drafter.MTPDrafter, "write_slots", lambda self, *args: change(*plain(self, *args))
    )
    with pytest.raises(SanitizerError) as caught:
        drafts_of(PROMPTS, NUM_TOKENS, max_num_seqs=5, sanitize=True)
    assert caught.value.rule in rule.split()


@pytest.mark.parametrize(
    ("mode", "async_scheduling"), [("none", True), ("align", False), ("all", True)]
)
def test_the_sanitizer_has_nothing_against_a_head_that_is_right(
    mode: str, async_scheduling: bool
) -> None:
    prompts = [*PROMPTS, *PROMPTS]
    options = {
        "mamba_cache_mode": mode,
        "max_num_seqs": 3,
        "max_num_batched_tokens": 20,
        "sanitize": True,
    }
    drafts_of(prompts, [*NUM_TOKENS, *NUM_TOKENS], async_scheduling=async_scheduling, **options)
