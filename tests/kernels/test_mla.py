"""Attention over a latent cache against the definition in float64.

Tolerances, of max|latent|. float32: softmax weights sum to one, and scores of order ten carry an
error of about 1e-6, so 5e-6, as for paged attention; float64: 1e-13; bfloat16: 2e-2, since torch
keeps weights and outputs in it.
"""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from hybrid_kv.kernels.common.strided import gather_tokens
from hybrid_kv.kernels.mla import attend_latent, store_latent
from hybrid_kv.kernels.paged_attention import attention_mask, slot_cells, token_index
from hybrid_kv.kernels.paged_attention.reference import FOLDED_QUERIES
from tests.kernels import definitions
from tests.kernels.harness import strided_states

Problem = tuple[list[int], list[int], int, int, int, int, torch.dtype, torch.Generator]

TOLERANCE = {torch.float32: 5e-6, torch.float64: 1e-13, torch.bfloat16: 2e-2}


def strided_cache(
    num_blocks: int, block_size: int, width: int, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """A layer's view with the gaps of other layers' pages, NaN everywhere."""
    return strided_states(torch.full((num_blocks, block_size, width), torch.nan, dtype=dtype))


def stored(
    latents: list[torch.Tensor], block_size: int, g: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """A cache with the rows' latents in blocks of any order, and its block table."""
    columns = -(-max(map(len, latents)) // block_size)
    cache = strided_cache(
        1 + columns * len(latents), block_size, latents[0].shape[1], latents[0].dtype
    )
    table = (1 + torch.randperm(len(cache) - 1, generator=g)).view(len(latents), columns).int()
    for row, latent in enumerate(latents):
        place = torch.arange(len(latent))
        slots = table[row].long()[place // block_size] * block_size + place % block_size
        store_latent(latent, cache, slot_cells(slots, block_size))
    return cache, table


def padded_positions(totals: list[int], new: list[int]) -> torch.Tensor:
    """Return each row's last `new` positions, [num_rows, max(new)], its last one repeated."""
    steps = torch.minimum(torch.arange(max(new)), torch.tensor(new)[:, None] - 1)
    return (torch.tensor(totals) - torch.tensor(new))[:, None] + steps


@st.composite
def problems(draw: DrawFn) -> Problem:
    totals = draw(st.lists(st.integers(1, FOLDED_QUERIES + 4), min_size=1, max_size=3))
    decodes = draw(st.booleans())
    new = [1 if decodes else draw(st.integers(1, total)) for total in totals]
    sizes = [draw(st.integers(1, most)) for most in (5, 3, 6, 4)]  # block, heads, rank, rope
    dtype = draw(st.sampled_from(list(TOLERANCE)))
    return totals, new, *sizes, dtype, torch.Generator().manual_seed(draw(st.integers(0, 2**31)))


@given(problems())
def test_rows_read_their_own_blocks_whatever_lies_in_unused_slots(problem: Problem) -> None:
    totals, new, block_size, heads, rank, rope, dtype, g = problem
    latents = [torch.randn(total, rank + rope, generator=g).to(dtype) for total in totals]
    cache, table = stored(latents, block_size, g)
    query = torch.randn(len(totals), max(new), heads, rank + rope, generator=g).to(dtype)
    positions = padded_positions(totals, new)
    before = [part.clone() for part in (query, cache)]
    num_keys = max(totals)
    index = token_index(cache, table, positions.amax(1), num_keys)
    read = gather_tokens(cache, index).unflatten(0, (-1, num_keys))
    out = attend_latent(query, read, attention_mask(positions, num_keys, heads, dtype), 0.7, rank)
    assert all(
        torch.equal(part.nan_to_num(), old.nan_to_num())
        for part, old in zip((query, cache), before, strict=True)
    )
    assert out.shape == (*query.shape[:3], rank) and out.dtype == dtype
    for row, latent in enumerate(latents):
        keys = latent.double().numpy()[:, None]
        operands = query[row].double().numpy(), keys, keys[..., :rank]
        expected = torch.from_numpy(definitions.attention(*operands, positions[row].tolist(), 0.7))
        difference = (out[row].double() - expected).abs().max()
        assert float(difference) <= TOLERANCE[dtype] * max(1.0, float(latent.double().abs().max()))


@given(
    st.lists(
        st.integers(-2, 11),
        min_size=1,
        max_size=8,
        unique_by=lambda slot: slot if slot >= 0 else object(),
    )
)
def test_a_negative_slot_stores_nothing(slots: list[int]) -> None:
    cache = strided_cache(3, 4, 2).zero_()
    latent = torch.arange(1, 1 + len(slots) * 2, dtype=torch.float32).view(-1, 2)
    store_latent(latent, cache, slot_cells(torch.tensor(slots), 4))
    expected = torch.zeros(12, 2)
    for slot, token in zip(slots, latent, strict=True):
        if slot >= 0:
            expected[slot] = token
    assert torch.equal(cache.reshape(12, 2), expected)
