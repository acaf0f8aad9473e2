"""Slots of the host that kernels read in place, and a report of a slot rewritten too early.

vLLM hands each step's numbers to kernels in slots that it uses in turn. The host may write a slot
again once it has waited for the last kernel that got it.
"""

from __future__ import annotations

from typing import Any

import torch

from .copies import TooEarlyError, address, place_of_call
from .streams import HOST, Stream, current

BUFFERS = "/buffer_utils.py"  # whose callers know what a slot is for
# By a slot's address: how far the stream of its last reader must be.
_readers: dict[int, tuple[Stream, int]] = {}
_slots: set[int] = set()


def note_readers(arguments: Any) -> None:
    """Keep which slots are among a launch's arguments."""
    stream, given = current(), 0
    for one in arguments:
        if isinstance(one, torch.Tensor) and (slot := address(one)) in _slots:
            given = given or stream.give()
            _readers[slot] = stream, given


def hand_out(slot: torch.Tensor) -> None:
    """Raise `TooEarlyError` unless the host may write a slot: its readers were waited for."""
    begin = address(slot)
    _slots.add(begin)
    if (reader := _readers.pop(begin, None)) is not None and not HOST.has_waited(*reader):
        raise TooEarlyError(
            f"a slot of {place_of_call(BUFFERS)} is rewritten, "
            "and a kernel that got it may still run"
        )


def install(buffers: Any) -> None:
    """Let `vllm.v1.worker.gpu.buffer_utils` ask about each slot that it has written.

    Which one that is, only the pool knows: a pool with a bug writes another than the next.
    """
    write = buffers.UvaBufferPool.copy_to_uva

    def write_and_ask(pool: Any, values: Any) -> Any:
        written = write(pool, values)
        hand_out(pool._uva_bufs[pool._curr].cpu)
        return written

    buffers.UvaBufferPool.copy_to_uva = write_and_ask
