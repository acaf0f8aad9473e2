"""A plan is held against what it is for: a state in a page and no longer page, memory that is full, a manager's pool.

Wrong sizes cost memory or hits, or let an engine start that can run nothing. No token of a run is wrong for them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from math import lcm
from typing import Any

import numpy as np
import torch

from hybrid_kv.cache.backend import DEFAULT_BLOCK_SIZE, AttentionBackend, BackendContext, get_backend
from hybrid_kv.cache.capacity import block_steps, capacity, most_blocks
from hybrid_kv.cache.layout import allocate_raw_buffers
from hybrid_kv.cache.manager import KVCacheManager
from hybrid_kv.cache.modes import MODES
from hybrid_kv.cache.plan import CachePlan, plan_cache
from hybrid_kv.cache.spec import FullAttentionSpec, KVCacheSpec, MambaSpec, UndoSpec, window_and_states
from hybrid_kv.config import CacheConfig, ConfigError
from hybrid_kv.guard.registry import CheckResult, Run, check
from hybrid_kv.kernels.common.integers import cdiv

BACKENDS = ("TORCH", "FLASH_ATTN", "FLASHINFER", "CPU_ATTN")
PLATFORMS = ("cuda", "xpu", "cpu")


@check("plan", quick=200, full=2000, seconds=0.002, place=12)
def check_plan(run: Run) -> list[CheckResult]:
    """`run.amount` models of attention and states, on any platform and backend, in memory for a few requests."""
    begin = time.perf_counter()
    wrong = list[str]()
    for trial in range(run.amount):
        wrong += [f"trial {trial}: {error}" for error in _errors(np.random.default_rng((run.seed, trial)))]
        run.progress(1)
    return [
        CheckResult(
            "plan", "sizes that a state, the memory or a manager refutes", not wrong, len(wrong), "settings", "0",
            run.amount, time.perf_counter() - begin, wrong[0] if wrong else "", {"seed": run.seed},
        )
    ]  # fmt: skip


def _errors(rng: np.random.Generator) -> Iterator[str]:
    num_states, num_attention = (int(count) for count in rng.integers(1, 9, size=2))
    width, heads, rows = (2 * int(rng.integers(1, 40)), *(int(n) for n in rng.integers(1, 6, size=2)))
    state = MambaSpec(1, window_and_states(((3, width), torch.bfloat16), ((heads, width), torch.float32)))
    attention = FullAttentionSpec(1, int(rng.integers(1, 3)), 2 * int(rng.integers(1, 5)), torch.bfloat16)
    layers: dict[str, KVCacheSpec] = {f"states.{i}": state for i in range(num_states)}
    layers |= {f"attention.{i}": attention for i in range(num_attention)}
    platform, mode = str(rng.choice(PLATFORMS)), str(rng.choice(list(MODES)))
    backend, context = get_backend(str(rng.choice(BACKENDS)), platform), BackendContext.for_layers(platform, layers)
    given = [None, 16, 48, 64][rng.integers(4)]
    cache = CacheConfig(block_size=given, mamba_cache_mode=mode, num_blocks=1000)
    chunk, limit = 16 * int(rng.integers(1, 9)), int(rng.integers(2, 3000))

    def plan(**changes: Any) -> CachePlan | None:
        try:
            return plan_cache(layers, replace(cache, **changes), backend, context, limit, chunk, rows)
        except ConfigError:
            return None

    if (made := plan()) is None:
        yield f"{backend.name} on {platform}, mode {mode}: 1000 blocks are refused"
        return
    yield from _sizes(made, mode, chunk, given, backend, context, attention.page_size_bytes, state.state_bytes)

    few, many = sorted((num_states, num_attention))
    num_groups = 2 if many < 1.5 * few else 1 + cdiv(many, few)
    named = sorted(name for group in made.config.groups for name in group.layer_names)
    if named != sorted(layers) or len(made.config.groups) != num_groups:
        yield f"{few} and {many} layers of two kinds are {num_groups} groups, not {len(made.config.groups)}"

    for count, due in ((num_groups, False), (num_groups + 1, True)):
        if (plan(num_blocks=count) is not None) != due:
            yield f"{count} blocks for {num_groups} groups are {'refused' if due else 'not refused'}"

    memory = made.config.block_bytes * int(rng.integers(num_groups + 1, 60)) + int(rng.integers(1000))
    if (full := plan(num_blocks=None, memory_bytes=memory)) is None:
        yield f"{memory} B for {num_groups} groups are refused"
        return
    taken = sum(buffer.nbytes for buffer in allocate_raw_buffers(full.config, torch.device("meta")))
    if not 0 <= memory - taken < taken // full.config.num_blocks:
        yield f"{full.config.num_blocks} blocks take {taken} of {memory} B"
    yield from _capacity(full, mode)
    yield from _counted(full, mode, rng)


def _sizes(
    plan: CachePlan,
    mode: str,
    chunk: int,
    given: int | None,
    backend: type[AttentionBackend],
    context: BackendContext,
    token_bytes: int,
    state_bytes: int,
) -> Iterator[str]:
    """The block is the shortest that holds a state, of those that mode and backend allow."""
    unit = given or backend.get_preferred_block_size(DEFAULT_BLOCK_SIZE, context)
    unit = lcm(unit, chunk) if MODES[mode].needs_unit else unit
    size = plan.sizes.block_size
    if size % unit or size * token_bytes < state_bytes or (size > unit and (size - unit) * token_bytes >= state_bytes):
        yield (
            f"{backend.name} on {context.platform}, mode {mode}: blocks of {size} tokens, {token_bytes} B each, for a "
            f"state of {state_bytes} B; they are multiples of {unit}"
        )


def _capacity(plan: CachePlan, mode: str) -> Iterator[str]:
    """What a manager takes with that pool."""
    longest, usable = plan.longest_request, plan.usable_blocks
    manager = KVCacheManager(plan.config, MODES[mode].keeps_states)
    if not manager.can_ever_fit(longest) or (longest < plan.max_model_len and manager.can_ever_fit(longest + 1)):
        yield f"mode {mode}: {usable} blocks hold a request of {longest} tokens at most"
    if MODES[mode].gives_back:
        return  # how much such a request holds depends on where it is
    fits = 0
    while manager.allocate_slots(str(fits), 0, longest) is not None:
        fits += 1
    if plan.token_capacity // longest != fits:
        yield f"mode {mode}: {usable} blocks hold {fits} requests of {longest} tokens, not {plan.token_capacity} tokens"


def _counted(plan: CachePlan, mode: str, rng: np.random.Generator) -> Iterator[str]:
    """What a manager gives requests, one after the other in a pool for a few of them, step by step and with drafts."""
    K, limit = int(rng.integers(0, 4)), 3 * max(group.spec.block_size for group in plan.config.groups)
    prompts, outputs = rng.integers(1, limit, size=3), rng.integers(2, 9, size=3)
    groups = tuple(
        replace(group, spec=replace(group.spec, undo=UndoSpec(K)) if isinstance(group.spec, MambaSpec) else group.spec)
        for group in plan.config.groups
    )
    config = replace(plan.config, groups=groups)
    most = most_blocks(config, prompts, outputs)
    config = replace(config, num_blocks=1 + int(rng.integers(most.max(), 3 * most.sum() + 1)))
    manager, fits, held = KVCacheManager(config, MODES[mode].keeps_states), 0, list[int]()
    while (given := _given(manager, str(fits), int(prompts[fits % 3]), int(outputs[fits % 3]), K)) is not None:
        fits, held = fits + 1, [*held, given]
    counted = block_steps(config, prompts, outputs, K).tolist()[: len(held)]
    if counted != held[:3]:
        yield f"mode {mode}, {K} drafts: requests of {prompts} + {outputs} tokens hold {held[:3]}, not {counted}"
    found = capacity(config, prompts, outputs, 2 * limit, K)
    if not MODES[mode].gives_back and found.num_fit != fits:
        yield f"mode {mode}, {K} drafts: {config.num_blocks} blocks take {fits} requests, not {found.num_fit}"


def _given(manager: KVCacheManager, name: str, prompt: int, output: int, num_drafts: int) -> int | None:
    """The blocks that a request holds, summed over the steps that give it a token; None if they do not suffice."""
    computed, last, held = 0, prompt + output - 1, 0
    while computed < last:
        is_decode = computed >= prompt
        end = min(computed + 1 + num_drafts, last)
        if not is_decode:
            end = manager.chunk_end(computed, prompt, prompt)
        if manager.allocate_slots(name, computed, end - computed, is_decode, num_seen_tokens=computed) is None:
            return None
        computed = computed + 1 if is_decode else end
        if computed >= prompt:
            held += sum(int(np.count_nonzero(ids)) for ids in manager.block_ids(name))
    return held
