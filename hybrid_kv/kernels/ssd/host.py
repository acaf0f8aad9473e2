"""The state-space recurrence of Mamba-2 on one core of a CPU, token by token in one compiled loop.

Shapes considered, float32, on one core: (a) `reference.chunk_scan` in chunks of 64, some 80
operations of torch and matrices of all pairs of tokens: 2.1 ms for 256 tokens of 16 heads with
states of 32 x 32, 52 ms for 2,048 tokens with states of 64 x 128. (b) All chunks in one product
each: 1.3 and 43 ms. (c) One loop without products of matrices: a head's state stays in the core's
nearest cache; 0.8 and 29 ms. This is (c). Cores share the work of (a), but not of (c).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hybrid_kv.kernels.common.compiled import compiled

Floats = npt.NDArray[Any]  # all of one call float32, or float64
Ints = npt.NDArray[np.int64]

MAX_THREADS = 2  # of torch; with more its products may be faster
_chunks = ContextVar("chunks", default=False)


@contextmanager
def in_chunks() -> Iterator[None]:
    """Run no loop, as with more threads: what such a machine runs is checked on this one."""
    token = _chunks.set(True)
    try:
        yield
    finally:
        _chunks.reset(token)


def _scan(
    x: Floats,
    dt: Floats,
    A: Floats,
    B: Floats,
    C: Floats,
    D: Floats,
    initial: Floats,
    first: Ints,
    offsets: Ints,
    y: Floats,
    kept_states: Floats,
) -> None:
    """Write `y` and `kept_states`, those in the order of rows and then `offsets`: see `chunk_scan`.

    Args:
        first: [num_rows + 1], where each row's offsets begin.
    """
    rows, length, heads, head_dim = x.shape
    per_group = heads // B.shape[2]
    size = B.shape[3]
    for row in range(rows):
        for head in range(heads):
            group = head // per_group
            due = first[row]
            state = initial[row, head].copy()
            for t in range(length):
                step = dt[row, t, head]
                decay = np.exp(step * A[head])
                for p in range(head_dim):
                    value = x[row, t, head, p]
                    added = step * value
                    total = D[head] * value
                    for n in range(size):
                        new = state[p, n] * decay + added * B[row, t, group, n]
                        state[p, n] = new
                        total += new * C[row, t, group, n]
                    y[row, t, head, p] = total
                while due < first[row + 1] and offsets[due] == t + 1:
                    kept_states[due, head] = state
                    due += 1


def scan_loop(x: torch.Tensor) -> Callable[..., None] | None:
    """Return the loop for operands like `x`; None where torch should run them."""
    if x.device.type != "cpu" or torch.get_num_threads() > MAX_THREADS or _chunks.get():
        return None
    if x.dtype not in (torch.float32, torch.float64):
        return None
    kind = "float32" if x.dtype == torch.float32 else "float64"
    dense = f"{kind}[:, :, :, ::1]"
    views = [
        f"{kind}[:, :, :, :]",
        f"{kind}[:, :, :]",
        f"{kind}[:]",
        dense,
        dense,
        f"{kind}[:]",
        dense,
    ]
    places = ["int64[::1]"] * 2
    results = [dense] * 2
    # Sums in any order, or the sum over a state's columns would take one element at a time.
    loop = compiled(_scan, f"void({', '.join(views + places + results)})", reorder=True)
    return None if loop is _scan else loop


def scan_tokens(
    loop: Callable[..., None],
    operands: tuple[torch.Tensor, ...],
    initial_state: torch.Tensor,
    rows: torch.Tensor,
    offsets: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run `chunk_scan` of x, dt, A, B, C, D, without chunks."""
    x, dt, A, B, C, D = operands
    order = np.lexsort((offsets.numpy(), rows.numpy()))
    first = np.searchsorted(rows.numpy()[order], np.arange(len(x) + 1))
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    sorted_states = x.new_empty(len(rows), *initial_state.shape[1:])
    inputs = x, dt, A, B.contiguous(), C.contiguous(), D, initial_state.contiguous()
    loop(
        *(operand.numpy() for operand in inputs),
        first,
        offsets.numpy()[order],
        y.numpy(),
        sorted_states.numpy(),
    )
    if len(order) < 2 or bool((order[1:] > order[:-1]).all()):
        return y, sorted_states
    states = torch.empty_like(sorted_states)
    states[torch.from_numpy(order)] = sorted_states
    return y, states
