"""Depthwise causal convolution over time, with a window carried between steps.

`y[t] = silu(bias + sum_j weight[:, j] * x[t - (kernel - 1) + j])`, as in Mamba-2 (Dao and Gu,
2024); LFM2 has no SiLU. The window is the last `kernel - 1` inputs. Shifted multiply-adds: torch's
depthwise `conv1d` takes 15-40 ms a call on two cores here.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from hybrid_kv.kernels.common.ragged import Ragged
from hybrid_kv.kernels.common.spans import Spans
from hybrid_kv.kernels.common.strided import gather_tokens, token_places


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    window: torch.Tensor,
    silu: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Convolve some tokens of each row.

    No token sees what comes after it, so padding at the end does no harm.

    Args:
        x: [num_rows, len, channels].
        weight: [channels, kernel]; bias: [channels] or None.
        window: [num_rows, kernel - 1, channels], the inputs before them (zeros at the start of a
            request).

    Returns:
        y [num_rows, len, channels] in the dtype of `x`, after SiLU if `silu`, and all inputs
        [num_rows, kernel - 1 + len, channels]: the window after the first n tokens begins at row n
        of them, see `windows_at`.
    """
    inputs = torch.cat([window, x], dim=1)
    if x.dtype.itemsize >= 4:
        return _convolve(inputs, weight, bias, silu), inputs
    # Rounded once, at the end: in 16 bits one token and several would be summed differently.
    wide = None if bias is None else bias.float()
    return _convolve(inputs.float(), weight.float(), wide, silu).to(x.dtype), inputs


def _convolve(
    inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, silu: bool
) -> torch.Tensor:
    """Return y of all inputs after the first `kernel - 1`."""
    kernel = weight.shape[1]
    length = inputs.shape[1] - kernel + 1
    if length == 1:
        y = (inputs * weight.T).sum(1, keepdim=True)
        y = y if bias is None else y.add_(bias)
    else:
        first = inputs[:, :length], weight[:, 0]
        y = torch.mul(*first) if bias is None else torch.addcmul(bias, *first)
        for j in range(1, kernel):
            y.addcmul_(inputs[:, j : j + length], weight[:, j])
    return F.silu(y, inplace=True) if silu else y


def windows_at(
    inputs: torch.Tensor, rows: torch.Tensor, first: torch.Tensor, size: int
) -> torch.Tensor:
    """Copy the windows `inputs[rows[m], first[m] : first[m] + size]`: [M, size, channels].

    Args:
        inputs: [num_rows, len, channels], what `causal_conv1d` returns or the blocks of a cache.
        rows, first: [M] int64.
    """
    if inputs.shape[1] == size:
        return inputs.index_select(0, rows)  # all of it, and `first` is 0
    return gather_tokens(inputs, window_places(inputs, rows, first, size)).unflatten(0, (-1, size))


def window_places(
    inputs: torch.Tensor, rows: torch.Tensor, first: torch.Tensor, size: int
) -> torch.Tensor:
    """Return the places of the windows of `windows_at` for `strided.gather_tokens`, [M * size]."""
    return token_places(
        inputs, rows[:, None], first[:, None] + torch.arange(size, device=inputs.device)
    ).flatten()


def causal_conv1d_update_reference(
    conv_state: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    cu_seqlens: torch.Tensor,
    window_indices: torch.Tensor,
    window_rows: torch.Tensor,
    state_indices: torch.Tensor,
) -> torch.Tensor:
    """Run `causal_conv1d_update` in plain torch; tokens of no row come out as zeros."""
    y = torch.zeros_like(x, memory_format=torch.contiguous_format)
    lengths = cu_seqlens.diff()
    active = lengths.nonzero()[:, 0]
    if not len(active):
        return y
    rows = Ragged(lengths[active].cpu().long(), x.device)
    tokens = int(cu_seqlens[-1])
    kernel = weight.shape[1]
    sources = window_indices[active].long()
    skip = window_rows[active].long()
    # All rows are read before any is written: a row may write the block that it starts from.
    window = (
        windows_at(conv_state, sources, skip, kernel - 1)
        .float()
        .masked_fill((sources == 0)[:, None, None], 0)
    )
    padded = rows.padded(x[:tokens])
    out, _ = causal_conv1d(
        padded.float(), weight.float(), None if bias is None else bias.float(), window
    )
    y[:tokens] = rows.flat(out).to(y.dtype)
    # What was convolved is not what is stored: an input may be rounded on its way into the block,
    # never on its way out.
    inputs = torch.cat([window.to(conv_state.dtype), padded.to(conv_state.dtype)], dim=1)[:, 1:]
    targets = state_indices[active, 0].long()[:, None].expand(inputs.shape[:2])
    steps = torch.arange(inputs.shape[1], device=x.device).expand(inputs.shape[:2])
    owned = (steps < kernel - 2 + rows.lengths[:, None]) & (targets != 0)
    conv_state[targets[owned], steps[owned]] = inputs[owned]
    return y


def causal_conv1d_prefill_reference(
    conv_state: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    spans: Spans,
    window_indices: torch.Tensor,
    window_rows: torch.Tensor,
    has_initial_state: torch.Tensor,
) -> torch.Tensor:
    """Run `causal_conv1d_prefill` in plain torch; tokens of no row come out as zeros."""
    y = torch.zeros_like(x, memory_format=torch.contiguous_format)
    lengths = spans.cu_seqlens.diff()
    active = lengths.nonzero()[:, 0]
    if not len(active):
        return y
    rows = Ragged(lengths[active].cpu().long(), x.device)
    size = weight.shape[1] - 1
    sources = window_indices[active].long()
    skip = window_rows[active].long()
    readable = has_initial_state[active] & (sources > 0)
    window = (
        windows_at(conv_state, sources.clamp(min=0), skip, size)
        .float()
        .masked_fill(~readable[:, None, None], 0)
    )
    padded = rows.padded(x[: spans.num_tokens]).float()
    out, inputs = causal_conv1d(
        padded, weight.float(), None if bias is None else bias.float(), window
    )
    y[: spans.num_tokens] = rows.flat(out).to(y.dtype)
    span_rows = torch.arange(len(active), device=x.device).repeat_interleave(
        spans.row_spans.diff()[active]
    )
    offsets = spans.cu_spans[1:] - spans.cu_seqlens[active][span_rows]
    kept = spans.span_blocks > 0
    windows = windows_at(inputs, span_rows, offsets.long(), size)
    conv_state[:, :size].index_copy_(0, spans.span_blocks[kept], windows[kept].to(conv_state.dtype))
    return y
