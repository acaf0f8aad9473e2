"""The convolution of a verify step against its definition, interpreted; tolerances in `layer`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from unittest.mock import patch

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from hybrid_kv.kernels.causal_conv1d import causal_conv1d_update, causal_conv1d_update_reference
from hybrid_kv.kernels.causal_conv1d import update as module
from tests.kernels.causal_conv1d.layer import Layer
from tests.kernels.harness import (
    FLOATS,
    GAPS,
    INTS,
    Expected,
    Operation,
    Shape,
    check,
    check_far,
    compiled,
    equality,
    measure,
    rejected_operations,
    shapes,
)
from tests.kernels.interpreter import interpreted


class Update(Operation, Layer):
    """Rows of a shape: tokens, tokens accepted before, padding or not, in place or not."""

    kernel = staticmethod(causal_conv1d_update)
    reference = staticmethod(causal_conv1d_update_reference)

    def __init__(self, shape: Shape, device: str = "cpu") -> None:
        self.shape, g = shape, torch.Generator().manual_seed(shape.seed)
        lengths, rows = [length for length, *_ in shape.rows], len(shape.rows)
        self.num_tokens = sum(lengths)
        Layer.__init__(
            self, shape, self.num_tokens, 1 + 3 * rows, shape.kernel - 2 + shape.columns, g, device
        )
        ids = (1 + torch.randperm(3 * rows, generator=g)).view(rows, 3)
        # This kernel reads and writes the first column alone.
        sources, targets = ids[:, 0].clone(), ids[:, 1:2].repeat(1, 1 + shape.columns)[:, 1:]
        targets[:, 1:] = ids[:, 2:]
        for row, (_, accepted, padding, alias) in enumerate(shape.rows):
            if padding:
                sources[row], targets[row, 0] = 0, 0
            elif alias:
                sources[row] = targets[row, 0]
            if sources[row]:
                self.put(int(sources[row]), accepted - 1, g)
        indices = {
            "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0),
            "window_indices": sources,
            "window_rows": torch.tensor([accepted - 1 for _, accepted, *_ in shape.rows]),
            "state_indices": targets,
        }
        self.arguments |= {
            name: part.to(device, shape.index_dtype) for name, part in indices.items()
        }

    @classmethod
    def patches(cls, shape: Shape) -> AbstractContextManager[object]:
        return patch.object(module, "warp_size", lambda: shape.lanes)

    def expected(self) -> Iterator[Expected]:
        ends = self.arguments["cu_seqlens"].tolist()
        for row, (length, accepted, padding, _) in enumerate(self.shape.rows):
            if length:
                source, target = (
                    int(self.arguments[name][row].flatten()[0])
                    for name in ("window_indices", "state_indices")
                )
                y, inputs = self.row(slice(ends[row], ends[row + 1]), source, accepted - 1)
                yield y
                if not padding:
                    yield self.stored(target, inputs[1:])


BASE = Shape(
    rows=((2, 1, False, False), (1, 2, False, True)),
    columns=2,
    channels=5,
    kernel=4,
    bias=True,
    tap_major=True,
    gap=3,
    scale=1.0,
    dtype=torch.float32,
    state_dtype=torch.float32,
    index_dtype=torch.int64,
    lanes=32,
    seed=0,
)
LAYOUTS = {
    "channels": [1, 7, 128, 150, 256, 300],
    "bias": [True, False],
    "tap_major": [True, False],
    "gap": GAPS,
    # Large tokens overflow the exponential of SiLU.
    "scale": [1.0, 100.0],
    "dtype": FLOATS,
    "state_dtype": FLOATS,
    "index_dtype": INTS,
    "lanes": [32, 64],
}


@st.composite
def cases(draw: DrawFn) -> Shape:
    columns = draw(st.integers(1, 6))
    row = st.tuples(st.integers(0, columns), st.integers(1, columns), st.booleans(), st.booleans())
    rows = tuple(draw(st.lists(row, min_size=1, max_size=4)))
    return draw(shapes(BASE.but(rows=rows, columns=columns), kernel=[2, 3, 4, 5], **LAYOUTS))


# Two programs side by side, and windows that begin behind the first row.
WIDE = BASE.but(
    rows=((2, 2, False, False), (3, 3, False, True), (0, 1, False, False)), columns=3, channels=300
)
test_equals_the_definition, test_the_reference_equals_the_definition = equality(
    Update, cases(), WIDE.but(tap_major=False)
)


def test_offsets_pass_int32() -> None:
    shape = BASE.but(rows=((2, 1, False, False),), channels=8, state_dtype=torch.float16)
    interpreted(check_far, Update, shape)


NANO = BASE.but(channels=6144, dtype=torch.bfloat16, state_dtype=torch.bfloat16, gap=4096)


@pytest.mark.parametrize("length", [1, 6])
def test_traffic_is_every_row_once(length: int) -> None:
    """At the shape of Nemotron-3-Nano: 3T + 5 rows of 12,288 bytes, whatever room a row has."""
    shape = NANO.but(rows=((length, 1, False, False),), columns=6)
    counted, y, launches = interpreted(measure, Update, shape, "conv_state", "x", "weight", "bias")
    row = 6144 * 2
    assert counted["conv_state"] == (3 * row, (length + 2) * row, 3 * row, (length + 2) * row)
    assert counted["x"] == (length * row, 0, length * row, 0)
    assert y == (0, length * row, 0, length * row)
    # Once a request, out of the cache for all but the first.
    assert (counted["weight"], counted["bias"]) == ((4 * row, 0, 4 * row, 0), (row, 0, row, 0))
    assert launches == 1


test_compiles_without_spills_to_128_bit_accesses = compiled(
    "conv_update", lambda case: case.shape in ("Nemotron-3-Nano, K=0", "Nemotron-3-Nano, K=5")
)
test_rejects_what_the_kernel_would_misread = rejected_operations(
    Update,
    BASE,
    special=[
        ("conv_state", lambda t: t[:, 1:], r"must be \(7, 4, 5\)"),
        ("weight", lambda t: t[:, :1], "weight has 1 taps; there must be at least 2"),
        ("bias", lambda t: t.to("meta"), "bias is on meta"),
        ("x", lambda t: t.t().contiguous().t(), "from dimension 1 on it must be contiguous"),
    ],
    allowed=["weight, gaps", "weight, apart", "x, short"],
)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOATS)
def test_on_a_gpu(dtype: torch.dtype) -> None:
    rows = (
        (6, 3, False, False),
        (1, 1, True, False),
        (3, 6, False, True),
        (0, 1, False, False),
        (4, 1, False, True),
    )
    check(Update(NANO.but(rows=rows, columns=6, state_dtype=dtype), "cuda"), causal_conv1d_update)
