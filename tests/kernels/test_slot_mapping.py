import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_kv.kernels.slot_mapping import PAD_SLOT, slot_mapping
from tests.kernels.definitions import slot


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_matches_tokens_that_are_dealt_out_one_by_one(data):
    interleave = data.draw(st.sampled_from([1, 2, 4]))
    block_size = interleave * data.draw(st.integers(1, 6))
    cp_size = data.draw(st.integers(1, 4))
    cp_rank = data.draw(st.integers(0, cp_size - 1))
    width = data.draw(st.integers(1, 4))
    table = data.draw(st.lists(st.lists(st.integers(1, 999), min_size=width, max_size=width), min_size=1, max_size=3))
    limit = width * block_size * cp_size
    tokens = data.draw(st.lists(st.tuples(st.integers(0, len(table) - 1), st.integers(0, limit + 5)), max_size=12))
    rows, positions = (torch.tensor([t[i] for t in tokens], dtype=torch.int64) for i in (0, 1))
    context = (cp_size, cp_rank) if interleave == 1 else (cp_size, cp_rank, interleave)
    slots = slot_mapping(torch.tensor(table, dtype=torch.int32), rows, positions, block_size, *context)
    assert slots.dtype == torch.int64
    assert slots.tolist() == [slot(table[r], p, block_size, cp_size, cp_rank, interleave) for r, p in tokens]


@pytest.mark.parametrize(("cp_size", "interleave"), [(1, 1), (2, 1), (4, 1), (2, 4), (3, 2), (4, 8)])
def test_every_token_has_one_owner_and_every_local_slot_one_token(cp_size, interleave):
    block_size, blocks = 16, [5, 2, 9]
    table = torch.tensor([blocks], dtype=torch.int32)
    positions = torch.arange(block_size * cp_size * len(blocks))
    rows = torch.zeros_like(positions)
    ranks = torch.stack(
        [slot_mapping(table, rows, positions, block_size, cp_size, rank, interleave) for rank in range(cp_size)]
    )
    assert ((ranks != PAD_SLOT).sum(dim=0) == 1).all()
    every_slot = sorted(b * block_size + k for b in blocks for k in range(block_size))
    for slots in ranks:
        assert sorted(slots[slots != PAD_SLOT].tolist()) == every_slot


def test_a_position_beyond_the_row_is_pad():
    """vllm!54296: not the first block of the next row."""
    table = torch.tensor([[1, 2], [3, 4]], dtype=torch.int32)
    slots = slot_mapping(table, torch.tensor([0, 0]), torch.tensor([31, 32]), 16)
    assert slots.tolist() == [2 * 16 + 15, PAD_SLOT]


def test_slots_beyond_int32_are_right():
    table = torch.tensor([[2**30]], dtype=torch.int32)
    assert slot_mapping(table, torch.tensor([0]), torch.tensor([15]), 16).tolist() == [2**34 + 15]
