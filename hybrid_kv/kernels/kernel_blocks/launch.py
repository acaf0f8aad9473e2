"""Manager block ids to kernel block ids.

Manager block `b` is kernel blocks `b * stride … b * stride + blocks_per_kv_block - 1`, where `stride` is
`blocks_per_kv_block` unless pages of other layers lie between. The engine never expands on the host: ids are staged as
they are and expanded by `gather_kernel_blocks` while a step's input table is written. `expand_*` are the alternatives
that other engines use or used, and a kernel that does nothing else; `bench/kernel_blocks.py` measures them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from hybrid_kv.kernels.common.integers import cdiv
from hybrid_kv.kernels.common.launch import AotCase, check, jit

if TYPE_CHECKING:
    import triton.language as tl

BLOCK = 1024
_COUNTS = ("count", "stride")  # specialised on, new divisibilities would compile the kernel again


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


def _expand(
    block_ids: tl.tensor,
    out: tl.tensor,
    count: tl.tensor,
    stride: tl.tensor,
    BLOCKS_PER_KV_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    # Lanes run over the kernel blocks: they are what is stored, and a manager block's id comes from memory once. A
    # constant divisor costs three instructions, a loaded one twenty; in 32 bit, counted from the program's first.
    start = tl.program_id(0).to(tl.int64) * BLOCK
    first = start // BLOCKS_PER_KV_BLOCK
    lane = tl.arange(0, BLOCK)
    inside = lane < count - start
    kernel_block = lane + (start - first * BLOCKS_PER_KV_BLOCK).to(tl.int32)
    column = kernel_block // BLOCKS_PER_KV_BLOCK
    block = tl.load(block_ids + first + column, mask=inside, other=0)
    tl.store(out + start + lane, block * stride + (kernel_block - column * BLOCKS_PER_KV_BLOCK), mask=inside)


def expand_triton(
    block_ids: torch.Tensor, blocks_per_kv_block: int, kernel_block_stride: int | None = None
) -> torch.Tensor:
    """One Triton kernel.

    Args:
        block_ids: [..., num_blocks] int32, contiguous.

    Returns:
        [..., num_blocks * blocks_per_kv_block] int32.

    Raises:
        ValueError: `block_ids` is no such tensor, or manager blocks overlap.
    """
    stride = kernel_block_stride or blocks_per_kv_block
    if not 1 <= blocks_per_kv_block <= stride:
        raise ValueError(
            f"{blocks_per_kv_block} kernel blocks every {stride}: they must be at least 1, and not overlap"
        )
    check("block_ids", block_ids, block_ids.shape, (torch.int32,), block_ids.device)
    out = block_ids.new_empty(*block_ids.shape[:-1], block_ids.shape[-1] * blocks_per_kv_block)
    if out.numel():
        jit(_expand, _COUNTS)[(cdiv(out.numel(), BLOCK),)](
            block_ids,
            out,
            out.numel(),
            stride,
            BLOCKS_PER_KV_BLOCK=blocks_per_kv_block,
            BLOCK=BLOCK,
        )
    return out


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


def aot_cases() -> list[AotCase]:
    """Few kernel blocks to a manager block, and as many as a hybrid model's pages make."""
    return [
        AotCase(
            kernel="kernel_blocks.expand_triton",
            shape=f"{bpk} kernel blocks",
            dtype="int32",
            fn=jit(_expand, _COUNTS),
            signature={"block_ids": "*i32", "out": "*i32", "count": "i32", "stride": "i32"},
            constexprs={"BLOCKS_PER_KV_BLOCK": bpk, "BLOCK": BLOCK},
            num_warps=4,
            num_stages=1,
            # Each manager block's id is read once, and all are written.
            bytes_per_program=BLOCK * 4 + BLOCK // bpk * 4,
        )
        for bpk in (2, 131)
    ]
