"""What a Mamba-2 layer's verify step must move, by formula; `static.counts` holds it against what kernels access."""

from __future__ import annotations

import torch


def step_bytes(
    shape: tuple[int, int, int, int],
    state_dtype: torch.dtype,
    num_tokens: int,
    n_hist: int,
    flush: bool,
    dtype: torch.dtype = torch.bfloat16,
) -> dict[str, int]:
    """Distinct bytes that `recompute_update` moves for one request in one layer, what requests share left out.

    Args:
        shape: heads, head_dim, state, groups.
        state_dtype: float32 stands for its planes.
        dtype: of the activations.
    """
    heads, head_dim, size, groups = shape
    elements = heads * head_dim * size
    upper = dtype == torch.bfloat16 and state_dtype == torch.float32 and not flush
    read = 2 * elements if upper else state_dtype.itemsize * elements
    per_token = (heads * head_dim + groups * size) * dtype.itemsize
    return {
        "state": read + (state_dtype.itemsize * elements if flush else 0),
        "ring": (n_hist + num_tokens) * (per_token + heads * 4),
        "inputs": num_tokens * (per_token + (groups * size + heads) * dtype.itemsize),
        "outputs": num_tokens * heads * head_dim * dtype.itemsize,
    }


def slots_bytes(
    shape: tuple[int, int, int, int], state_dtype: torch.dtype, num_tokens: int, dtype: torch.dtype = torch.bfloat16
) -> dict[str, int]:
    """The same of `selective_state_update_slots`."""
    heads, head_dim, size, _ = shape
    state = (1 + num_tokens) * heads * head_dim * size * state_dtype.itemsize
    return step_bytes(shape, state_dtype, num_tokens, 0, False, dtype) | {"state": state, "ring": 0}
