"""The number of threads that torch takes.

Two of them on two cores that are busy cost a small model 20 to 70 times what one costs: each
operation waits for both.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

SMALL_BYTES = 2**26  # of weights; operations of larger models are worth several threads


@contextmanager
def one_thread() -> Iterator[None]:
    """Give torch one thread, in this process."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def is_small(folder: str | Path) -> bool:
    """Return whether one thread is enough for the checkpoint in a folder."""
    return sum(file.stat().st_size for file in Path(folder).glob("*.safetensors")) < SMALL_BYTES


def threads_for(folder: str | Path) -> AbstractContextManager[None]:
    """Give torch one thread if the checkpoint in a folder is small, else as many as before."""
    return one_thread() if is_small(folder) else nullcontext()
