"""Expanding block ids on the host and in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch


def expand_list(
    block_ids: Sequence[int], blocks_per_kv_block: int, kernel_block_stride: int | None = None
) -> list[int]:
    """List comprehension (vllm!38831). A stride of None is `blocks_per_kv_block`, here and below."""
    stride = kernel_block_stride or blocks_per_kv_block
    return [b * stride + k for b in block_ids for k in range(blocks_per_kv_block)]


def expand_numpy(
    block_ids: Sequence[int] | npt.NDArray[np.int32], blocks_per_kv_block: int, kernel_block_stride: int | None = None
) -> npt.NDArray[np.int32]:
    """Broadcast sum in numpy (vLLM 0.22's V1 runner)."""
    ids: npt.NDArray[np.int32] = np.asarray(block_ids, dtype=np.int32).reshape(-1, 1)
    stride = kernel_block_stride or blocks_per_kv_block
    return np.add(ids * stride, np.arange(blocks_per_kv_block), dtype=np.int32).reshape(-1)


def expand_torch(
    block_ids: torch.Tensor, offsets: torch.Tensor, kernel_block_stride: int | None = None
) -> torch.Tensor:
    """Broadcast sum in torch (vLLM 0.32, on the device); `offsets` is `arange(blocks_per_kv_block)`, int32."""
    return torch.add(offsets, block_ids.unsqueeze(-1), alpha=kernel_block_stride or offsets.numel()).flatten(-2)


def gather_kernel_blocks(
    table: torch.Tensor, rows: torch.Tensor, num_blocks: int, offsets: torch.Tensor, out: torch.Tensor
) -> None:
    """Write the first `num_blocks` manager blocks of the given rows into `out`, expanded to kernel blocks.

    Args:
        table: [max_num_reqs, width] int32, persistent, in manager blocks.
        rows: [num_reqs] int64, the row of each batch position.
        num_blocks: manager blocks to copy per row; the rest of `out` keeps its old content, which no reader may use.
        offsets: [blocks_per_kv_block] int32, `arange`.
        out: [num_reqs, width * blocks_per_kv_block] int32, written in place.
    """
    ids = table[:, :num_blocks].index_select(0, rows)
    width = num_blocks * offsets.numel()
    if offsets.numel() == 1:
        out[:, :width] = ids
    else:
        out[:, :width] = expand_torch(ids, offsets)
