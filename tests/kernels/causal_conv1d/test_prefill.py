"""The convolution of a prefill against its definition, interpreted; tolerances in `layer`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from unittest.mock import patch

import pytest
import torch
from hypothesis import strategies as st

from hybrid_kv.kernels.causal_conv1d import causal_conv1d_prefill, causal_conv1d_prefill_reference
from hybrid_kv.kernels.causal_conv1d import prefill as module
from tests.kernels.causal_conv1d.layer import Layer
from tests.kernels.causal_conv1d.test_update import BASE, LAYOUTS, NANO
from tests.kernels.harness import (
    FLOATS,
    Expected,
    Operation,
    Shape,
    check,
    check_far,
    check_far_tokens,
    check_kernel,
    compiled,
    equality,
    measure,
    rejected_operations,
    shapes,
)
from tests.kernels.interpreter import backwards, interpreted, programs
from tests.support.spans import Cut, Row, rows


class Prefill(Operation, Layer):
    kernel = staticmethod(causal_conv1d_prefill)
    reference = staticmethod(causal_conv1d_prefill_reference)

    def __init__(self, shape: Shape, device: str = "cpu") -> None:
        self.shape, g = shape, torch.Generator().manual_seed(shape.seed)
        self.cut = Cut(shape.rows, 16, g, device, shape.index_dtype)
        self.num_tokens, height = self.cut.spans.num_tokens, shape.kernel + 1 + shape.more_rows
        Layer.__init__(self, shape, self.num_tokens, self.cut.num_blocks, height, g, device)
        for row, source in zip(shape.rows, self.cut.sources, strict=True):
            if row.initial and source > 0:
                self.put(source, row.accepted - 1, g)
        first = torch.tensor(
            [row.accepted - 1 for row in shape.rows], dtype=shape.index_dtype, device=device
        )
        self.arguments |= self.cut.arguments("window_indices") | {"window_rows": first}

    @classmethod
    def patches(cls, shape: Shape) -> AbstractContextManager[object]:
        return patch.object(module, "warp_size", lambda: shape.lanes)

    def expected(self) -> Iterator[Expected]:
        for row, span, source, kept in self.cut.rows():
            y, inputs = self.row(span, source, row.accepted - 1)
            yield y
            for offset, block in kept:
                yield self.stored(block, inputs[offset : offset + self.shape.kernel - 1])


# A row whose first states are kept before the window is full, in the block that it starts from.
# This seed reads and writes block 1, the first behind the null block.
SHORT = BASE.but(
    rows=(Row(2, (1, 2), "first"), Row(0), Row(1, start="last"), Row(18, (17, 1, 2), "first")),
    channels=7,
    more_rows=-2,
    seed=8,
)
NOTHING = SHORT.but(rows=(), kernel=17, bias=False)
CASES = shapes(
    SHORT,
    rows=st.lists(rows([0, 1, 2, 3, 15, 16, 17, 33]), max_size=4).map(tuple),
    kernel=[2, 3, 5, 17],
    more_rows=[0, 1, 2],
    **LAYOUTS,
)
test_equals_the_definition, test_the_reference_equals_the_definition = equality(
    Prefill, CASES, SHORT, NOTHING
)


def check_backwards(shape: Shape) -> None:
    """Programs have no order: what the last ones store, the first must not read."""
    with programs(backwards) as grids:
        check_kernel(Prefill, shape)
    assert grids == [(-(-shape.channels // 128) * sum(-(-row.length // 16) for row in shape.rows),)]


def test_programs_need_no_order_though_rows_write_the_blocks_that_they_start_from() -> None:
    drawn = tuple(
        Row(40, boundaries, start)
        for boundaries in ((17, 33), (1, 40))
        for start in ("first", "last")
    )
    interpreted(check_backwards, SHORT.but(rows=drawn, channels=129, tap_major=False))


FAR = SHORT.but(rows=(Row(19, (18,)),), channels=8)


def test_offsets_pass_int32() -> None:
    interpreted(check_far, Prefill, FAR.but(rows=(Row(2),), state_dtype=torch.float16))
    interpreted(check_far_tokens, Prefill, FAR.but(dtype=torch.float16), ["x"], 2**27)


def test_traffic_is_every_token_once_and_the_windows() -> None:
    """An eighth of a layer of Nemotron-3-Nano; a tile loads the three tokens before it again."""
    shape = NANO.but(channels=768, rows=(Row(48, (32,)),), more_rows=1)
    counted, y, launches = interpreted(measure, Prefill, shape, "conv_state", "x", "weight", "bias")
    row = 768 * 2
    assert counted["conv_state"] == (3 * row, 2 * 3 * row, 3 * row, 2 * 3 * row)
    assert counted["x"] == (48 * row, 0, (48 + 2 * 3 + 2 * 3) * row, 0)
    assert y == (0, 48 * row, 0, 48 * row)
    assert (counted["weight"][0], counted["bias"][0]) == (4 * row, row)
    assert launches == 1


def test_a_window_that_reaches_back_loads_no_token_before_its_row() -> None:
    """It would be another row's, or, in front of the first row, no memory of ours."""
    shape = SHORT.but(
        rows=(Row(16), Row(1, start="last"), Row(2, (1,), initial=False)), channels=128
    )
    counted, _, _ = interpreted(measure, Prefill, shape, "x")
    tokens, in_windows = 16 + 1 + 2, 3 + 1 + (1 + 2)
    assert counted["x"][2] == (tokens + in_windows) * 128 * 4


# Each program holds the 8 KB of its tile; 48 KB in flight are what an SM's share of the bus takes.
test_compiles_without_spills_to_128_bit_accesses = compiled("conv_prefill", least=lambda *_: 48 / 8)
test_rejects_what_the_kernel_would_misread = rejected_operations(
    Prefill,
    SHORT.but(rows=(Row(2), Row(2)), channels=5),
    special=[
        (
            "conv_state",
            lambda t: t[:, :2],
            "x has 6 tokens and conv_state 2 rows; spans and weight need 4 and 3",
        ),
        ("spans", lambda _: Cut((Row(4), Row(4)), 16, torch.Generator()).spans, "x has 6 tokens"),
        ("weight", lambda t: t[:, :1], "1 taps; there must be 2 to 17"),
        ("weight", lambda t: t[:, :1].repeat(1, 18), "18 taps; there must be 2 to 17"),
        ("window_rows", lambda t: t[1:], r"window_rows has shape \(1,\); it must be \(2,\)"),
    ],
    allowed=["weight, gaps", "weight, apart", "x, short"],
)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOATS)
def test_on_a_gpu(dtype: torch.dtype) -> None:
    drawn = (Row(600, (528,), "first"), Row(0), Row(3, (1, 2), "last"), Row(33, initial=False))
    check(
        Prefill(NANO.but(rows=drawn, state_dtype=dtype, more_rows=1), "cuda"), causal_conv1d_prefill
    )
