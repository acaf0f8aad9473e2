"""Small scenarios in which one request pattern happens by construction, whatever the seed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from hybrid_kv.cache import modes as cache_modes
from hybrid_kv.cache.modes import MODES
from hybrid_kv.guard.scenario import COMMON, Event, Scenario, SmallBlocksFirst, SmallKVFirst, answer_book, cache_options
from hybrid_kv.kernels.recompute import shortest_ring_len
from hybrid_kv.sampling import SamplingParams

BLOCK = 8
VOCAB = 97


def _draw(rng: np.random.Generator, *lengths: int) -> list[list[int]]:
    return [rng.integers(0, VOCAB, size=length).tolist() for length in lengths]


def _params(*max_tokens: int, **options: Any) -> list[SamplingParams]:
    return [SamplingParams(max_tokens=count, **options) for count in max_tokens]


def _scenario(
    seed: int,
    rng: np.random.Generator,
    prompts: list[list[int]],
    params: list[SamplingParams],
    *,
    modes: Sequence[str] = tuple(MODES),
    layers: str = "",
    K: int = 0,
    drafts: str = "none",
    waves: tuple[int, ...] = (),
    events: tuple[Event, ...] = (),
    **options: Any,
) -> Scenario:
    """A scenario of blocks of eight tokens in a pool with room, except for `options`."""
    mode = str(rng.choice(list(modes)))
    layers = layers or ("**" if mode == "attention" else str(rng.choice(["M*", "*M", "M*MM*"])))
    options = {
        "attention_backend": str(rng.choice([SmallBlocksFirst.name, SmallKVFirst.name])),
        "block_size": BLOCK,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "max_model_len": 96,
        "num_blocks": 400,
        "captured_batch_sizes": (),
        "device": "cpu",
        **cache_options(mode, K, drafts),
        **options,
    }
    return Scenario(seed, layers, options, prompts, params, waves, drafts, events)


Builder = Callable[[int, np.random.Generator], Scenario]
FORCED: dict[str, Builder] = {}


def _forces(*names: str) -> Callable[[Builder], Builder]:
    """Enter a builder under the patterns that it forces."""

    def enter(builder: Builder) -> Builder:
        FORCED[", ".join(names)] = builder
        return builder

    return enter


@_forces("one_token_of_new_request", "row_reuse")
def _one_token(seed: int, rng: np.random.Generator) -> Scenario:
    return _scenario(seed, rng, _draw(rng, 3, 3, 4, 10), _params(2, 2, 6, 6), waves=(2, 2), max_num_batched_tokens=5)


@_forces("one_token_left", "first_decode_beside_chunk")
def _one_token_left(seed: int, rng: np.random.Generator) -> Scenario:
    K = int(rng.integers(2, 6))
    prompts = _draw(rng, 1 + K, 2 * BLOCK + 1)
    budget = 1 + K + BLOCK
    return _scenario(seed, rng, prompts, _params(30, 4), K=K, drafts="right", max_num_batched_tokens=budget)


@_forces("few_tokens_left")
def _few_tokens_left(seed: int, rng: np.random.Generator) -> Scenario:
    K = int(rng.integers(2, 6))
    prompts = _draw(rng, 1 + K, 2 * BLOCK + int(rng.integers(2, K + 2)))
    budget = 1 + K + BLOCK
    return _scenario(seed, rng, prompts, _params(30, 4), K=K, drafts="right", max_num_batched_tokens=budget)


@_forces("uneven_prefills")
def _uneven_prefills(seed: int, rng: np.random.Generator) -> Scenario:
    return _scenario(seed, rng, _draw(rng, 5, 7, 6), _params(5, 5, 5))


@_forces("lone_chunks", "one_behind_chunk", "short_prompt", "one_token_prefill")
def _lone_chunks(seed: int, rng: np.random.Generator) -> Scenario:
    return _scenario(
        seed, rng, _draw(rng, 33, 1, 17, 2), _params(4, 4, 4, 4), waves=(1, 1, 1, 1), max_num_batched_tokens=16
    )


@_forces("undrafted_after_accepts", "number_of_drafts_varies")
def _ragged(seed: int, rng: np.random.Generator) -> Scenario:
    K = int(rng.integers(2, 8))
    return _scenario(seed, rng, _draw(rng, 5, 9, 14), _params(30, 30, 30), K=K, drafts="ragged")


@_forces("all_rejected", "whole_batch_rejected", "padded_drafts")
def _wrong(seed: int, rng: np.random.Generator) -> Scenario:
    K = int(rng.integers(2, 8))
    return _scenario(
        seed, rng, _draw(rng, 5, 9, 14), _params(12, 12, 12), K=K, drafts="wrong", captured_batch_sizes=(4,)
    )


@_forces("all_accepted", "max_model_len_with_drafts")
def _right(seed: int, rng: np.random.Generator) -> Scenario:
    K = int(rng.integers(2, 8))
    return _scenario(seed, rng, _draw(rng, 5, 9, 40), _params(30, 30, 30), K=K, drafts="right", max_model_len=64)


@_forces("accepted_to_boundary", "rejected_at_boundary")
def _boundary(seed: int, rng: np.random.Generator) -> Scenario:
    K = int(rng.integers(2, 8))
    return _scenario(seed, rng, _draw(rng, 5, 8, 11, 16), _params(*[30] * 4), K=K, drafts="boundary")


@_forces("rejected_behind_boundary")
def _beyond(seed: int, rng: np.random.Generator) -> Scenario:
    K = int(rng.integers(3, 8))
    return _scenario(seed, rng, _draw(rng, 5, 8, 11, 16), _params(*[30] * 4), K=K, drafts="beyond")


@_forces("middle_row_ends")
def _middle_row_ends(seed: int, rng: np.random.Generator) -> Scenario:
    return _scenario(seed, rng, _draw(rng, 5, 6, 7, 9), _params(25, 4, 40, 6), K=3, drafts="rotate", max_num_seqs=3)


@_forces("exact_block", "hit_up_to_last_token", "hit_before_last_block", "hit_of_several_blocks", "exact_hit")
def _exact_blocks(seed: int, rng: np.random.Generator) -> Scenario:
    prompts = _draw(rng, BLOCK, BLOCK + 1, 3 * BLOCK, 3 * BLOCK + 1)
    return _scenario(
        seed,
        rng,
        prompts * 2,
        _params(*[6] * 8),
        waves=(4, 4),
        modes=("align", "all", "attention"),
        K=2,
        drafts="mixed",
    )


@_forces("unequal_blocks")
def _unequal_blocks(seed: int, rng: np.random.Generator) -> Scenario:
    prompts = _draw(rng, 2 * BLOCK + 1, 5 * BLOCK, 4 * BLOCK + 3) * 2
    return _scenario(
        seed, rng, prompts, _params(*[6] * 6), waves=(3, 3), modes=("align", "all"), K=2, drafts="mixed", layers="M+*M"
    )


@_forces("between_boundaries")
def _between_boundaries(seed: int, rng: np.random.Generator) -> Scenario:
    # The state after 32 tokens is the oldest block and lost, that after 24 is there; K and V come in blocks of 16.
    return _scenario(
        seed, rng, _draw(rng, 33) * 2, _params(2, 6), waves=(1, 1), modes=("all",), layers="M*+",
        events=(Event("evict", 2),),
    )  # fmt: skip


@_forces("repeated_after_cut_chunk")
def _cut_chunk(seed: int, rng: np.random.Generator) -> Scenario:
    busy, prompt = _draw(rng, 4, 12)
    return _scenario(
        seed, rng, [busy, prompt, prompt], _params(20, 4, 8), waves=(2, 1), modes=("align", "all"), K=3,
        drafts="right", max_num_batched_tokens=9,
    )  # fmt: skip


@_forces("attention_deeper")
def _attention_deeper(seed: int, rng: np.random.Generator) -> Scenario:
    (text,) = _draw(rng, 30)
    # The last one finds two blocks of K and V, and the state of the short one behind the first of them.
    prompts = [text, text[: BLOCK + 1], text[:20] + _draw(rng, 9)[0]]
    return _scenario(seed, rng, prompts, _params(6, 6, 6), waves=(1, 1, 1), modes=("align",))


@_forces("state_deeper", "eviction", "hit_behind_losses")
def _state_deeper(seed: int, rng: np.random.Generator) -> Scenario:
    prompts = _draw(rng, 33) * 2
    # The first group's deepest block is the oldest one.
    return _scenario(
        seed,
        rng,
        prompts,
        _params(2, 2),
        waves=(1, 1),
        modes=("all",),
        layers="*M",
        events=(Event("evict", 2),),
    )


@_forces("no_common_depth")
def _no_common_depth(seed: int, rng: np.random.Generator) -> Scenario:
    # After 32 tokens there is a state, and a block of K/V that is lost; after 24 tokens there is K/V and no state.
    return _scenario(
        seed,
        rng,
        _draw(rng, 33) * 2,
        _params(1, 6),
        waves=(1, 1),
        modes=("align",),
        layers="*M",
        events=(Event("evict", 2),),
    )


def _second_turn(seed: int, rng: np.random.Generator, mode: str) -> Scenario:
    first, tail = _draw(rng, 12, 5)
    layers = "M*MM*"
    answer = answer_book(layers).without_stop(first, SamplingParams(max_tokens=20), 96)
    return _scenario(
        seed,
        rng,
        [first, [*first, *answer[:18], *tail]],
        _params(20, 8),
        waves=(1, 1),
        modes=(mode,),
        layers=layers,
        K=int(rng.integers(2, 6)),
        drafts=str(rng.choice(["right", "beyond"])),
        max_num_seqs=1,
    )


@_forces("second_turn_align")
def _second_turn_align(seed: int, rng: np.random.Generator) -> Scenario:
    return _second_turn(seed, rng, "align")


@_forces("second_turn_all")
def _second_turn_all(seed: int, rng: np.random.Generator) -> Scenario:
    return _second_turn(seed, rng, "all")


@_forces("duplicates")
def _duplicates(seed: int, rng: np.random.Generator) -> Scenario:
    (text,) = _draw(rng, 20)
    params = [SamplingParams(max_tokens=6, cache_salt=salt) for salt in ("a", "b")]
    return _scenario(seed, rng, [text, text], params, modes=(*MODES, "attention"))


@_forces("waits_for_prefix", "shared_block")
def _waits_for_prefix(seed: int, rng: np.random.Generator) -> Scenario:
    (text,) = _draw(rng, 20)
    prompts = [text, text, text, [*text, 1]]
    return _scenario(seed, rng, prompts, _params(*[6] * 4), waves=(2, 2), modes=("align", "all", "attention"))


@_forces("identical_prompts")
def _identical_prompts(seed: int, rng: np.random.Generator) -> Scenario:
    (text,) = _draw(rng, COMMON)
    prompts = [[*text, i, i + 1] for i in range(4)]
    return _scenario(seed, rng, prompts, _params(*[8] * 4), K=2, drafts="mixed")


@_forces("abort_in_flight", "same_prompt_after_abort")
def _abort_in_flight(seed: int, rng: np.random.Generator) -> Scenario:
    (text,) = _draw(rng, 20)
    return _scenario(
        seed, rng, [text, text, text], _params(12, 8, 8), max_num_seqs=1, events=(Event("abort", 0),),
        async_scheduling=bool(rng.integers(2)),
    )  # fmt: skip


@_forces("preemption", "waiting")
def _preempt_with_one_waiting(seed: int, rng: np.random.Generator) -> Scenario:
    K = int(rng.integers(0, 3))
    prompts = _draw(rng, 9, 12, 17, 9)
    rng.integers(2, 4)  # was an option; what is drawn behind it stays the same
    return _scenario(
        seed, rng, prompts, _params(*[12] * 4), K=K, drafts="mixed" if K else "none", max_num_seqs=3,
        events=(Event("preempt", 4),),
    )  # fmt: skip


@_forces("abort_waiting")
def _abort_waiting(seed: int, rng: np.random.Generator) -> Scenario:
    return _scenario(seed, rng, _draw(rng, 9, 9, 9, 9), _params(*[8] * 4), max_num_seqs=1, events=(Event("drop", 1),))


@_forces("preempted_while_speculating", "resumed_from_cache", "recomputed_output")
def _preempt(seed: int, rng: np.random.Generator) -> Scenario:
    return _scenario(
        seed, rng, _draw(rng, 10, 12, 14), _params(25, 25, 25), modes=("align", "all", "attention"), K=2,
        drafts="right", events=(Event("preempt", 3, 6),),
    )  # fmt: skip


@_forces("full_pool", "refused")
def _full_pool(seed: int, rng: np.random.Generator) -> Scenario:
    K = int(rng.integers(0, 4))
    mode = str(rng.choice(list(MODES)))
    # 32 tokens are cached of the longest request that fits; the other one has a token more.
    policy = cache_modes.MODES[mode]
    states = policy.held_at_most(policy.num_logical_blocks(32, 8), 1) + K
    return _scenario(
        seed, rng, _draw(rng, 20, 21), _params(13, 13), modes=(mode,), layers="M*", K=K, num_blocks=1 + states + 4
    )


@_forces("two_blocks")
def _two_blocks(seed: int, rng: np.random.Generator) -> Scenario:
    return _scenario(
        seed, rng, _draw(rng, 10, 3, 1), _params(5, 5, 5), modes=("none", "attention"), layers="*", block_size=16,
        num_blocks=2, attention_backend="TORCH",
    )  # fmt: skip


@_forces("long_lived", "all_blocks_used", "block_reuse")
def _long_lived(seed: int, rng: np.random.Generator) -> Scenario:
    return _scenario(
        seed, rng, _draw(rng, 3, *[10] * 12), _params(80, *[3] * 12), layers="M*", num_blocks=34, max_num_seqs=2
    )


@_forces("several_groups")
def _several_groups(seed: int, rng: np.random.Generator) -> Scenario:
    return _scenario(
        seed, rng, _draw(rng, 5, 8, 11), _params(20, 20, 20), layers="MMM*M", K=3, drafts="boundary",
        captured_batch_sizes=(4,),
    )  # fmt: skip


@_forces("no_reuse")
def _no_reuse(seed: int, rng: np.random.Generator) -> Scenario:
    return _scenario(
        seed, rng, _draw(rng, 5, 8, 11, 30), _params(*[12] * 4), modes=("align", "all", "attention"),
        attention_backend="FLASHINFER", block_size=48,
    )  # fmt: skip


@_forces("salts_apart")
def _salts_apart(seed: int, rng: np.random.Generator) -> Scenario:
    prompts = _draw(rng, 20) * 3
    params = [SamplingParams(max_tokens=6, cache_salt=salt) for salt in ("a", "b", "a")]
    return _scenario(seed, rng, prompts, params, waves=(1, 1, 1), modes=("align", "all", "attention"))


@_forces("stop_inside_drafts", "one_row_with_drafts")
def _stop_inside_drafts(seed: int, rng: np.random.Generator) -> Scenario:
    (prompt,) = _draw(rng, 9)
    answer = answer_book("M*").without_stop(prompt, SamplingParams(max_tokens=12), 96)
    # The first step's draft goes on behind the stop token.
    params = [SamplingParams(max_tokens=12, stop_token_ids=(answer[2],)), SamplingParams(max_tokens=12)]
    return _scenario(
        seed, rng, [prompt, prompt], params, waves=(1, 1), layers="M*", K=5, drafts="right", max_num_seqs=1
    )


@_forces("mixed_sampling", "top_k_beside_top_p", "logprobs_of_sampled", "prompt_logprobs")
def _mixed_sampling(seed: int, rng: np.random.Generator) -> Scenario:
    prompts, hot = _draw(rng, 9, 9), SamplingParams(max_tokens=12, temperature=2e8, seed=seed)
    both = replace(hot, max_tokens=20, top_k=5, top_p=0.6, logprobs=2, prompt_logprobs=2)
    params = [SamplingParams(max_tokens=12, logprobs=0), hot, both]
    return _scenario(seed, rng, [*prompts, prompts[0]], params, K=2, drafts="mixed")


@_forces("one_step_late")
def _one_step_late(seed: int, rng: np.random.Generator) -> Scenario:
    K = int(rng.integers(0, 4))
    return _scenario(
        seed, rng, _draw(rng, 5, 9, 14, 33), _params(*[20] * 4), K=K, drafts="mixed" if K else "none",
        async_scheduling=True, max_num_batched_tokens=20,
    )  # fmt: skip


@_forces("once_more_at_max_model_len")
def _once_more(seed: int, rng: np.random.Generator) -> Scenario:
    # With no K does a step end one token before the end: then no draft would be in flight there.
    return _scenario(
        seed, rng, _draw(rng, 5, 9, 40), _params(60, 60, 60), K=int(rng.integers(2, 8)), drafts="right",
        block_size=2 * BLOCK, max_model_len=64, async_scheduling=True,
    )  # fmt: skip


@_forces("strange_drafts")
def _strange_drafts(seed: int, rng: np.random.Generator) -> Scenario:
    return _scenario(
        seed, rng, _draw(rng, 5, 9, 14), _params(30, 30, 30), K=int(rng.integers(1, 8)), drafts="strange",
        block_size=2 * BLOCK, async_scheduling=bool(rng.integers(2)),
    )  # fmt: skip


@_forces("offload_hit", "exact_hit_of_host")
def _offload_hit(seed: int, rng: np.random.Generator) -> Scenario:
    text, *others = _draw(rng, 30, 60, 60, 60)
    mode = str(rng.choice(["align", "all", "attention"]))
    return _scenario(
        seed, rng, [text, *others, text], _params(*[4] * 5), waves=(1, 3, 1), modes=(mode,),
        layers="**" if mode == "attention" else "M*", num_blocks=20, kv_offload_bytes=2**20, max_num_seqs=1,
    )  # fmt: skip


@_forces("hit_attention", "full_pool")
def _fits_once_published(seed: int, rng: np.random.Generator) -> Scenario:
    # The first request has a block more than its tokens fill, for drafts, when the second one gives its blocks back.
    # The third one begins with the first one's answer, and fits as soon as the next block of that can be found.
    first, second, tail = _draw(rng, 9, 1, 10)
    answer = answer_book("**").without_stop(first, SamplingParams(max_tokens=20), 96)
    prompts = [first, second, [*first, *answer[:7], *tail]]
    return _scenario(
        seed, rng, prompts, _params(20, 6, 3), waves=(3,), modes=("attention",), K=3, drafts="wrong", num_blocks=6
    )


@_forces("reset")
def _reset(seed: int, rng: np.random.Generator) -> Scenario:
    # Different prompts: blocks that two requests share are not forgotten.
    return _scenario(
        seed, rng, _draw(rng, 20, 21) * 2, _params(*[20] * 4), waves=(2, 2), modes=("align", "all", "attention"),
        events=(Event("reset", 4),),
    )  # fmt: skip


@_forces("sleep")
def _sleep(seed: int, rng: np.random.Generator) -> Scenario:
    return _scenario(
        seed, rng, _draw(rng, 20, 20, 33) * 2, _params(*[20] * 6), waves=(3, 3), modes=("none", "align", "all"), K=2,
        drafts="mixed", events=(Event("sleep", 5), Event("sleep", 11, 8)),
    )  # fmt: skip


@_forces("sanitized")
def _sanitized(seed: int, rng: np.random.Generator) -> Scenario:
    prompts = _draw(rng, 5, 9, 14, 33)
    return _scenario(
        seed, rng, prompts * 2, _params(*[20] * 8), waves=(4, 4), K=3, drafts="mixed", sanitize=True,
        events=(Event("preempt", 4, 7),),
    )  # fmt: skip


REPLAY: dict[str, Any] = {"state_scheme": "recompute"}


@_forces("ring_emptied", "ring_wrapped", "flushed_in_place")
def _ring_emptied(seed: int, rng: np.random.Generator) -> Scenario:
    K = int(rng.integers(0, 5))
    return _scenario(
        seed, rng, _draw(rng, 5, 9, 14), _params(50, 50, 50), K=K, drafts="right" if K else "none", block_size=32,
        recompute_ring_len=shortest_ring_len(1 + K) + int(rng.integers(3)), **REPLAY,
    )  # fmt: skip


@_forces("flushed_at_boundary")
def _flushed_at_boundary(seed: int, rng: np.random.Generator) -> Scenario:
    K = int(rng.integers(2, 8))
    return _scenario(
        seed, rng, _draw(rng, 5, 9, 14), _params(40, 40, 40), modes=("align", "all"), K=K, drafts="beyond",
        async_scheduling=bool(rng.integers(2)), **REPLAY,
    )  # fmt: skip


def _passed_boundary(
    seed: int, rng: np.random.Generator, later: Sequence[int], events: tuple[Event, ...] = ()
) -> Scenario:
    """The second request passes its boundary in step 2, and one more takes up its tokens there."""
    other, text = _draw(rng, 12, 2 * BLOCK - 2)
    layers = str(rng.choice(["M*", "*M", "M*MM*"]))
    answer = answer_book(layers).without_stop(text, SamplingParams(max_tokens=20), 96)
    again = [*text, *answer[:2], 7, 8]
    return _scenario(
        seed, rng, [other, text, again], _params(12, *later, 4), waves=(2, 1), modes=("all",), layers=layers,
        events=events, **REPLAY,
    )  # fmt: skip


@_forces("flushed_at_finish", "hit_on_flushed")
def _flushed_at_finish(seed: int, rng: np.random.Generator) -> Scenario:
    return _passed_boundary(seed, rng, [3])


@_forces("flushed_at_preemption")
def _flushed_at_preemption(seed: int, rng: np.random.Generator) -> Scenario:
    return _passed_boundary(seed, rng, [12], (Event("preempt", 3),))


@_forces("flushed_at_abort")
def _flushed_at_abort(seed: int, rng: np.random.Generator) -> Scenario:
    return _passed_boundary(seed, rng, [12], (Event("drop", 3),))


@_forces("window_ahead")
def _window_ahead(seed: int, rng: np.random.Generator) -> Scenario:
    K = int(rng.integers(3, 8))
    return _scenario(
        seed, rng, _draw(rng, 5, 9), _params(20, 30), modes=("align", "all"), K=K, drafts="lapses",
        async_scheduling=bool(rng.integers(2)), **REPLAY,
    )  # fmt: skip


@_forces("shared_base")
def _shared_base(seed: int, rng: np.random.Generator) -> Scenario:
    (text,) = _draw(rng, 2 * BLOCK + 1)
    return _scenario(
        seed, rng, [text] * 3, _params(2, 6, 6), waves=(1, 2), modes=("align", "all"), K=int(rng.integers(0, 3)),
        **REPLAY,
    )  # fmt: skip
