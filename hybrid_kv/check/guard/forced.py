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
    Disturbance,
    Scenario,
    SmallBlocksFirst,
    SmallKVFirst,
    answer_book,
    cache_options,
)
from hybrid_kv.kernels.recompute import shortest_ring_len
from hybrid_kv.models.exact import ExactConfig
from hybrid_kv.sampling import SamplingParams

Forced = Callable[["Draw"], Scenario]

BLOCK = 8
VOCAB = ExactConfig.vocab_size
CACHED = ("align", "all", "attention")  # modes in which a prefix can be found again
STATES = CACHED[:2]
RECOMPUTE: dict[str, Any] = {"state_scheme": "recompute"}

FORCED: dict[str, Forced] = {}  # by the patterns that each forces, in the order of their numbers


def forces(*patterns: str) -> Callable[[Forced], Forced]:
    """Register what draws a scenario in which these patterns happen.

    Draws follow each other in the order of the arguments: another order is another scenario.
    """

    def register(draw_scenario: Forced) -> Forced:
        FORCED[", ".join(patterns)] = draw_scenario
        return draw_scenario

    return register


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
        num_drafts: int = 0,
        drafts: str = "none",
        waves: tuple[int, ...] = (),
        **options: Any,
    ) -> Scenario:
        """Draw a scenario with blocks of eight tokens in a pool with room, except for `options`.

        Args:
            answers: of each prompt the most tokens, or all of its parameters.
            num_drafts: of a verify step; without any there is no script of `drafts`.
        """
        mode = self.one_of(*modes)
        layers = layers or ("**" if mode == "attention" else self.one_of("M*", "*M", "M*MM*"))
        script = drafts if num_drafts else "none"
        options = {
            "attention_backend": self.one_of(SmallBlocksFirst.name, SmallKVFirst.name),
            "block_size": BLOCK,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 64,
            "max_model_len": 96,
            "num_blocks": 400,
            "captured_batch_sizes": (),
            "device": "cpu",
            **cache_options(mode, num_drafts, script),
            **options,
        }
        params = [
            SamplingParams(max_tokens=answer) if isinstance(answer, int) else answer
            for answer in answers
        ]
        return Scenario(self.seed, layers, options, prompts, params, waves, script)


def disturbed(scenario: Scenario, *events: Disturbance) -> Scenario:
    """Return the scenario with these events."""
    return replace(scenario, events=events)


def _answer(layers: str, prompt: list[int]) -> list[int]:
    return answer_book(layers).without_stop(prompt, SamplingParams(max_tokens=20), 96)


@forces("one_token_of_new_request", "row_reuse")
def _one_token_of_new_request(d: Draw) -> Scenario:
    prompts = d.prompts(3, 3, 4, 10)
    return d.scenario(prompts, [2, 2, 6, 6], waves=(2, 2), max_num_batched_tokens=5)


@forces("one_token_left", "first_decode_beside_chunk")
def _one_token_left(d: Draw) -> Scenario:
    num_drafts = d.number(2, 6)
    return _last_tokens(d, num_drafts, 1)


@forces("few_tokens_left")
def _few_tokens_left(d: Draw) -> Scenario:
    num_drafts = d.number(2, 6)
    return _last_tokens(d, num_drafts, d.number(2, num_drafts + 2))


def _last_tokens(d: Draw, num_drafts: int, num_last: int) -> Scenario:
    """Draw a prompt whose last tokens are left for a step of verified drafts."""
    prompts = d.prompts(1 + num_drafts, 2 * BLOCK + num_last)
    budget = 1 + num_drafts + BLOCK
    return d.scenario(
        prompts, [30, 4], num_drafts=num_drafts, drafts="right", max_num_batched_tokens=budget
    )


@forces("uneven_prefills")
def _uneven_prefills(d: Draw) -> Scenario:
    return d.scenario(d.prompts(5, 7, 6), [5] * 3)


@forces("lone_chunks", "one_behind_chunk", "short_prompt", "one_token_prefill")
def _lone_chunks(d: Draw) -> Scenario:
    prompts = d.prompts(33, 1, 17, 2)
    return d.scenario(prompts, [4] * 4, waves=(1, 1, 1, 1), max_num_batched_tokens=16)


