"""LFM2's short convolution.

Each output is one token's bit of the window times a bit of the current token.
"""

from __future__ import annotations

import torch

from hybrid_kv.models.exact_weights.design import CHANNELS, WIDTH, Choices, spread


def short_conv(taps: int, is_first: bool, draw: Choices) -> dict[str, torch.Tensor]:
    """Return the tensors of a layer, by their names below `conv.`.

    Args:
        is_first: of the model. Its first channel is 1 at the first token of a text, where the
            window is zero, else 0.
    """
    before, after, value = (torch.zeros(WIDTH, WIDTH) for _ in range(3))
    window = torch.zeros(WIDTH, 1, taps)
    out = spread(WIDTH, draw)
    before[:, CHANNELS.one] = 1.0
    for row in range(WIDTH):
        value[row, draw.source()] = draw.sign()
        after[row, draw.source()] = 1.0
        window[row, 0, draw.below(taps - 1)] = 1.0  # never the current token: the residual has it
    if is_first:
        value[0], after[0], window[0], out[:, 0] = 0.0, 0.0, 0.0, 0.0
        value[0, CHANNELS.one] = after[0, CHANNELS.one] = 1.0
        window[0, 0, -2:] = torch.tensor([-1.0, 1.0])
        out[CHANNELS.first, 0] = 1.0
    return {
        "in_proj.weight": torch.cat([before, after, value]),
        "conv.weight": window,
        "out_proj.weight": out,
    }
