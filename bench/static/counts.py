"""Bytes that the state update of a verify step moves: Triton's interpreter counts on the CPU.

Every address that the programs of a launch load or store counts once, parameters that all requests
share left out. What is counted must be what `state_bytes` says, which `mean_traffic` then averages
over the histories and flushes that `recompute.commit` makes in a long run. Launches are counted by
`bench.device`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np
import torch

from bench._shapes import DELTA_MODELS, MODELS, NANO, QWEN3_5, DeltaShape
from bench.static.compile import Measured
from bench.static.state_bytes import Shape, slots_bytes, step_bytes
from hybrid_kv.errors import deaf_to_ctrl_c
from hybrid_kv.kernels.common.interpreter import start_interpreter
from hybrid_kv.kernels.recompute import RecomputeCursors, commit_reference, default_ring_len

if (
    TYPE_CHECKING
):  # a suite needs counts alone, also of an older hybrid_kv that lacks what the gate imports
    from bench.static.gate import Baseline

# times as many bytes as `recompute` that `slots` must move with 3 and 5 drafts, states in float32
FEWEST = 5.0
# Layers with a delta rule, whose bytes are counted beside the first model's.
DELTA = {"Qwen3-Next": DELTA_MODELS["Qwen3-Next"], "Qwen3.5-397B": QWEN3_5}
# The records of vLLM (ReplaySSM, vllm#47576) and FlashInfer (flashinfer#4081) are u, unit key and
# log decay as well, of so many tokens at most; the checkpoint is read as a whole, and written when
# a step would not fit behind it.
RECORDED = 16


@dataclass(frozen=True)
class Count(Measured):
    """Bytes of one request, layer and step; `wrong` says what must not be."""

    bytes: int
    wrong: str = ""

    def values(self) -> dict[str, float]:
        return {"bytes": self.bytes}


def distinct_bytes(call: Callable[[], object], shared: Sequence[torch.Tensor]) -> int:
    """Count each address once that is loaded, and once that is stored, of all launches inside.

    Those of `shared` are left out.

    A tensor is left out with its whole storage.
    """
    from triton.runtime.interpreter import InterpreterBuilder

    accesses: list[list[tuple[Any, int]]] = []

    def counting(name: str, mask_at: int) -> Any:
        access = getattr(InterpreterBuilder, name)
        accesses.append(own := [])

        def count(self: Any, pointers: Any, *rest: Any) -> Any:
            addresses, active = np.broadcast_arrays(pointers.data, rest[mask_at].data.astype(bool))
            size = pointers.get_element_ty().primitive_bitwidth // 8
            own.append((np.unique(addresses[active].astype(np.int64)), size))
            return access(self, pointers, *rest)

        return patch.object(InterpreterBuilder, name, count)

    with counting("create_masked_load", 0), counting("create_masked_store", 1):
        call()
    storages = [tensor.untyped_storage() for tensor in shared]
    total = 0
    for parts in accesses:
        for size in {size for _, size in parts}:
            addresses = np.unique(np.concatenate([part for part, own in parts if own == size]))
            for storage in storages:
                first = storage.data_ptr()
                addresses = addresses[(addresses < first) | (addresses >= first + storage.nbytes())]
            total += size * len(addresses)
    return total


def count_scheme(shape: Shape, K: int, n_hist: int | None, flush: bool) -> int:
    """Count the bytes of one request in one layer; `n_hist` None: scheme `slots`."""
    from hybrid_kv.kernels.gated_delta import gated_delta_recompute, gated_delta_update_slots
    from hybrid_kv.kernels.recompute import (
        RecomputeRing,
        RecomputeStep,
        recompute_update,
        split_state,
    )
    from hybrid_kv.kernels.ssd import selective_state_update_slots

    is_delta = isinstance(shape, DeltaShape)
    if isinstance(shape, DeltaShape):
        heads, head_dim, size, groups = shape.heads, shape.value_dim, shape.key_dim, shape.key_heads
    else:
        heads, head_dim, size, groups = shape
    tokens, bf16 = 1 + K, torch.bfloat16
    x, B, C = (
        torch.zeros(tokens, *part, dtype=bf16)
        for part in ((heads, head_dim), (groups, size), (groups, size))
    )
    (dt, beta), cu_seqlens = torch.zeros(2, tokens, heads, dtype=bf16), torch.tensor([0, tokens])
    dt_bias, A_log, D = heads_of = tuple(torch.zeros(3, heads))
    layer = (C, B, x, dt, dt_bias, A_log, beta) if is_delta else (x, dt, dt_bias, A_log, B, C, D)
    states = torch.zeros(2 + tokens, heads, head_dim, size)
    if n_hist is None:
        sources, targets = torch.tensor([1]), torch.arange(2, 2 + tokens)[None]
        indices, slots = (cu_seqlens, sources, targets), selective_state_update_slots
        slots = gated_delta_update_slots if is_delta else slots
        return distinct_bytes(lambda: slots(states, *layer, *indices), [*heads_of, *indices])
    ring_len = default_ring_len(tokens)
    ring = RecomputeRing.allocate(
        1, ring_len, (heads, head_dim), (groups, size), bf16, torch.device("cpu")
    )
    row, one = torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.int64)
    parts = (
        row,
        one,
        one + 1 if flush else one.clone(),
        row.clone(),
        n_hist * one,
        n_hist * one if flush else row + 0,
    )
    step = RecomputeStep(*parts, max_query_len=tokens)
    planes, update = split_state(states), gated_delta_recompute if is_delta else recompute_update
    return distinct_bytes(
        lambda: update(planes, ring, step, *layer, cu_seqlens), [*heads_of, cu_seqlens, *parts]
    )


@dataclass(frozen=True)
class Traffic:
    """Bytes per request, layer and step of both schemes, averaged over a long run.

    Attributes:
        flush_rate: share of the steps that flush.
        recompute, slots: bytes.
    """

    flush_rate: float
    recompute: float
    slots: float

    @property
    def ratio(self) -> float:
        return self.slots / self.recompute


def mean_traffic(
    shape: Shape,
    state_dtype: torch.dtype,
    num_speculative_tokens: int,
    acceptance: float = 0.75,
    block_size: int | None = 528,
    steps: int = 400,
    recorded: int | None = None,
) -> Traffic:
    """Return the mean traffic of both schemes under drafts.

    Each draft is accepted with probability `acceptance` if those before it are.

    The cursors of 64 requests are moved by `commit_reference` itself, so the rate of flushes is
    that of its rule.

    Args:
        recorded: tokens of another engine's record, whose checkpoints are no planes.
    """
    num_rows, tokens = 64, 1 + num_speculative_tokens
    ring_len = default_ring_len(tokens) if recorded is None else recorded + tokens
    device, generator = torch.device("cpu"), torch.Generator().manual_seed(0)
    cursors = RecomputeCursors.allocate(num_rows, ring_len, tokens, device)
    rows = torch.arange(num_rows)
    cursors.restart(rows, 1 + rows)  # Not in step with each other.
    cu_seqlens = torch.arange(num_rows + 1) * tokens
    columns = 2 if block_size is None else 2 + (num_rows + steps * tokens) // block_size
    block_table = torch.ones(num_rows, columns, dtype=torch.int64)
    accepted = torch.ones(num_rows, dtype=torch.int64)
    warm, seen = steps // 4, Counter[tuple[int, bool]]()
    for index in range(steps):
        step = commit_reference(cursors, rows, accepted, cu_seqlens, block_table, block_size)
        hits = torch.rand(num_rows, num_speculative_tokens, generator=generator) < acceptance
        accepted = 1 + hits.long().cumprod(1).sum(1)
        if index >= warm:
            seen.update(zip(step.n_hist.tolist(), (step.n_flush > 0).tolist(), strict=True))
    moved = sum(
        count * sum(step_bytes(shape, state_dtype, tokens, *kind, planes=recorded is None).values())
        for kind, count in seen.items()
    )
    flushes = sum(count for (_, flush), count in seen.items() if flush)
    slots = sum(slots_bytes(shape, state_dtype, tokens).values())
    return Traffic(flushes / seen.total(), moved / seen.total(), slots)


def count_bytes() -> list[Count]:
    """Count the bytes of one request, layer and step.

    The shapes are those of Nemotron-3-Nano and of delta rules with float32 states.
    """
    fp32, found = torch.float32, []
    heads, head_dim, size, groups = MODELS[NANO].state
    layers: list[tuple[str, Shape, Shape, int]] = [
        (NANO, MODELS[NANO].state, (heads // groups, head_dim, size, 1), groups)
    ]
    layers += [
        (name, shape, shape.of_rank(shape.key_heads), shape.key_heads)
        for name, shape in DELTA.items()
    ]
    for (name, shape, group, groups), K in product(layers, (3, 5)):
        wrong = []
        for n_hist, flush in ((None, False), (9, False), (9, True)):
            if n_hist is None:
                said = sum(slots_bytes(shape, fp32, 1 + K).values())
            else:
                said = sum(step_bytes(shape, fp32, 1 + K, n_hist, flush).values())
            # Groups have nothing in common, so one of them tells of all.
            bytes_moved = groups * count_scheme(group, K, n_hist, flush)
            if bytes_moved != said:
                what = (
                    "slots"
                    if n_hist is None
                    else f"recompute of {n_hist} tokens{', flushed' if flush else ''}"
                )
                wrong.append(f"{what} moves {bytes_moved} bytes, the model says {said}")
        traffic = mean_traffic(shape, fp32, K, steps=200)
        if traffic.ratio < FEWEST:
            wrong.append(
                f"slots moves {traffic.ratio:.2f} times the bytes of recompute, it must be {FEWEST}"
            )
        schemes = {"slots": traffic.slots, "recompute": traffic.recompute}
        if isinstance(shape, DeltaShape):
            schemes["record"] = mean_traffic(
                shape, fp32, K, block_size=None, steps=200, recorded=RECORDED
            ).recompute
            if schemes["record"] < traffic.recompute:
                wrong.append("a record of vLLM or FlashInfer moves fewer bytes than recompute")
        for scheme, value in schemes.items():
            found.append(
                Count(
                    f"bytes.{scheme}",
                    f"{name}, K={K}",
                    "float32",
                    "any",
                    round(value),
                    "; ".join(wrong),
                )
            )
    return found


# ---- comparing ----


def count_all() -> list[Count]:
    """Count everything, in a process that interprets kernels."""
    with ProcessPoolExecutor(1, get_context("spawn"), start_interpreter) as pool:
        with deaf_to_ctrl_c():
            pool.submit(int)  # The first submit starts the worker.
        return pool.submit(count_bytes).result()


def failures(count: Count, baseline: Baseline) -> list[str]:
    """Return what got worse: one byte more than in the baseline is too many."""
    then = baseline.get(count.key, {}).get("bytes", count.bytes)
    more = [f"{count.bytes} bytes instead of {then:.0f}"] if count.bytes > then else []
    return [count.wrong, *more] if count.wrong else more


def print_counts(counts: Sequence[Count], found: Sequence[Sequence[str]]) -> None:
    """Print a line per count, and below what is wrong."""
    print(f"\n{'counted in the interpreter':26} {'shape':24} {'':8} {'bytes':>11}")
    for one, wrong in zip(counts, found, strict=True):
        print(
            f"{one.kernel:26} {one.shape:24} {one.dtype:8} {one.bytes:>11,}  "
            f"{'FAILED' if wrong else 'ok'}"
        )
    for one, wrong in zip(counts, found, strict=True):
        for line in wrong:
            print(f"{one.kernel} ({one.shape}, {one.dtype}): {line}")
