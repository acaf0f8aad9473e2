"""A plan is held against what it is for: a state in a page and no longer page, memory that is full, a manager's pool.

Wrong sizes cost memory or hits, or let an engine start that can run nothing. No token of a run is wrong for them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import lcm
from typing import Any

import numpy as np
import torch

from hybrid_kv.attention.undo import ReplaySpec
from hybrid_kv.cache.backend import BackendContext, get_backend
from hybrid_kv.cache.capacity import Capacity, block_steps, capacity
from hybrid_kv.cache.layout import allocate_raw_buffers
from hybrid_kv.cache.manager import KVCacheManager
from hybrid_kv.cache.modes import MODES
from hybrid_kv.cache.plan import BlockSizes, CachePlan, plan_cache
from hybrid_kv.cache.ranks import Ranks, over_context
from hybrid_kv.cache.spec import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    UndoSpec,
    window_and_states,
)
from hybrid_kv.config import CacheConfig, ConfigError
from hybrid_kv.guard import block_sizes
from hybrid_kv.guard.plan_figures import figures
from hybrid_kv.guard.registry import CheckResult, Run, check
from hybrid_kv.kernels.common.integers import cdiv
from hybrid_kv.kernels.replay.ring import shortest_ring_len

BACKENDS = ("TORCH", "FLASH_ATTN", "FLASHINFER", "CPU_ATTN")
PLATFORMS = ("cuda", "xpu", "cpu")
XPU = ("xpu", "gdn_attention")  # its kernels take 64 tokens at a time


@check("plan", quick=200, full=2000, seconds=0.002, place=12)
def check_plan(run: Run) -> list[CheckResult]:
    """`run.amount` models of attention and states, on any platform and backend, in memory for a few requests."""
    begin = time.perf_counter()
    wrong = list[str]()
    for trial in range(run.amount):
        rng = np.random.default_rng((run.seed, trial))
        wrong += [
            f"trial {trial}: {error}" for part in (_errors, figures, _lone, _late, _stages) for error in part(rng)
        ]
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
    kind = str(rng.choice(["mamba2", "gdn_attention"]))
    parts = window_and_states(((3, width), torch.bfloat16), ((heads, width), torch.float32))
    state = MambaSpec(1, parts, mamba_type=kind)
    attention = FullAttentionSpec(1, int(rng.integers(1, 3)), 2 * int(rng.integers(1, 5)), torch.bfloat16)
    layers: dict[str, KVCacheSpec] = {f"states.{i}": state for i in range(num_states)}
    layers |= {f"attention.{i}": attention for i in range(num_attention)}
    platform, mode = str(rng.choice(PLATFORMS)), str(rng.choice(list(MODES)))
    backend, context = get_backend(str(rng.choice(BACKENDS)), platform), BackendContext.for_layers(platform, layers)
    # With another state the kernels of FlashAttention take more.
    context = replace(context, float32_ssm_state=context.float32_ssm_state and bool(rng.integers(2)))
    given = [None, 16, 48, 64, 8 * int(rng.integers(1, 12))][rng.integers(5)]
    cache = CacheConfig(block_size=given, mamba_cache_mode=mode, num_blocks=1000)
    chunk, limit = 16 * int(rng.integers(1, 9)), int(rng.integers(2, 3000))

    refusal = ""

    def plan(**changes: Any) -> CachePlan | None:
        nonlocal refusal
        try:
            return plan_cache(layers, replace(cache, **changes), backend, context, limit, chunk, rows)
        except ConfigError as error:
            refusal = str(error)
            return None

    made = plan()
    known = backend.name, context.float32_ssm_state
    unit = given or block_sizes.preferred(backend.name, platform)
    if block_sizes.kernel_block(*known, unit) is None:
        reason = f"block size {unit} does not fit {backend.name}, whose kernel blocks are {block_sizes.allowed(*known)}"
        if made is not None or refusal != reason:
            yield f"{refusal or 'it is planned'}; it must be refused because {reason!r}"
        return
    if made is None:
        yield f"{backend.name} on {platform}, mode {mode}: 1000 blocks are refused: {refusal}"
        return
    unit = lcm(unit, 64) if (platform, kind) == XPU else unit
    unit = lcm(unit, chunk) if MODES[mode].needs_unit else unit
    where = f"{backend.name} on {platform}, mode {mode}"
    yield from _sizes(made.sizes.block_size, unit, where, attention.page_size_bytes, state.state_bytes)

    in_blocks = [(group.spec, group.spec.block_size) for group in made.config.groups]
    kernels = [
        size if isinstance(spec, MambaSpec) else block_sizes.kernel_block(*known, size) for spec, size in in_blocks
    ]
    if [*made.kernel_block_sizes] != kernels:
        yield f"{where}: kernel blocks of {made.kernel_block_sizes} tokens, not {kernels}"

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


def _sizes(size: int, unit: int, where: str, token_bytes: int, state_bytes: int) -> Iterator[str]:
    """The block is the shortest that holds a state, of those that mode, backend and platform allow."""
    if size % unit or size * token_bytes < state_bytes or (size > unit and (size - unit) * token_bytes >= state_bytes):
        yield (
            f"{where}: blocks of {size} tokens, {token_bytes} B each, for a state of {state_bytes} B; they are "
            f"multiples of {unit}"
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
    while manager.allocate_slots(str(fits), 0, longest, is_decode=False) is not None:
        fits += 1
    if plan.token_capacity // longest != fits:
        yield f"mode {mode}: {usable} blocks hold {fits} requests of {longest} tokens, not {plan.token_capacity} tokens"


def _counted(plan: CachePlan, mode: str, rng: np.random.Generator) -> Iterator[str]:
    """What a manager gives requests, one after the other in a pool for a few of them, step by step and with drafts.

    They end at a boundary or just behind one; some are refused or cut.
    """
    shortest = min(group.spec.block_size for group in plan.config.groups)  # more drafts than it has tokens are refused
    K, ranks = int(rng.integers(0, min(4, shortest))), int(rng.integers(1, 4))
    undone = (
        replace(group, spec=replace(group.spec, undo=UndoSpec(K)) if isinstance(group.spec, MambaSpec) else group.spec)
        for group in plan.config.groups
    )
    config = over_context(replace(plan.config, groups=tuple(undone)), ranks)
    longest, size = 3 * max(group.spec.block_size for group in config.groups), config.groups[-1].spec.block_size
    outputs = rng.integers(2, 9, size=3)
    ends = rng.integers(1, 4, size=3) * size + rng.integers(0, 2, size=3)
    prompts = np.where(
        rng.integers(2, size=3) == 1, rng.integers(1, longest, size=3), np.maximum(ends + 1 - outputs, 1)
    )
    limit = int(rng.choice([2 * longest + 9, *prompts, *(prompts + outputs - 2)]))
    cut = np.minimum(outputs, limit - prompts)
    most = np.zeros_like(prompts)
    for group in plan.config.groups:
        is_state = isinstance(group.spec, MambaSpec)
        blocks = cdiv(prompts + cut - 1, group.spec.block_size * (1 if is_state else ranks))
        kept = blocks if MODES[mode].keeps_states else 1
        most += (np.minimum(kept, 2) if MODES[mode].gives_back else kept) + K if is_state else blocks
    usable = int(rng.integers(most.min(), 3 * most.sum() + 1))
    taken = np.flatnonzero((prompts < limit) & (most <= usable)).tolist()
    where = f"mode {mode}, {K} drafts, {ranks} ranks, {prompts} + {outputs} tokens, at most {limit}, {usable} blocks"
    try:
        found = capacity(replace(config, num_blocks=1 + usable), prompts, outputs, limit, K)
    except ConfigError as error:
        if taken:
            yield f"{where}: {error}"
        return
    if not taken:
        yield f"{where}: none fits, but {found} is told"
        return
    manager = KVCacheManager(replace(config, num_blocks=1 + int(most.sum())), MODES[mode].keeps_states)
    lengths = [(int(prompts[i]), int(cut[i])) for i in taken]
    held = [_given(manager, str(i), *both, K) for i, both in enumerate(lengths)]
    counted = block_steps(config, prompts[taken], cut[taken], K).tolist()
    if counted != held or None in held:
        yield f"{where}: tokens hold {held}, not {counted}"
        return
    left, fits = usable, 0
    while left >= (needed := int(most[taken[fits % len(taken)]])):
        left, fits = left - needed, fits + 1
    # Blocks for drafts are counted, and an answer of one token has no use for them.
    if not MODES[mode].gives_back and cut[taken].min() > 1:
        manager, played = KVCacheManager(replace(config, num_blocks=1 + usable), MODES[mode].keeps_states), 0
        while _given(manager, str(played), *lengths[played % len(lengths)], K) is not None:
            played += 1
        if played != fits:
            yield f"{where}: a manager takes {played} requests, not {fits}"
    due = Capacity(3 - len(taken), fits, int(most[taken].sum()) / len(taken), sum(counted) / int(cut[taken].sum()))
    if found != due:
        yield f"{where}: {found}; the blocks take {due}"


def _given(
    manager: KVCacheManager,
    name: str,
    prompt: int,
    output: int,
    num_drafts: int,
    num_seen: Callable[[int], int] = lambda num_computed: num_computed,
) -> int | None:
    """The blocks that a request holds, summed over the steps that give it a token; None if they do not suffice.

    Args:
        num_seen: how many of so many computed tokens the state has seen that the next step reads.
    """
    computed, last, held = 0, prompt + output - 1, 0
    while computed < last:
        is_decode = computed >= prompt
        end = min(computed + 1 + num_drafts, last)
        if not is_decode:
            end = manager.chunk_end(computed, prompt, prompt)
        if (
            manager.allocate_slots(name, computed, end - computed, is_decode, num_seen_tokens=num_seen(computed))
            is None
        ):
            return None
        computed = computed + 1 if is_decode else end
        if computed >= prompt:
            held += sum(int(np.count_nonzero(ids)) for ids in manager.block_ids(name))
    return held


def _lone(rng: np.random.Generator) -> Iterator[str]:
    """Layers of one kind alone: a state fills its page, and what is for the other kind is refused."""
    mode, limit = str(rng.choice(list(MODES))), int(rng.integers(1, 3000))
    given, chunk = ([None, 1, size][rng.integers(3)] for size in (24, 16))
    parts = window_and_states(((3, 8), torch.bfloat16), ((4, 8), torch.float32))
    states: dict[str, KVCacheSpec] = {"0": MambaSpec(1, parts)}

    def planned(layers: dict[str, KVCacheSpec], ranks: int = 1, **changes: Any) -> CachePlan | None:
        cache = CacheConfig(**{"mamba_cache_mode": mode, "num_blocks": 100, **changes})
        arguments = get_backend("TORCH", "cpu"), BackendContext("cpu", False), limit, chunk
        try:
            return plan_cache(layers, cache, *arguments, context_parallel=ranks)
        except ConfigError:
            return None

    size = given or (limit if not MODES[mode].keeps_states else chunk)
    state_bytes = 3 * 8 * 2 + 4 * 8 * 4
    due = BlockSizes(size, size, state_bytes, state_bytes) if size else None
    plan = planned(states, mamba_block_size=given)
    if (found := plan and plan.sizes) != due:
        yield f"states alone, mode {mode}, {given} given, chunks of {chunk}: {found}, not {due}"
    elif plan is not None:
        yield from _counted(plan, mode, rng)
    attention: dict[str, KVCacheSpec] = {"0": FullAttentionSpec(1, 1, 4, torch.bfloat16)}
    if planned(states, block_size=16) is not None or planned(attention, mamba_block_size=16) is not None:
        yield f"mode {mode}: the block size of layers that are not there is not refused"
    for ranks in (2, 3):
        if planned(states, ranks, mamba_block_size=16) is not None or planned(attention, ranks) is None:
            yield f"mode {mode}: the tokens of states are divided among {ranks} ranks, or those of attention are not"
    for size in (1, 16):
        made = planned(attention, block_size=size, num_blocks=2)
        if made is None or made.sizes != BlockSizes(size, None, size * 16, 0):
            yield f"attention alone: {made and made.sizes}"
        if planned(attention, block_size=size, num_blocks=1) is not None:
            yield "attention alone: the null block alone is enough"


def _late(rng: np.random.Generator) -> Iterator[str]:
    """States that are written as late as they may be: a manager that is told so holds what is counted."""
    K, size = int(rng.integers(0, 4)), int(rng.integers(4, 9))
    ring_len, longest = shortest_ring_len(1 + K) + int(rng.integers(0, 2 * size)), 6 * size
    undo = ReplaySpec(K, ring_len)
    state = MambaSpec(size, (), mamba_cache_mode="align", undo=undo)
    groups = tuple(
        KVCacheGroupSpec((name,), spec)
        for name, spec in (("0", FullAttentionSpec(size, 1, 2, torch.bfloat16)), ("1", state))
    )
    config = KVCacheConfig(100, groups)
    # A longer prompt has given back some of its columns by its own chunks.
    prompts, outputs = np.ones(3, dtype=np.int64), rng.integers(2, longest, size=3)
    # A step finds at most the ring's tokens, or the rest of a block and those of two steps, behind a state.
    behind = cdiv(min(ring_len, size - 1 + 2 * (1 + K)), size)
    manager = KVCacheManager(config, enable_prefix_caching=True)
    held = [
        _given(manager, str(i), 1, int(output), K, lambda computed: max(1, (computed // size - behind) * size + 1))
        for i, output in enumerate(outputs)
    ]
    counted = block_steps(config, prompts, outputs, K).tolist()
    if counted != held:
        yield f"replay, {K} drafts, ring {ring_len}, blocks of {size}: 1 + {outputs} tokens hold {held}, not {counted}"


def _stages(rng: np.random.Generator) -> Iterator[str]:
    """Layers are dealt to pipeline stages one by one: all get as many, and one more those just before the last."""
    num_layers, num_stages, tensor, context = (int(rng.integers(1, n)) for n in (30, 9, 5, 4))
    given = {"tensor_parallel": tensor * context, "pipeline_parallel": num_stages, "context_parallel": context}
    ranks = Ranks(**{name: number for name, number in given.items() if number > 1})
    if ranks.num_gpus != tensor * context * num_stages:
        yield f"{ranks} are {ranks.num_gpus} GPUs"
    strange = [given | {name: number} for name in given for number in (0, -1)]
    for numbers in [*strange, given | {"tensor_parallel": tensor * context + 1}][: 6 + (context > 1)]:
        try:
            yield f"{Ranks(**numbers)} is not refused"
        except ConfigError:
            continue
    counts = [num_layers // num_stages] * num_stages
    for more in range(num_layers % num_stages):
        counts[num_stages - 2 - more] += 1
    due = [range(sum(counts[:i]), sum(counts[: i + 1])) for i in range(num_stages)]
    try:
        found = ranks.stages(num_layers)
    except ConfigError:
        found = []
    if found != (due if num_layers >= num_stages else []):
        yield f"{num_layers} layers on {num_stages} stages: {found}, not {due}"
