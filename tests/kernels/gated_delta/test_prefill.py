"""The scan of a prefill against the delta rule in float64, in Triton's interpreter.

Tolerances are shares of the largest norm among rows of states, and of the largest value: queries
and keys have length 1, so no product with one is larger. In float32 2e-5 (as in
tests/kernels/test_recurrences.py). With 16-bit inputs what meets in a product has been rounded to
2^-8 in bfloat16 and 2^-11 in float16, twice that in the interpreter, which truncates: what a token
learns is made of two such products, an output of two more. Storing adds its own rounding.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import strategies as st

from hybrid_kv.kernels.gated_delta import gated_delta_prefill, gated_delta_prefill_reference
from hybrid_kv.kernels.gated_delta import prefill as module
from tests.kernels import recurrent
from tests.kernels.gated_delta.layer import LAYOUTS, Layer
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
    measure,
    multiply_bfloat16,
    rejected_operations,
    shapes,
)
from tests.kernels.interpreter import backwards, interpreted, programs
from tests.support.spans import Cut, Row, rows

EXACT = 2e-5
PRODUCTS = {torch.float32: 0.0, torch.bfloat16: 2.0**-5, torch.float16: 2.0**-8}


class Prefill(recurrent.Prefill, Layer):
    kernel = staticmethod(gated_delta_prefill)
    reference = staticmethod(gated_delta_prefill_reference)
    like = "v"

    @classmethod
    @contextlib.contextmanager
    def patches(cls, shape: Shape) -> Iterator[None]:
        with patch.multiple(module, TILE_BYTES=shape.tile_bytes), multiply_bfloat16():
            yield

    def expected(self) -> Iterator[Expected]:
        shape, share = self.shape, EXACT + PRODUCTS[self.shape.dtype]
        for _, span, source, kept in self.cut.rows():
            y, states, largest = self.row(span, source)
            yield Expected("y", span, y, share, largest, shape.dtype)
            for n, block in kept:
                yield Expected("state", (block,), states[n - 1], share, largest, shape.state_dtype)


SEVERAL = Shape(
    rows=(
        Row(2, (1, 2), "first"),
        Row(0),
        Row(40, (7, 40), "last", initial=False),
        Row(33, (32,), "last"),
    ),
    chunk_size=32,
    key_heads=2,
    shared=2,
    value=17,
    key=16,
    per_channel=False,
    beta_scale=1.0,
    gap=3,
    initial=1.0,
    tile_bytes=64,
    dtype=torch.float32,
    state_dtype=torch.float32,
    index_dtype=torch.int64,
    seed=0,
)
BY_CHANNEL = SEVERAL.but(per_channel=True, key=20, beta_scale=2.0)
NARROW = SEVERAL.but(key_heads=1, dtype=torch.bfloat16)
NOTHING, UNREAD = (
    SEVERAL.but(rows=()),
    SEVERAL.but(rows=(Row(5, (2,), "null", keep=False), Row(3, (), "negative"))),
)
CASES = shapes(
    SEVERAL,
    rows=st.lists(rows([0, 1, 2, 15, 16, 17, 33, 40]), max_size=3).map(tuple),
    chunk_size=[16, 32, 64],
    key_heads=[1, 2],
    shared=[1, 2],
    value=[1, 3, 16, 20],
    key=[1, 3, 16, 33],
    tile_bytes=[64, 128],
    **LAYOUTS,
)
test_equals_the_rule, test_the_reference_equals_the_rule = equality(
    Prefill,
    CASES,
    SEVERAL.but(key_heads=1),
    BY_CHANNEL.but(key_heads=1, shared=1),
    NARROW,
    NOTHING,
    UNREAD,
)


def check_backwards(shape: Shape) -> None:
    """Programs have no order: what the last ones store, the first must not read.

    Two launches, of so many programs.
    """
    with programs(backwards) as grids:
        check_kernel(Prefill, shape)
    heads, parts = shape.key_heads * shape.shared, shape.chunk_size // 16
    chunks = parts * len(Prefill(shape).cut.spans.chunks)
    assert grids == [(heads, chunks), (heads * -(-shape.value // 16), len(shape.rows))]


def test_two_launches_whose_programs_need_no_order() -> None:
    interpreted(check_backwards, SEVERAL.but(key_heads=1))


FAR = SEVERAL.but(rows=(Row(17),), key_heads=1, shared=1, value=4, key=4, chunk_size=16)
FAR_TOKENS = (
    FAR.but(rows=(Row(140),), chunk_size=64, dtype=torch.float16),
    ("q", "k", "v", "dt", "beta"),
    2**24 - 8,
)


@pytest.mark.parametrize(
    ("checked", "arguments"),
    [
        (check_far, (Prefill, FAR.but(state_dtype=torch.float16))),
        (check_far_tokens, (Prefill, *FAR_TOKENS)),
        (check_far_tokens, (Prefill, FAR_TOKENS[0].but(per_channel=True), *FAR_TOKENS[1:])),
    ],
)
def test_offsets_pass_int32(checked: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    interpreted(checked, *arguments)


# The value heads of one key head of Qwen3-Next.
PART = SEVERAL.but(
    rows=(Row(100, (64,)),),
    chunk_size=64,
    key_heads=1,
    shared=2,
    value=128,
    key=128,
    gap=4096,
    dtype=torch.bfloat16,
    tile_bytes=module.TILE_BYTES,
)


@pytest.mark.parametrize("per_channel", [False, True])
def test_a_state_is_read_once_and_passes_memory_only_for_its_blocks(per_channel: bool) -> None:
    shape = PART.but(per_channel=per_channel, shared=1 + (not per_channel))
    counted, y, launches = interpreted(measure, Prefill, shape, "state", "v", "beta")
    heads = shape.shared
    state, v = heads * 128 * 128 * 4, heads * 100 * 128 * 2
    assert counted["state"] == (state, 2 * state, state, 2 * state)
    assert counted["v"] == (v, 0, v, 0) and counted["beta"] == (
        heads * 100 * 2,
        0,
        heads * 100 * 2,
        0,
    )
    assert y == (0, v, 0, v) and launches == 2


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize(("dtype", "chunk_size"), [(torch.float32, 64), (torch.bfloat16, 128)])
def test_heads_of_real_models(dtype: torch.dtype, chunk_size: int, per_channel: bool) -> None:
    drawn = (Row(70, (1, 64)), Row(33, initial=False))
    shape = PART.but(
        rows=drawn, shared=1, dtype=dtype, chunk_size=chunk_size, per_channel=per_channel
    )
    interpreted(check_kernel, Prefill, shape)


def check_strong_decay(shape: Shape) -> None:
    """Decays of e^-3000 in a row: their inverse is infinite.

    Behind, weak ones must count exactly.
    """
    problem = Prefill(shape.but(rows=(Row(64, (40,)),), chunk_size=64))
    problem.arguments["dt"][:32], problem.arguments["dt"][32:64] = 40.0, -6.0
    problem.arguments["A_log"].fill_(1.0)
    with Prefill.patches(shape):
        check(problem, gated_delta_prefill)


def check_one_key(shape: Shape) -> None:
    """Each token overwrites the last, without decay: powers of the system pass 2^64."""
    problem = Prefill(shape.but(rows=(Row(64),), chunk_size=64, beta_scale=2.0))
    problem.arguments["dt"].fill_(-24.0)
    problem.arguments["beta"].fill_(8.0)
    problem.arguments["k"][:64] = problem.arguments["k"][:1].clone()
    with Prefill.patches(shape):
        check(problem, gated_delta_prefill)


@pytest.mark.parametrize("checked", [check_strong_decay, check_one_key])
@pytest.mark.parametrize("shape", [SEVERAL, BY_CHANNEL], ids=["per head", "per channel"])
@pytest.mark.parametrize("tile_bytes", [64, 256])
def test_neither_overflows_nor_blurs_what_follows(
    checked: Callable[..., None], shape: Shape, tile_bytes: int
) -> None:
    interpreted(checked, shape.but(key_heads=1, shared=1, tile_bytes=tile_bytes))


# A wave of the chunks must not leave an SM to one block.
test_compiles_without_spills_to_128_bit_accesses = compiled(
    "delta_prefill",
    lambda case: case.dtype == "bfloat16",
    least=lambda case, _: 2 if "inside" in case.kernel else 1,
)
test_rejects_what_the_kernel_would_misread = rejected_operations(
    Prefill,
    SEVERAL.but(rows=(Row(2), Row(2)), key=3),
    special=[
        ("k", lambda t: t[:, :0], "0 heads of k do not divide 4 heads of v"),
        ("q", lambda t: t.bfloat16(), "q is torch.bfloat16; it must be one of torch.float32"),
        (
            "spans",
            lambda _: Cut((Row(7),), 16, torch.Generator()).spans,
            "v has 6 tokens; the spans have 7",
        ),
        (
            "dt",
            lambda t: torch.empty(2**27).as_strided(t.shape, (2**24, 1)),
            "tokens lie 16777216 elements apart; it must be fewer than 16777216",
        ),
    ],
)


@pytest.mark.gpu
@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("dtype", FLOATS)
def test_on_a_gpu(dtype: torch.dtype, per_channel: bool) -> None:
    drawn = (Row(600, (528,), "first"), Row(0), Row(3, (1, 2), "last"), Row(133, initial=False))
    chunk_size = 64 if dtype == torch.float32 else 128
    shape = PART.but(
        rows=drawn, key_heads=16, dtype=dtype, chunk_size=chunk_size, per_channel=per_channel
    )
    check(Prefill(shape, "cuda"), gated_delta_prefill)
