"""Which state each row uses, and who must not read an old one."""

import torch

from hybrid_kv.attention.mamba import build_mamba_metadata
from tests.attention.test_paged import common

TABLE = torch.tensor([[5, 90], [3, 91], [8, 92], [1, 93]], dtype=torch.int32)


def test_decodes_come_first_and_only_a_first_chunk_starts_from_nothing():
    persistent = torch.full((6,), 77)
    metadata = build_mamba_metadata(common([6, 0, 4, 0], [1, 3, 2, 1], num_decodes=1), TABLE, persistent)
    assert metadata.num_decodes == 1
    assert metadata.state_indices.tolist() == [5, 3, 8, 1]
    assert metadata.state_indices.dtype == torch.int64
    assert metadata.state_indices.data_ptr() == persistent.data_ptr()
    assert metadata.prefill_rows is not None and metadata.has_initial_state is not None
    assert metadata.prefill_rows.lengths.tolist() == [3, 2, 1]
    assert metadata.has_initial_state.tolist() == [False, True, False]


def test_a_pure_decode_step_has_no_prefill_rows():
    persistent = torch.full((6,), 77)
    metadata = build_mamba_metadata(common([6, 2], [1, 1], num_decodes=2, padding=2), TABLE, persistent)
    assert metadata.num_decodes == 4
    assert metadata.prefill_rows is None
    assert metadata.has_initial_state is None
