"""Small scenarios in which one request pattern happens by construction, whatever the seed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from hybrid_kv.cache import modes as cache_modes
from hybrid_kv.cache.modes import MODES
from hybrid_kv.check.guard.scenario import (
    COMMON,
    Event,
    Scenario,
    SmallBlocksFirst,
    SmallKVFirst,
    answer_book,
    cache_options,
)
from hybrid_kv.kernels.recompute import shortest_ring_len
from hybrid_kv.models.exact import ExactConfig
from hybrid_kv.sampling import SamplingParams

BLOCK = 8
VOCAB = ExactConfig.vocab_size
CACHED = ("align", "all", "attention")  # modes in which a prefix can be found again
STATES = CACHED[:2]


class Draw:
    """The random choices of a scenario, by its seed and their order."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rng = np.random.default_rng(seed)

    def prompts(self, *lengths: int) -> list[list[int]]:
        return [self.rng.integers(0, VOCAB, size=length).tolist() for length in lengths]

    def number(self, low: int, end: int) -> int:
        return int(self.rng.integers(low, end))

    def coin(self) -> bool:
        return bool(self.rng.integers(2))

    def one_of(self, *names: str) -> str:
        return str(self.rng.choice(list(names)))

    def scenario(
        self,
        prompts: list[list[int]],
        answers: Sequence[int | SamplingParams],
        *,
        modes: Sequence[str] = tuple(MODES),
        layers: str = "",
        K: int = 0,
        drafts: str = "none",
        waves: tuple[int, ...] = (),
        events: tuple[Event, ...] = (),
        **options: Any,
    ) -> Scenario:
        """One of blocks of eight tokens in a pool with room, except for `options`.

        Args:
            answers: of each prompt the most tokens, or all of its parameters.
        """
        mode = self.one_of(*modes)
        layers = layers or ("**" if mode == "attention" else self.one_of("M*", "*M", "M*MM*"))
        options = {
            "attention_backend": self.one_of(SmallBlocksFirst.name, SmallKVFirst.name),
            "block_size": BLOCK,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 64,
            "max_model_len": 96,
            "num_blocks": 400,
            "captured_batch_sizes": (),
            "device": "cpu",
            **cache_options(mode, K, drafts if K else "none"),
            **options,
        }
        params = [
            SamplingParams(max_tokens=own) if isinstance(own, int) else own for own in answers
        ]
        return Scenario(
            self.seed, layers, options, prompts, params, waves, drafts if K else "none", events
        )


def _last_tokens(d: Draw, several: bool) -> Scenario:
    K = d.number(2, 6)
    prompts = d.prompts(1 + K, 2 * BLOCK + (d.number(2, K + 2) if several else 1))
    return d.scenario(prompts, [30, 4], K=K, drafts="right", max_num_batched_tokens=1 + K + BLOCK)


def _cut_chunk(d: Draw) -> Scenario:
    busy, prompt = d.prompts(4, 12)
    options: dict[str, Any] = {"K": 3, "drafts": "right", "max_num_batched_tokens": 9}
    return d.scenario([busy, prompt, prompt], [20, 4, 8], waves=(2, 1), modes=STATES, **options)


def _attention_deeper(d: Draw) -> Scenario:
    (text,) = d.prompts(30)
    # The last one finds two blocks of K and V, and the state of the short one behind the first of them.
    prompts = [text, text[: BLOCK + 1], text[:20] + d.prompts(9)[0]]
    return d.scenario(prompts, [6, 6, 6], waves=(1, 1, 1), modes=("align",))


def _second_turn(d: Draw, mode: str) -> Scenario:
    first, tail = d.prompts(12, 5)
    prompts = [first, [*first, *_answer("M*MM*", first)[:18], *tail]]
    K = d.number(2, 6)
    drafts = d.one_of("right", "beyond")
    return d.scenario(
        prompts,
        [20, 8],
        waves=(1, 1),
        modes=(mode,),
        layers="M*MM*",
        K=K,
        drafts=drafts,
        max_num_seqs=1,
    )


