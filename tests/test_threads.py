"""A small checkpoint gets one thread; afterwards there are as many as before."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hybrid_kv.threads import SMALL_BYTES, one_thread, threads_for


@pytest.fixture(autouse=True)
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_one_thread_until_the_end_even_of_an_error() -> None:
    with pytest.raises(ValueError, match="injected"), one_thread():
        assert torch.get_num_threads() == 1
        raise ValueError("injected")
    assert torch.get_num_threads() == 3


@pytest.mark.parametrize(("num_bytes", "num_threads"), [(SMALL_BYTES - 1, 1), (SMALL_BYTES, 3)])
def test_the_shards_of_a_checkpoint_are_counted_together(
    tmp_path: Path, num_bytes: int, num_threads: int
) -> None:
    for name, size in (("a.safetensors", 1000), ("b.safetensors", num_bytes - 1000)):
        with open(tmp_path / name, "wb") as file:
            file.truncate(size)
    with threads_for(tmp_path):
        assert torch.get_num_threads() == num_threads
    assert torch.get_num_threads() == 3
