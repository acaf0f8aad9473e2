"""Copies between a pool of a device and one of the host, by index, and streams and events.

All are complete once they are called, so races between streams are hidden.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

POOLS = ("mha", "mamba", "mla")


def copy_all_layers(
    src_ptrs: Any, dst_ptrs: Any, src_indices: Any, dst_indices: Any, page_size: int
) -> None:
    """Copy the layers of a device's pool to a host's pool [pages, layers, page_size, …]."""
    per_host = len(src_ptrs) // len(dst_ptrs)
    slots = src_indices.long().view(-1, page_size)
    pages = dst_indices.long().view(-1, page_size)[:, 0] // page_size
    for i, host in enumerate(dst_ptrs):
        for layer in range(per_host):
            host[pages, layer] = src_ptrs[i * per_host + layer][slots].view_as(host[pages, layer])


def copy_layer(
    src_ptrs: Any, dst_ptrs: Any, src_indices: Any, dst_indices: Any, layer_id: int, page_size: int
) -> None:
    """Copy one layer of a host's pool [pages, layers, page_size, …] to a device's."""
    slots = dst_indices.long().view(-1, page_size)
    pages = src_indices.long().view(-1, page_size)[:, 0] // page_size
    for host, device in zip(src_ptrs, dst_ptrs, strict=True):
        device[slots] = host[pages, layer_id].view_as(device[slots])


def copy_layers(
    src_layers: Any, dst_layers: Any, src_indices: Any, dst_indices: Any, page_size: int
) -> None:
    """Copy between layers with slots of the same layout."""
    for src, dst in zip(src_layers, dst_layers, strict=True):
        dst[dst_indices.long()] = src[src_indices.long()]


class PastEvent:
    """An event that has occurred."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record(self, *_: Any) -> None:
        """Do nothing."""

    def wait(self, *_: Any) -> None:
        """Do nothing."""

    def synchronize(self) -> None:
        """Do nothing."""

    def query(self) -> bool:
        """Return that it has occurred."""
        return True

    def elapsed_time(self, other: PastEvent) -> float:
        """Return no time, in milliseconds."""
        return 0.0


def install() -> None:
    """Let SGLang's host pools copy so."""
    cpu: Any = torch.cpu
    cpu.Event = PastEvent
    for name in POOLS:
        module: Any = import_module(f"sglang.srt.mem_cache.pool_host.{name}")
        module.transfer_kv_all_layer_direct_lf_pf = copy_all_layers
        module.transfer_kv_per_layer_direct_pf_lf = copy_layer
        module.transfer_kv_direct = copy_layers
    common = import_module("sglang.srt.mem_cache.pool_host.common")
    for name in ("_cuda_host_register", "_cuda_host_unregister"):
        setattr(common, name, lambda *_, **__: None)  # pages are not locked
