"""Writing and reading K and V through a block table, against a loop over queries and heads in float64.

Tolerances, of max|V|. float32: softmax weights sum to one, and scores of order ten carry an error of about 1e-6, so
5e-6; a kernel rescales its sums once per tile of keys, 1e-5. Outputs in fewer bits add a unit in the last place. Where
float16 goes to the tensor core as it is, so do the weights of the values: 2^-10 more (the interpreter truncates).
"""

import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from hybrid_kv.cache.backend import FlashAttentionBackend, TorchBackend
from hybrid_kv.cache.layout import attention_view, split_kv
from hybrid_kv.cache.spec import FullAttentionSpec
from hybrid_kv.kernels.paged_attention import (
    attend_tokens,
    attention_mask,
    paged_attention,
    paged_attention_varlen,
    paged_attention_varlen_reference,
    slot_cells,
    store,
    store_kv,
    token_index,
    write_kv,
)
from hybrid_kv.kernels.paged_attention import launch as module
from hybrid_kv.kernels.paged_attention.launch import aot_cases
from hybrid_kv.kernels.paged_attention.reference import FOLDED_QUERIES
from hybrid_kv.static.compile import TARGETS, compile_case, read_metrics
from tests.kernels.interpreter import count_bytes, interpreted, share_memory_with_the_interpreter
from tests.kernels.ssd.test_slots import ROUNDING, near, poisoned

TOLERANCE, TILED, FLOAT16_WEIGHTS = 5e-6, 1e-5, 2.0**-10
BACKENDS = {"TORCH": TorchBackend, "FLASH_ATTN": FlashAttentionBackend}


def strided_cache(num_blocks, block_size, kv_heads, head_size, backend):
    """K and V as `cache.layout` makes them, every byte poisoned: -1 is NaN in float32."""
    spec = FullAttentionSpec(block_size, kv_heads, head_size, torch.float32)
    raw = torch.full((num_blocks * spec.page_size_bytes,), -1, dtype=torch.int8)
    return split_kv(attention_view(raw, num_blocks, spec, block_size, backend), backend)


@st.composite
def problems(draw):
    totals = draw(st.lists(st.integers(1, FOLDED_QUERIES + 4), min_size=1, max_size=3))
    decodes = draw(st.booleans())
    new = [1 if decodes else draw(st.integers(1, total)) for total in totals]
    return (
        totals,
        new,
        draw(st.integers(1, 5)),  # block size
        draw(st.integers(1, 3)),  # KV heads
        draw(st.integers(1, 3)),  # queries per KV head
        draw(st.integers(1, 6)),  # head size
        draw(st.sampled_from([TorchBackend, FlashAttentionBackend])),
        draw(st.integers(0, 2**31)),
    )


