"""Bytes that a recurrent layer's verify step must move, by formula.

`static.counts` holds them against what kernels access.
"""

from __future__ import annotations

import torch

from bench._shapes import DeltaShape

Shape = (
    tuple[int, int, int, int] | DeltaShape
)  # heads, head_dim, state and groups of Mamba-2, or a delta rule


def step_bytes(
    shape: Shape,
    state_dtype: torch.dtype,
    num_tokens: int,
    n_hist: int,
    flush: bool,
    dtype: torch.dtype = torch.bfloat16,
    planes: bool = True,
) -> dict[str, int]:
    """Return the distinct bytes that a step of scheme `recompute` moves in one layer.

    They are those of one request; what requests share is left out.

    Args:
        state_dtype: float32 stands for its planes, if there are any.
        dtype: of the activations.
    """
    if isinstance(shape, DeltaShape):
        values, keys, betas = (
            shape.heads * shape.value_dim,
            shape.key_heads * shape.key_dim,
            shape.heads,
        )
        elements, gates = (
            values * shape.key_dim,
            shape.heads * (shape.key_dim if shape.per_channel else 1),
        )
    else:
        gates, head_dim, size, groups = shape
        values, keys, betas, elements = gates * head_dim, groups * size, 0, gates * head_dim * size
    upper = planes and dtype == torch.bfloat16 and state_dtype == torch.float32 and not flush
    read = 2 * elements if upper else state_dtype.itemsize * elements
    per_token = (values + keys) * dtype.itemsize
    return {
        "state": read + (state_dtype.itemsize * elements if flush else 0),
        "ring": (n_hist + num_tokens) * (per_token + gates * 4),
        "inputs": num_tokens * (per_token + (keys + gates + betas) * dtype.itemsize),
        "outputs": num_tokens * values * dtype.itemsize,
    }


def slots_bytes(
    shape: Shape, state_dtype: torch.dtype, num_tokens: int, dtype: torch.dtype = torch.bfloat16
) -> dict[str, int]:
    """Return the distinct bytes that a step of scheme `slots` moves."""
    read = step_bytes(shape, state_dtype, num_tokens, 0, flush=False, dtype=dtype, planes=False)
    return read | {"state": (1 + num_tokens) * read["state"], "ring": 0}
