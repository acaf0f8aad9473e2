"""Expanding block ids in one launch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hybrid_kv.kernels.common.integers import cdiv
from hybrid_kv.kernels.common.launch import AotCase, check, jit

if TYPE_CHECKING:
    import triton.language as tl

BLOCK = 1024
_COUNTS = ("count", "stride")  # specialised on, new divisibilities would compile the kernel again


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
