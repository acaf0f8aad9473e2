"""Writing and reading K and V through a block table, against the definition in float64.

Tolerances, of max|V|. float32: softmax weights sum to one, and scores of order ten carry an error
of about 1e-6, so 5e-6; a kernel rescales its sums once per tile of keys, 1e-5. Outputs in fewer
bits add a unit in the last place. Where float16 goes to the tensor core as it is, so do the weights
of the values: 2^-10 more (the interpreter truncates).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bench.static.compile import compile_case
from bench.static.launches import aot_cases
from hybrid_kv.kernels.paged_attention import (
    attend_tokens,
    attention_mask,
    paged_attention_varlen,
    slot_cells,
    store_kv,
    token_index,
    write_kv,
)
from hybrid_kv.kernels.paged_attention import launch as module
from hybrid_kv.kernels.paged_attention.reference import FOLDED_QUERIES, sees_nothing
from hybrid_kv.measure.device import pretend_gpu
from tests.kernels.harness import (
    FLOATS,
    GAPS,
    INTS,
    Expected,
    Operation,
    Pool,
    Shape,
    bits,
    check,
    check_far,
    compiled,
    equality,
    flat_tokens,
    measure,
    rejected_operations,
    shapes,
)
from tests.kernels.interpreter import interpreted
from tests.support.paged_attention import MIXED, TOLERANCE, Attention


def test_behind_a_rows_last_token_that_token_is_read_again() -> None:
    """A block holds two tokens of three elements: 7 places between blocks, 3 between tokens."""
    cache = torch.zeros(100 * 7).as_strided((100, 2, 1, 3), (7, 3, 3, 1))
    table = torch.tensor([[3, 1], [2, 99]], dtype=torch.int32)
    assert token_index(cache, table, torch.tensor([2, 0]), 3).tolist() == [21, 24, 7, 14, 14, 14]


def test_in_the_place_of_tokens_on_a_grid_the_last_one_is_read() -> None:
    cache, table = torch.zeros(4, 2, 1, 3), torch.tensor([[3, 1]], dtype=torch.int32)
    assert token_index(cache, table, torch.tensor([3]), 4, grid=2).tolist() == [3, 7, 3, 3]
    assert [sees_nothing(torch.arange(3), grid).tolist() for grid in (1, 2)] == [
        [True] * 3,
        [True, False, False],
    ]


def test_a_gpu_finds_the_cells_of_slots_without_a_wait() -> None:
    with pretend_gpu():
        kept, cells = slot_cells(torch.tensor([5, -1, 11]).to("cuda:0"), 4)
        assert kept is None and [part.tolist() for part in cells] == [[1, 0, 2], [1, 0, 3]]


@given(
    st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=20), min_size=1, max_size=3).map(
        lambda rows: [row[:1] * max(map(len, rows)) + row for row in rows]
    ),
    st.integers(1, 3),
    st.none() | st.integers(1, 9),
)
def test_a_mask_hides_what_comes_later_and_the_grid(
    rows: list[list[int]], per_kv: int, grid: int | None
) -> None:
    length = min(map(len, rows))
    positions = torch.tensor([row[:length] for row in rows])
    mask = attention_mask(positions, 41, per_kv, torch.float64, grid)
    folded = per_kv if 1 < length <= FOLDED_QUERIES else 1
    assert mask.shape == (len(rows), 1, length * folded, 41) and mask.dtype == torch.float64
    for row, at in enumerate(positions.tolist()):
        for i, position in enumerate(at):
            seen = [
                0.0 if k <= position and (grid is None or k % grid) else -torch.inf
                for k in range(41)
            ]
            assert mask[row, 0, i * folded : (i + 1) * folded].tolist() == [seen] * folded


# ---- the kernels, in Triton's interpreter ----


ROW = st.tuples(st.integers(0, 6), st.integers(0, 20), st.sampled_from([False, False, True]))
CASES = shapes(
    MIXED,
    rows=st.lists(ROW, min_size=1, max_size=3).map(tuple),
    kv_heads=[1, 2, 3],
    per_kv=[1, 2, 3, 5],
    head_size=[1, 3, 16, 20],
    block_size=[1, 2, 5, 16],
    gap=GAPS,
    is_swapped=[False, True],
    dtype=FLOATS,
    index_dtype=INTS,
    grid=[0, 0, 1, 3, 8],
    window=[0, 0, 1, 2, 6, 19],
    has_sinks=[False, True],
    stale=[0, 1, 2],
)
test_equals_the_definition, _ = equality(
    Attention,
    CASES,
    MIXED,
    MIXED.but(grid=4, dtype=torch.float16),
    MIXED.but(window=7),
    MIXED.but(window=7, has_sinks=True),
    MIXED.but(
        per_kv=5, max_rows=32, dtype=torch.bfloat16, is_swapped=True, index_dtype=torch.int64
    ),
)


def check_padding() -> None:
    """Its output stays what it was, as that of tokens of no row."""
    problem = Attention(MIXED.but(rows=((1, 0, True), (2, 3, False), (1, 0, True))))
    marked = torch.full_like(problem.arguments["query"], 7.0, memory_format=torch.contiguous_format)
    with patch.object(torch, "empty_like", lambda *_, **__: marked):
        out = problem.run(paged_attention_varlen)
    assert out is marked
    assert [bool((token == 7).all()) for token in out] == [True, False, False, True, True, True]


def test_padding_and_tokens_of_no_row_are_not_written() -> None:
    interpreted(check_padding)


# One head of K and V of Nemotron-3-Nano.
NANO = MIXED.but(
    rows=((1, 99, False),),
    kv_heads=1,
    per_kv=16,
    head_size=128,
    block_size=16,
    gap=0,
    dtype=torch.float16,
)


@pytest.mark.parametrize(
    ("new", "times"),
    # 4 tokens of 16 heads fill a program of 64 rows; 8 tokens take two, of which the first stops 4
    # keys earlier.
    [(1, 1), (4, 1), (8, 2)],
)
def test_keys_and_values_are_loaded_once_for_all_heads_of_a_group(new: int, times: int) -> None:
    shape = NANO.but(
        rows=((new, 100 - new, False),), max_rows=module.MAX_ROWS, block_n=module.BLOCK_N
    )
    counted, out, launches = interpreted(
        measure, Attention, shape, "query", "key_cache", "value_cache"
    )
    one = 100 * 128 * 2
    loaded = times * one - (4 * 128 * 2 if times == 2 else 0)
    assert counted["key_cache"] == counted["value_cache"] == (one, 0, loaded, 0)
    assert counted["query"][2] == out[1] == out[3] == new * 16 * 128 * 2
    assert launches == 1


@pytest.mark.parametrize(
    ("shape", "keys"), [(NANO.but(rows=((1, 0, True),)), 0), (NANO.but(grid=4), 75)]
)
def test_padding_and_keys_on_the_grid_are_not_loaded(shape: Shape, keys: int) -> None:
    counted, _, _ = interpreted(measure, Attention, shape, "key_cache", "value_cache")
    assert counted["key_cache"][0] == counted["value_cache"][0] == keys * 128 * 2


class Store(Operation):
    """K and V of tokens with the slots of a shape."""

    kernel = staticmethod(store_kv)
    like = ""

    def __init__(self, shape: Shape, device: str = "cpu") -> None:
        self.shape, g, count = shape, torch.Generator().manual_seed(shape.seed), len(shape.slots)
        tokens = flat_tokens(count + 2, [(shape.heads, shape.size)] * 2, shape.gap, shape.dtype, g)
        key, value = (part[:count].to(device) for part in tokens)
        blocks = 1 + max(0, *shape.slots) // shape.block_size
        pool = Pool(
            blocks, (2, shape.block_size, shape.heads, shape.size), shape.gap, shape.dtype, device
        )
        self.pools = dict.fromkeys(("key_cache", "value_cache"), pool)
        caches = {"key_cache": pool.blocks[:, 0], "value_cache": pool.blocks[:, 1]}
        self.arguments = {
            "key": key,
            "value": value,
            **caches,
            "slots": torch.tensor(shape.slots, device=device),
        }

    @staticmethod
    def reference(
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        write_kv(key, value, key_cache, value_cache, slot_cells(slots, key_cache.shape[1]))

    def expected(self) -> Iterator[Expected]:
        for token, slot in enumerate(self.shape.slots):
            if slot >= 0:
                at = divmod(slot, self.shape.block_size)
                for name, cache in (("key", "key_cache"), ("value", "value_cache")):
                    value = self.arguments[name][token].cpu().double()
                    yield Expected(cache, at, value, 0, 0, self.shape.dtype)


TWO = Shape(slots=(5, 1), heads=3, size=3, block_size=4, gap=5, dtype=torch.float32, seed=0)
SLOTS = st.lists(
    st.integers(-2, 20), min_size=1, max_size=6, unique_by=lambda s: s if s >= 0 else object()
).map(tuple)
test_storing_writes_the_slots_and_nothing_else, test_the_torch_way_writes_the_same = equality(
    Store,
    shapes(
        TWO,
        slots=SLOTS,
        heads=[1, 2, 3],
        size=[1, 3, 8],
        block_size=[1, 3, 16],
        gap=[0, 5],
        dtype=FLOATS,
    ),
    TWO,
)


def test_offsets_pass_int32() -> None:
    shape = MIXED.but(rows=((2, 3, False),), block_size=4, dtype=torch.float16)
    interpreted(check_far, Attention, shape)
    interpreted(check_far, Store, TWO.but(slots=(9, 5, 1), dtype=torch.float16), 1)


def check_apart(kind: type[Operation], shape: Shape) -> None:
    """Tokens of a block whose K or V has others beside it."""
    here, there = kind(shape), kind(shape)
    for name in there.pools:
        view = there.arguments[name]
        wide = torch.full((*view.shape[:2], 2, *view.shape[2:]), torch.nan, dtype=view.dtype)
        there.arguments[name] = wide[:, :, 1].copy_(view)
    outputs = [operation.run(kind.kernel) for operation in (here, there)]
    if outputs[0] is not None:
        assert torch.equal(*(bits(y[: here.num_tokens]) for y in outputs))
    for name in there.pools:
        assert torch.equal(
            *(bits(operation.arguments[name].contiguous()) for operation in (here, there))
        )


@pytest.mark.parametrize(
    ("kind", "shape"), [(Attention, MIXED.but(rows=((2, 3, False),))), (Store, TWO)]
)
def test_tokens_of_a_block_may_lie_apart(kind: type[Operation], shape: Shape) -> None:
    interpreted(check_apart, kind, shape)


def test_no_tokens_are_no_launch() -> None:
    cache = torch.zeros(1, 2, 1, 4)
    store_kv(
        torch.zeros(0, 1, 4), torch.zeros(0, 1, 4), cache, cache, torch.zeros(0, dtype=torch.int64)
    )


# The smallest and the largest tile, and the store. 64 lanes take a token's K with half as much
# each.
test_compiles_without_spills = compiled(
    "paged_attention",
    lambda case: case.shape.startswith("Nemotron-3-Nano"),
    load=64,
    store=64,
    least=lambda *_: 2,
)


def test_float32_keeps_its_digits() -> None:
    case = next(
        case for case in aot_cases() if case.kernel == "paged_attention.paged_attention_varlen"
    )
    wide = {name: kind.replace("bf16", "fp32") for name, kind in case.signature.items()}
    ptx = compile_case(replace(case, signature=wide), "sm_90").asm["ptx"]
    assert "fma" in ptx and "tf32" not in ptx


test_rejects_what_the_kernel_would_misread = rejected_operations(
    Attention,
    MIXED.but(rows=((2, 1, False), (1, 1, False)), per_kv=2, grid=4),
    special=[
        ("key_cache", lambda t: t[..., :-1], r"key_cache has shape"),
        ("value_cache", lambda t: t.half(), "torch.float16; it must be one of torch.float32"),
        ("query_start_loc", lambda t: t[1:], r"has shape \(2,\); it must be \(3,\)"),
        ("query", lambda t: t[:, :3], "2 heads of K do not divide 3 heads"),
        ("key_cache", lambda t: t[:, :, :0], "0 heads of K do not divide 4 heads"),
        (
            "key_cache",
            lambda t: t.repeat(1, 1, 1, 2)[..., : t.shape[-1]],
            "from dimension 2 on it must be contiguous",
        ),
        ("grid", lambda _: -1, "grid=-1"),
        ("max_query_len", lambda _: 0, "max_query_len=0 must be >= 1"),
    ],
    allowed=["query, short", "key_cache, apart", "value_cache, apart"],
)
test_storing_rejects_what_the_kernel_would_misread = rejected_operations(
    Store,
    TWO,
    special=[
        ("slots", lambda t: t[1:], r"slots has shape \(1,\)"),
        ("value", lambda t: t.half(), "value is torch.float16"),
        ("value_cache", lambda t: t[:1], "value_cache has shape"),
        (
            "key_cache",
            lambda t: t.repeat(1, 1, 1, 2)[..., : t.shape[-1]],
            "from dimension 2 on it must be contiguous",
        ),
        ("key", lambda t: t[0], "key has shape .* it must have 3 dimensions"),
    ],
    allowed=[
        f"{kind}_cache, {change}" for kind in ("key", "value") for change in ("short", "apart")
    ],
)


@pytest.mark.parametrize("length", [1, 2, FOLDED_QUERIES, FOLDED_QUERIES + 1])
def test_queries_that_see_everything_need_no_mask(length: int) -> None:
    g = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(2, n, h, 4, generator=g) for n, h in ((length, 6), (5, 2), (5, 2))
    )
    out = attend_tokens(query, key, value, None, 0.5)
    assert out.shape == query.shape
    mask = attention_mask(torch.full((2, length), 4), 5, 3, torch.float32)
    torch.testing.assert_close(
        out, attend_tokens(query, key, value, mask, 0.5), rtol=0, atol=TOLERANCE
    )
    wide = (part.repeat_interleave(3, 2) for part in (key, value))
    torch.testing.assert_close(out, attend_tokens(query, *wide, None, 0.5), rtol=0, atol=TOLERANCE)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOATS)
def test_on_a_gpu(dtype: torch.dtype) -> None:
    rows = ((1, 500, False), (4, 37, False), (1, 0, True), (0, 5, False), (130, 10, False))
    shape = NANO.but(
        rows=rows, kv_heads=2, dtype=dtype, gap=16, max_rows=module.MAX_ROWS, block_n=module.BLOCK_N
    )
    check(Attention(shape, "cuda"), paged_attention_varlen)
    check(Store(TWO.but(slots=(3, -1, 40), size=128, block_size=16, dtype=dtype), "cuda"), store_kv)