def _answer(layers: str, prompt: list[int]) -> list[int]:
    return answer_book(layers).without_stop(prompt, SamplingParams(max_tokens=20), 96)


def _salted(text: list[int], salts: str, **options: Any) -> dict[str, Any]:
    """One prompt from several tenants."""
    params = [SamplingParams(max_tokens=6, cache_salt=salt) for salt in salts]
    return {"prompts": [text] * len(salts), "answers": params, **options}


def _waits_for_prefix(d: Draw) -> Scenario:
    (text,) = d.prompts(20)
    return d.scenario([text, text, text, [*text, 1]], [6] * 4, waves=(2, 2), modes=CACHED)


def _identical_prompts(d: Draw) -> Scenario:
    (text,) = d.prompts(COMMON)
    return d.scenario([[*text, i, i + 1] for i in range(4)], [8] * 4, K=2, drafts="mixed")


def _preempt_with_one_waiting(d: Draw) -> Scenario:
    K = d.number(0, 3)
    prompts = d.prompts(9, 12, 17, 9)
    d.number(2, 4)  # was an option; what is drawn behind it stays the same
    return d.scenario(
        prompts, [12] * 4, K=K, drafts="mixed", max_num_seqs=3, events=(Event("preempt", 4),)
    )


def _full_pool(d: Draw) -> Scenario:
    K = d.number(0, 4)
    mode = d.one_of(*MODES)
    # 32 tokens are cached of the longest request that fits; the other one has a token more.
    policy = cache_modes.MODES[mode]
    states = policy.held_at_most(policy.num_logical_blocks(32, 8), 1) + K
    prompts = d.prompts(20, 21)
    return d.scenario(prompts, [13, 13], modes=(mode,), layers="M*", K=K, num_blocks=1 + states + 4)


def _stop_inside_drafts(d: Draw) -> Scenario:
    (prompt,) = d.prompts(9)
    # The first step's draft goes on behind the stop token.
    params = [
        SamplingParams(max_tokens=12, stop_token_ids=(_answer("M*", prompt)[2],)),
        SamplingParams(max_tokens=12),
    ]
    return d.scenario(
        [prompt] * 2, params, waves=(1, 1), layers="M*", K=5, drafts="right", max_num_seqs=1
    )


def _mixed_sampling(d: Draw) -> Scenario:
    prompts = d.prompts(9, 9)
    hot = SamplingParams(max_tokens=12, temperature=2e8, seed=d.seed)
    both = replace(hot, max_tokens=20, top_k=5, top_p=0.6, logprobs=2, prompt_logprobs=2)
    params = [SamplingParams(max_tokens=12, logprobs=0), hot, both]
    return d.scenario([*prompts, prompts[0]], params, K=2, drafts="mixed")


def _offload_hit(d: Draw, attention: str, *events: Event) -> Scenario:
    text, *others = d.prompts(30, 60, 60, 60)
    mode = d.one_of(*CACHED)
    options: dict[str, Any] = {"num_blocks": 20, "kv_offload_bytes": 2**20, "max_num_seqs": 1}
    layers = 2 * attention if mode == "attention" else "M" + attention
    sent: dict[str, Any] = {
        "waves": (1, 3, 1),
        "modes": (mode,),
        "layers": layers,
        "events": events,
    }
    return d.scenario([text, *others, text], [4] * 5, **sent, **options)


def _verify_shapes(d: Draw) -> Scenario:
    """Prompts of as many tokens as a verify step has: one alone, then three of them, then one beside verify steps."""
    K = d.number(1, 8)
    prompts = d.prompts(*[1 + K] * 5)
    return d.scenario(prompts, [3, 9, 12, 15, 3], waves=(1, 4), K=K, drafts="right", max_num_seqs=3)


def _scored_beside_copies(d: Draw) -> Scenario:
    """A prompt in small chunks while another request has its drafts accepted up to one boundary after the other."""
    scored = SamplingParams(max_tokens=4, logprobs=1, prompt_logprobs=1)
    prompts = d.prompts(5, 80)
    return d.scenario(
        prompts, [40, scored], modes=STATES, K=3, drafts="boundary", max_num_batched_tokens=10
    )


