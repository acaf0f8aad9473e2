"""One raw memory, one strided view of it per layer and backend.

Invariant: page `b` of *every* view lies inside bytes `[b * page, (b + 1) * page)` of its raw
buffer. So a block id means the same bytes to an attention layer and to a Mamba layer, whatever
logical shape their backends like.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import prod
from operator import mul
from typing import Any

import torch

from hybrid_kv.cache.backend import AttentionBackend, AttentionGroup
from hybrid_kv.cache.spec import (
    FullAttentionSpec,
    KVCacheConfig,
    MambaSpec,
    MLAAttentionSpec,
    layer_specs,
)


def allocate_raw_buffers(config: KVCacheConfig, device: torch.device) -> list[torch.Tensor]:
    """Allocate flat int8 tensors, zeroed; buffer i has pages of the i-th layer of every group."""
    sizes = [config.num_blocks * page for page in config.buffer_page_sizes]
    return [torch.zeros(size, dtype=torch.int8, device=device) for size in sizes]


def contiguous_stride(shape: Sequence[int]) -> list[int]:
    """Return the row-major strides of `shape`."""
    return list(accumulate(reversed(shape[1:]), mul, initial=1))[::-1]


def attention_view(
    raw: torch.Tensor,
    num_blocks: int,
    spec: FullAttentionSpec,
    kernel_block_size: int,
    backend: type[AttentionBackend],
) -> torch.Tensor:
    """Return K and V of one layer in the backend's logical shape, over kernel blocks.

    Wherever the logical shape has them, memory orders the kernel block first, then K or V, then the
    rest as the backend lists it, so that a kernel block's K and V lie side by side inside the page.
    For a `(2, num_blocks, …)` backend that is a re-strided view. The backend defines which
    dimension counts blocks; a size never does (vllm!37236).
    """
    geometry = (kernel_block_size, spec.num_kv_heads, spec.head_size)
    num_kernel_blocks = num_blocks * (spec.block_size // kernel_block_size)
    shape = backend.get_kv_cache_shape(num_kernel_blocks, *geometry)
    block_dim = backend.get_kv_cache_block_dim(*geometry)
    kv_dim = backend.get_kv_dim()
    inner = [dim for dim in range(len(shape)) if dim not in (block_dim, kv_dim)]
    stride = dict(zip(inner, contiguous_stride([shape[dim] for dim in inner]), strict=True))
    stride[kv_dim] = prod(geometry)
    stride[block_dim] = 2 * stride[kv_dim]
    return raw.view(spec.dtype).as_strided(shape, [stride[dim] for dim in range(len(shape))])


def latent_view(
    raw: torch.Tensor, num_blocks: int, spec: MLAAttentionSpec, kernel_block_size: int
) -> torch.Tensor:
    """Return one vector per token of one layer, whatever the backend.

    The shape is `[num_kernel_blocks, kernel_block_size, head_size]`.
    """
    num_kernel_blocks = num_blocks * (spec.block_size // kernel_block_size)
    return raw.view(spec.dtype).view(num_kernel_blocks, kernel_block_size, spec.head_size)


def mamba_views(raw: torch.Tensor, num_blocks: int, spec: MambaSpec) -> tuple[torch.Tensor, ...]:
    """Return the parts of one layer's state, each `[num_blocks, *shape]`.

    They lie one after the other at the start of each page.

    The rollback scheme may store a part as something else of the same bytes
    (`RollbackSpec.stored`).
    """
    views = []
    offset = 0
    for state_part in map(spec.rollback.stored, spec.parts):
        stride = (
            spec.page_size_bytes // state_part.dtype.itemsize,
            *contiguous_stride(state_part.shape),
        )
        shape = (num_blocks, *state_part.shape)
        views.append(
            raw.view(state_part.dtype).as_strided(
                shape, stride, offset // state_part.dtype.itemsize
            )
        )
        offset += state_part.nbytes
    return tuple(views)


def allocate_row_memory(
    config: KVCacheConfig, num_rows: int, device: torch.device
) -> dict[str, Any]:
    """Allocate, by layer, the rollback scheme's memory for the rows of the engine, if any."""
    memory = {}
    for group in config.groups:
        for name, spec in zip(group.layer_names, group.layer_specs, strict=True):
            rows = (
                spec.rollback.allocate(spec.inputs, num_rows, device)
                if isinstance(spec, MambaSpec)
                else None
            )
            if rows is not None:
                memory[name] = rows
    return memory


def split_kv(
    view: torch.Tensor, backend: type[AttentionBackend]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K and V as views.

    Each is `[num_kernel_blocks, kernel_block_size, num_kv_heads, head_size]`.
    """
    key, value = view.unbind(backend.get_kv_dim())
    return key, value


def bind_views(
    config: KVCacheConfig, groups: Sequence[AttentionGroup], raw_buffers: Sequence[torch.Tensor]
) -> dict[str, tuple[torch.Tensor, ...]]:
    """Return for every layer `(key, value)`, its latents, or the parts of its Mamba state.

    The i-th layer of every group shares raw buffer i; the number of blocks is the configuration's,
    never a shape's.
    """
    views: dict[str, tuple[torch.Tensor, ...]] = {}
    for group in groups:
        specs = layer_specs(group.layer_names, group.spec)
        for name, spec, raw in zip(group.layer_names, specs, raw_buffers, strict=False):
            if isinstance(spec, MambaSpec):
                views[name] = mamba_views(raw, config.num_blocks, spec)
            elif isinstance(spec, MLAAttentionSpec):
                views[name] = (latent_view(raw, config.num_blocks, spec, group.kernel_block_size),)
            else:
                assert isinstance(spec, FullAttentionSpec)
                view = attention_view(
                    raw, config.num_blocks, spec, group.kernel_block_size, group.backend
                )
                views[name] = split_kv(view, group.backend)
    return views
