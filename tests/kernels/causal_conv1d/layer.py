"""A convolution's operands for flat tokens, and what its definition says of one row of them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

from tests.kernels.definitions import causal_conv1d
from tests.kernels.harness import Expected, Pool, Shape, flat_tokens

# In float32, of the sum of the magnitudes that meet before SiLU (as many roundings as taps, and
# exp), whose slope is at most 1.1; plus the rounding of a 16-bit output. What is stored is compared
# bit for bit: it is copied.
OUTPUTS = 1e-6


def numpy(tensor: torch.Tensor | None) -> npt.NDArray[np.float64] | None:
    return None if tensor is None else tensor.cpu().double().numpy()


def convolve(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, window: torch.Tensor
) -> Iterator[torch.Tensor]:
    """y [len, channels] and all inputs [kernel - 1 + len, channels] of a row, in float64."""
    return map(torch.from_numpy, causal_conv1d(*map(numpy, (window, x, weight, bias))))


class Layer:
    """`arguments` from conv_state to bias; of the pool nothing but NaN is in a block."""

    def __init__(
        self,
        shape: Shape,
        tokens: int,
        num_blocks: int,
        height: int,
        g: torch.Generator,
        device: str,
    ) -> None:
        # Values that both types hold, so that what is stored can be compared bit for bit: the
        # interpreter does not round as a GPU does.
        (x,) = flat_tokens(
            tokens + 2, [(shape.channels,)], shape.gap, shape.state_dtype, g, shape.scale, offset=2
        )
        taps = (shape.kernel, shape.channels) if shape.tap_major else (shape.channels, shape.kernel)
        weight = torch.randn(*taps, generator=g).to(device, shape.dtype)
        pool = Pool(num_blocks, (height, shape.channels), shape.gap, shape.state_dtype, device)
        self.arguments = {
            "conv_state": pool.blocks,
            "x": x.to(device, shape.dtype)[: tokens + 2 * shape.bias],
            "weight": weight.t() if shape.tap_major else weight,
            "bias": torch.randn(shape.channels, generator=g).to(device, shape.dtype)
            if shape.bias
            else None,
        }
        self.pools = {"conv_state": pool}

    def put(self, block: int, first: int, g: torch.Generator) -> None:
        """A window into a block, from row `first` on."""
        window = torch.randn(self.shape.kernel - 1, self.shape.channels, generator=g)
        self.arguments["conv_state"][block, first : first + self.shape.kernel - 1] = window.to(
            self.pools["conv_state"].storage
        )

    def row(self, span: slice, source: int, first: int) -> tuple[Expected, torch.Tensor]:
        """What is expected of a row's outputs, and all of its inputs."""
        blocks, x, weight, bias = (
            self.arguments[name] for name in ("conv_state", "x", "weight", "bias")
        )
        window = blocks[source, first : first + weight.shape[1] - 1]
        window = window if source > 0 else torch.zeros_like(window)
        y, inputs = convolve(x[span], weight, bias, window)
        magnitude = inputs.abs().max() * weight.cpu().abs().double().sum(1).max()
        magnitude += 0 if bias is None else bias.cpu().abs().double().max()
        return Expected("y", span, y, OUTPUTS, magnitude, x.dtype), inputs

    def stored(self, block: int, inputs: torch.Tensor) -> Expected:
        """A block whose first rows must hold these."""
        return Expected(
            "conv_state", (block, slice(len(inputs))), inputs, 0, 0, self.shape.state_dtype
        )
