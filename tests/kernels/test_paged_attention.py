"""Writing and reading K and V through a block table, against a loop over queries and heads in float64.

Tolerance: 5e-6 of max|V|; softmax weights sum to one, and scores of order ten carry a float32 error of about 1e-6.
"""

import torch
from hypothesis import given
from hypothesis import strategies as st

from hybrid_kv.cache.backend import FlashAttentionBackend, TorchBackend
from hybrid_kv.cache.layout import attention_view, split_kv
from hybrid_kv.cache.spec import FullAttentionSpec
from hybrid_kv.kernels.paged_attention import gather_kv, paged_attention, write_kv

TOLERANCE = 5e-6


def strided_cache(num_blocks, block_size, kv_heads, head_size, backend):
    """K and V as `cache.layout` makes them, every byte poisoned: -1 is NaN in float32."""
    spec = FullAttentionSpec(block_size, kv_heads, head_size, torch.float32)
    raw = torch.full((num_blocks * spec.page_size_bytes,), -1, dtype=torch.int8)
    return split_kv(attention_view(raw, num_blocks, spec, block_size, backend), backend)


@st.composite
def problems(draw):
    totals = draw(st.lists(st.integers(1, 12), min_size=1, max_size=3))
    new = [draw(st.integers(1, total)) for total in totals]
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
        write_kv(keys[row], values[row], key_cache, value_cache, slots)
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
    write_kv(key, -key, key_cache, value_cache, torch.tensor(slots))
    expected = torch.zeros(12, 2, 3)
    for slot, token in zip(slots, key, strict=True):
        if slot >= 0:
            expected[slot] = token
    assert torch.equal(key_cache.reshape(12, 2, 3), expected)
    assert torch.equal(value_cache.reshape(12, 2, 3), -expected)


def test_gather_follows_the_table_order():
    key_cache, _ = strided_cache(4, 2, 1, 1, TorchBackend)
    key_cache.copy_(torch.arange(8.0).view(4, 2, 1, 1))
    gathered = gather_kv(key_cache, torch.tensor([[3, 1], [2, 2]], dtype=torch.int32))
    assert gathered.flatten(1).tolist() == [[6, 7, 2, 3], [4, 5, 4, 5]]
