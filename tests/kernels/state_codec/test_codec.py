"""Rounded states: Philox's published numbers, kernel against reference to the bit, and the mean.

Nothing is compared with a tolerance but the mean of many draws, whose bound is six of its standard
deviations.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given

from hybrid_kv.kernels.common.rounding import StateRounding
from hybrid_kv.kernels.state_codec import (
    decode_states,
    encode_states,
    encode_states_reference,
    largest_error,
    philox,
    state_codec,
)
from hybrid_kv.kernels.state_codec.reference import LARGEST
from tests.kernels.harness import Shape, bits, compiled, rejections, shapes
from tests.kernels.interpreter import interpreted

F16, F8, I8 = torch.float16, torch.float8_e4m3fn, torch.int8
ROUNDING = StateRounding(seed=3, philox_rounds=5)
BASE = Shape(
    count=2, rows=(2,), size=4, dtype=I8, scale=1.0, rounding=ROUNDING, position=0, stream=1, seed=0
)
CASES = shapes(
    BASE,
    count=[0, 1, 3],
    rows=[(), (1,), (2, 3)],
    size=[1, 2, 7, 16, 100],
    dtype=[F16, F8, I8],
    scale=[1e-30, 1e-7, 1.0, 1e5],
    rounding=[None, ROUNDING, StateRounding(-(2**41), 10), StateRounding(2**41 + 1, 1)],
    position=[0, 1, 2**31 - 3],
    stream=[0, 1, 2**32 - 1],
)


def states(shape: Shape) -> torch.Tensor:
    g = torch.Generator().manual_seed(shape.seed)
    values = torch.randn(shape.count, *shape.rows, shape.size, generator=g) * shape.scale
    values[torch.rand(values.shape[:-1], generator=g) < 0.1] = 0  # rows of zeros
    values[torch.rand(values.shape, generator=g) < 0.1] = -0.0
    return values


def arguments(shape: Shape) -> dict[str, Any]:
    return {
        "states": states(shape),
        "positions": torch.arange(shape.count) + shape.position,
        "dtype": shape.dtype,
        "rounding": shape.rounding or (ROUNDING if shape.dtype == F16 else None),
        "stream": shape.stream,
    }


def compare(shape: Shape) -> None:
    given_ = arguments(shape)
    parts = encode_states(**given_)
    expected = encode_states_reference(**given_)
    assert len(parts) == len(expected) == (1 if shape.dtype == F16 else 2)
    for values, wanted in zip(parts, expected, strict=True):
        assert values.dtype == wanted.dtype and torch.equal(bits(values), bits(wanted)), shape


@given(CASES)
def test_the_kernel_equals_the_reference_to_the_bit(shape: Shape) -> None:
    interpreted(compare, shape)


def test_philox_gives_the_published_numbers() -> None:
    """Of Random123's known answers: zeros, ones, and digits of pi."""
    ones = torch.tensor(0xFFFFFFFF)
    zero = torch.tensor(0)
    pi = [torch.tensor(word) for word in (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)]
    for counter, seed, words in (
        ([zero] * 4, 0, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([ones] * 4, -1, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (pi, 0x299F31D0A4093822, [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]),
    ):
        assert [int(word) for word in philox(counter, seed, 10)] == words


@given(CASES)
def test_what_can_be_stored_is_never_changed_and_nothing_moves_further_than_a_step(
    shape: Shape,
) -> None:
    given_ = arguments(shape)
    before = given_["states"].clamp(-65504, 65504)
    given_["states"] = before
    stored = decode_states(*encode_states_reference(**given_))
    limits = largest_error(shape.dtype, before.abs().amax(-1, keepdim=True), given_["rounding"])
    assert ((before - stored).abs() <= limits * (1 + 1e-5) + 1e-44).all()
    if shape.dtype == F16:
        again = encode_states_reference(
            stored, given_["positions"] + 1, F16, given_["rounding"], shape.stream + 1
        )
        assert torch.equal(decode_states(*again), stored)


@pytest.mark.parametrize("dtype", [F8, I8])
def test_without_noise_values_are_the_nearest(dtype: torch.dtype) -> None:
    given_ = arguments(BASE.but(count=50, size=64, dtype=dtype, rounding=None))
    values, scales = encode_states_reference(**given_)
    scaled = given_["states"] / scales.masked_fill(scales == 0, 1).unsqueeze(-1)
    limit = LARGEST[dtype]
    wanted = scaled.clamp(-limit, limit)
    wanted = wanted.to(F8) if dtype == F8 else wanted.round().to(I8)
    assert torch.equal(values.float(), wanted.float())


@pytest.mark.parametrize("dtype", [F16, F8, I8])
def test_on_average_nothing_is_lost(dtype: torch.dtype) -> None:
    count = 20_000
    row = torch.tensor([1.0, 0.3001, -0.7003, 0.01003, 3e-5, 0.0])
    for rounding in (StateRounding(0, 5), StateRounding(1, 10)):
        parts = encode_states_reference(
            row.expand(count, -1).contiguous(), torch.arange(count), dtype, rounding, 7
        )
        error = decode_states(*parts).double().mean(0) - row.double()
        deviation = largest_error(dtype, torch.tensor(1.0), rounding) / 2 / count**0.5
        assert error.abs().max() <= 6 * deviation


def test_seed_position_layer_and_element_all_change_the_noise_and_the_place_does_not() -> None:
    values = torch.full((4, 8, 16), 0.5003)
    positions = torch.tensor([5, 6, 5, 7])

    def stored(rounding: StateRounding, stream: int) -> torch.Tensor:
        return encode_states_reference(values, positions, F16, rounding, stream)[0]

    first = stored(ROUNDING, 1)
    assert torch.equal(first[0], first[2])
    assert not torch.equal(first[0], first[1])
    assert len(first[0].unique()) == 2 and not torch.equal(first[0][0], first[0][1])
    for other in (stored(StateRounding(4, 5), 1), stored(ROUNDING, 2)):
        assert not torch.equal(first, other)


def test_states_as_computed_have_no_codec() -> None:
    assert state_codec(torch.float32, None) is None and state_codec(F16, None) is None
    codec = state_codec(I8, None)
    assert codec is not None and codec.dtype == I8


test_compiles_without_spills = compiled("state_codec", load=0, store=0)
test_rejects_what_the_kernel_would_misread = rejections(
    lambda: arguments(BASE),
    encode_states,
    special=[
        ("dtype", lambda _: torch.bfloat16, "states are not encoded to torch.bfloat16"),
        ("states", lambda t: t[:, :, :0], r"states has shape \(2, 2, 0\)"),
    ],
    allowed=["states, flat"],
)
