"""State scheme `recompute`, end to end: tokens of `slots`, planned blocks, no lost prefix."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from hybrid_kv.cache.spec import MambaSpec
from hybrid_kv.check.guard.poison import poison
from hybrid_kv.check.guard.scenario import AnswerBook, ScriptedProposer, answer_book
from hybrid_kv.engine.llm import LLM, RequestOutput
from hybrid_kv.sampling import SamplingParams

MODES = ("none", "align", "all")
LIMIT = 96
BOOK = answer_book("M*")
TEXT = [(7 * i * i + 3) % 97 for i in range(60)]


def engine(
    mode: str,
    k: int = 0,
    script: str = "right",
    prompts: Sequence[list[int]] = (TEXT,),
    block_size: int = 16,
    book: AnswerBook = BOOK,
    **options: Any,
) -> LLM:
    """An engine whose drafts follow a script; its requests must be `prompts`, in their order."""
    sequences = [
        [*p, *book.without_stop(p, SamplingParams(max_tokens=LIMIT), LIMIT)] for p in prompts
    ]
    proposer = (
        ScriptedProposer(script, k, sequences, [len(p) for p in prompts], block_size, 97)
        if k
        else None
    )
    defaults = {
        "num_blocks": 200,
        "max_model_len": LIMIT,
        "attention_backend": "TORCH",
        "device": "cpu",
    }
    defaults["max_num_seqs"] = 4
    llm = LLM(
        book.model,
        proposer=proposer,
        mamba_cache_mode=mode,
        num_speculative_tokens=k,
        block_size=block_size,
        state_scheme="recompute",
        **defaults | options,
    )
    poison(llm)
    return llm


def answer(prompt: list[int], count: int) -> list[int]:
    return BOOK.answer(prompt, SamplingParams(max_tokens=count), LIMIT)


def generate(
    llm: LLM,
    prompts: Sequence[list[int]],
    count: int = LIMIT,
    on_step: Callable[[LLM], None] | None = None,
) -> list[RequestOutput]:
    outputs = llm.generate(
        prompts, SamplingParams(max_tokens=count), progress=False, on_step=on_step
    )
    assert [output.error for output in outputs] == [None] * len(outputs)
    return outputs


def shortest(k: int) -> int:
    return 3 * (1 + k) - 1


@pytest.mark.parametrize(
    ("mode", "block_size", "k", "ring_len", "is_async", "most"),
    [
        ("none", 16, 0, None, False, 1),
        ("none", 16, 5, None, True, 1),
        ("all", 16, 3, None, False, 6),
        ("align", 16, 0, 16, False, 2),  # the ring is no longer than a block
        ("align", 16, 3, 16, False, 2),
        ("align", 16, 4, 14, False, 2),
        ("align", 16, 3, 12, True, 2),
        ("align", 16, 0, 17, False, 3),  # it is
        ("align", 16, 3, 17, False, 3),
        ("align", 16, 3, None, False, 3),
        ("align", 16, 3, 13, True, 3),
        ("align", 8, 3, None, False, 3),
        ("align", 8, 5, None, False, 4),  # a step from a boundary on reaches the one after the next
        ("align", 8, 3, None, True, 4),
    ],
)
def test_the_longest_request_holds_what_the_plan_says(
    mode: str, block_size: int, k: int, ring_len: int | None, is_async: bool, most: int
) -> None:
    highest = 0

    def watch(llm: LLM) -> None:
        nonlocal highest
        (group,) = (
            i for i, g in enumerate(llm.plan.config.groups) if isinstance(g.spec, MambaSpec)
        )
        for request in llm.scheduler.running:
            highest = max(highest, len(llm.manager.block_ids(request.request_id)[group]))

    for script, start in itertools.product(("mixed", "beyond") if k else ("",), (8, 11)):
        options = {
            "recompute_ring_len": ring_len,
            "async_scheduling": is_async,
            "max_num_batched_tokens": 50,
        }
        llm = engine(mode, k, script, [TEXT[:start]], block_size, **options)
        generate(llm, [TEXT[:start]], on_step=watch)
        spec = next(
            group.spec for group in llm.plan.config.groups if isinstance(group.spec, MambaSpec)
        )
        assert spec.max_blocks_per_request(LIMIT) == most
        assert spec.max_memory_usage_bytes(LIMIT) == most * spec.page_size_bytes + spec.row_bytes
        assert spec.num_speculative_blocks == 0
    assert highest == most


@pytest.mark.parametrize("mode", MODES)
def test_rings_cost_what_the_plan_says(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = engine(mode, 3, max_num_seqs=5)
    allocated = sum(ring.nbytes for ring in llm.runner.row_memory.values())
    assert allocated == llm.plan.row_bytes == 5 * llm.plan.config.bytes_per_row > 0
    pages = llm.plan.config.total_bytes
    paid = engine(mode, 3, max_num_seqs=5, num_blocks=None, memory_bytes=pages + allocated)
    assert paid.plan.config.num_blocks == llm.plan.config.num_blocks
    less = engine(mode, 3, max_num_seqs=5, num_blocks=None, memory_bytes=pages + allocated - 1)
    assert less.plan.config.num_blocks == llm.plan.config.num_blocks - 1
    page = pages // llm.plan.config.num_blocks
    monkeypatch.setattr("hybrid_kv.engine.build.DEFAULT_CPU_CACHE_BYTES", allocated + 20 * page - 1)
    assert engine(mode, 3, max_num_seqs=5, num_blocks=None).plan.config.num_blocks == 19


@pytest.mark.parametrize("mode", ["align", "all"])
@pytest.mark.parametrize("k", [0, 3])
def test_a_state_is_published_in_the_step_after_its_boundary_was_passed(mode: str, k: int) -> None:
    prompt = TEXT[:20]
    llm = engine(mode, k, "right", [prompt])
    pool, seen = llm.manager.pool, []

    def watch(llm: LLM) -> None:
        for request in llm.scheduler.running:
            states = sum(key[0] == 0 for key in pool.published_keys())
            seen.append((request.progress.computed, request.progress.flushed, states))

    generate(llm, [prompt], on_step=watch)
    for (before, _, _), (now, flushed, states) in itertools.pairwise(
        entry for entry in seen if entry[0] >= 20
    ):
        assert flushed % 16 == 0 or flushed == 20  # nothing else is due: the ring is long
        assert max(flushed, before // 16 * 16) == flushed <= now
        # A chunk leaves no state at the boundary inside it in mode align, unless it ended there.
        assert states == (max(flushed, 16) // 16)


@pytest.mark.parametrize("end", ["finish", "stop", "preempt", "abort"])
@pytest.mark.parametrize("is_async", [False, True])
def test_no_state_is_lost_at_the_end_of_a_request(end: str, is_async: bool) -> None:
    """The last boundary is passed in the last step, and the next request hits all tokens."""
    prompt = TEXT[:20]
    whole = [*prompt, *answer(prompt, 14)]
    params = SamplingParams(max_tokens=13)
    if end == "stop":  # the 14th token is sampled, and not kept
        params = SamplingParams(max_tokens=30, stop_token_ids=(whole[33],))
        assert whole[33] not in whole[20:33]
    again = [*whole[:32], 1, 2]
    llm = engine("all", prompts=[prompt, again], async_scheduling=is_async, sanitize=True)

    def disturb(llm: LLM) -> None:
        request = llm.scheduler.running[0] if llm.scheduler.running else None
        if (
            request is not None
            and request.num_computed_tokens == 32
            and not request.num_preemptions
        ):
            if end == "preempt":
                llm.scheduler.preempt(request)
            elif end == "abort":
                llm.abort(request.request_id)

    if end in ("preempt", "abort"):
        params = SamplingParams(max_tokens=14 if end == "preempt" else 20)
    (output,) = llm.generate([prompt], params, progress=False, on_step=disturb)
    assert output.num_preemptions == (end == "preempt")
    assert generate(llm, [again], 2)[0].cached_tokens == 32
    llm.scheduler.check_integrity()


@pytest.mark.parametrize("mode", ["align", "all"])
def test_a_boundary_among_the_last_drafts_is_not_lost(mode: str) -> None:
    """The last step, from token 29 to 33, verifies drafts across it; no later step writes it."""
    prompt = TEXT[:21]
    again = [*prompt, *answer(prompt, 11), 1, 2]
    llm = engine(mode, 3, "right", prompts=[prompt, again], sanitize=True)
    llm.generate([prompt], SamplingParams(max_tokens=13), progress=False)
    assert generate(llm, [again], 2)[0].cached_tokens == 32


def test_a_chunk_that_is_in_flight_has_left_the_states_before_it() -> None:
    llm = engine("align", async_scheduling=True, recompute_ring_len=15, max_num_batched_tokens=16)
    held = []
    generate(
        llm,
        [TEXT],
        4,
        lambda llm: held.extend(
            len(llm.manager.block_ids(r.request_id)[0]) for r in llm.scheduler.running
        ),
    )
    assert max(held) == 2


def test_a_state_block_size_means_nothing_in_mode_none() -> None:
    llm = engine("none", 2, "mixed", [TEXT[:20]], mamba_block_size=8)
    assert generate(llm, [TEXT[:20]], 40)[0].token_ids == answer(TEXT[:20], 40)


def test_a_failed_step_publishes_nothing_and_the_engine_goes_on() -> None:
    prompt = TEXT[:20]
    llm = engine("all", prompts=[prompt] * 2, sanitize=True)

    def fail(llm: LLM) -> None:
        if llm.scheduler.running and llm.scheduler.running[0].num_computed_tokens == 32:
            raise KeyboardInterrupt

    before = set()
    with pytest.raises(KeyboardInterrupt):
        generate(
            llm,
            [prompt],
            on_step=lambda llm: (before.update(llm.manager.pool.published_keys()), fail(llm)),
        )
    assert set(llm.manager.pool.published_keys()) == before
    assert generate(llm, [prompt], 20)[0].token_ids == answer(prompt, 20)
