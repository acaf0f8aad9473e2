from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from hybrid_kv.kernels.kernel_blocks import expand_list, expand_numpy, expand_torch, expand_triton, gather_kernel_blocks
from hybrid_kv.kernels.kernel_blocks.launch import aot_cases
from hybrid_kv.static.compile import TARGETS, compile_case, read_metrics
from tests.kernels.interpreter import count_bytes, interpreted, share_memory_with_the_interpreter
from tests.kernels.programs import programs


@pytest.mark.parametrize("num_blocks", [0, 1, 7, 256])
@pytest.mark.parametrize("bpk", [1, 2, 8, 34])
@pytest.mark.parametrize("gap", [None, 0, 3])
def test_all_expansions_are_equal(num_blocks, bpk, gap):
    stride = bpk + (gap or 0)
    ids = np.random.default_rng(num_blocks).integers(0, (1 << 31) // stride, num_blocks).astype(np.int32)
    expected = [int(b) * stride + k for b in ids for k in range(bpk)]
    given_stride = () if gap is None else (stride,)
    assert expand_list(ids.tolist(), bpk, *given_stride) == expected
    for given_ids in (ids, ids.tolist()):
        from_numpy = expand_numpy(given_ids, bpk, *given_stride)
        assert from_numpy.dtype == np.int32
        assert from_numpy.tolist() == expected
    from_torch = expand_torch(torch.from_numpy(ids), torch.arange(bpk, dtype=torch.int32), *given_stride)
    assert from_torch.dtype == torch.int32
    assert from_torch.tolist() == expected


@dataclass(frozen=True)
class Case:
    shape: tuple[int, ...]
    bpk: int
    stride: int | None
    seed: int = 0


@st.composite
def cases(draw):
    bpk = draw(st.integers(1, 40))
    return Case(
        shape=(*draw(st.lists(st.integers(0, 9), max_size=1)), draw(st.integers(0, 300))),
        bpk=bpk,
        stride=draw(st.one_of(st.none(), st.integers(bpk, bpk + 5))),
        seed=draw(st.integers(0, 99)),
    )


def check_kernel(case):
    """Also of negative ids, which stay in front of the first block."""
    largest = (1 << 31) // (case.stride or case.bpk)
    g = torch.Generator().manual_seed(case.seed)
    ids = torch.randint(-largest, largest, case.shape, generator=g, dtype=torch.int32)
    got = expand_triton(ids, case.bpk, case.stride)
    expected = expand_torch(ids, torch.arange(case.bpk, dtype=torch.int32), case.stride)
    assert got.dtype == torch.int32 and torch.equal(got, expected)


@given(cases())
@example(Case((8, 128), 1, None))
@example(Case((3, 1023), 7, 9))
def test_the_kernel_equals_the_other_expansions(case):
    interpreted(check_kernel, case)


def check_far():
    """2^31 ids and more, 8 GB that are never committed: only what the last program writes is."""
    share_memory_with_the_interpreter()
    bpk = 2**20
    with programs(lambda grid: [(grid[0] - 1, 0)]):
        out = expand_triton(torch.zeros(2**11 + 1, dtype=torch.int32).index_fill_(0, torch.tensor(2**11), 5), bpk)
    assert out.numel() > 2**31
    assert out[-3:].tolist() == [6 * bpk - 3, 6 * bpk - 2, 6 * bpk - 1]


def test_offsets_pass_int32():
    interpreted(check_far)


def measure():
    ids = torch.arange(256, dtype=torch.int32)
    return count_bytes({"ids": ids}, expand_triton, ids, 8)


def test_traffic_is_every_id_once():
    counted, out, launches = interpreted(measure)
    assert counted["ids"][:2] == (256 * 4, 0)
    assert out == (0, 256 * 8 * 4, 0, 256 * 8 * 4)
    assert launches == 1


@pytest.mark.parametrize("target", TARGETS)
def test_compiles_without_spills(target):
    for case in aot_cases()[-1:]:  # `hybrid-kv kernels` compiles all.
        metrics = read_metrics(case, target, compile_case(case, target))
        assert metrics.spill_bytes == 0 and metrics.registers <= 64, (case, metrics)


@pytest.mark.parametrize(
    ("change", "bpk", "stride", "message"),
    [
        (lambda t: t.long(), 2, None, "torch.int64"),
        (lambda t: t.repeat(2, 1).t(), 2, None, "must be contiguous"),
        (lambda t: t, 0, None, "0 kernel blocks every 0"),
        (lambda t: t, 3, 2, "3 kernel blocks every 2"),
    ],
)
def test_refuses_what_the_kernel_would_misread(change, bpk, stride, message):
    with pytest.raises(ValueError, match=message):
        expand_triton(change(torch.arange(4, dtype=torch.int32)), bpk, stride)


@pytest.mark.parametrize("bpk", [1, 3])
def test_gather_takes_the_rows_in_batch_order_and_leaves_the_rest(bpk):
    table = torch.arange(12, dtype=torch.int32).view(3, 4)
    out = torch.full((2, 4 * bpk), -7, dtype=torch.int32)
    gather_kernel_blocks(table, torch.tensor([2, 0]), 3, torch.arange(bpk, dtype=torch.int32), out)
    assert out[:, : 3 * bpk].tolist() == [expand_list([8, 9, 10], bpk), expand_list([0, 1, 2], bpk)]
    assert (out[:, 3 * bpk :] == -7).all()


@pytest.mark.gpu
def test_on_a_gpu():
    ids = torch.randint(0, 1000, (5, 241), dtype=torch.int32)
    expected = expand_torch(ids, torch.arange(131, dtype=torch.int32), 140)
    assert torch.equal(expand_triton(ids.cuda(), 131, 140).cpu(), expected)
