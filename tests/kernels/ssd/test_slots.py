"""The states of a verify step against the recurrence in float64, in Triton's interpreter.

Tolerances. float32 arithmetic: each of up to six tokens multiplies and adds twice, softplus and exp
err by a few 1e-7, so states err by 5e-6 of the largest of their head; an output sums `state`
products, so by 1e-5 of the sum of their magnitudes. Storing in fewer bits adds a unit in the last
place (half of one on a GPU; the interpreter truncates): 2^-7 of the value in bfloat16, 2^-10 or
2^-24 absolute in float16.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from unittest.mock import patch

import pytest
import torch

from hybrid_kv.kernels.ssd import (
    selective_state_update_slots,
    selective_state_update_slots_reference,
)
from hybrid_kv.kernels.ssd import slots as module
from tests.kernels.harness import (
    FLOATS,
    Expected,
    Shape,
    check,
    check_far,
    compiled,
    equality,
    measure,
    rejected_operations,
)
from tests.kernels.interpreter import interpreted
from tests.kernels.recurrent import VerifyStep, verify_steps
from tests.kernels.ssd.layer import LAYOUTS, Layer

STATES, OUTPUTS = 5e-6, 1e-5


class Slots(VerifyStep, Layer):
    kernel = staticmethod(selective_state_update_slots)
    reference = staticmethod(selective_state_update_slots_reference)

    @classmethod
    def patches(cls, shape: Shape) -> AbstractContextManager[object]:
        return patch.multiple(module, warp_size=lambda: shape.lanes, TILE_BYTES=shape.tile_bytes)

    def expected(self) -> Iterator[Expected]:
        ends = self.arguments["cu_seqlens"].tolist()
        for row, (length, padding, _) in enumerate(self.shape.rows):
            span, source = (
                slice(ends[row], ends[row + 1]),
                int(self.arguments["source_indices"][row]),
            )
            y, states, magnitude, _ = self.row(span, source)
            yield Expected("y", span, y, OUTPUTS, magnitude, self.shape.dtype)
            for j in range(0 if padding else length):
                block, scale = (
                    int(self.arguments["state_indices"][row, j]),
                    states[j].abs().amax((1, 2), keepdim=True),
                )
                yield Expected("state", (block,), states[j], STATES, scale, self.shape.state_dtype)


BASE = Shape(
    rows=((1, False, -1), (3, False, 1)),
    columns=3,
    groups=2,
    per_group=1,
    head_dim=9,
    size=16,
    gap=3,
    initial=1.0,
    dtype=torch.float32,
    state_dtype=torch.float32,
    index_dtype=torch.int64,
    lanes=32,
    tile_bytes=512,
    seed=0,
)


CASES = verify_steps(
    BASE,
    groups=[1, 2, 3],
    per_group=[1, 2],
    head_dim=[1, 3, 7, 8, 11],
    size=[1, 3, 16, 33],
    lanes=[32, 64],
    tile_bytes=[64, 512, 4096],
    **LAYOUTS,
)
test_equals_the_recurrence, test_the_reference_equals_the_recurrence = equality(
    Slots, CASES, BASE, BASE.but(size=129, tile_bytes=64)
)


def test_offsets_pass_int32() -> None:
    interpreted(
        check_far, Slots, BASE.but(rows=((2, False, -1),), columns=2, state_dtype=torch.float16)
    )


EIGHTH = BASE.but(
    rows=((4, False, -1),),
    columns=4,
    groups=1,
    per_group=8,
    head_dim=64,
    size=128,
    gap=4096,
    dtype=torch.bfloat16,
    tile_bytes=module.TILE_BYTES,
)
INPUTS = ("x", "dt", "B", "C")
SMALL = ("dt_bias", "A_log", "D", "cu_seqlens", "source_indices", "state_indices")


@pytest.mark.parametrize(("length", "state_dtype"), [(4, torch.float32), (1, torch.bfloat16)])
def test_traffic_is_one_state_read_and_one_written_per_token(
    length: int, state_dtype: torch.dtype
) -> None:
    """Counted on the heads of one group of Nemotron-3-Nano, an eighth of a layer."""
    shape = EIGHTH.but(
        rows=((length, False, -1), (0, True, -1)), columns=length, state_dtype=state_dtype
    )
    counted, y, launches = interpreted(measure, Slots, shape, "state", *INPUTS, *SMALL)
    one = 8 * 64 * 128 * state_dtype.itemsize
    # Nothing of a state is loaded or stored twice, and nothing of padding.
    assert counted["state"] == (one, length * one, one, length * one)
    assert sum(counted[name][0] for name in INPUTS) == length * 2 * (8 * 64 + 8 + 2 * 128)
    assert y == (0, length * 2 * 8 * 64, 0, length * 2 * 8 * 64)
    # 4 KB of a state are a program's; of 16 bits it reads B and C twice, for the rows in 512 bytes.
    assert counted["B"][2] == counted["C"][2] == length * 2 * 8 * 8 * 128
    assert sum(counted[name][0] for name in SMALL) < 256
    assert launches == 1


test_compiles_without_spills_to_128_bit_accesses = compiled(
    "state_update",
    lambda case: case.shape == "Nemotron-3-Nano, K=3",
    least=lambda *_: (48 << 10) / module.TILE_BYTES,
)
test_rejects_what_the_kernel_would_misread = rejected_operations(
    Slots,
    BASE.but(size=3),
    special=[
        ("B", lambda t: t[:, :0], "0 groups of B do not divide 2 heads"),
        ("B", lambda t: torch.cat([t, t[:, :1]], 1), "3 groups of B do not divide 2 heads"),
        ("cu_seqlens", lambda t: t[1:], r"cu_seqlens has shape \(2,\); it must be \(3,\)"),
        ("x", lambda t: t[0], r"x has shape \(2, 9\); it must have 3 dimensions"),
        ("dt", lambda t: t.double(), "dt is torch.float64; it must be one of torch.float32, "),
        ("A_log", lambda t: t.to("meta"), "A_log is on meta; the others are on cpu"),
        (
            "C",
            lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
            "C has strides .* from dimension 1 on",
        ),
    ],
)


@pytest.mark.gpu
@pytest.mark.parametrize("state_dtype", FLOATS)
def test_on_a_gpu(state_dtype: torch.dtype) -> None:
    rows = ((6, False, -1), (1, True, -1), (3, False, 2), (0, False, -1), (4, False, 0))
    shape = EIGHTH.but(rows=rows, columns=6, groups=8, state_dtype=state_dtype)
    check(Slots(shape, "cuda"), selective_state_update_slots)
