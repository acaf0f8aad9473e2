"""The causal convolution of a verify step, from a window that leaves rejected drafts out.

A row has 1 … 1 + K tokens.

A block holds the last inputs of a request, oldest first: the window before the step's first token
begins at its row `window_rows`, as many as drafts were accepted in the step before. This step's
inputs go into the row's own block from row 0 on, so that the next step can begin anywhere in them;
nothing is ever rolled back. One launch per layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hybrid_kv.kernels.common.integers import cdiv
from hybrid_kv.kernels.common.launch import (
    FLOATS,
    INTS,
    check,
    check_dims,
    jit,
    per_warp,
    strides,
    warp_size,
)

if TYPE_CHECKING:
    import triton.language as tl


def _conv_update(
    conv_state: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    y: tl.tensor,
    cu_seqlens: tl.tensor,
    window_indices: tl.tensor,
    window_rows: tl.tensor,
    state_indices: tl.tensor,
    state_stride: tl.tensor,
    x_stride: tl.tensor,
    channel_stride: tl.tensor,
    tap_stride: tl.tensor,
    indices_stride: tl.tensor,
    CHANNELS: tl.constexpr,
    KERNEL: tl.constexpr,
    COLUMNS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    # A program owns BLOCK channels of a row, 16 bytes a lane of one warp, and keeps its inputs in
    # registers: each is loaded once though four outputs need it, all loads are in flight before the
    # first is used, and since no channel meets another the window may lie in the block that is
    # written. Unrolled, since registers have no index.
    row = tl.program_id(1)
    start = tl.program_id(0) * BLOCK
    first = tl.load(cu_seqlens + row).to(tl.int64)
    length = (tl.load(cu_seqlens + row + 1) - first).to(tl.int32)
    # Block ids are widened before they are multiplied: a pool passes 2^31 elements.
    source = tl.load(window_indices + row).to(tl.int64)
    target = tl.load(state_indices + row * indices_stride).to(tl.int64)
    skip = tl.load(window_rows + row)
    c = tl.arange(0, BLOCK)
    # True where the size divides, so that no mask is left.
    inside = (c < CHANNELS - start) | (CHANNELS % BLOCK == 0)

    window = conv_state + source * state_stride + skip * CHANNELS + start
    x += first * x_stride + start
    inputs = ()
    for i in tl.static_range(KERNEL - 1):
        loaded = tl.load(window + i * CHANNELS + c, mask=inside & (source != 0), other=0.0)
        inputs += (loaded,)  # type: ignore[assignment]
    for j in tl.static_range(COLUMNS):
        loaded = tl.load(x + j * x_stride + c, mask=inside & (j < length), other=0.0)
        inputs += (loaded,)  # type: ignore[assignment]
    weight += start * channel_stride
    taps = ()
    for i in tl.static_range(KERNEL):
        tap = tl.load(weight + i * tap_stride + c * channel_stride, mask=inside, other=0.0)
        taps += (tap.to(tl.float32),)  # type: ignore[assignment]
    base = tl.zeros([BLOCK], tl.float32)
    if HAS_BIAS:
        base += tl.load(bias + start + c, mask=inside, other=0.0).to(tl.float32)

    y += first * CHANNELS + start
    for j in tl.static_range(COLUMNS):
        total = base
        for i in tl.static_range(KERNEL):
            total += inputs[i + j].to(tl.float32) * taps[i]
        out = total / (1.0 + tl.exp(-total))
        tl.store(y + j * CHANNELS + c, out.to(y.dtype.element_ty), mask=inside & (j < length))
    conv_state += target * state_stride + start
    for i in tl.static_range(KERNEL - 2 + COLUMNS):
        owned = (target != 0) & (length > 0) & (i < KERNEL - 2 + length)
        tl.store(
            conv_state + i * CHANNELS + c,
            inputs[i + 1].to(conv_state.dtype.element_ty),
            mask=inside & owned,
        )


def check_inputs(
    conv_state: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> None:
    """Check that the operands of a layer fit together, but for the rows of a block.

    Raises:
        ValueError: they do not.
    """
    check_dims(x=(x, 2), weight=(weight, 2), conv_state=(conv_state, 3))
    tokens, channels = x.shape
    device = x.device
    check("conv_state", conv_state, (*conv_state.shape[:2], channels), FLOATS, device, free=1)
    check("x", x, (tokens, channels), FLOATS, device, free=1)
    check("weight", weight, (channels, weight.shape[1]), FLOATS, device, free=2)
    if bias is not None:
        check("bias", bias, (channels,), FLOATS, device)


def causal_conv1d_update(
    conv_state: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    cu_seqlens: torch.Tensor,
    window_indices: torch.Tensor,
    window_rows: torch.Tensor,
    state_indices: torch.Tensor,
) -> torch.Tensor:
    """Convolve every row's tokens, and store their inputs in the row's block; one launch.

    The result is `silu(bias + convolution)`.

    Row r has the tokens `cu_seqlens[r] … cu_seqlens[r + 1] - 1`, at most as many as `state_indices`
    has columns. Block `state_indices[r, 0]` gets the last `kernel - 2` inputs before them and then
    the tokens; rows behind stay as they are. The null block 0 reads as zeros and is never written,
    so padding rows and rows without tokens do no harm. A row may write the block that it starts
    from. No block may be written by one row and read or written by another.

    Args:
        conv_state: [num_blocks, kernel - 1 + K, channels] float32, bfloat16 or float16, blocks at
            any stride; written.
        x: [num_tokens, channels], tokens at any stride.
        weight: [channels, kernel], at any strides. In memory tap by tap (a transpose of contiguous
            [kernel, channels]) it is read 16 bytes a lane, otherwise one element.
        bias: [channels] or None.
        cu_seqlens: [num_rows + 1] int32 or int64 from 0, never falling.
        window_indices: [num_rows] int32 or int64, the block that a row's window is in.
        window_rows: [num_rows] int32 or int64, 0 … K.
        state_indices: [num_rows, 1 + K] int32 or int64, of which the first column is read.

    Returns:
        y like x, contiguous; tokens of no row are not written.

    Raises:
        ValueError: a shape, dtype, device or stride is none of these.
    """
    check_inputs(conv_state, x, weight, bias)
    check_dims(state_indices=(state_indices, 2))
    device = x.device
    channels, kernel = weight.shape
    num_rows, columns = state_indices.shape
    if kernel < 2:
        raise ValueError(f"weight has {kernel} taps; there must be at least 2")
    check(
        "conv_state",
        conv_state,
        (len(conv_state), kernel - 2 + columns, channels),
        FLOATS,
        device,
        free=1,
    )
    check("cu_seqlens", cu_seqlens, (num_rows + 1,), INTS, device)
    check("window_indices", window_indices, (num_rows,), INTS, device)
    check("window_rows", window_rows, (num_rows,), INTS, device)
    check("state_indices", state_indices, (num_rows, columns), INTS, device, free=1)
    block = per_warp(conv_state.element_size(), warp_size())
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    jit(_conv_update)[(cdiv(channels, block), num_rows)](
        *(conv_state, x, weight, bias, y, cu_seqlens, window_indices, window_rows, state_indices),
        *(*strides(conv_state, x), *weight.stride(), state_indices.stride(0)),
        CHANNELS=channels,
        KERNEL=kernel,
        COLUMNS=columns,
        HAS_BIAS=bias is not None,
        BLOCK=block,
        num_warps=1,
        num_stages=1,
    )
    return y
