"""The encoding of states in one launch: scale, noise and rounding of a row in registers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hybrid_kv.kernels.common.integers import next_power_of_2
from hybrid_kv.kernels.common.launch import INTS, check, jit
from hybrid_kv.kernels.common.rounding import StateRounding
from hybrid_kv.kernels.state_codec.reference import LARGEST, MANTISSAS, Tensors

if TYPE_CHECKING:
    import triton.language as tl


def _encode(
    states: tl.tensor,
    positions: tl.tensor,
    values: tl.tensor,
    scales: tl.tensor,
    rows: tl.tensor,
    seed: tl.tensor,
    stream: tl.tensor,
    LIMIT: tl.constexpr,
    BITS: tl.constexpr,
    LEAST: tl.constexpr,
    ROUNDS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    # A program owns a row of one state: what has one scale. BITS are those of a mantissa, 0 of an
    # integer; without ROUNDS the nearest value is taken.
    program = tl.program_id(0).to(tl.int64)
    state = program // rows
    c = tl.arange(0, BLOCK)
    inside = (c < SIZE) | (SIZE == BLOCK)
    x = tl.load(states + program * SIZE + c, mask=inside, other=0.0)
    if LIMIT < 1000.0:  # 8 bits
        scale = tl.div_rn(tl.max(tl.abs(x), axis=0), LIMIT)
        x = tl.div_rn(x, tl.where(scale == 0.0, 1.0, scale) + tl.zeros_like(x))
        tl.store(scales + program, scale)
    step = tl.zeros_like(x) + 1.0
    if BITS > 0:
        exponent = (x.to(tl.int32, bitcast=True) >> 23 & 0xFF) - 127
        step = (tl.maximum(exponent, LEAST) - BITS + 127 << 23).to(tl.float32, bitcast=True)
    scaled = x / step  # by a power of two: any division is exact
    if ROUNDS > 0:
        element = ((program % rows) * SIZE + c).to(tl.uint32)
        zero = tl.zeros_like(element)
        position = zero + tl.load(positions + state).to(tl.uint32)
        word, _, _, _ = tl.philox(
            seed, element, position, zero + stream.to(tl.uint32), zero, ROUNDS
        )
        noise = (word >> 8).to(tl.float32) * 5.9604644775390625e-08  # 2^-24
        below = tl.floor(scaled)
        scaled = below + tl.where(noise < scaled - below, 1.0, 0.0)
    else:
        # To the nearest integer: from 1.5 * 2^23 on there is nothing between them.
        scaled = (scaled + 12582912.0) - 12582912.0
    y = tl.minimum(tl.maximum(scaled * step, -LIMIT), LIMIT)
    if (BITS > 0) & (LIMIT < 1000.0):
        # The byte of an e4m3 by hand: not all targets convert to it.
        bits = y.to(tl.int32, bitcast=True)
        normal = (bits >> 20 & 0x7FF) - (120 << 3)
        small = (tl.abs(y) * 512.0).to(tl.int32)
        byte = tl.where(tl.abs(y) < 0.015625, small, normal) | (bits >> 24 & 0x80)
        tl.store(values + program * SIZE + c, byte.to(tl.int8), mask=inside)
    else:
        tl.store(values + program * SIZE + c, y.to(values.dtype.element_ty), mask=inside)


def encode_states(
    states: torch.Tensor,
    positions: torch.Tensor,
    dtype: torch.dtype,
    rounding: StateRounding | None,
    stream: int,
) -> Tensors:
    """Return what `encode_states_reference` does, to the bit.

    Args:
        states: [n, …, size] float32, contiguous.
        positions: [n] int64 or int32.

    Raises:
        ValueError: a shape, dtype, device or stride is none of these, or states of `dtype` are not
            encoded.
    """
    if dtype not in LARGEST or (rounding is None and dtype.itemsize > 1):
        raise ValueError(f"states are not encoded to {dtype} with rounding {rounding}")
    if states.dim() < 2 or not states.shape[-1]:
        raise ValueError(f"states has shape {tuple(states.shape)}; it must be [n, …, size]")
    check("states", states, states.shape, (torch.float32,), states.device)
    check("positions", positions, states.shape[:1], INTS, states.device)
    size = states.shape[-1]
    num_rows = states.numel() // size
    values = torch.empty_like(states, dtype=dtype)
    has_scales = dtype.itemsize == 1
    scales = states.new_empty(states.shape[:-1] if has_scales else (1,))
    bits, least = MANTISSAS.get(dtype, (0, 0))
    if num_rows:
        jit(_encode, ("rows", "seed", "stream"))[(num_rows,)](
            *(states, positions, values.view(torch.int8) if has_scales else values, scales),
            *(num_rows // len(states), rounding.seed if rounding else 0, stream),
            LIMIT=LARGEST[dtype],
            BITS=bits,
            LEAST=least,
            ROUNDS=rounding.philox_rounds if rounding else 0,
            SIZE=size,
            BLOCK=next_power_of_2(size),
            num_warps=1,
            num_stages=1,
        )
    return (values, scales) if has_scales else (values,)
