import numpy as np
import pytest
import torch

from hybrid_kv.kernels.kernel_blocks import expand_list, expand_numpy, expand_torch, gather_kernel_blocks


@pytest.mark.parametrize("num_blocks", [0, 1, 7, 256])
@pytest.mark.parametrize("bpk", [1, 2, 8, 34])
def test_all_expansions_are_equal(num_blocks, bpk):
    ids = np.random.default_rng(num_blocks).integers(0, (1 << 31) // bpk, num_blocks).astype(np.int32)
    expected = [int(b) * bpk + k for b in ids for k in range(bpk)]
    assert expand_list(ids.tolist(), bpk) == expected
    for given in (ids, ids.tolist()):
        from_numpy = expand_numpy(given, bpk)
        assert from_numpy.dtype == np.int32
        assert from_numpy.tolist() == expected
    from_torch = expand_torch(torch.from_numpy(ids), torch.arange(bpk, dtype=torch.int32))
    assert from_torch.dtype == torch.int32
    assert from_torch.tolist() == expected


@pytest.mark.parametrize("bpk", [1, 3])
def test_gather_takes_the_rows_in_batch_order_and_leaves_the_rest(bpk):
    table = torch.arange(12, dtype=torch.int32).view(3, 4)
    out = torch.full((2, 4 * bpk), -7, dtype=torch.int32)
    gather_kernel_blocks(table, torch.tensor([2, 0]), 3, torch.arange(bpk, dtype=torch.int32), out)
    assert out[:, : 3 * bpk].tolist() == [expand_list([8, 9, 10], bpk), expand_list([0, 1, 2], bpk)]
    assert (out[:, 3 * bpk :] == -7).all()
