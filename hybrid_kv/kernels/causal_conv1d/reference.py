"""Depthwise causal convolution over time, with a window carried between steps.

`y[t] = silu(bias + sum_j weight[:, j] * x[t - (kernel - 1) + j])`, as in Mamba-2 (Dao and Gu, 2024). The window is the
last `kernel - 1` inputs. Shifted multiply-adds: torch's depthwise `conv1d` takes 15-40 ms a call on two cores here.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from hybrid_kv.kernels.common.strided import gather_tokens, token_places


def causal_conv1d(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, window: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Convolve some tokens of each row; no token sees what comes after it, so padding at the end does no harm.

    Args:
        x: [num_rows, len, channels].
        weight: [channels, kernel]; bias: [channels] or None.
        window: [num_rows, kernel - 1, channels], the inputs before them (zeros at the start of a request).

    Returns:
        y [num_rows, len, channels] after SiLU, and all inputs [num_rows, kernel - 1 + len, channels]: the window after
        the first n tokens begins at row n of them, see `windows_at`.
    """
    length, kernel = x.shape[1], weight.shape[1]
    inputs = torch.cat([window, x], dim=1)
    if length == 1:
        y = (inputs * weight.T).sum(1, keepdim=True)
        return F.silu(y if bias is None else y.add_(bias), inplace=True), inputs
    first = inputs[:, :length], weight[:, 0]
    y = torch.mul(*first) if bias is None else torch.addcmul(bias, *first)
    for j in range(1, kernel):
        y.addcmul_(inputs[:, j : j + length], weight[:, j])
    return F.silu(y, inplace=True), inputs


def windows_at(inputs: torch.Tensor, rows: torch.Tensor, first: torch.Tensor, size: int) -> torch.Tensor:
    """Copies of the windows `inputs[rows[m], first[m] : first[m] + size]`: [M, size, channels].

    Args:
        inputs: [num_rows, len, channels], what `causal_conv1d` returns or the blocks of a cache.
        rows, first: [M] int64.
    """
    if inputs.shape[1] == size:
        return inputs.index_select(0, rows)  # all of it, and `first` is 0
    return gather_tokens(inputs, window_places(inputs, rows, first, size)).unflatten(0, (-1, size))


def window_places(inputs: torch.Tensor, rows: torch.Tensor, first: torch.Tensor, size: int) -> torch.Tensor:
    """What `strided.gather_tokens` wants for the windows of `windows_at`, [M * size]."""
    return token_places(inputs, rows[:, None], first[:, None] + torch.arange(size, device=inputs.device)).flatten()
