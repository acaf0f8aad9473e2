"""The states of a verify step against the delta rule in float64, in Triton's interpreter.

Tolerances. float32 arithmetic, as shares of the largest number among states and values: each of up
to six tokens takes two sums over a key of at most 33 channels, its unit vectors and decays err by a
few 1e-7, so states and outputs err by 1e-5 at most (as in tests/kernels/test_recurrences.py).
Storing in fewer bits adds a unit in the last place (half of one on a GPU; the interpreter
truncates): 2^-7 of the value in bfloat16, 2^-10 or 2^-24 absolute in float16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import pytest
import torch

from hybrid_kv.kernels.gated_delta import (
    gated_delta_update_slots,
    gated_delta_update_slots_reference,
)
from hybrid_kv.kernels.gated_delta import slots as module
from tests.kernels.gated_delta.layer import LAYOUTS, Layer
from tests.kernels.harness import (
    FLOATS,
    Expected,
    Shape,
    check,
    check_far,
    check_far_tokens,
    compiled,
    equality,
    measure,
    rejected_operations,
)
from tests.kernels.interpreter import interpreted
from tests.kernels.recurrent import VerifyStep, verify_steps

EXACT = 1e-5


class Slots(VerifyStep, Layer):
    kernel = staticmethod(gated_delta_update_slots)
    reference = staticmethod(gated_delta_update_slots_reference)
    like = "v"

    @classmethod
    def patches(cls, shape: Shape) -> AbstractContextManager[object]:
        return patch.multiple(module, warp_size=lambda: shape.lanes, TILE=shape.tile)

    def expected(self) -> Iterator[Expected]:
        ends = self.arguments["cu_seqlens"].tolist()
        for row, (length, padding, _) in enumerate(self.shape.rows):
            if not length:
                continue
            span, source = (
                slice(ends[row], ends[row + 1]),
                int(self.arguments["source_indices"][row]),
            )
            y, states, largest = self.row(span, source)
            yield Expected("y", span, y, EXACT, largest, self.shape.dtype)
            for j in range(0 if padding else length):
                block = int(self.arguments["state_indices"][row, j])
                yield Expected("state", (block,), states[j], EXACT, largest, self.shape.state_dtype)


BASE = Shape(
    rows=((1, False, -1), (3, False, 1)),
    columns=3,
    key_heads=2,
    shared=2,
    value=9,
    key=16,
    per_channel=False,
    beta_scale=1.0,
    gap=3,
    initial=1.0,
    dtype=torch.float32,
    state_dtype=torch.float32,
    index_dtype=torch.int64,
    lanes=32,
    tile=128,
    seed=0,
)
BY_CHANNEL = BASE.but(per_channel=True, key=11)


CASES = verify_steps(
    BASE,
    key_heads=[1, 2, 3],
    shared=[1, 2],
    value=[1, 3, 7, 8, 11],
    key=[1, 3, 16, 33],
    lanes=[32, 64],
    tile=[16, 128, 1024],
    **LAYOUTS,
)
test_equals_the_rule, test_the_reference_equals_the_rule = equality(
    Slots, CASES, BASE, BY_CHANNEL, BASE.but(key=129, tile=16)
)


FAR = BASE.but(rows=((2, False, -1),), columns=2)


@pytest.mark.parametrize(
    ("checked", "arguments"),
    [
        (check_far, (Slots, FAR.but(state_dtype=torch.float16))),
        (
            check_far_tokens,
            (
                Slots,
                FAR.but(dtype=torch.float16, per_channel=True),
                ("q", "k", "v", "dt", "beta"),
                2**30 + 8,
            ),
        ),
    ],
)
def test_offsets_pass_int32(checked: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    interpreted(checked, *arguments)


# The value heads of two key heads of Qwen3-Next, an eighth of a layer.
EIGHTH = BASE.but(
    rows=((4, False, -1),),
    columns=4,
    key_heads=2,
    shared=2,
    value=128,
    key=128,
    gap=4096,
    dtype=torch.bfloat16,
    tile=module.TILE,
)
INPUTS = ("q", "k", "v", "dt", "beta")
SMALL = ("dt_bias", "A_log", "cu_seqlens", "source_indices", "state_indices")


@pytest.mark.parametrize(
    ("length", "state_dtype", "per_channel"), [(4, torch.float32, False), (1, torch.bfloat16, True)]
)
def test_traffic_is_one_state_read_and_one_written_per_token(
    length: int, state_dtype: torch.dtype, per_channel: bool
) -> None:
    shape = EIGHTH.but(
        rows=((length, False, -1), (0, True, -1)),
        columns=length,
        state_dtype=state_dtype,
        per_channel=per_channel,
    )
    counted, y, launches = interpreted(measure, Slots, shape, "state", *INPUTS, *SMALL)
    one, gates = 4 * 128 * 128 * state_dtype.itemsize, 4 * 128 if per_channel else 4
    # Nothing of a state is loaded or stored twice, and nothing of padding.
    assert counted["state"] == (one, length * one, one, length * one)
    assert sum(counted[name][0] for name in INPUTS) == length * 2 * (
        2 * 2 * 128 + 4 * 128 + gates + 4
    )
    assert y == (0, length * 2 * 4 * 128, 0, length * 2 * 4 * 128)
    # 16 programs of a head read a key, and as often as many rows of the state lie in 512 bytes.
    assert counted["k"][2] == length * 2 * 4 * 16 * 128 * 4 // state_dtype.itemsize
    assert sum(counted[name][0] for name in SMALL) < 256 + 2 * gates
    assert launches == 1


# 48 KB in flight on an SM, in tiles of 4 KB or, of bfloat16, 2 KB.
test_compiles_without_spills_to_128_bit_accesses = compiled(
    "delta_update",
    lambda case: case.shape.endswith("K=3"),
    least=lambda case, _: (48 << 10) / (module.TILE * (4 if case.dtype == "float32" else 2)),
)
test_rejects_what_the_kernel_would_misread = rejected_operations(
    Slots,
    BASE.but(shared=1, key=3),
    special=[
        ("k", lambda t: t[:, :0], "0 heads of k do not divide 2 heads of v"),
        ("k", lambda t: torch.cat([t, t[:, :1]], 1), "3 heads of k do not divide 2 heads of v"),
        (
            "dt",
            lambda t: t[:, 0],
            r"dt has shape \(6,\); it must have 2 dimensions, or 3 per channel",
        ),
        ("dt", lambda t: t[:, :, None], r"dt has shape \(6, 2, 1\); it must be \(6, 2, 3\)"),
        ("dt_bias", lambda t: t[:, None], r"dt_bias has shape \(2, 1\); it must be \(2,\)"),
        ("cu_seqlens", lambda t: t[1:], r"cu_seqlens has shape \(2,\); it must be \(3,\)"),
        ("v", lambda t: t[0], r"v has shape \(2, 9\); it must have 3 dimensions"),
    ],
)


@pytest.mark.gpu
@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("state_dtype", FLOATS)
def test_on_a_gpu(state_dtype: torch.dtype, per_channel: bool) -> None:
    rows = ((6, False, -1), (1, True, -1), (3, False, 2), (0, False, -1), (4, False, 0))
    shape = EIGHTH.but(
        rows=rows, columns=6, key_heads=16, state_dtype=state_dtype, per_channel=per_channel
    )
    check(Slots(shape, "cuda"), gated_delta_update_slots)