@forces("undrafted_after_accepts", "number_of_drafts_varies")
def _ragged_drafts(d: Draw) -> Scenario:
    num_drafts = d.number(2, 8)
    return d.scenario(d.prompts(5, 9, 14), [30] * 3, num_drafts=num_drafts, drafts="ragged")


@forces("all_rejected", "whole_batch_rejected", "padded_drafts")
def _wrong_drafts(d: Draw) -> Scenario:
    num_drafts = d.number(2, 8)
    options: dict[str, Any] = {"num_drafts": num_drafts, "drafts": "wrong"}
    return d.scenario(d.prompts(5, 9, 14), [12] * 3, captured_batch_sizes=(4,), **options)


@forces("all_accepted", "max_model_len_with_drafts")
def _right_drafts(d: Draw) -> Scenario:
    num_drafts = d.number(2, 8)
    options: dict[str, Any] = {"num_drafts": num_drafts, "drafts": "right"}
    return d.scenario(d.prompts(5, 9, 40), [30] * 3, max_model_len=64, **options)


@forces("accepted_to_boundary", "rejected_at_boundary")
def _drafts_to_boundary(d: Draw) -> Scenario:
    num_drafts = d.number(2, 8)
    prompts = d.prompts(5, 8, 11, 16)
    return d.scenario(prompts, [30] * 4, num_drafts=num_drafts, drafts="boundary")


@forces("rejected_behind_boundary")
def _drafts_beyond_boundary(d: Draw) -> Scenario:
    num_drafts = d.number(3, 8)
    prompts = d.prompts(5, 8, 11, 16)
    return d.scenario(prompts, [30] * 4, num_drafts=num_drafts, drafts="beyond")


@forces("middle_row_ends")
def _middle_row_ends(d: Draw) -> Scenario:
    prompts = d.prompts(5, 6, 7, 9)
    return d.scenario(prompts, [25, 4, 40, 6], num_drafts=3, drafts="rotate", max_num_seqs=3)


@forces(
    "exact_block",
    "hit_up_to_last_token",
    "hit_before_last_block",
    "hit_of_several_blocks",
    "exact_hit",
)
def _whole_blocks_again(d: Draw) -> Scenario:
    prompts = d.prompts(BLOCK, BLOCK + 1, 3 * BLOCK, 3 * BLOCK + 1)
    return d.scenario(
        prompts * 2, [6] * 8, waves=(4, 4), modes=CACHED, num_drafts=2, drafts="mixed"
    )


@forces("unequal_blocks")
def _unequal_blocks(d: Draw) -> Scenario:
    prompts = d.prompts(2 * BLOCK + 1, 5 * BLOCK, 4 * BLOCK + 3)
    options: dict[str, Any] = {"num_drafts": 2, "drafts": "mixed", "layers": "M+*M"}
    return d.scenario(prompts * 2, [6] * 6, waves=(3, 3), modes=STATES, **options)


@forces("between_boundaries")
def _between_boundaries(d: Draw) -> Scenario:
    """Lose the state after 32 tokens, the oldest block; that after 24 stays.

    K and V come in blocks of 16 tokens.
    """
    prompts = d.prompts(33)
    scenario = d.scenario(prompts * 2, [2, 6], waves=(1, 1), modes=("all",), layers="M*+")
    return disturbed(scenario, Disturbance("evict", 2))


@forces("repeated_after_cut_chunk")
def _repeated_after_cut_chunk(d: Draw) -> Scenario:
    busy, prompt = d.prompts(4, 12)
    options: dict[str, Any] = {"num_drafts": 3, "drafts": "right", "max_num_batched_tokens": 9}
    return d.scenario([busy, prompt, prompt], [20, 4, 8], waves=(2, 1), modes=STATES, **options)


@forces("attention_deeper")
def _attention_deeper(d: Draw) -> Scenario:
    """Let the last prompt find two blocks of K and V, and the short one's state after one block."""
    (text,) = d.prompts(30)
    prompts = [text, text[: BLOCK + 1], text[:20] + d.prompts(9)[0]]
    return d.scenario(prompts, [6, 6, 6], waves=(1, 1, 1), modes=("align",))


