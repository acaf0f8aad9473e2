"""The causal convolution of a prefill: rows of any length, windows stored where a state is kept.

One launch per layer. Tokens are independent of each other but for the few inputs before them, so a
row's tiles run at once. Whatever a row writes into blocks is written by the program that read its
window: with a barrier between programs missing, that alone allows a row to write the block that it
starts from.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hybrid_kv.kernels.causal_conv1d.update import check_inputs
from hybrid_kv.kernels.common.integers import cdiv
from hybrid_kv.kernels.common.launch import (
    INTS,
    check,
    jit,
    per_warp,
    register_limit,
    strides,
    warp_size,
)
from hybrid_kv.kernels.common.spans import TILE, Spans

if TYPE_CHECKING:
    import triton.language as tl

REGISTERS = 184  # two warps of each quarter of an SM


def _conv_prefill(
    conv_state: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    y: tl.tensor,
    tiles: tl.tensor,
    row_spans: tl.tensor,
    cu_spans: tl.tensor,
    span_blocks: tl.tensor,
    window_indices: tl.tensor,
    window_rows: tl.tensor,
    has_initial_state: tl.tensor,
    state_stride: tl.tensor,
    x_stride: tl.tensor,
    channel_stride: tl.tensor,
    tap_stride: tl.tensor,
    CHANNELS: tl.constexpr,
    KERNEL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    # A program owns BLOCK channels of TILE tokens, 16 bytes a lane of one warp, and keeps its
    # inputs in registers: each is loaded once though four outputs need it, and all loads are in
    # flight before the first is used. Unrolled, since registers have no index. One axis, as a
    # prefill has more tiles than the others may have programs; the channels of a tile are
    # neighbours, as they are in memory.
    blocks: tl.constexpr = (CHANNELS + BLOCK - 1) // BLOCK
    tiles += (tl.program_id(0) // blocks) * 4
    channel = (tl.program_id(0) % blocks) * BLOCK
    row = tl.load(tiles)
    first = tl.load(tiles + 1).to(tl.int64)
    start = tl.load(tiles + 2).to(tl.int64)
    length = (tl.load(tiles + 3) - start).to(tl.int32)
    is_first = start == first
    # Block ids are widened before they are multiplied: a pool passes 2^31 elements.
    source = tl.load(window_indices + row).to(tl.int64)
    readable = is_first & (source > 0) & (tl.load(has_initial_state + row) != 0)
    skip = tl.load(window_rows + row)
    c = tl.arange(0, BLOCK)
    # True where the size divides, so that no mask is left.
    inside = (c < CHANNELS - channel) | (CHANNELS % BLOCK == 0)
    conv_state += channel
    x += channel

    window = conv_state + source * state_stride + skip * CHANNELS
    inputs = ()
    for i in tl.static_range(KERNEL - 1):
        # Before the row's first token lies its window; before any other tile, the tile before.
        old = tl.load(window + i * CHANNELS + c, mask=inside & readable, other=0.0).to(tl.float32)
        earlier = x + (start + (i - (KERNEL - 1))) * x_stride
        loaded = tl.load(earlier + c, mask=inside & (is_first == 0), other=0.0).to(tl.float32)
        inputs += (tl.where(is_first, old, loaded),)  # type: ignore[assignment]
    for j in tl.static_range(TILE):
        loaded = tl.load(x + (start + j) * x_stride + c, mask=inside & (j < length), other=0.0)
        inputs += (loaded,)  # type: ignore[assignment]
    weight += channel * channel_stride
    taps = ()
    for i in tl.static_range(KERNEL):
        tap = tl.load(weight + i * tap_stride + c * channel_stride, mask=inside, other=0.0)
        taps += (tap.to(tl.float32),)  # type: ignore[assignment]
    base = tl.zeros([BLOCK], tl.float32)
    if HAS_BIAS:
        base += tl.load(bias + channel + c, mask=inside, other=0.0).to(tl.float32)

    y += start * CHANNELS + channel
    for j in tl.static_range(TILE):
        total = base
        for i in tl.static_range(KERNEL):
            total += inputs[i + j].to(tl.float32) * taps[i]
        out = total / (1.0 + tl.exp(-total))
        tl.store(y + j * CHANNELS + c, out.to(y.dtype.element_ty), mask=inside & (j < length))
    if is_first:
        for span in range(tl.load(row_spans + row), tl.load(row_spans + row + 1)):
            target = tl.load(span_blocks + span)
            end = tl.load(cu_spans + span + 1).to(tl.int64)
            if target > 0:
                for i in tl.static_range(KERNEL - 1):
                    token = end + (i - (KERNEL - 1))
                    kept = tl.load(
                        x + token * x_stride + c, mask=inside & (token >= first), other=0.0
                    ).to(tl.float32)
                    # A window may reach back into the one that the row began with.
                    for j in tl.static_range(KERNEL - 1):
                        kept = tl.where(token == first + (j - (KERNEL - 1)), inputs[j], kept)
                    stored = kept.to(conv_state.dtype.element_ty)
                    tl.store(
                        conv_state + target * state_stride + i * CHANNELS + c, stored, mask=inside
                    )


def causal_conv1d_prefill(
    conv_state: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    spans: Spans,
    window_indices: torch.Tensor,
    window_rows: torch.Tensor,
    has_initial_state: torch.Tensor,
) -> torch.Tensor:
    """Convolve every row's tokens, and store the window at the end of each span in its block.

    The result is `silu(bias + convolution)`.

    The window before a row's first token begins at row `window_rows` of block `window_indices`. It
    is zero, and not read, without an initial state, and for the null block 0 and negative ids,
    which are never written either. A window is stored into the first `kernel - 1` rows of its
    block; rows behind stay as they are. A row may write the block that it starts from. No block may
    be written twice, nor by one row and read by another.

    Args:
        conv_state: [num_blocks, kernel - 1 + K, channels] float32, bfloat16 or float16, blocks at
            any stride; written.
        x: [num_tokens, channels], tokens at any stride.
        weight: [channels, kernel], at any strides. In memory tap by tap (a transpose of contiguous
            [kernel, channels]) it is read 16 bytes a lane, otherwise one element.
        bias: [channels] or None.
        spans: of the rows, on the device of x.
        window_indices, window_rows: [num_rows] int32 or int64.
        has_initial_state: [num_rows] bool.

    Returns:
        y like x, contiguous; tokens of no row are not written.

    Raises:
        ValueError: a shape, dtype, device or stride is none of these.
    """
    check_inputs(conv_state, x, weight, bias)
    device = x.device
    tokens = len(x)
    channels, kernel = weight.shape
    rows = (spans.num_rows,)
    if not 2 <= kernel <= TILE + 1:
        raise ValueError(f"weight has {kernel} taps; there must be 2 to {TILE + 1}")
    if tokens < spans.num_tokens or conv_state.shape[1] < kernel - 1:
        raise ValueError(
            f"x has {tokens} tokens and conv_state {conv_state.shape[1]} rows; "
            f"spans and weight need {spans.num_tokens} and {kernel - 1}"
        )
    check("spans", spans.tiles, spans.tiles.shape, (torch.int32,), device)
    check("window_indices", window_indices, rows, INTS, device)
    check("window_rows", window_rows, rows, INTS, device)
    check("has_initial_state", has_initial_state, rows, (torch.bool,), device)
    lanes = warp_size()
    block = per_warp(conv_state.element_size(), lanes)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if spans.num_tokens:
        jit(_conv_prefill)[(len(spans.tiles) * cdiv(channels, block),)](
            *(
                conv_state,
                x,
                weight,
                bias,
                y,
                spans.tiles,
                spans.row_spans,
                spans.cu_spans,
                spans.span_blocks,
            ),
            *(window_indices, window_rows, has_initial_state.view(torch.int8)),
            *(*strides(conv_state, x), *weight.stride()),
            CHANNELS=channels,
            KERNEL=kernel,
            HAS_BIAS=bias is not None,
            TILE=TILE,
            BLOCK=block,
            num_warps=1,
            num_stages=1,
            **register_limit(REGISTERS, lanes),
        )
    return y
