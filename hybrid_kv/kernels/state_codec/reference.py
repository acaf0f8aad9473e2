"""Encoding and decoding of states in plain torch.

A state of 8 bits has a scale in float32 for each row of its last dimension, the largest value of
the row over the largest that the dtype holds (vllm!40012, vllm!52962: one for each head and channel
of a head). A state in float16 has none.

Without `StateRounding` a value is rounded to the nearest one that can be stored. With it a value
between two of these goes up with the probability that is its place between them, so that on average
nothing is lost: a state that moves by less than half a step each token would stand still otherwise.
A value that can be stored is never changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from hybrid_kv.kernels.common.rounding import StateRounding
from hybrid_kv.kernels.state_codec.philox import philox

Tensors = tuple[torch.Tensor, ...]

LARGEST = {torch.float16: 65504.0, torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
# Of a float: bits of its mantissa, and the exponent below which its steps stay the same.
MANTISSAS = {torch.float16: (10, -14), torch.float8_e4m3fn: (3, -6)}


def encode_states_reference(
    states: torch.Tensor,
    positions: torch.Tensor,
    dtype: torch.dtype,
    rounding: StateRounding | None,
    stream: int,
) -> Tensors:
    """Return the parts that are stored of states: the values, and of 8-bit ones the scales.

    Args:
        states: [n, …, size], taken as float32.
        positions: [n] int64, of the token that each is the state after.
        dtype: float16, float8_e4m3fn or int8.
        stream: 32 bits, other ones for each layer.

    Returns:
        Values [n, …, size] of `dtype`; scales [n, …] float32.
    """
    noise = None
    if rounding is not None:
        noise = rounding_noise(states.shape, positions, rounding, stream)
    return round_states(states, dtype, noise)


def round_states(states: torch.Tensor, dtype: torch.dtype, noise: torch.Tensor | None) -> Tensors:
    """Return the parts of states [n, …, size], rounded by noise in [0, 1) of the same shape.

    Without noise, to the nearest value.
    """
    values = states.float()
    scales: Tensors = ()
    if dtype.itemsize == 1:
        scale = values.abs().amax(-1) / LARGEST[dtype]
        # A row of zeros has the scale 0.
        values = values / torch.where(scale == 0, 1.0, scale).unsqueeze(-1)
        scales = (scale,)
    step = _steps(values, dtype)
    scaled = values / step
    if noise is None:
        scaled = scaled.round() + 0.0  # no negative zeros
    else:
        below = scaled.floor()
        scaled = below + (noise < scaled - below)
    limit = LARGEST[dtype]
    return (scaled * step).clamp(-limit, limit).to(dtype), *scales


def decode_states(values: torch.Tensor, scales: torch.Tensor | None = None) -> torch.Tensor:
    """Return states [n, …, size] in float32 from their parts."""
    wide = values.float()
    return wide if scales is None else wide * scales.unsqueeze(-1)


def rounding_noise(
    shape: Sequence[int], positions: torch.Tensor, rounding: StateRounding, stream: int
) -> torch.Tensor:
    """Return a number in [0, 1) for each element of `shape` [n, …], float32 of 24 random bits."""
    elements = torch.arange(prod(shape[1:]), device=positions.device)
    zero = elements.new_zeros(())
    counter = elements, positions[:, None], zero + stream, zero
    word = philox(counter, rounding.seed, rounding.philox_rounds)[0]
    return ((word >> 8).float() * 2.0**-24).view(*shape)


def _steps(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return how far the values around each that can be stored are apart."""
    if dtype not in MANTISSAS:
        return torch.ones_like(values)
    bits, least = MANTISSAS[dtype]
    exponent = (values.view(torch.int32) >> 23 & 0xFF) - 127
    # A power of two, by its bits: dividing by it loses nothing.
    return ((exponent.clamp_min(least) - bits + 127) << 23).view(torch.float32)


def largest_error(
    dtype: torch.dtype, peaks: torch.Tensor, rounding: StateRounding | None
) -> torch.Tensor:
    """Return how far a value is from the one that is stored, at most.

    Args:
        peaks: the largest values of rows, of any shape.
    """
    steps = peaks / LARGEST[dtype]
    if dtype in MANTISSAS:
        bits, least = MANTISSAS[dtype]
        smallest = steps * 2.0**least if dtype.itemsize == 1 else steps.new_tensor(2.0**least)
        steps = 2.0**-bits * peaks.maximum(smallest)
    return steps if rounding is not None else steps / 2
