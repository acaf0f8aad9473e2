"""Stored forms of recurrent states that are smaller than float32: rounded, or with scales."""

from hybrid_kv.kernels.state_codec.codec import StateCodec, state_codec
from hybrid_kv.kernels.state_codec.launch import encode_states
from hybrid_kv.kernels.state_codec.philox import DEFAULT_ROUNDS, philox
from hybrid_kv.kernels.state_codec.reference import (
    decode_states,
    encode_states_reference,
    largest_error,
    round_states,
    rounding_noise,
)

__all__ = [
    "DEFAULT_ROUNDS",
    "StateCodec",
    "decode_states",
    "encode_states",
    "encode_states_reference",
    "largest_error",
    "philox",
    "round_states",
    "rounding_noise",
    "state_codec",
]