@forces("state_deeper", "eviction", "hit_behind_losses")
def _state_deeper(d: Draw) -> Scenario:
    """Lose the first group's deepest block, which is the oldest one."""
    prompts = d.prompts(33)
    scenario = d.scenario(prompts * 2, [2, 2], waves=(1, 1), modes=("all",), layers="*M")
    return disturbed(scenario, Disturbance("evict", 2))


@forces("no_common_depth")
def _no_common_depth(d: Draw) -> Scenario:
    """Keep a state after 32 tokens without its K/V, and K/V after 24 tokens without a state."""
    prompts = d.prompts(33)
    scenario = d.scenario(prompts * 2, [1, 6], waves=(1, 1), modes=("align",), layers="*M")
    return disturbed(scenario, Disturbance("evict", 2))


@forces("second_turn_align")
def _second_turn_align(d: Draw) -> Scenario:
    return _second_turn(d, "align")


@forces("second_turn_all")
def _second_turn_all(d: Draw) -> Scenario:
    return _second_turn(d, "all")


def _second_turn(d: Draw, mode: str) -> Scenario:
    layers = "M*MM*"
    first, tail = d.prompts(12, 5)
    prompts = [first, [*first, *_answer(layers, first)[:18], *tail]]
    drafts: dict[str, Any] = {"num_drafts": d.number(2, 6), "drafts": d.one_of("right", "beyond")}
    return d.scenario(
        prompts, [20, 8], waves=(1, 1), modes=(mode,), layers=layers, max_num_seqs=1, **drafts
    )


@forces("duplicates")
def _duplicates(d: Draw) -> Scenario:
    (text,) = d.prompts(20)
    return d.scenario([text] * 2, _tenants("ab"), modes=(*MODES, "attention"))


@forces("waits_for_prefix", "shared_block")
def _waits_for_prefix(d: Draw) -> Scenario:
    (text,) = d.prompts(20)
    return d.scenario([text, text, text, [*text, 1]], [6] * 4, waves=(2, 2), modes=CACHED)


@forces("identical_prompts")
def _identical_prompts(d: Draw) -> Scenario:
    (text,) = d.prompts(COMMON)
    prompts = [[*text, i, i + 1] for i in range(4)]
    return d.scenario(prompts, [8] * 4, num_drafts=2, drafts="mixed")


@forces("abort_in_flight", "same_prompt_after_abort")
def _abort_in_flight(d: Draw) -> Scenario:
    prompts = d.prompts(20)
    scenario = d.scenario(prompts * 3, [12, 8, 8], max_num_seqs=1, async_scheduling=d.coin())
    return disturbed(scenario, Disturbance("abort", 0))


@forces("preemption", "waiting")
def _preempt_with_one_waiting(d: Draw) -> Scenario:
    num_drafts = d.number(0, 3)
    prompts = d.prompts(9, 12, 17, 9)
    d.number(2, 4)  # Not used: without this draw those after it would be others.
    scenario = d.scenario(prompts, [12] * 4, num_drafts=num_drafts, drafts="mixed", max_num_seqs=3)
    return disturbed(scenario, Disturbance("preempt", 4))


@forces("abort_waiting")
def _abort_waiting(d: Draw) -> Scenario:
    scenario = d.scenario(d.prompts(9, 9, 9, 9), [8] * 4, max_num_seqs=1)
    return disturbed(scenario, Disturbance("drop", 1))


@forces("preempted_while_speculating", "resumed_from_cache", "recomputed_output")
def _preempted_while_speculating(d: Draw) -> Scenario:
    prompts = d.prompts(10, 12, 14)
    scenario = d.scenario(prompts, [25] * 3, modes=CACHED, num_drafts=2, drafts="right")
    return disturbed(scenario, Disturbance("preempt", 3, 6))


@forces("full_pool", "refused")
def _full_pool(d: Draw) -> Scenario:
    """Give the pool exactly the blocks of the first request; the second has a token more."""
    num_drafts = d.number(0, 4)
    mode = d.one_of(*MODES)
    # 32 tokens are cached of the longest request that fits.
    policy = cache_modes.MODES[mode]
    states = policy.held_at_most(policy.num_logical_blocks(32, 8), 1) + num_drafts
    options: dict[str, Any] = {"num_drafts": num_drafts, "num_blocks": 1 + states + 4}
    return d.scenario(d.prompts(20, 21), [13, 13], modes=(mode,), layers="M*", **options)


