"""One decode or verify step: bytes and launches of its kernels, and their cost.

They are counted from the layers of a plan.

No torch: specs with planned dtypes are enough. Bytes are those that a kernel must move at least;
`bench.static.counts` holds the same formulas against what kernels access.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod

from hybrid_kv.attention.rollback import SCHEMES
from hybrid_kv.cache.spec import (
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    StatePart,
    StateProgress,
    window_of,
    with_block_size,
)
from hybrid_kv.measure.predict.gpu import (
    CHIPS,
    CONVOLUTION,
    GPU,
    GRAPH_NODE,
    INTERVALS,
    LAUNCH,
    UPDATE,
    WAIT,
    WIDTH_LAST,
    bound_of,
    microseconds,
)

STEPS = 4_000  # of a request, over which flushes and histories are averaged


@dataclass(frozen=True)
class Kernel:
    """The launches of one kind in a step.

    Attributes:
        family: of `gpu`; what has no floor of its own there takes the smallest one.
        num_bytes: read and written by all of them.
        serial_tokens: of a request, that one launch computes one after the other.
        flops: of matrix products; 0 where bytes decide.
    """

    name: str
    launches: int
    num_bytes: float
    family: str = WIDTH_LAST
    serial_tokens: int = 1
    flops: float = 0.0


@dataclass(frozen=True)
class Priced:
    """Predicted µs of a kernel or of a step, its 90 % interval, and its bound.

    A bound is one of `BOUNDS`, `compute` or `host`.
    """

    us: float
    low: float
    high: float
    bound: str


def priced(kernel: Kernel, gpu: GPU, footprint: float) -> Priced:
    """Price all launches of a kind."""
    chip = CHIPS[gpu.chip]
    sizes = kernel.launches, kernel.num_bytes, footprint, kernel.serial_tokens
    parts = [float(share) for share in microseconds(gpu, chip, kernel.family, *sizes)]
    us = sum(parts)
    compute = kernel.flops / (chip.matmul * gpu.tflops * 1e6)
    bound = bound_of(*parts)
    low, high = INTERVALS[bound]
    if compute > us:
        us = compute
        bound = "compute"
    return Priced(us, low * us, high * us, bound)


def step_time(
    kernels: Sequence[Kernel], gpu: GPU, waits: int, eager: bool
) -> tuple[Priced, list[Priced]]:
    """Price a step and each of its kernels.

    The step takes as long as the device or the launches, whichever is longer, and each wait of the
    host.
    """
    # Between two launches of a kernel all others pass through the cache.
    footprint = sum(kernel.num_bytes for kernel in kernels)
    prices = [priced(kernel, gpu, footprint) for kernel in kernels]
    launches = sum(kernel.launches for kernel in kernels) * (LAUNCH if eager else GRAPH_NODE)
    us, low, high = (
        max(launches, sum(getattr(price, name) for price in prices))
        for name in ("us", "low", "high")
    )
    waited = waits * WAIT
    by_bound = defaultdict[str, float](float)
    by_bound["host"] = waited + (launches if launches == us else 0.0)
    for price in prices:
        by_bound[price.bound] += price.us
    return Priced(
        us + waited, low + waited, high + waited, max(by_bound, key=by_bound.__getitem__)
    ), prices


def cache_kernels(
    layers: Iterable[KVCacheSpec], batch: int, context: int, acceptance: float
) -> list[Kernel]:
    """Return the cache's kernels of a step of `batch` requests with `context` tokens each.

    Args:
        layers: with the block sizes of a plan, which decide what modes copy at boundaries.
        acceptance: the probability of a draft to be accepted if those before it are.
    """
    tokens = 1
    totals = {"conv": [0, 0.0], "update": [0, 0.0], "attention": [0, 0.0]}

    def add(name: str, launches: int, num_bytes: float) -> None:
        totals[name] = [totals[name][0] + launches, totals[name][1] + batch * num_bytes]

    for spec in layers:
        if isinstance(spec, MambaSpec):
            roles = {state.role for state in spec.parts}
            tokens = 1 + spec.num_speculative_tokens
            add("conv", "window" in roles, window_bytes(spec))
            if "state" in roles:
                add("update", 1, update_bytes(spec, acceptance))
        elif isinstance(spec, FullAttentionSpec):
            # A launch of its own stores K and V.
            seen = min(context + 1, window_of(spec) or context + 1)
            add("attention", 2, seen * with_block_size(spec, 1).page_size_bytes)
    families = {"conv": (CONVOLUTION, 1), "update": (UPDATE, tokens), "attention": (WIDTH_LAST, 1)}
    kernels = [
        Kernel(name, int(n), moved, *families[name]) for name, (n, moved) in totals.items() if n
    ]
    return [*kernels, Kernel("tables", 1, 0.0)]


def other_kernels(num_layers: int, tokens: int, weight_bytes: float) -> list[Kernel]:
    """Return the kernels that are not the cache's: bfloat16 weights that are all read once.

    Each layer has a norm and two products.

    A Mamba layer has as many (`results/kernels.csv`, launches.mamba_layer).
    """
    return [Kernel("weights", 3 * num_layers, weight_bytes, flops=weight_bytes * tokens)]


def window_bytes(spec: MambaSpec) -> float:
    """Return the bytes of one request in one layer's convolution.

    The window and the tokens are read, the outputs and the inputs that a later step may start from
    are written.
    """
    drafts = spec.num_speculative_tokens
    parts = ((window, window.shape[0]) for window in spec.parts if window.role == "window")
    return sum(
        (2 * rows - drafts + 2 * (1 + drafts)) * window.nbytes / rows for window, rows in parts
    )


def update_bytes(spec: MambaSpec, acceptance: float) -> float:
    """Return the bytes of one request in one layer's state update, averaged over many steps.

    They are states, the ring, inputs and outputs.
    """
    tokens = 1 + spec.num_speculative_tokens
    written, history, gained = _averages(spec, acceptance)
    ring = sum(state.nbytes for state in spec.inputs) if spec.rollback.writes_late else 0
    moved = (history + tokens) * ring
    copies = spec.mode.keeps_states and tokens > 1 and SCHEMES[spec.rollback.scheme].copies_states
    for state in spec.parts:
        if state.role == "window":
            moved += tokens * state.nbytes / state.shape[0]
            continue
        read = 1 - (1 - written) / 2 if _reads_half(spec, state) else 1.0
        moved += (read + written * (1 + spec.rollback.num_blocks)) * state.nbytes
        if state.role == "state":
            moved += tokens * prod(state.shape[:-1]) * spec.parts[0].dtype.itemsize  # outputs
        if copies:
            # To the block of a boundary.
            moved += 2 * state.nbytes * gained / spec.block_size
    return moved


def _reads_half(spec: MambaSpec, state_part: StatePart) -> bool:
    """Return whether a step without a flush reads the upper plane of a float32 state alone.

    It does so with bfloat16 inputs.
    """
    dtypes = {str(inputs.dtype) for inputs in spec.inputs[:1]}
    return (
        spec.rollback.writes_late
        and state_part.dtype.itemsize == 4
        and dtypes == {"torch.bfloat16"}
    )


@cache
def _averages(spec: MambaSpec, acceptance: float) -> tuple[float, float, float]:
    """Return averages over steps: share that writes states, tokens read of the ring, and gained."""
    drafts = spec.num_speculative_tokens
    rollback = spec.rollback
    if not rollback.writes_late:
        return 1.0, 0.0, sum(acceptance**n for n in range(1 + drafts))
    block_size = spec.block_size if spec.mode.keeps_states else None
    rng = random.Random(0)
    progress = StateProgress(1, 1)
    writes = history = 0
    for _ in range(STEPS):
        start = progress.computed
        accepted = next((n for n in range(drafts) if rng.random() >= acceptance), drafts)
        flushed = progress.flushed
        rollback.advance(progress, start, 1 + drafts, start + 1 + accepted, block_size)
        writes += progress.flushed != flushed
        history += start - flushed
    return writes / STEPS, history / STEPS, (progress.computed - 1) / STEPS