@given(problems())
def test_rows_read_their_own_blocks_whatever_lies_in_unused_slots(problem):
    totals, new, block_size, kv_heads, per_kv, head_size, backend, seed = problem
    g = torch.Generator().manual_seed(seed)
    width = -(-max(totals) // block_size)
    num_blocks = 1 + width * len(totals)
    key_cache, value_cache = strided_cache(num_blocks, block_size, kv_heads, head_size, backend)
    table = (1 + torch.randperm(num_blocks - 1, generator=g)).view(len(totals), width).int()
    keys = [torch.randn(total, kv_heads, head_size, generator=g) for total in totals]
    values = [torch.randn(total, kv_heads, head_size, generator=g) for total in totals]
    for row, total in enumerate(totals):
        slots = torch.tensor([int(table[row, t // block_size]) * block_size + t % block_size for t in range(total)])
        write_kv(keys[row], values[row], key_cache, value_cache, slot_cells(slots, block_size))
    heads = kv_heads * per_kv
    query = torch.randn(len(totals), max(new), heads, head_size, generator=g)
    steps = torch.minimum(torch.arange(max(new)), torch.tensor(new)[:, None] - 1)
    positions = (torch.tensor(totals) - torch.tensor(new))[:, None] + steps
    out = paged_attention(query, key_cache, value_cache, table, positions, 0.7)
    for row in range(len(totals)):
        for i in range(new[row]):
            last = int(positions[row, i]) + 1
            for h in range(heads):
                k, v = (t[row][:last, h // per_kv].double() for t in (keys, values))
                expected = torch.softmax(k @ query[row, i, h].double() * 0.7, 0) @ v
                difference = (out[row, i, h].double() - expected).abs().max()
                assert float(difference) <= TOLERANCE * max(1.0, float(v.abs().max()))


@given(st.lists(st.integers(-2, 11), min_size=1, max_size=8, unique_by=lambda slot: slot if slot >= 0 else object()))
def test_a_negative_slot_stores_nothing(slots):
    key_cache, value_cache = strided_cache(3, 4, 2, 3, FlashAttentionBackend)
    key_cache.zero_()
    value_cache.zero_()
    key = torch.arange(1, 1 + len(slots) * 6, dtype=torch.float32).view(-1, 2, 3)
    write_kv(key, -key, key_cache, value_cache, slot_cells(torch.tensor(slots), 4))
    expected = torch.zeros(12, 2, 3)
    for slot, token in zip(slots, key, strict=True):
        if slot >= 0:
            expected[slot] = token
    assert torch.equal(key_cache.reshape(12, 2, 3), expected)
    assert torch.equal(value_cache.reshape(12, 2, 3), -expected)


def test_behind_a_rows_last_token_that_token_is_read_again():
    """A block holds two tokens of three elements and a gap of one: 7 places between blocks, 3 between tokens."""
    cache = torch.zeros(100 * 7).as_strided((100, 2, 1, 3), (7, 3, 3, 1))
    table = torch.tensor([[3, 1], [2, 99]], dtype=torch.int32)
    assert token_index(cache, table, torch.tensor([2, 0]), 3).tolist() == [21, 24, 7, 14, 14, 14]


def test_in_the_place_of_tokens_on_a_grid_the_last_one_is_read():
    cache, table = torch.zeros(4, 2, 1, 3), torch.tensor([[3, 1]], dtype=torch.int32)
    assert token_index(cache, table, torch.tensor([3]), 4, grid=2).tolist() == [3, 7, 3, 3]


@given(
    st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=20), min_size=1, max_size=3).map(
        lambda rows: [row[:1] * max(map(len, rows)) + row for row in rows]
    ),
    st.integers(1, 3),
    st.none() | st.integers(1, 9),
)
def test_a_mask_hides_what_comes_later_and_the_grid(rows, per_kv, grid):
    length = min(map(len, rows))
    positions = torch.tensor([row[:length] for row in rows])
    mask = attention_mask(positions, 41, per_kv, torch.float64, grid)
    folded = per_kv if 1 < length <= FOLDED_QUERIES else 1
    assert mask.shape == (len(rows), 1, length * folded, 41) and mask.dtype == torch.float64
    for row, at in enumerate(positions.tolist()):
        for i, position in enumerate(at):
            seen = [0.0 if k <= position and (grid is None or k % grid) else -torch.inf for k in range(41)]
            assert mask[row, 0, i * folded : (i + 1) * folded].tolist() == [seen] * folded


# ---- the kernels, in Triton's interpreter ----


@dataclass(frozen=True)
class Case:
    """Everything that a process needs to build the inputs of one launch.

    Attributes:
        rows: per row its new tokens, those computed before, and whether it is padding.
        gap: elements between blocks, and between tokens, that are not the layer's.
        stale: columns of the table behind a row's own.
        max_rows, block_n: of a program; with few of them a row takes several tiles.
    """

    rows: tuple[tuple[int, int, bool], ...]
    kv_heads: int = 1
    per_kv: int = 1
    head_size: int = 4
    block_size: int = 2
    gap: int = 3
    layout: str = "TORCH"
    dtype: torch.dtype = torch.float32
    index_dtype: torch.dtype = torch.int32
    grid: int = 0
    stale: int = 1
    max_rows: int = 16
    block_n: int = 16
    seed: int = 0


@st.composite
def cases(draw):
    row = st.tuples(st.integers(0, 6), st.integers(0, 20), st.sampled_from([False, False, True]))
    return Case(
        rows=tuple(draw(st.lists(row, min_size=1, max_size=3))),
        kv_heads=draw(st.integers(1, 3)),
        per_kv=draw(st.sampled_from([1, 2, 3, 5])),
        head_size=draw(st.sampled_from([1, 3, 16, 20])),
        block_size=draw(st.sampled_from([1, 2, 5, 16])),
        gap=draw(st.sampled_from([0, 5, 16])),
        layout=draw(st.sampled_from(list(BACKENDS))),
        dtype=draw(st.sampled_from(list(ROUNDING))),
        index_dtype=draw(st.sampled_from([torch.int32, torch.int64])),
        grid=draw(st.sampled_from([0, 0, 1, 3, 8])),
        stale=draw(st.integers(0, 2)),
        seed=draw(st.integers(0, 2**31)),
    )


class Problem:
    """Inputs of one launch. The pool, its gaps, its null block and the table's stale blocks hold NaN."""

    def __init__(self, case, device="cpu"):
        self.case = case
        g = torch.Generator().manual_seed(case.seed)
        size, heads = case.head_size, case.kv_heads * case.per_kv
        # A row of padding is one token on the null block; one that has nothing to run has no tokens either.
        self.lengths = [1 if padding else new for new, _, padding in case.rows]
        self.totals = [1 if padding else new + before for new, before, padding in case.rows]
        width = -(-max(1, *self.totals) // case.block_size)
        blocks = 2 + len(case.rows) * width  # the null block first, a stale one last
        token = case.kv_heads * size + case.gap
        block = 2 * case.block_size * token + case.gap
        storage = poisoned(2 + blocks * block, case.dtype)
        shape, inner = (blocks, case.block_size, case.kv_heads, size), (token, size, 1)
        self.storage = storage.to(device)
        self.key_cache, self.value_cache = (
            self.storage.as_strided(shape, (block, *inner), 2 + part * case.block_size * token) for part in (0, 1)
        )
        if case.layout == "FLASH_ATTN":  # another order of K and V in memory, with the same meaning
            self.key_cache, self.value_cache = self.value_cache, self.key_cache
        ids = 1 + torch.randperm(len(case.rows) * width, generator=g).view(len(case.rows), width)
        table = torch.full((len(case.rows), width + case.stale), blocks - 1)
        self.keys, self.values = [], []
        for row, (_, _, padding) in enumerate(case.rows):
            total = self.totals[row]
            k, v = (torch.randn(total, case.kv_heads, size, generator=g).to(case.dtype) for _ in range(2))
            self.keys.append(k)
            self.values.append(v)
            if padding:
                table[row] = 0
                continue
            used = -(-total // case.block_size)
            table[row, :used] = ids[row, :used]
            place = torch.arange(total)
            at = table[row, place // case.block_size].to(device), (place % case.block_size).to(device)
            self.key_cache[at], self.value_cache[at] = k.to(device), v.to(device)
        tokens = sum(self.lengths)
        wide = torch.randn(tokens + 1, heads * size + case.gap, generator=g).to(case.dtype)
        self.query = wide[:, : heads * size].unflatten(1, (heads, size)).to(device)
        starts = torch.tensor([0, *self.lengths]).cumsum(0)
        self.table, self.starts, self.lens = (
            part.to(device, case.index_dtype) for part in (table, starts, torch.tensor(self.totals))
        )

    def run(self, implementation):
        return implementation(
            self.query,
            self.key_cache,
            self.value_cache,
            self.table,
            self.starts,
            self.lens,
            max(1, *self.lengths),
            self.case.head_size**-0.5,
            self.case.grid,
        )


def expected_of(problem, row, i):
    """[num_heads, head_size] of the i-th query of a row, and max|V| of what it sees."""
    case = problem.case
    last = problem.totals[row] - problem.lengths[row] + i
    seen = [t for t in range(last + 1) if not case.grid or t % case.grid]
    query = problem.query[int(problem.starts[row]) + i].cpu().double()
    if not seen:
        return torch.zeros_like(query), 1.0
    out = []
    for h, q in enumerate(query):
        k, v = (part[row][seen, h // case.per_kv].double() for part in (problem.keys, problem.values))
        out.append(torch.softmax(k @ q * case.head_size**-0.5, 0) @ v)
    return torch.stack(out), max(1.0, float(problem.values[row].abs().max()))


def check_problem(problem, implementation):
    case, before = problem.case, problem.storage.cpu().clone()
    out = problem.run(implementation).cpu()
    assert out.dtype == case.dtype and out.is_contiguous() and out.shape == problem.query.shape
    share = TILED + (FLOAT16_WEIGHTS if case.dtype != torch.float32 else 0)
    for row, (_, _, padding) in enumerate(case.rows):
        for i in range(0 if padding else problem.lengths[row]):
            expected, scale = expected_of(problem, row, i)
            near(f"row {row}, query {i}", out[int(problem.starts[row]) + i], expected, share, scale, case.dtype)
    after = problem.storage.cpu()
    assert torch.equal(before.view(torch.uint8), after.view(torch.uint8)), "the cache was written"


def check(case):
    with patch.multiple(module, MAX_ROWS=case.max_rows, BLOCK_N=case.block_n):
        check_problem(Problem(case), paged_attention_varlen)


MIXED = Case(
    rows=((1, 0, False), (4, 37, False), (1, 0, True), (0, 5, False), (23, 10, False)),
    kv_heads=2,
    per_kv=3,
    head_size=16,
    block_size=5,
)


@given(cases())
@example(MIXED)
@example(replace(MIXED, grid=4, dtype=torch.float16))
@example(replace(MIXED, per_kv=5, max_rows=32, dtype=torch.bfloat16, layout="FLASH_ATTN"))
def test_equals_the_loop_and_writes_nothing_else(case):
    interpreted(check, case)


@given(cases())
@example(MIXED)
def test_the_reference_equals_the_loop_and_writes_nothing_else(case):
    check_problem(Problem(case), paged_attention_varlen_reference)


def check_padding():
    """Its output stays what it was, as that of tokens of no row."""
    problem = Problem(replace(MIXED, rows=((1, 0, True), (2, 3, False), (1, 0, True))))
    marked = torch.full_like(problem.query, 7.0, memory_format=torch.contiguous_format)
    with patch.object(torch, "empty_like", lambda *_, **__: marked):
        out = problem.run(paged_attention_varlen)
    assert out is marked
    assert [bool((token == 7).all()) for token in out] == [True, False, False, True, True]


def test_padding_and_tokens_of_no_row_are_not_written():
    interpreted(check_padding)


def check_far(dtype):
    """Blocks 2^31 elements and more behind the start of a pool that is never committed as a whole."""
    share_memory_with_the_interpreter()
    case = Case(rows=((2, 3, False),), kv_heads=2, block_size=4, gap=0, dtype=dtype)
    near_problem, far_problem = Problem(case), Problem(case)
    stride = 2**30 + 8
    pool = torch.empty(3 * stride, dtype=dtype)
    shape, (_, *inner) = near_problem.key_cache.shape[1:], near_problem.key_cache.stride()
    used = near_problem.table[0, :2].long()
    slots = torch.tensor([8, 9, 10, 11, 4])  # of the tokens, in the far pool
    far_problem.table = torch.tensor([[2, 1]], dtype=torch.int32)
    for name, offset in (("key_cache", 0), ("value_cache", 64)):
        setattr(far_problem, name, pool.as_strided((3, *shape), (stride, *inner), offset))
    at = used.repeat_interleave(4)[:5], torch.tensor([0, 1, 2, 3, 0])
    store_kv(
        near_problem.key_cache[at], near_problem.value_cache[at], far_problem.key_cache, far_problem.value_cache, slots
    )
    assert torch.equal(far_problem.key_cache[2], near_problem.key_cache[used[0]])
    assert torch.equal(far_problem.value_cache[2], near_problem.value_cache[used[0]])
    outputs = [problem.run(paged_attention_varlen)[:2] for problem in (near_problem, far_problem)]
    assert torch.equal(*outputs)


def test_offsets_pass_int32():
    interpreted(check_far, torch.float16)


# One head of K and V of Nemotron-3-Nano.
NANO = Case(((1, 99, False),), per_kv=16, head_size=128, block_size=16, gap=0, dtype=torch.float16)


def measure(case):
    problem = Problem(case)
    names = ("query", "key_cache", "value_cache", "table")
    with patch.multiple(module, MAX_ROWS=case.max_rows, BLOCK_N=case.block_n):
        return count_bytes({name: getattr(problem, name) for name in names}, problem.run, paged_attention_varlen)


@pytest.mark.parametrize(
    ("new", "times"),
    # 4 tokens of 16 heads fill a program of 64 rows; 8 tokens take two, of which the first stops 4 keys earlier.
    [(1, 1), (4, 1), (8, 2)],
)
def test_keys_and_values_are_loaded_once_for_all_heads_of_a_group(new, times):
    case = replace(NANO, rows=((new, 100 - new, False),), max_rows=64, block_n=32)
    counted, out, launches = interpreted(measure, case)
    one = 100 * 128 * 2
    loaded = times * one - (4 * 128 * 2 if times == 2 else 0)
    assert counted["key_cache"] == counted["value_cache"] == (one, 0, loaded, 0)
    assert counted["query"][2] == out[1] == out[3] == new * 16 * 128 * 2
    assert launches == 1


def test_padding_and_keys_on_the_grid_are_not_loaded():
    counted, out, _ = interpreted(measure, replace(NANO, rows=((1, 0, True),)))
    assert counted["key_cache"] == counted["value_cache"] == (0, 0, 0, 0) and out == (0, 0, 0, 0)
    counted, _, _ = interpreted(measure, replace(NANO, grid=4))
    assert counted["key_cache"][0] == counted["value_cache"][0] == 75 * 128 * 2


@dataclass(frozen=True)
class Store:
    slots: tuple[int, ...]
    heads: int
    size: int
    block_size: int
    gap: int
    dtype: torch.dtype


def check_store(case, implementation=store_kv, device="cpu"):
    g = torch.Generator().manual_seed(0)
    count = len(case.slots)
    wide = torch.randn(count, 2 * case.heads * case.size + case.gap, generator=g).to(case.dtype).to(device)
    key, value = (wide[:, i * case.heads * case.size :][:, : case.heads * case.size] for i in (0, 1))
    key, value = (part.unflatten(1, (case.heads, case.size)) for part in (key, value))
    token = case.heads * case.size + case.gap
    block = 2 * case.block_size * token + case.gap
    blocks = 1 + max(0, *case.slots) // case.block_size
    storages = [poisoned(blocks * block, case.dtype).to(device) for _ in range(2)]
    for storage, write in zip(storages, (implementation, None), strict=True):
        shape, strides = (blocks, case.block_size, case.heads, case.size), (block, token, case.size, 1)
        caches = [storage.as_strided(shape, strides, part * case.block_size * token) for part in (0, 1)]
        if write is not None:
            write(key, value, *caches, torch.tensor(case.slots, device=device))
            continue
        for i, slot in enumerate(case.slots):
            if slot >= 0:
                caches[0][slot // case.block_size, slot % case.block_size] = key[i]
                caches[1][slot // case.block_size, slot % case.block_size] = value[i]
    assert torch.equal(storages[0].view(torch.uint8), storages[1].view(torch.uint8))


stores = st.builds(
    Store,
    slots=st.lists(st.integers(-2, 20), min_size=1, max_size=6, unique_by=lambda s: s if s >= 0 else object()).map(
        tuple
    ),
    heads=st.integers(1, 3),
    size=st.sampled_from([1, 3, 8]),
    block_size=st.sampled_from([1, 3, 16]),
    gap=st.sampled_from([0, 5]),
    dtype=st.sampled_from(list(ROUNDING)),
)


@given(stores)
def test_storing_writes_the_slots_and_nothing_else(case):
    interpreted(check_store, case)


@given(stores)
def test_the_torch_way_writes_the_same(case):
    def write(key, value, key_cache, value_cache, slots):
        write_kv(key, value, key_cache, value_cache, slot_cells(slots, case.block_size))

    check_store(case, write)


def test_no_tokens_are_no_launch():
    cache = torch.zeros(1, 2, 1, 4)
    store_kv(torch.zeros(0, 1, 4), torch.zeros(0, 1, 4), cache, cache, torch.zeros(0, dtype=torch.int64))


@pytest.mark.parametrize("target", TARGETS)
def test_compiles_without_spills(target):
    """The smallest and the largest tile, and the store; `hybrid-kv kernels` compiles all."""
    for case in [*aot_cases(TARGETS[target].warp_size), *store.aot_cases()]:
        if case.shape.startswith("Nemotron-3-Nano"):
            metrics = read_metrics(case, target, compile_case(case, target))
            assert metrics.spill_bytes == 0 and metrics.blocks_per_sm >= 2, (case, metrics)
            wide = 64 if target == "gfx942" else 128  # 64 lanes take a token's K with half as much each
            assert metrics.load_bits >= wide and metrics.store_bits >= 64, (case, metrics)


def test_float32_keeps_its_digits():
    case = next(case for case in aot_cases() if case.shape == "Nemotron-3-Nano, K=0")
    wide = {name: kind.replace("bf16", "fp32") for name, kind in case.signature.items()}
    ptx = compile_case(replace(case, signature=wide), "sm_90").asm["ptx"]
    assert "fma" in ptx and "tf32" not in ptx


BAD = {
    "query": (lambda t: t.double(), "torch.float64"),
    "key_cache": (lambda t: t[..., :-1], r"key_cache has shape"),
    "value_cache": (lambda t: t.half(), "torch.float16; it must be one of torch.float32"),
    "table": (lambda t: t[0], "dimensions"),
    "table deep": (lambda t: t[None], "dimensions"),
    "query flat": (lambda t: t[0], "dimensions"),
    "query deep": (lambda t: t[None], "dimensions"),
    "key_cache flat": (lambda t: t[0], "dimensions"),
    "key_cache deep": (lambda t: t[None], "dimensions"),
    "starts": (lambda t: t[1:], r"has shape \(1,\); it must be \(2,\)"),
    "lens": (lambda t: t.float(), "torch.float32"),
}


@pytest.mark.parametrize("name", BAD)
def test_refuses_what_the_kernel_would_misread(name):
    problem = Problem(Case(rows=((2, 1, False),), kv_heads=2))
    change, message = BAD[name]
    name = name.split()[0]
    setattr(problem, name, change(getattr(problem, name)))
    with pytest.raises(ValueError, match=message):
        problem.run(paged_attention_varlen)


def test_refuses_heads_lengths_grids_and_slots_that_do_not_fit():
    problem = Problem(Case(rows=((2, 1, False),), kv_heads=2, per_kv=2))
    problem.query = problem.query[:, :3]
    with pytest.raises(ValueError, match="2 heads of K do not divide 3 heads"):
        problem.run(paged_attention_varlen)
    problem = Problem(Case(rows=((2, 1, False),), grid=-1))
    with pytest.raises(ValueError, match="grid=-1"):
        problem.run(paged_attention_varlen)
    with pytest.raises(ValueError, match="max_query_len=0 must be >= 1"):
        problem = Problem(Case(rows=((2, 1, False),)))
        problem.run(lambda *arguments: paged_attention_varlen(*arguments[:6], 0, *arguments[7:]))
    key, cache = torch.zeros(2, 1, 4), torch.zeros(3, 2, 1, 4)
    wrong_dims = [(part, key, cache, cache) for part in (key[0], key[None])]
    wrong_dims += [(key, key, part, cache) for part in (cache[0], cache[None])]
    for wrong in wrong_dims:
        with pytest.raises(ValueError, match="must have 3 and 4 dimensions"):
            store_kv(*wrong, torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ValueError, match="slots has shape"):
        store_kv(key, key, cache, cache, torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match="value is"):
        store_kv(key, key.half(), cache, cache, torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ValueError, match="value_cache has shape"):
        store_kv(key, key, cache, cache[:2], torch.zeros(2, dtype=torch.int64))


@pytest.mark.parametrize("length", [1, 2, FOLDED_QUERIES, FOLDED_QUERIES + 1])
def test_queries_that_see_everything_need_no_mask(length):
    g = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, n, h, 4, generator=g) for n, h in ((length, 6), (5, 2), (5, 2)))
    out = attend_tokens(query, key, value, None, 0.5)
    mask = attention_mask(torch.full((2, length), 4), 5, 3, torch.float32)
    torch.testing.assert_close(out, attend_tokens(query, key, value, mask, 0.5), rtol=0, atol=TOLERANCE)
    wide = (part.repeat_interleave(3, 2) for part in (key, value))
    torch.testing.assert_close(out, attend_tokens(query, *wide, None, 0.5), rtol=0, atol=TOLERANCE)


def test_imports_without_triton():
    code = "import sys; sys.modules['triton'] = None; import hybrid_kv.kernels.paged_attention"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[3])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", list(ROUNDING))
def test_on_a_gpu(dtype):
    rows = ((1, 500, False), (4, 37, False), (1, 0, True), (0, 5, False), (130, 10, False))
    check_problem(Problem(replace(NANO, rows=rows, kv_heads=2, dtype=dtype, gap=16), "cuda"), paged_attention_varlen)
    check_store(Store((3, -1, 40), 2, 128, 16, 16, dtype), store_kv, "cuda")