@forces("two_blocks")
def _two_blocks(d: Draw) -> Scenario:
    options: dict[str, Any] = {"block_size": 16, "num_blocks": 2, "attention_backend": "TORCH"}
    prompts = d.prompts(10, 3, 1)
    return d.scenario(prompts, [5] * 3, modes=("none", "attention"), layers="*", **options)


@forces("long_lived", "all_blocks_used", "block_reuse")
def _long_lived(d: Draw) -> Scenario:
    prompts = d.prompts(3, *[10] * 12)
    return d.scenario(prompts, [80, *[3] * 12], layers="M*", num_blocks=34, max_num_seqs=2)


@forces("several_groups")
def _several_groups(d: Draw) -> Scenario:
    options: dict[str, Any] = {"layers": "MMM*M", "captured_batch_sizes": (4,)}
    prompts = d.prompts(5, 8, 11)
    return d.scenario(prompts, [20] * 3, num_drafts=3, drafts="boundary", **options)


@forces("no_reuse")
def _no_reuse(d: Draw) -> Scenario:
    options: dict[str, Any] = {"attention_backend": "FLASHINFER", "block_size": 48}
    return d.scenario(d.prompts(5, 8, 11, 30), [12] * 4, modes=CACHED, **options)


@forces("salts_apart")
def _salts_apart(d: Draw) -> Scenario:
    (text,) = d.prompts(20)
    return d.scenario([text] * 3, _tenants("aba"), waves=(1, 1, 1), modes=CACHED)


def _tenants(salts: str) -> list[SamplingParams]:
    """Return the parameters of requests from several tenants, a letter each."""
    return [SamplingParams(max_tokens=6, cache_salt=salt) for salt in salts]


@forces("stop_inside_drafts", "one_row_with_drafts")
def _stop_inside_drafts(d: Draw) -> Scenario:
    """End a request by a stop token inside the drafts of its first verify step."""
    (prompt,) = d.prompts(9)
    stop = _answer("M*", prompt)[2]
    params = [
        SamplingParams(max_tokens=12, stop_token_ids=(stop,)),
        SamplingParams(max_tokens=12),
    ]
    options: dict[str, Any] = {"num_drafts": 5, "drafts": "right", "max_num_seqs": 1}
    return d.scenario([prompt] * 2, params, waves=(1, 1), layers="M*", **options)


@forces("mixed_sampling", "top_k_beside_top_p", "logprobs_of_sampled", "prompt_logprobs")
def _mixed_sampling(d: Draw) -> Scenario:
    prompts = d.prompts(9, 9)
    sampled = SamplingParams(max_tokens=12, temperature=2e8, seed=d.seed)
    restricted = replace(sampled, max_tokens=20, top_k=5, top_p=0.6, logprobs=2, prompt_logprobs=2)
    params = [SamplingParams(max_tokens=12, logprobs=0), sampled, restricted]
    return d.scenario([*prompts, prompts[0]], params, num_drafts=2, drafts="mixed")


@forces("one_step_late")
def _one_step_late(d: Draw) -> Scenario:
    options: dict[str, Any] = {"num_drafts": d.number(0, 4), "drafts": "mixed"}
    prompts = d.prompts(5, 9, 14, 33)
    return d.scenario(
        prompts, [20] * 4, async_scheduling=True, max_num_batched_tokens=20, **options
    )


@forces("once_more_at_max_model_len")
def _once_more_at_max_model_len(d: Draw) -> Scenario:
    """Choose lengths whose last step has a draft in flight.

    With no number of drafts does a step end one token before the end.
    """
    prompts = d.prompts(5, 9, 40)
    options: dict[str, Any] = {"num_drafts": d.number(2, 8), "drafts": "right"}
    options |= {"block_size": 2 * BLOCK, "max_model_len": 64}
    return d.scenario(prompts, [60] * 3, async_scheduling=True, **options)


