"""Block ids to kernel blocks in one launch that does nothing else, as engines do that expand whole tables each step.

The engine expands ids while it writes a step's input tables (`kernels.block_tables`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hybrid_kv.kernels.common.integers import cdiv
from hybrid_kv.kernels.common.launch import check, jit

if TYPE_CHECKING:
    import triton.language as tl

BLOCK = 1024


def _expand(
    block_ids: tl.tensor, out: tl.tensor, count: tl.tensor, BLOCKS_PER_KV_BLOCK: tl.constexpr, BLOCK: tl.constexpr
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
    expanded = block * BLOCKS_PER_KV_BLOCK + (kernel_block - column * BLOCKS_PER_KV_BLOCK)
    tl.store(out + start + lane, expanded, mask=inside)


def expand_triton(block_ids: torch.Tensor, blocks_per_kv_block: int) -> torch.Tensor:
    """[..., num_blocks] int32, contiguous, to [..., num_blocks * blocks_per_kv_block] int32."""
    check("block_ids", block_ids, block_ids.shape, (torch.int32,), block_ids.device)
    out = block_ids.new_empty(*block_ids.shape[:-1], block_ids.shape[-1] * blocks_per_kv_block)
    if out.numel():
        grid = (cdiv(out.numel(), BLOCK),)
        jit(_expand, ("count",))[grid](
            block_ids, out, out.numel(), BLOCKS_PER_KV_BLOCK=blocks_per_kv_block, BLOCK=BLOCK
        )
    return out
