"""The scan of a prefill against the recurrence in float64, in Triton's interpreter.

Tolerances are shares of the sum of the magnitudes that meet in a result. In float32 1e-5: a few
hundred roundings of 6e-8, and decays between tokens that err by 2e-6, the last place of sums up to
32. With 16-bit inputs every product has been rounded twice at most on its way (weighted inputs,
then the state; or the weighted scores), to 2^-8 in bfloat16 and 2^-11 in float16, twice that in the
interpreter, which truncates; float16 besides loses 2^-24 of each where it underflows. Storing adds
its own rounding.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import strategies as st

from hybrid_kv.kernels.common.spans import Spans
from hybrid_kv.kernels.ssd import chunk_scan_prefill, chunk_scan_prefill_reference
from hybrid_kv.kernels.ssd import prefill as module
from tests.kernels import recurrent
from tests.kernels.harness import (
    FLOATS,
    Expected,
    Shape,
    check,
    check_far,
    check_far_tokens,
    check_kernel,
    compiled,
    equality,
    multiply_bfloat16,
    near,
    rejected_operations,
    shapes,
)
from tests.kernels.interpreter import (
    Counts,
    backwards,
    count_bytes,
    interpreted,
    programs,
    share_memory_with_the_interpreter,
)
from tests.kernels.ssd.layer import LAYOUTS, Layer, mamba2
from tests.support.spans import Cut, Row, rows

EXACT = 1e-5
PRODUCTS = {torch.float32: 0.0, torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}


class Prefill(recurrent.Prefill, Layer):
    kernel = staticmethod(chunk_scan_prefill)
    reference = staticmethod(chunk_scan_prefill_reference)

    @classmethod
    @contextlib.contextmanager
    def patches(cls, shape: Shape) -> Iterator[None]:
        sizes = {"BLOCK_P": shape.block_p, "TILE_BYTES": shape.tile_bytes}
        with patch.multiple(module, **sizes), multiply_bfloat16():
            yield

    def expected(self) -> Iterator[Expected]:
        shape, share = self.shape, EXACT + PRODUCTS[self.shape.dtype]
        for row, span, source, kept in self.cut.rows():
            y, states, magnitude, sizes = self.row(span, source)
            x, B, C = (
                self.arguments[name][span].cpu().double().abs().amax() for name in ("x", "B", "C")
            )
            lost = (2.0**-24 if shape.dtype == torch.float16 else 0.0) * (row.length + 1) / share
            scale = magnitude + lost * (shape.size * C * (1 + B) + x)
            yield Expected("y", span, y, share, scale, shape.dtype)
            for n, block in kept:
                yield Expected(
                    "state",
                    (block,),
                    states[n - 1],
                    share,
                    sizes[n - 1] + lost * B,
                    shape.state_dtype,
                )


SEVERAL = Shape(
    rows=(Row(2, (1, 2), "first"), Row(0), Row(40, (7, 40), "last", initial=False), Row(33, (32,))),
    chunk_size=32,
    groups=2,
    per_group=2,
    head_dim=17,
    size=16,
    gap=3,
    initial=1.0,
    block_p=16,
    tile_bytes=64,
    dtype=torch.float32,
    state_dtype=torch.float32,
    index_dtype=torch.int64,
    seed=0,
)
NOTHING, UNREAD = (
    SEVERAL.but(rows=()),
    SEVERAL.but(rows=(Row(5, (2,), "null", keep=False), Row(3, (), "negative"))),
)
CASES = shapes(
    SEVERAL,
    rows=st.lists(rows([0, 1, 2, 15, 16, 17, 33, 40]), max_size=3).map(tuple),
    chunk_size=[16, 32, 64],
    groups=[1, 2, 3],
    per_group=[1, 2],
    head_dim=[1, 3, 7, 16, 20],
    size=[1, 3, 16, 33],
    block_p=[16, 64],
    tile_bytes=[64, 128],
    **LAYOUTS,
)
test_equals_the_recurrence, test_the_reference_equals_the_recurrence = equality(
    Prefill, CASES, SEVERAL, SEVERAL.but(dtype=torch.bfloat16), NOTHING, UNREAD
)


def check_backwards(shape: Shape) -> None:
    """Programs have no order: what the last ones store, the first must not read.

    Two launches, of so many programs.
    """
    with programs(backwards) as grids:
        check_kernel(Prefill, shape)
    heads, tiles = shape.groups * shape.per_group, shape.chunk_size // (shape.tile_bytes // 4)
    slices, chunks = -(-shape.head_dim // shape.block_p), len(Prefill(shape).cut.spans.chunks)
    assert grids == [(heads * slices, len(shape.rows)), (heads * tiles, chunks)]


def test_two_launches_whose_programs_need_no_order() -> None:
    interpreted(check_backwards, SEVERAL.but(groups=1))


def check_far_outputs(dtype: torch.dtype) -> None:
    """Check outputs and states 2^31 elements after the first: a huge call's last programs."""
    share_memory_with_the_interpreter()
    tokens, heads, head_dim, size = 2**17, 16, 1024, 128
    g = torch.Generator().manual_seed(0)
    x, B, C = (
        torch.randn(1, *shape, generator=g) for shape in ((heads, head_dim), (1, size), (1, size))
    )
    x, B, C = (part.to(dtype).expand(tokens + 1, -1, -1) for part in (x, B, C))
    parameters = torch.rand(4, heads, generator=g)
    dt = parameters[0].to(dtype).expand(tokens + 1, -1)
    state = torch.randn(2, heads, head_dim, size, generator=g)
    spans = Spans(torch.tensor([tokens, 1]), torch.tensor([0, 0]))
    # Those of the last head, in the last row or chunk.
    with programs(
        lambda grid: [(x, grid[1] - 1) for x in range(grid[0] - grid[0] // heads, grid[0])]
    ):
        y = chunk_scan_prefill(
            state,
            x,
            dt,
            *parameters[1:3],
            B,
            C,
            parameters[3],
            spans,
            torch.tensor([0, 1]),
            torch.tensor([True, True]),
        )
    assert y.numel() > 2**31 and len(spans.chunks) * state[0].numel() > 2**31
    step = torch.nn.functional.softplus(dt[:1, -1:].double() + parameters[1, -1:].double())
    A = -parameters[2, -1:].double().exp()
    expected, _ = mamba2(state[1, -1:], x[:1, -1:], step, A, B[:1], C[:1], parameters[3, -1:])
    near("y", y[-1:, -1:], expected, PRODUCTS[dtype], expected.abs().amax(), dtype)


FAR = SEVERAL.but(rows=(Row(17),), groups=1, per_group=1, head_dim=4, size=4, chunk_size=16)
FAR_TOKENS = (
    FAR.but(rows=(Row(140),), chunk_size=128, dtype=torch.float16),
    ("x", "dt", "B", "C"),
    2**24 - 8,
)


@pytest.mark.parametrize(
    ("checked", "arguments"),
    [
        (check_far, (Prefill, FAR.but(state_dtype=torch.float16))),
        (check_far_tokens, (Prefill, *FAR_TOKENS)),
        (check_far_outputs, (torch.float16,)),
    ],
)
def test_offsets_pass_int32(checked: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    interpreted(checked, *arguments)


# The heads of one group of Nemotron-3-Nano, an eighth of a layer.
EIGHTH = SEVERAL.but(
    rows=(Row(200, (128,)),),
    chunk_size=128,
    groups=1,
    per_group=8,
    head_dim=64,
    size=128,
    gap=4096,
    block_p=module.BLOCK_P,
    tile_bytes=module.TILE_BYTES,
    dtype=torch.bfloat16,
)


def measure_with_scratch(shape: Shape) -> tuple[dict[str, Counts], Counts, int]:
    problem, empty = Prefill(shape), torch.empty
    tensors = {name: problem.arguments[name] for name in ("state", "x", "dt", "B", "C")}
    x, state = tensors["x"], tensors["state"]
    tensors["chunk_states"] = empty(
        len(problem.cut.spans.chunks), *state.shape[1:], dtype=shape.dtype
    )
    tensors["times"] = empty(3, x.shape[1], problem.num_tokens)
    scratch = {tuple(tensor.shape): tensor for tensor in tensors.values()}
    with patch.object(torch, "empty", lambda *shape, **options: scratch.get(shape, empty(0))):
        return count_bytes(tensors, problem.run, chunk_scan_prefill)


def test_traffic_is_two_reads_of_the_inputs_and_the_states_of_chunks_once() -> None:
    counted, y, launches = interpreted(measure_with_scratch, EIGHTH)
    state, x, shared = 8 * 64 * 128, 200 * 8 * 64 * 2, 200 * 128 * 2
    # One state read, one stored at the boundary and one at the end; nothing of them twice.
    assert counted["state"] == (4 * state, 2 * 4 * state, 4 * state, 2 * 4 * state)
    # Each launch reads and writes its part of two chunks' states; the outputs of 128 tokens are two
    # programs' work.
    assert counted["chunk_states"] == (
        2 * 2 * state,
        2 * 2 * state,
        2 * 2 * 2 * state,
        2 * 2 * state,
    )
    assert counted["times"][:2] == (3 * 8 * 200 * 4, 3 * 8 * 200 * 4)
    assert counted["x"][:2] == (x, 0) and counted["B"][:2] == counted["C"][:2] == (shared, 0)
    # The states ask for x once; the outputs for the tile's own twice, and for earlier tiles.
    assert counted["x"][2] == x + 2 * x + 2 * 64 * 8 * 64 * 2
    assert y == (0, x, 0, x)
    assert launches == 2


@pytest.mark.parametrize(("dtype", "chunk_size"), [(torch.float32, 64), (torch.bfloat16, 128)])
def test_heads_of_real_models(dtype: torch.dtype, chunk_size: int) -> None:
    drawn = (Row(300, (1, 128, 160)), Row(129, initial=False))
    shape = EIGHTH.but(rows=drawn, per_group=2, dtype=dtype, gap=0, chunk_size=chunk_size)
    interpreted(check_kernel, Prefill, shape)


def check_strong_decay(chunk_size: int) -> None:
    """Decays of 2^-2900 a chunk: above the diagonal their inverse is infinite.

    Behind, weak ones must count exactly.
    """
    problem = Prefill(SEVERAL.but(rows=(Row(128, (40,)),), chunk_size=chunk_size, groups=1))
    problem.arguments["dt"][:32], problem.arguments["dt"][32:128] = 40.0, -6.0
    problem.arguments["A_log"].fill_(1.0)
    check(problem, chunk_scan_prefill)


@pytest.mark.parametrize("chunk_size", [16, 64])
def test_strong_decay_neither_overflows_nor_blurs_what_follows(chunk_size: int) -> None:
    interpreted(check_strong_decay, chunk_size)


# A wave of the outputs must not leave an SM to one block; AMD's keeps its tiles in registers.
test_compiles_without_spills_to_128_bit_accesses = compiled(
    "ssd_prefill",
    lambda case: case.dtype == "bfloat16",
    store=0,
    least=lambda case, target: 1 if "states" in case.kernel or target == "gfx942" else 2,
)
test_rejects_what_the_kernel_would_misread = rejected_operations(
    Prefill,
    SEVERAL.but(rows=(Row(2), Row(2)), size=3),
    special=[
        ("B", lambda t: t[:, :0], "0 groups of B do not divide 4 heads"),
        ("C", lambda t: t.bfloat16(), "C is torch.bfloat16; it must be one of torch.float32"),
        (
            "spans",
            lambda _: Cut((Row(7),), 16, torch.Generator()).spans,
            "x has 6 tokens; the spans have 7",
        ),
        (
            "spans",
            lambda _: Cut((Row(2), Row(2)), 128, torch.Generator()).spans,
            "is 128; it must be at most 64",
        ),
        (
            "dt",
            lambda t: torch.empty(2**27).as_strided(t.shape, (2**24, 1)),
            "tokens lie 16777216 elements apart",
        ),
        (
            "dt",
            lambda t: torch.empty(2**27).as_strided(t.shape, (2**24 + 1, 1)),
            "it must be fewer than 16777216",
        ),
    ],
)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOATS)
def test_on_a_gpu(dtype: torch.dtype) -> None:
    drawn = (Row(600, (528,), "first"), Row(0), Row(3, (1, 2), "last"), Row(133, initial=False))
    chunk_size = 64 if dtype == torch.float32 else 128
    check(
        Prefill(EIGHTH.but(rows=drawn, groups=8, dtype=dtype, chunk_size=chunk_size), "cuda"),
        chunk_scan_prefill,
    )