@forces("strange_drafts")
def _strange_drafts(d: Draw) -> Scenario:
    prompts = d.prompts(5, 9, 14)
    options: dict[str, Any] = {"num_drafts": d.number(1, 8), "drafts": "strange"}
    return d.scenario(prompts, [30] * 3, block_size=2 * BLOCK, async_scheduling=d.coin(), **options)


@forces("offload_hit", "exact_hit_of_host")
def _hit_of_host(d: Draw) -> Scenario:
    return _offload_hit(d, "L")


@forces("lost_hit")
def _lost_hit(d: Draw) -> Scenario:
    return disturbed(_offload_hit(d, "*"), Disturbance("lose", 0, 1))


def _offload_hit(d: Draw, attention: str) -> Scenario:
    text, *others = d.prompts(30, 60, 60, 60)
    mode = d.one_of(*CACHED)
    layers = 2 * attention if mode == "attention" else "M" + attention
    options: dict[str, Any] = {"num_blocks": 20, "kv_offload_bytes": 2**20, "max_num_seqs": 1}
    prompts = [text, *others, text]
    return d.scenario(prompts, [4] * 5, waves=(1, 3, 1), modes=(mode,), layers=layers, **options)


@forces("verify_shape", "verify_shapes")
def _verify_shapes(d: Draw) -> Scenario:
    """Draw prompts of as many tokens as a verify step has.

    One runs alone, then three together, then one with verify steps.
    """
    num_drafts = d.number(1, 8)
    options: dict[str, Any] = {"num_drafts": num_drafts, "drafts": "right", "max_num_seqs": 3}
    prompts = d.prompts(*[1 + num_drafts] * 5)
    return d.scenario(prompts, [3, 9, 12, 15, 3], waves=(1, 4), **options)


@forces("prompt_logprobs_beside_copies")
def _scored_beside_copies(d: Draw) -> Scenario:
    """Draw a prompt in small chunks while another request accepts drafts up to each boundary."""
    scored = SamplingParams(max_tokens=4, logprobs=1, prompt_logprobs=1)
    options: dict[str, Any] = {"num_drafts": 3, "drafts": "boundary"}
    prompts = d.prompts(5, 80)
    return d.scenario(prompts, [40, scored], modes=STATES, max_num_batched_tokens=10, **options)


@forces("sat_out_slots")
def _sat_out_slots(d: Draw) -> Scenario:
    return _sits_out(d, "slots", {"none": 15, "align": 18, "all": 21})


@forces("sat_out_recompute")
def _sat_out_recompute(d: Draw) -> Scenario:
    return _sits_out(d, "recompute", {"none": 12, "align": 13, "all": 16})


def _sits_out(d: Draw, scheme: str, num_blocks: dict[str, int]) -> Scenario:
    """Draw three requests of which the youngest lacks a block for a step.

    With drafts of this script their lengths in each step do not depend on their tokens.

    Args:
        num_blocks: of the pool, by mode.
    """
    mode = d.one_of(*num_blocks)
    options: dict[str, Any] = {
        "num_blocks": num_blocks[mode],
        "async_scheduling": True,
        "state_scheme": scheme,
        "num_drafts": 3,
        "drafts": "rotate",
    }
    return d.scenario(d.prompts(6, 12, 7), [25, 34, 24], modes=(mode,), layers="M*", **options)


@forces("hit_attention", "full_pool")
def _fits_once_published(d: Draw) -> Scenario:
    """Let a request fit as soon as a block of another's answer can be found.

    When the second request gives its blocks back, the first has a block more than its tokens fill,
    for drafts. The third begins with the first one's answer, and waits for its next block.
    """
    first, second, tail = d.prompts(9, 1, 10)
    prompts = [first, second, [*first, *_answer("**", first)[:7], *tail]]
    options: dict[str, Any] = {"num_drafts": 3, "drafts": "wrong", "num_blocks": 6}
    return d.scenario(prompts, [20, 6, 3], waves=(3,), modes=("attention",), **options)


@forces("reset")
def _reset(d: Draw) -> Scenario:
    """Draw different prompts: blocks that two requests share are not forgotten."""
    prompts = d.prompts(20, 21)
    scenario = d.scenario(
        prompts * 2, [20] * 4, waves=(2, 2), modes=CACHED, async_scheduling=d.coin()
    )
    return disturbed(scenario, Disturbance("reset", 4))


