"""Block ids to kernel blocks: the kernel's result, and the uploads and launches of each way."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bench import kernel_blocks
from bench.harness.cells import WrongResultError
from tests.kernels.interpreter import interpreted

pytest.importorskip("triton")


def kernel_and_reference(ids: list[list[int]], bpk: int) -> tuple[list[list[int]], list[list[int]]]:
    """Kernel blocks of a table by the kernel and by torch, in which the interpreter has no part."""
    table, offsets = torch.tensor(ids, dtype=torch.int32), torch.arange(bpk, dtype=torch.int32)
    return kernel_blocks.by_kernel(table, offsets).tolist(), kernel_blocks.expand_torch(
        table, offsets
    ).tolist()


@st.composite
def tables(draw: st.DrawFn) -> tuple[list[list[int]], int]:
    """Rows of equal length, some longer than a program; ids as large as int32 takes."""
    bpk = draw(st.sampled_from([1, 2, 3, 8, 34, 1500]))
    rows, width = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 7, 31, 700]))
    last = 2**31 // bpk - 1
    seed = draw(st.integers(0, 2**20))
    ids = [
        [(seed + 7919 * (row * width + column)) % last for column in range(width)]
        for row in range(rows)
    ]
    ids[-1][-1] = last
    return ids, bpk


@settings(max_examples=15)  # The interpreter is slow.
@given(tables())
def test_the_kernel_is_the_reference(table: tuple[list[list[int]], int]) -> None:
    found, wanted = interpreted(kernel_and_reference, *table)
    assert found == wanted


@pytest.mark.parametrize(("num_ids", "bpk"), [(1, 1), (70, 34)])
@pytest.mark.parametrize("subject", kernel_blocks.WAYS)
def test_uploads_and_launches_are_counted(subject: str, num_ids: int, bpk: int) -> None:
    found = {
        name: count.value
        for name, count in interpreted(kernel_blocks.count, num_ids, bpk, subject).items()
    }
    on_host = subject in ("list", "numpy")
    assert (found["uploads"], found["launches"]) == (1, int(not on_host))
    # and six more arrays, none of them longer than 16 bytes
    ids_of_engine = 16 * -(-4 * num_ids // 16)
    wanted = {"engine": ids_of_engine + 6 * 16}.get(subject, 4 * num_ids * (bpk if on_host else 1))
    assert found["upload_bytes"] == wanted


def message_of_a_wrong_kernel(subject: str) -> str:
    wrong = kernel_blocks.WAYS[subject]
    send = wrong.send

    def late(way: Any) -> torch.Tensor:
        return send(way).roll(1)

    with patch.object(wrong, "send", late), pytest.raises(WrongResultError) as raised:
        kernel_blocks.count(5, 8, subject)
    return str(raised.value)


@pytest.mark.parametrize("subject", kernel_blocks.WAYS)
def test_what_is_wrong_on_the_device_is_not_counted(subject: str) -> None:
    assert interpreted(message_of_a_wrong_kernel, subject).startswith("kernel blocks: ")


def test_no_rival_is_held_against_the_engine() -> None:
    """Its launch does a whole step's work, so no ratio of these times is a verdict."""
    expansions = [
        cell for cell in kernel_blocks.cells() if cell.benchmark in ("expand", "expand_device")
    ]
    assert {cell.promise for cell in expansions if cell.params["subject"] != "engine"} == {0.0}
    assert {cell.promise for cell in expansions if cell.params["subject"] == "engine"} == {None}
