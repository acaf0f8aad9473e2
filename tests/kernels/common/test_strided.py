"""Blocks at any stride are read and written as an index would."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybrid_kv.kernels.common.strided import copy_blocks, gather_tokens, token_places


def strided(
    blocks: int,
    tokens: int,
    inner: int,
    gap: int,
    generator: torch.Generator,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a view [blocks, tokens, inner] with foreign elements before, between and after."""
    page = tokens * inner + gap
    storage = torch.randn(1 + (blocks - 1) * page + tokens * inner, generator=generator).to(dtype)
    return storage, storage.as_strided((blocks, tokens, inner), (page, inner, 1), 1)


@given(
    st.integers(1, 4), st.integers(1, 3), st.integers(1, 6), st.integers(0, 6), st.integers(0, 99)
)
def test_tokens_are_gathered_from_any_strides(
    blocks: int, tokens: int, inner: int, gap: int, seed: int
) -> None:
    """With a gap the stride of a block may be no multiple of a token's."""
    g = torch.Generator().manual_seed(seed)
    _, cache = strided(blocks, tokens, inner, gap, g)
    at = torch.randint(blocks, (2, 3), generator=g), torch.randint(tokens, (2, 3), generator=g)
    found = gather_tokens(cache, token_places(cache, *at).flatten())
    assert torch.equal(found.view(2, 3, inner), cache[at])


@given(
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int16]),
    st.integers(1, 3),
    st.sampled_from([1, 3, 4, 8, 16]),
    st.integers(0, 9),
    st.integers(0, 1),
    st.integers(0, 99),
)
def test_blocks_are_copied_whole_and_nothing_else(
    dtype: torch.dtype, tokens: int, inner: int, gap: int, start: int, seed: int
) -> None:
    """Sizes, gaps and addresses that are multiples of 16 bytes, and others."""
    g = torch.Generator().manual_seed(seed)
    page = tokens * inner + gap
    storage = (torch.randn(start + 5 * page, generator=g) * 99).to(dtype)
    pool = storage.as_strided((5, tokens, inner), (page, inner, 1), start)
    order = torch.randperm(5, generator=g)[:3]
    values = (torch.randn(3, tokens, inner, generator=g) * 99).to(dtype)
    expected = storage.clone()
    expected.as_strided((5, tokens, inner), (page, inner, 1), start)[order] = values
    copy_blocks(pool, order, values)
    assert torch.equal(storage, expected)


@pytest.mark.parametrize("bits", [0x7F800001, 0x7FC12345, -1])
def test_bits_stay_as_they_are(bits: int) -> None:
    """Planes of a split state are no numbers, and a NaN may carry anything."""
    pool = torch.zeros(3, 4, dtype=torch.int32)
    copy_blocks(
        pool.view(torch.float32),
        torch.tensor([2]),
        torch.full((1, 4), bits).int().view(torch.float32),
    )
    assert pool.tolist() == [[0] * 4, [0] * 4, [torch.tensor(bits).int().item()] * 4]