@forces("sleep")
def _sleep(d: Draw) -> Scenario:
    options: dict[str, Any] = {"num_drafts": 2, "drafts": "mixed"}
    prompts = d.prompts(20, 20, 33)
    scenario = d.scenario(prompts * 2, [20] * 6, waves=(3, 3), modes=("none", *STATES), **options)
    return disturbed(scenario, Disturbance("sleep", 5), Disturbance("sleep", 11, 8))


@forces("sanitized")
def _sanitized(d: Draw) -> Scenario:
    options: dict[str, Any] = {"num_drafts": 3, "drafts": "mixed", "sanitize": True}
    prompts = d.prompts(5, 9, 14, 33)
    scenario = d.scenario(prompts * 2, [20] * 8, waves=(4, 4), **options)
    return disturbed(scenario, Disturbance("preempt", 4, 7))


@forces("ring_emptied", "ring_wrapped", "flushed_in_place")
def _ring_wrapped(d: Draw) -> Scenario:
    num_drafts = d.number(0, 5)
    prompts = d.prompts(5, 9, 14)
    options: dict[str, Any] = {"num_drafts": num_drafts, "drafts": "right", "block_size": 32}
    ring_len = shortest_ring_len(1 + num_drafts) + d.number(0, 3)
    return d.scenario(prompts, [50] * 3, recompute_ring_len=ring_len, **options, **RECOMPUTE)


@forces("flushed_at_boundary")
def _flushed_at_boundary(d: Draw) -> Scenario:
    drafts: dict[str, Any] = {"num_drafts": d.number(2, 8), "drafts": "beyond"}
    prompts = d.prompts(5, 9, 14)
    options: dict[str, Any] = {"modes": STATES, "async_scheduling": d.coin()}
    return d.scenario(prompts, [40] * 3, **drafts, **options, **RECOMPUTE)


@forces("flushed_at_finish", "hit_on_flushed")
def _flushed_at_finish(d: Draw) -> Scenario:
    return _passed_boundary(d, 3)


@forces("flushed_at_preemption")
def _flushed_at_preemption(d: Draw) -> Scenario:
    return disturbed(_passed_boundary(d, 12), Disturbance("preempt", 3))


@forces("flushed_at_abort")
def _flushed_at_abort(d: Draw) -> Scenario:
    return disturbed(_passed_boundary(d, 12), Disturbance("drop", 3))


def _passed_boundary(d: Draw, num_new: int) -> Scenario:
    """Draw a request that passes a boundary in step 2, and another that takes up its tokens there.

    Args:
        num_new: tokens of the answer of the request that passes it.
    """
    other, text = d.prompts(12, 2 * BLOCK - 2)
    layers = d.one_of("M*", "*M", "M*MM*")
    prompts = [other, text, [*text, *_answer(layers, text)[:2], 7, 8]]
    return d.scenario(
        prompts, [12, num_new, 4], waves=(2, 1), modes=("all",), layers=layers, **RECOMPUTE
    )


@forces("window_ahead")
def _window_ahead(d: Draw) -> Scenario:
    drafts: dict[str, Any] = {"num_drafts": d.number(3, 8), "drafts": "lapses"}
    prompts = d.prompts(5, 9)
    options: dict[str, Any] = {"modes": STATES, "async_scheduling": d.coin()}
    return d.scenario(prompts, [20, 30], **drafts, **options, **RECOMPUTE)


@forces("window_given_back", "window_hit")
def _window_given_back(d: Draw) -> Scenario:
    prompts = d.prompts(33)
    options: dict[str, Any] = {"layers": "M~*", "async_scheduling": d.coin()}
    return d.scenario(prompts * 2, [12, 6], waves=(1, 1), modes=STATES, **options)


@forces("window_crossed")
def _window_crossed(d: Draw) -> Scenario:
    prompts = d.prompts(9, 20, 30)
    layers = d.one_of("M~*", "M=+")
    options: dict[str, Any] = {"num_drafts": d.number(3, 8), "drafts": "mixed"}
    options |= {"async_scheduling": d.coin(), "block_size": 2 * BLOCK}
    return d.scenario(prompts, [30] * 3, layers=layers, **options)