# Blocks of a pool in which the youngest of `_sits_out` lacks one for a step.
SITS_OUT = {
    "slots": {"none": 15, "align": 18, "all": 21},
    "recompute": {"none": 12, "align": 13, "all": 16},
}


def _sits_out(d: Draw, scheme: str) -> Scenario:
    """With drafts of this script the lengths of three requests in each step do not depend on their tokens."""
    mode = d.one_of(*SITS_OUT[scheme])
    pool: dict[str, Any] = {
        "num_blocks": SITS_OUT[scheme][mode],
        "async_scheduling": True,
        "state_scheme": scheme,
    }
    return d.scenario(
        d.prompts(6, 12, 7), [25, 34, 24], modes=(mode,), layers="M*", K=3, drafts="rotate", **pool
    )


def _fits_once_published(d: Draw) -> Scenario:
    # The first request has a block more than its tokens fill, for drafts, when the second one gives its blocks back.
    # The third one begins with the first one's answer, and fits as soon as the next block of that can be found.
    first, second, tail = d.prompts(9, 1, 10)
    prompts = [first, second, [*first, *_answer("**", first)[:7], *tail]]
    return d.scenario(
        prompts, [20, 6, 3], waves=(3,), modes=("attention",), K=3, drafts="wrong", num_blocks=6
    )


def _passed_boundary(d: Draw, later: int, *events: Event) -> Scenario:
    """The second request passes its boundary in step 2, and one more takes up its tokens there."""
    other, text = d.prompts(12, 2 * BLOCK - 2)
    layers = d.one_of("M*", "*M", "M*MM*")
    prompts = [other, text, [*text, *_answer(layers, text)[:2], 7, 8]]
    return d.scenario(
        prompts, [12, later, 4], waves=(2, 1), modes=("all",), layers=layers, events=events, **LATE
    )


