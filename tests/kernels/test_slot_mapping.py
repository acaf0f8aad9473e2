from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_kv.kernels.slot_mapping import slot_mapping
from tests.kernels.definitions import slot


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_matches_tokens_that_are_dealt_out_one_by_one(data: st.DataObject) -> None:
    """One beyond the row has no slot, not one in the first block of the next row (vllm!54296)."""
    interleave = data.draw(st.sampled_from([1, 2, 4]))
    block_size = interleave * data.draw(st.integers(1, 6))
    cp_size = data.draw(st.integers(1, 4))
    cp_rank = data.draw(st.integers(0, cp_size - 1))
    width = data.draw(st.integers(1, 4))
    table = data.draw(
        st.lists(
            st.lists(st.integers(1, 999), min_size=width, max_size=width), min_size=1, max_size=3
        )
    )
    limit = width * block_size * cp_size
    tokens = data.draw(
        st.lists(st.tuples(st.integers(0, len(table) - 1), st.integers(0, limit + 5)), max_size=12)
    )
    rows, positions = (torch.tensor([t[i] for t in tokens], dtype=torch.int64) for i in (0, 1))
    options = {"cp_size": (cp_size, 1), "cp_rank": (cp_rank, 0), "cp_interleave": (interleave, 1)}
    given = {name: value for name, (value, default) in options.items() if value != default}
    slots = slot_mapping(
        torch.tensor(table, dtype=torch.int32), rows, positions, block_size, **given
    )
    assert slots.dtype == torch.int64
    assert slots.tolist() == [
        slot(table[r], p, block_size, cp_size, cp_rank, interleave) for r, p in tokens
    ]


def test_slots_beyond_int32_are_right() -> None:
    table = torch.tensor([[2**30]], dtype=torch.int32)
    assert slot_mapping(table, torch.tensor([0]), torch.tensor([15]), 16).tolist() == [2**34 + 15]