@forces("shared_base")
def _shared_base(d: Draw) -> Scenario:
    prompts = d.prompts(2 * BLOCK + 1)
    options: dict[str, Any] = {"num_drafts": d.number(0, 3), **RECOMPUTE}
    return d.scenario(prompts * 3, [2, 6, 6], waves=(1, 2), modes=STATES, **options)


@forces("drafting_ends", "drafting_begins")
def _drafting_ends(d: Draw) -> Scenario:
    """Let one request draft alone, two more join it and end before it.

    The first prompt fills a step: the others begin once it has drafts.
    """
    num_drafts = d.number(2, 8)
    options: dict[str, Any] = {"num_drafts": num_drafts, "drafts": "right"}
    options |= {"async_scheduling": d.coin(), "state_scheme": d.one_of("slots", "recompute")}
    ranges = ((1, 1, num_drafts), (2, 2, 1), (3, 4, 0))
    budget = 16
    return d.scenario(
        d.prompts(budget, 3, 3),
        [60, 8, 12],
        block_size=2 * BLOCK,
        max_num_batched_tokens=budget,
        num_speculative_tokens_per_batch_size=ranges,
        **options,
    )


@forces("hit_inside_block", "hit_inside_first_block")
def _hit_inside_block(d: Draw) -> Scenario:
    """Send prompts again, in one step, and one that goes on from inside a block of another.

    Their hits end in the first block, and in a later one.
    """
    unit = 2 ** d.number(0, 3)
    short, long = d.prompts(2 * BLOCK - 2, 4 * BLOCK + 3)
    longer = [*long[: (len(long) - 1) // unit * unit], *d.prompts(9)[0]]
    options: dict[str, Any] = {"num_drafts": d.number(0, 4), "drafts": "mixed"}
    options |= {"async_scheduling": d.coin(), "state_scheme": d.one_of("slots", "recompute")}
    return d.scenario(
        [short, long, longer, short, long],
        [12, 12, 6, 6, 6],
        waves=(2, 3),
        modes=("align",),
        layers=d.one_of("M*", "M~*", "M*MM*", "M+*M"),
        block_size=2 * BLOCK,
        max_num_batched_tokens=2 * BLOCK * d.number(1, 4),
        prefix_match_unit=unit,
        sanitize=True,
        **options,
    )


@forces("block_accepted", "block_rejected", "block_of_hit")
def _block_of_hit(d: Draw) -> Scenario:
    prompts = d.prompts(33, 20)
    return _block_drafts(d, [*prompts, *prompts], [20, 30, 20, 30], waves=(2, 2), modes=STATES)


@forces("block_again")
def _block_again(d: Draw) -> Scenario:
    scenario = _block_drafts(d, d.prompts(9, 20, 40), [20, 30, 30], max_num_batched_tokens=16)
    return disturbed(scenario, Disturbance("preempt", 4, 5))


@forces("block_paused")
def _block_paused(d: Draw) -> Scenario:
    """Let a request draft alone, and after others that have come and gone."""
    ranges = ((1, 1, 4), (2, 4, 0))
    return _block_drafts(
        d,
        d.prompts(16, 3, 3),
        [60, 8, 12],
        num_drafts=4,
        max_num_batched_tokens=16,
        num_speculative_tokens_per_batch_size=ranges,
    )


@forces("block_wider")
def _block_wider(d: Draw) -> Scenario:
    return _block_drafts(
        d, d.prompts(9, 30), [50, 40], num_drafts=d.number(7, 17), layers="M*>", block_size=40
    )


def _block_drafts(
    d: Draw,
    prompts: list[list[int]],
    answers: list[int],
    num_drafts: int = 0,
    layers: str = "",
    **options: Any,
) -> Scenario:
    """Draw a scenario with a block drafter; 0 drafts: 2 to 7."""
    return d.scenario(
        prompts,
        answers,
        layers=layers or d.one_of("M*>", "M*}", "M~*>", "M*M}"),
        num_drafts=num_drafts or d.number(2, 8),
        drafts="dflash",
        async_scheduling=d.coin(),
        **{"block_size": 2 * BLOCK, "sanitize": True, **options},
    )
