"""Copies between a pool of a device and one of the host, by index, and streams and events.

What runs on a stream of the device is done at once but for these copies: one that is submitted on a
side stream is done when somebody waits for an event, or the stream, after it; and an event that is
queried says once that it has not occurred. So a wait that is missing shows as wrong tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

POOLS = ("mha", "mamba", "mla")


class Copies:
    """The copies of a stream that were submitted and are not done."""

    def __init__(self) -> None:
        self._waiting = deque[Callable[[], None]]()
        self.num_submitted = 0

    def submit(self, copy: Callable[[], None]) -> None:
        """Take a copy that is to be done after all before it."""
        self._waiting.append(copy)
        self.num_submitted += 1

    def is_done(self, number: int) -> bool:
        """Return whether the first `number` copies are done."""
        return self.num_submitted - len(self._waiting) >= number

    def finish(self, number: int) -> None:
        """Do the first `number` copies, as far as they are not done."""
        while not self.is_done(number):
            self._waiting.popleft()()


_copies: dict[Any, Copies] = {}  # by stream


def copies_of(stream: Any) -> Copies:
    """Return the copies of a stream."""
    return _copies.setdefault(stream, Copies())


def _submit(copy: Callable[[], None]) -> None:
    cpu: Any = torch.cpu
    stream = cpu.current_stream()
    if stream is cpu._default_cpu_stream:
        copy()
    else:
        copies_of(stream).submit(copy)


def copy_all_layers(
    src_ptrs: Any, dst_ptrs: Any, src_indices: Any, dst_indices: Any, page_size: int
) -> None:
    """Copy the layers of a device's pool to a host's pool [pages, layers, page_size, …]."""
    per_host = len(src_ptrs) // len(dst_ptrs)
    slots = src_indices.long().clone().view(-1, page_size)
    pages = dst_indices.long().view(-1, page_size)[:, 0] // page_size

    def copy() -> None:
        for i, host in enumerate(dst_ptrs):
            for layer in range(per_host):
                values = src_ptrs[i * per_host + layer][slots]
                host[pages, layer] = values.view_as(host[pages, layer])

    _submit(copy)


def copy_layer(
    src_ptrs: Any, dst_ptrs: Any, src_indices: Any, dst_indices: Any, layer_id: int, page_size: int
) -> None:
    """Copy one layer of a host's pool [pages, layers, page_size, …] to a device's."""
    slots = dst_indices.long().clone().view(-1, page_size)
    pages = src_indices.long().view(-1, page_size)[:, 0] // page_size

    def copy() -> None:
        for host, device in zip(src_ptrs, dst_ptrs, strict=True):
            device[slots] = host[pages, layer_id].view_as(device[slots])

    _submit(copy)


def copy_layers(
    src_layers: Any, dst_layers: Any, src_indices: Any, dst_indices: Any, page_size: int
) -> None:
    """Copy between layers with slots of the same layout."""
    sources = src_indices.long().clone()
    targets = dst_indices.long().clone()

    def copy() -> None:
        for src, dst in zip(src_layers, dst_layers, strict=True):
            dst[targets] = src[sources]

    _submit(copy)


class LateEvent:
    """An event that occurs when somebody waits for it, or has asked for it once."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._copies = Copies()
        self._number = 0

    def record(self, stream: Any = None) -> None:
        """Let it occur after the copies that the stream has now."""
        self._copies = copies_of(stream or torch.cpu.current_stream())
        self._number = self._copies.num_submitted

    def synchronize(self) -> None:
        """Let it occur."""
        self._copies.finish(self._number)

    def wait(self, stream: Any = None) -> None:
        """Let it occur: what the waiting stream runs next is run at once."""
        self.synchronize()

    def query(self) -> bool:
        """Return whether it has occurred; it will have when it is asked for again."""
        has_occurred = self._copies.is_done(self._number)
        self.synchronize()
        return has_occurred

    def elapsed_time(self, other: LateEvent) -> float:
        """Return no time, in milliseconds."""
        return 0.0


def _finish_stream(stream: Any) -> None:
    copies = copies_of(stream)
    copies.finish(copies.num_submitted)


def finish_all(*_: Any) -> None:
    """Do all copies that are waiting."""
    for stream in list(_copies):
        _finish_stream(stream)


def install() -> None:
    """Let SGLang's host pools copy so."""
    cpu: Any = torch.cpu
    cpu.Event = LateEvent
    cpu.synchronize = finish_all
    cpu.Stream.wait_event = lambda _, event: event.wait()
    cpu.Stream.wait_stream = lambda _, other: _finish_stream(other)
    cpu.Stream.synchronize = _finish_stream
    for name in POOLS:
        module: Any = import_module(f"sglang.srt.mem_cache.pool_host.{name}")
        module.transfer_kv_all_layer_direct_lf_pf = copy_all_layers
        module.transfer_kv_per_layer_direct_pf_lf = copy_layer
        module.transfer_kv_direct = copy_layers
    common = import_module("sglang.srt.mem_cache.pool_host.common")
    for name in ("_cuda_host_register", "_cuda_host_unregister"):
        setattr(common, name, lambda *_, **__: None)  # pages are not locked
