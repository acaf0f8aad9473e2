"""Storing K and V of tokens in their slots, one launch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hybrid_kv.kernels.common.integers import next_power_of_2
from hybrid_kv.kernels.common.launch import FLOATS, INTS, AotCase, check, jit
from hybrid_kv.kernels.common.shapes import NANO, SHAPES

if TYPE_CHECKING:
    import triton.language as tl


def _store_kv(
    key: tl.tensor,
    value: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    slots: tl.tensor,
    key_stride: tl.tensor,
    value_stride: tl.tensor,
    key_block_stride: tl.tensor,
    value_block_stride: tl.tensor,
    key_token_stride: tl.tensor,
    value_token_stride: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    # One program a token: its K and V are WIDTH contiguous elements on both sides.
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    if slot >= 0:
        block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
        i = tl.arange(0, BLOCK)
        inside = (i < WIDTH) | (WIDTH == BLOCK)
        k = tl.load(key + token * key_stride + i, mask=inside)
        v = tl.load(value + token * value_stride + i, mask=inside)
        key_cache += block * key_block_stride + offset * key_token_stride
        value_cache += block * value_block_stride + offset * value_token_stride
        tl.store(key_cache + i, k, mask=inside)
        tl.store(value_cache + i, v, mask=inside)


def store_kv(
    key: torch.Tensor, value: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, slots: torch.Tensor
) -> None:
    """`write_kv` in one launch, without waiting for the device.

    Args:
        key, value: [num_tokens, num_kv_heads, head_size] float32, bfloat16 or float16, tokens at any stride.
        key_cache, value_cache: [num_kernel_blocks, kernel_block_size, num_kv_heads, head_size] of the same dtype,
            blocks and tokens at any stride.
        slots: [num_tokens] int32 or int64; a negative one stores nothing. No slot may occur twice.

    Raises:
        ValueError: a shape, dtype, device or stride is none of these.
    """
    if key.dim() != 3 or key_cache.dim() != 4:
        shapes = tuple(key.shape), tuple(key_cache.shape)
        raise ValueError(f"key and key_cache have shapes {shapes}; they must have 3 and 4 dimensions")
    tokens, heads, size = key.shape
    cache_shape = (*key_cache.shape[:2], heads, size)
    check("key", key, (tokens, heads, size), FLOATS, key.device, free=1)
    check("value", value, (tokens, heads, size), (key.dtype,), key.device, free=1)
    for name, tensor in (("key_cache", key_cache), ("value_cache", value_cache)):
        check(name, tensor, cache_shape, (key.dtype,), key.device, free=2)
    check("slots", slots, (tokens,), INTS, key.device)
    if not tokens:
        return
    jit(_store_kv)[(tokens,)](
        key,
        value,
        key_cache,
        value_cache,
        slots,
        key.stride(0),
        value.stride(0),
        key_cache.stride(0),
        value_cache.stride(0),
        key_cache.stride(1),
        value_cache.stride(1),
        BLOCK_SIZE=key_cache.shape[1],
        WIDTH=heads * size,
        BLOCK=next_power_of_2(heads * size),
        num_warps=1 if heads * size <= 512 else 4,
    )


def aot_cases() -> list[AotCase]:
    """What a launch compiles for a bfloat16 model with 16-token kernel blocks."""
    strides = ("key_block_stride", "value_block_stride", "key_token_stride", "value_token_stride")
    width = SHAPES[NANO].kv_heads * SHAPES[NANO].head_size
    return [
        AotCase(
            kernel="paged_attention.store_kv",
            shape=NANO,
            dtype="bfloat16",
            fn=jit(_store_kv),
            signature={
                **dict.fromkeys(("key", "value", "key_cache", "value_cache"), "*bf16"),
                "slots": "*i64",
                **dict.fromkeys(("key_stride", "value_stride", *strides), "i32"),
            },
            constexprs={"BLOCK_SIZE": 16, "WIDTH": width, "BLOCK": width},
            num_warps=1,
            num_stages=3,
            bytes_per_program=4 * width * 2,
            divisible=("key_stride", "value_stride", *strides),
        )
    ]