LATE: dict[str, Any] = {"state_scheme": "recompute"}
EVICT = (Event("evict", 2),)
# By the patterns that each forces. What it draws is in the order of its arguments.
FORCED: dict[str, Callable[[Draw], Scenario]] = {
    "one_token_of_new_request, row_reuse": lambda d: d.scenario(
        d.prompts(3, 3, 4, 10), [2, 2, 6, 6], waves=(2, 2), max_num_batched_tokens=5
    ),
    "one_token_left, first_decode_beside_chunk": lambda d: _last_tokens(d, False),
    "few_tokens_left": lambda d: _last_tokens(d, True),
    "uneven_prefills": lambda d: d.scenario(d.prompts(5, 7, 6), [5] * 3),
    "lone_chunks, one_behind_chunk, short_prompt, one_token_prefill": lambda d: d.scenario(
        d.prompts(33, 1, 17, 2), [4] * 4, waves=(1, 1, 1, 1), max_num_batched_tokens=16
    ),
    "undrafted_after_accepts, number_of_drafts_varies": lambda d: d.scenario(
        K=d.number(2, 8), prompts=d.prompts(5, 9, 14), answers=[30] * 3, drafts="ragged"
    ),
    "all_rejected, whole_batch_rejected, padded_drafts": lambda d: d.scenario(
        K=d.number(2, 8), prompts=d.prompts(5, 9, 14), answers=[12] * 3, drafts="wrong", captured_batch_sizes=(4,)
    ),
    "all_accepted, max_model_len_with_drafts": lambda d: d.scenario(
        K=d.number(2, 8), prompts=d.prompts(5, 9, 40), answers=[30] * 3, drafts="right", max_model_len=64
    ),
    "accepted_to_boundary, rejected_at_boundary": lambda d: d.scenario(
        K=d.number(2, 8), prompts=d.prompts(5, 8, 11, 16), answers=[30] * 4, drafts="boundary"
    ),
    "rejected_behind_boundary": lambda d: d.scenario(
        K=d.number(3, 8), prompts=d.prompts(5, 8, 11, 16), answers=[30] * 4, drafts="beyond"
    ),
    "middle_row_ends": lambda d: d.scenario(
        d.prompts(5, 6, 7, 9), [25, 4, 40, 6], K=3, drafts="rotate", max_num_seqs=3
    ),
    "exact_block, hit_up_to_last_token, hit_before_last_block, hit_of_several_blocks, exact_hit": lambda d: d.scenario(
        d.prompts(BLOCK, BLOCK + 1, 3 * BLOCK, 3 * BLOCK + 1) * 2, [6] * 8, waves=(4, 4), modes=CACHED, K=2,
        drafts="mixed",
    ),
    "unequal_blocks": lambda d: d.scenario(
        d.prompts(2 * BLOCK + 1, 5 * BLOCK, 4 * BLOCK + 3) * 2, [6] * 6, waves=(3, 3), modes=STATES, K=2,
        drafts="mixed", layers="M+*M",
    ),
    # The state after 32 tokens is the oldest block and lost, that after 24 is there; K and V come in blocks of 16.
    "between_boundaries": lambda d: d.scenario(
        d.prompts(33) * 2, [2, 6], waves=(1, 1), modes=("all",), layers="M*+", events=EVICT
    ),
    "repeated_after_cut_chunk": _cut_chunk,
    "attention_deeper": _attention_deeper,
    # The first group's deepest block is the oldest one.
    "state_deeper, eviction, hit_behind_losses": lambda d: d.scenario(
        d.prompts(33) * 2, [2, 2], waves=(1, 1), modes=("all",), layers="*M", events=EVICT
    ),
    # After 32 tokens there is a state, and a block of K/V that is lost; after 24 tokens there is K/V and no state.
    "no_common_depth": lambda d: d.scenario(
        d.prompts(33) * 2, [1, 6], waves=(1, 1), modes=("align",), layers="*M", events=EVICT
    ),
    "second_turn_align": lambda d: _second_turn(d, "align"),
    "second_turn_all": lambda d: _second_turn(d, "all"),
    "duplicates": lambda d: d.scenario(**_salted(d.prompts(20)[0], "ab", modes=(*MODES, "attention"))),
    "waits_for_prefix, shared_block": _waits_for_prefix,
    "identical_prompts": _identical_prompts,
    "abort_in_flight, same_prompt_after_abort": lambda d: d.scenario(
        d.prompts(20) * 3, [12, 8, 8], max_num_seqs=1, events=(Event("abort", 0),), async_scheduling=d.coin()
    ),
    "preemption, waiting": _preempt_with_one_waiting,
    "abort_waiting": lambda d: d.scenario(
        d.prompts(9, 9, 9, 9), [8] * 4, max_num_seqs=1, events=(Event("drop", 1),)
    ),
    "preempted_while_speculating, resumed_from_cache, recomputed_output": lambda d: d.scenario(
        d.prompts(10, 12, 14), [25] * 3, modes=CACHED, K=2, drafts="right", events=(Event("preempt", 3, 6),)
    ),
    "full_pool, refused": _full_pool,
    "two_blocks": lambda d: d.scenario(
        d.prompts(10, 3, 1), [5] * 3, modes=("none", "attention"), layers="*", block_size=16, num_blocks=2,
        attention_backend="TORCH",
    ),
    "long_lived, all_blocks_used, block_reuse": lambda d: d.scenario(
        d.prompts(3, *[10] * 12), [80, *[3] * 12], layers="M*", num_blocks=34, max_num_seqs=2
    ),
    "several_groups": lambda d: d.scenario(
        d.prompts(5, 8, 11), [20] * 3, layers="MMM*M", K=3, drafts="boundary", captured_batch_sizes=(4,)
    ),
    "no_reuse": lambda d: d.scenario(
        d.prompts(5, 8, 11, 30), [12] * 4, modes=CACHED, attention_backend="FLASHINFER", block_size=48
    ),
    "salts_apart": lambda d: d.scenario(**_salted(d.prompts(20)[0], "aba", waves=(1, 1, 1), modes=CACHED)),
    "stop_inside_drafts, one_row_with_drafts": _stop_inside_drafts,
    "mixed_sampling, top_k_beside_top_p, logprobs_of_sampled, prompt_logprobs": _mixed_sampling,
    "one_step_late": lambda d: d.scenario(
        K=d.number(0, 4), prompts=d.prompts(5, 9, 14, 33), answers=[20] * 4, drafts="mixed", async_scheduling=True,
        max_num_batched_tokens=20,
    ),
    # With no K does a step end one token before the end: then no draft would be in flight there.
    "once_more_at_max_model_len": lambda d: d.scenario(
        d.prompts(5, 9, 40), [60] * 3, K=d.number(2, 8), drafts="right", block_size=2 * BLOCK, max_model_len=64,
        async_scheduling=True,
    ),
    "strange_drafts": lambda d: d.scenario(
        d.prompts(5, 9, 14), [30] * 3, K=d.number(1, 8), drafts="strange", block_size=2 * BLOCK,
        async_scheduling=d.coin(),
    ),
    "offload_hit, exact_hit_of_host": lambda d: _offload_hit(d, "L"),
    "lost_hit": lambda d: _offload_hit(d, "*", Event("lose", 0, 1)),
    "verify_shape, verify_shapes": _verify_shapes,
    "prompt_logprobs_beside_copies": _scored_beside_copies,
    "sat_out_slots": lambda d: _sits_out(d, "slots"),
    "sat_out_recompute": lambda d: _sits_out(d, "recompute"),
    "hit_attention, full_pool": _fits_once_published,
    # Different prompts: blocks that two requests share are not forgotten.
    "reset": lambda d: d.scenario(
        d.prompts(20, 21) * 2, [20] * 4, waves=(2, 2), modes=CACHED, events=(Event("reset", 4),),
        async_scheduling=d.coin(),
    ),
    "sleep": lambda d: d.scenario(
        d.prompts(20, 20, 33) * 2, [20] * 6, waves=(3, 3), modes=("none", *STATES), K=2, drafts="mixed",
        events=(Event("sleep", 5), Event("sleep", 11, 8)),
    ),
    "sanitized": lambda d: d.scenario(
        d.prompts(5, 9, 14, 33) * 2, [20] * 8, waves=(4, 4), K=3, drafts="mixed", sanitize=True,
        events=(Event("preempt", 4, 7),),
    ),
    "ring_emptied, ring_wrapped, flushed_in_place": lambda d: d.scenario(
        K=(K := d.number(0, 5)), prompts=d.prompts(5, 9, 14), answers=[50] * 3, drafts="right", block_size=32,
        recompute_ring_len=shortest_ring_len(1 + K) + d.number(0, 3), **LATE,
    ),
    "flushed_at_boundary": lambda d: d.scenario(
        K=d.number(2, 8), prompts=d.prompts(5, 9, 14), answers=[40] * 3, modes=STATES, drafts="beyond",
        async_scheduling=d.coin(), **LATE,
    ),
    "flushed_at_finish, hit_on_flushed": lambda d: _passed_boundary(d, 3),
    "flushed_at_preemption": lambda d: _passed_boundary(d, 12, Event("preempt", 3)),
    "flushed_at_abort": lambda d: _passed_boundary(d, 12, Event("drop", 3)),
    "window_ahead": lambda d: d.scenario(
        K=d.number(3, 8), prompts=d.prompts(5, 9), answers=[20, 30], modes=STATES, drafts="lapses",
        async_scheduling=d.coin(), **LATE,
    ),
    "window_given_back, window_hit": lambda d: d.scenario(
        d.prompts(33) * 2, [12, 6], waves=(1, 1), modes=STATES, layers="M~*", async_scheduling=d.coin()
    ),
    "window_crossed": lambda d: d.scenario(
        d.prompts(9, 20, 30), [30] * 3, layers=d.one_of("M~*", "M=+"), K=d.number(3, 8), drafts="mixed",
        async_scheduling=d.coin(), block_size=2 * BLOCK,
    ),
    "shared_base": lambda d: d.scenario(
        d.prompts(2 * BLOCK + 1) * 3, [2, 6, 6], waves=(1, 2), modes=STATES, K=d.number(0, 3), **LATE
    ),
}  # fmt: skip
