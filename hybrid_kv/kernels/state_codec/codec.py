"""The codec of a layer's stored states, chosen by their dtype and rounding.

Contract: the state after a token is what its stored form says. A step goes on from the rounded
state after each of its tokens, in a prefill as in a decode and between the drafts of a verify step.
So the state after n tokens is a function of these tokens and the engine's rounding alone: not of
chunks, of the batch, of hits, of drafts, nor of whether it was computed twice.

An engine that rounds once a step has a state that depends on where its steps ended
(sgl-project/sgl-kernel-npu!651). Its states are rounded no more often than these.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from hybrid_kv.kernels.common.rounding import StateRounding
from hybrid_kv.kernels.state_codec.reference import (
    Tensors,
    decode_states,
    encode_states_reference,
)


@dataclass(frozen=True)
class StateCodec:
    """From states in float32 to the parts that are stored, and back.

    Attributes:
        dtype: of the values: float16, float8_e4m3fn or int8.
        rounding: None: to the nearest value.
    """

    dtype: torch.dtype
    rounding: StateRounding | None = None

    def encode(self, states: torch.Tensor, positions: torch.Tensor, stream: int) -> Tensors:
        """Return the parts [n, …] of states [n, …, size] after the tokens at `positions` [n]."""
        return encode_states_reference(states, positions, self.dtype, self.rounding, stream)

    def decode(self, parts: Tensors) -> torch.Tensor:
        """Return states [n, …, size] in float32."""
        return decode_states(*parts)


@cache
def state_codec(dtype: torch.dtype, rounding: StateRounding | None) -> StateCodec | None:
    """Return the codec of states that are stored in `dtype`; None if they are as computed."""
    if rounding is None and dtype.itemsize > 1:
        return None
    return StateCodec(dtype, rounding)
