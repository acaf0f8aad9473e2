"""The state update of a Mamba-2 layer's verify step, 1 + K tokens of each request.

It is measured in either scheme.

Tolerances: float32 arithmetic errs by 5e-6 of the largest state and 1e-5 of the largest output
(tests/kernels/ssd/test_slots.py derives them), with a history in another order of sums 2e-5 (as a
chunk does); bfloat16 outputs are rounded by 2^-8 at most, and again what they are computed from in
scheme `recompute`.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from functools import cache, partial
from itertools import product
from typing import Any

import numpy as np
import torch

from bench._layers import Layer, verify_step
from bench._reference import Floats, near, recurrence
from bench._shapes import SHAPES
from bench.harness.cells import Case, Cell, grid, seed
from bench.harness.contest import (
    MODELS,
    VLLM,
    Contest,
    Prepare,
    Rival,
    bound_update,
    models,
    peer_case,
)
from bench.ssd import expected_of, layer
from bench.static import state_bytes
from bench.static.counts import mean_traffic
from hybrid_kv.kernels.ssd import (
    selective_state_update_slots,
    selective_state_update_slots_reference,
)

STATES, OUTPUTS, RECOMPUTED, ROUNDED = 5e-6, 1e-5, 2e-5, 2.0**-7
HISTORY = 12  # tokens in the ring, of some 32 at most


def slots(
    seed: int,
    model: str,
    num_reqs: int,
    K: int,
    implementation: Any,
    device: str,
    dtype: torch.dtype,
) -> Case:
    """See `verify_step`."""
    shape, g = SHAPES[model], torch.Generator().manual_seed(seed)
    inputs = layer(shape, num_reqs * (1 + K), dtype, g)
    tolerances = (OUTPUTS if dtype == torch.float32 else ROUNDED), STATES
    timed = Layer(shape.state[:3], inputs, implementation, device, expected_of, tolerances)
    return verify_step(timed, num_reqs, K, g)


def _fill(
    pairs: Iterable[tuple[torch.Tensor, torch.Tensor]], row: torch.Tensor, place: torch.Tensor
) -> None:
    """Write the history of each request into places of its row of a ring.

    Args:
        pairs: a part of the ring [num_reqs, heads or groups, ring_len, …], and its values
            [num_reqs, HISTORY or more, heads or groups, …].
        row: [num_reqs]; place: [num_reqs, HISTORY].
    """
    for target, values in pairs:
        at = row[:, None].to(target.device), slice(None), place.to(target.device)
        target[at] = values[:, :HISTORY].to(target.device, target.dtype)


def recompute(
    seed: int,
    model: str,
    num_reqs: int,
    K: int,
    flush: bool,
    name: str,
    device: str,
    dtype: torch.dtype,
) -> Case:
    """Build a step that reads one state and the history of each request.

    With `flush` it also writes the state after the history.
    """
    from hybrid_kv.kernels import recompute as kernels

    implementation = getattr(kernels, name)
    shape, columns = SHAPES[model], 1 + K
    g = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=g)

    heads, groups, size = shape.heads, shape.groups, shape.state_size
    states = normal(num_reqs, heads, shape.head_dim, size)
    A_log, D, dt_bias = (normal(heads) for _ in range(3))
    x, B = (
        normal(num_reqs, HISTORY + columns, heads, shape.head_dim),
        normal(num_reqs, HISTORY + columns, groups, size),
    )
    C, dt = normal(num_reqs, columns, groups, size), normal(num_reqs, HISTORY + columns, heads)
    x, B, C, dt = (part.to(dtype) for part in (x, B, C, dt))
    step_dt = torch.nn.functional.softplus(dt.double() + dt_bias.double())

    ring_len = kernels.default_ring_len(columns)
    sizes = (num_reqs, ring_len, (heads, shape.head_dim), (groups, size))
    ring = kernels.RecomputeRing.allocate(*sizes, dtype, torch.device(device))
    start = torch.randint(0, ring_len, (num_reqs,), generator=g)
    row = torch.arange(num_reqs)
    place = (start[:, None] + torch.arange(HISTORY)) % ring_len
    _fill(((ring.x, x), (ring.B, B), (ring.dt, step_dt)), row, place)
    ids = 1 + torch.randperm(2 * num_reqs, generator=g).view(2, num_reqs)
    pool = torch.zeros(1 + 2 * num_reqs, heads, shape.head_dim, size).index_copy(0, ids[0], states)
    pool = kernels.split_state(pool).to(device)
    # A block of its own for what is flushed, so that a call leaves its input as it was; the inputs
    # that it appends to the ring are the same each time.
    count = torch.full((num_reqs,), HISTORY)
    parts = (
        row,
        ids[0],
        ids[1] if flush else ids[0],
        start,
        count,
        count if flush else torch.zeros_like(count),
    )
    step = kernels.RecomputeStep(*(part.to(device) for part in parts), max_query_len=columns)
    new_x, new_dt, new_B = (part[:, HISTORY:].flatten(0, 1) for part in (x, dt, B))
    inputs = (
        new_x,
        new_dt,
        dt_bias,
        A_log,
        new_B,
        C.flatten(0, 1),
        D,
        torch.arange(num_reqs + 1) * columns,
    )
    arguments = (pool, ring, step, *(part.to(device) for part in inputs))

    @cache
    def expected() -> tuple[Floats, Floats]:
        all_C = torch.cat([torch.zeros(num_reqs, HISTORY, groups, size), C], dim=1)
        operands = (states, x, step_dt, -A_log.double().exp(), B, all_C, D)
        y, passed = recurrence(*(np.asarray(part.double()) for part in operands))
        return y[:, HISTORY:], passed[:, HISTORY - 1] if flush else np.asarray(states.double())

    def check() -> float:
        outputs, after = expected()
        if flush:
            pool[ids[1].to(device)] = 0
        y = np.asarray(implementation(*arguments).double().cpu()).reshape(outputs.shape)
        written = kernels.read_states(pool, step.dst).double().cpu()
        exact = dtype == torch.float32
        return max(
            near("y", y, outputs, RECOMPUTED if exact else 2 * ROUNDED),
            near("states", written, after, RECOMPUTED if exact else ROUNDED),
        )

    return Case(lambda: implementation(*arguments), check)


def vllm_state_update() -> Prepare:
    """Return `selective_state_update` with a destination per token."""
    function = importlib.import_module(f"{VLLM}.mamba_ssm").selective_state_update

    def prepare(state, x, dt, dt_bias, A_log, B, C, D, cu_seqlens, sources, targets):  # type: ignore[no-untyped-def]
        y = torch.empty_like(x)
        launch = bound_update(
            function,
            (state, x, dt, dt_bias, A_log, B, C, D),
            state_batch_indices=sources[:, None].expand(-1, targets.shape[1]).int().contiguous(),
            dst_state_batch_indices=targets.int(),
            null_block_id=0,
            out=y,
            num_accepted_tokens=torch.ones_like(sources, dtype=torch.int32),
            cu_seqlens=cu_seqlens.int(),
        )
        return launch, lambda: y

    return prepare


def mamba_ssm_state_update() -> Prepare:
    """Return the update of one token, in place: in the block that ours only writes."""
    function = importlib.import_module(
        "mamba_ssm.ops.triton.selective_state_update"
    ).selective_state_update

    def prepare(state, x, dt, dt_bias, A_log, B, C, D, cu_seqlens, sources, targets):  # type: ignore[no-untyped-def]
        state[targets[:, 0]] = state[sources]
        outputs: list[torch.Tensor] = []
        operands, written = (
            (state, x, dt, dt_bias, A_log, B, C, D),
            targets[:, 0].int().contiguous(),
        )
        launch = bound_update(function, operands, state_batch_indices=written)
        return lambda: outputs.append(launch()), outputs.pop

    return prepare


@cache
def flush_rate(K: int) -> float:
    """Return the share of the steps that flush, by the rule itself."""
    return mean_traffic(SHAPES["nemotron-3-nano"].state, torch.float32, K).flush_rate


def state_updates(device: str, model: str, num_reqs: int, K: int) -> Contest:
    """Return the contest of one layer's step of 1 + K tokens a request.

    The states are those of all tokens, or one state and a ring.
    """
    shape, tokens = SHAPES[model], 1 + K
    sizes, bf16 = shape.state, torch.bfloat16
    params = {"model": model, "num_reqs": num_reqs, "K": K}
    number = seed("state_update", params)

    def build(implementation: Any) -> Case:
        return slots(number, model, num_reqs, K, implementation, device, bf16)

    def recomputed(flush: bool) -> Rival:
        moved = state_bytes.step_bytes(sizes, torch.float32, tokens, HISTORY, flush)
        make = partial(
            recompute,
            number,
            model,
            num_reqs,
            K,
            flush,
            "recompute_update",
            device=device,
            dtype=bf16,
        )
        return Rival(make, num_reqs * sum(moved.values()))

    moved = num_reqs * sum(state_bytes.slots_bytes(sizes, torch.float32, tokens).values())
    rivals = {
        "slots": Rival(lambda: build(selective_state_update_slots), moved),
        "recompute_step": recomputed(flush=False),
        "recompute_flush": recomputed(flush=True),
        "vllm": Rival(lambda: peer_case(build, vllm_state_update()), moved),
        "torch": Rival(lambda: build(selective_state_update_slots_reference), moved, graph=False),
    }
    if not K:
        rivals["mamba_ssm"] = Rival(lambda: peer_case(build, mamba_ssm_state_update()), moved)
    rate = flush_rate(K)
    return Contest(
        "state_update",
        params,
        rivals,
        {"recompute": {"recompute_step": 1 - rate, "recompute_flush": rate}},
    )


def gpu_contests(quick: bool, device: str) -> Iterator[Contest]:
    """Batches by drafts; the reference of a large batch of the larger model would take 40 GB."""
    for model in models(quick):
        batches = (128,) if quick else (1, 16, 128) if model == MODELS[0] else (16,)
        for num_reqs, K in product(batches, (0, 3) if quick else (0, 1, 3, 5, 7)):
            yield state_updates(device, model, num_reqs, K)


def cells() -> list[Cell]:
    """Return cells of both schemes, on a CPU and a GPU."""
    steps = {
        "model": ("nemotron-3-nano-tp8", "granite-4-h-small-tp8"),
        "num_reqs": (2,),
        "K": (0, 1, 3, 5, 7),
    }
    launches = {
        "model": ("nemotron-3-nano", "granite-4-h-small"),
        "num_reqs": (16, 128),
        "K": (0, 1, 3, 5, 7),
    }
    quick = [("nemotron-3-nano-tp8", 2, 0), ("nemotron-3-nano-tp8", 2, 3)]
    on_cpu: dict[str, Any] = {"device": "cpu", "dtype": torch.float32}
    on_gpu: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    slots_cpu = partial(slots, implementation=selective_state_update_slots_reference, **on_cpu)
    recompute_cpu = partial(recompute, name="recompute_update_reference", **on_cpu)
    slots_gpu = partial(slots, implementation=selective_state_update_slots, **on_gpu)
    recompute_gpu = partial(recompute, name="recompute_update", **on_gpu)
    flushes, quick_gpu = {**launches, "flush": (False, True)}, [("nemotron-3-nano", 128, 3)]
    return [
        *grid("state_update", "slots", "cpu", slots_cpu, steps, quick),
        *grid(
            "state_update",
            "recompute",
            "cpu",
            recompute_cpu,
            {**steps, "flush": (False, True)},
            quick[1:],
        ),
        *grid("state_update", "slots_kernel", "gpu", slots_gpu, launches, quick_gpu),
        *grid("state_update", "recompute_kernel", "gpu", recompute_gpu, flushes, quick_gpu),
    ]
