"""What each part of a step reads: its own tokens, positions and blocks."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybrid_kv.attention.common import CommonAttentionMetadata
from hybrid_kv.attention.paged import build_paged_attention_metadata


def common(computed, lens, num_decodes, padding=0):
    """A batch whose first `num_decodes` rows are decodes; padding rows follow them (only if there are no prefills)."""
    computed, lens = [*computed, *[0] * padding], [*lens, *[1] * padding]
    positions = [torch.arange(start, start + n) for start, n in zip(computed, lens, strict=True)]
    num_reqs, num_tokens = len(lens) - padding, sum(lens) - padding
    return CommonAttentionMetadata(
        num_reqs=num_reqs,
        num_reqs_padded=len(lens),
        num_tokens=num_tokens,
        num_tokens_padded=sum(lens),
        num_decodes=num_decodes + padding,
        num_decode_tokens=sum(lens[:num_decodes]) + padding,
        query_lens=np.array(lens, dtype=np.int64),
        num_computed_tokens=np.array(computed, dtype=np.int64),
        positions=torch.cat(positions),
        max_seq_len=max(a + b for a, b in zip(computed, lens, strict=True)),
    )


@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 4)), max_size=4),  # with up to 3 drafts
    st.lists(st.tuples(st.integers(0, 15), st.integers(1, 9)), max_size=4),
    st.integers(1, 6),
)
def test_each_part_has_its_rows(decodes, prefills, kernel_block_size):
    if not decodes and not prefills:
        return
    computed, lens = zip(*decodes, *prefills, strict=True)
    batch = common(computed, lens, len(decodes))
    table = torch.arange(len(lens) * 40, dtype=torch.int32).view(len(lens), 40)
    slots = torch.arange(sum(lens))
    metadata = build_paged_attention_metadata(batch, table, slots, kernel_block_size)
    assert metadata.slots is slots
    used = -(-max(a + b for a, b in zip(computed, lens, strict=True)) // kernel_block_size)
    row = token = 0
    for part in metadata.parts:
        assert part.start == token
        lengths = part.rows.lengths.tolist()
        assert lengths == list(lens[row : row + len(lengths)])
        assert torch.equal(part.block_table, table[row : row + len(lengths), :used])
        for i, n in enumerate(lengths):
            assert part.positions[i, :n].tolist() == list(range(computed[row + i], computed[row + i] + n))
        assert part.num_tokens == sum(lengths)
        row, token = row + len(lengths), token + part.num_tokens
    assert (row, token) == (len(lens), sum(lens))
    assert [part.rows.num_rows for part in metadata.parts] == [n for n in (len(decodes), len(prefills)) if n]


def test_padding_rows_are_decodes_at_position_zero():
    batch = common([7, 3], [1, 1], 2, padding=2)
    table = torch.zeros(4, 9, dtype=torch.int32)
    (part,) = build_paged_attention_metadata(batch, table, torch.tensor([7, 9, -1, -1]), 4).parts
    assert part.positions.flatten().tolist() == [7, 3, 0, 0]
    assert part.block_table.shape == (4, 2)
