"""Depthwise causal convolution over time, with a window carried between steps.

`y[t] = silu(bias + sum_j weight[:, j] * x[t - (kernel - 1) + j])`, as in Mamba-2 (Dao and Gu, 2024). The window is the
last `kernel - 1` inputs. Shifted multiply-adds: torch's depthwise `conv1d` takes 15-40 ms a call on two cores here.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def causal_conv1d_prefill(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, window: torch.Tensor, lengths: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Convolve a chunk of each row.

    Args:
        x: [num_rows, max_len, channels]; padding behind `lengths` is ignored.
        weight: [channels, kernel]; bias: [channels] or None.
        window: [num_rows, kernel - 1, channels], the inputs before the chunk (zeros at the start of a request).
        lengths: [num_rows] int64.

    Returns:
        y [num_rows, max_len, channels] after SiLU, and the window after each row's last token. A chunk shorter than the
        window keeps part of the old one.
    """
    kernel = weight.shape[1]
    max_len = x.shape[1]
    inputs = torch.cat([window, x], dim=1)
    y = inputs[:, :max_len] * weight[:, 0]
    for j in range(1, kernel):
        y = torch.addcmul(y, inputs[:, j : j + max_len], weight[:, j])
    if bias is not None:
        y = y + bias
    last = lengths[:, None] + torch.arange(kernel - 1, device=x.device)
    new_window = inputs[torch.arange(len(x), device=x.device)[:, None], last]
    return F.silu(y), new_window


def causal_conv1d_update(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, window: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Convolve one token of each row.

    Args:
        x: [num_rows, channels]. Others as in `causal_conv1d_prefill`.

    Returns:
        y [num_rows, channels] after SiLU, and the window after the token.
    """
    inputs = torch.cat([window, x.unsqueeze(1)], dim=1)
    y = torch.einsum("rkc,ck->rc", inputs, weight)
    if bias is not None:
        y = y + bias
    return F.silu(y), inputs[:, 1:]
