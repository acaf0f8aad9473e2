"""Recurrences whose state after each token is what its stored form says.

See `kernels.state_codec`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple
from zlib import crc32

import torch

from hybrid_kv.kernels.common.strided import copy_blocks
from hybrid_kv.kernels.state_codec import StateCodec

Tensors = tuple[torch.Tensor, ...]


class WantedBlocks(NamedTuple):
    """States that a step stores, [n] int64 each: after `offsets` tokens of `rows`, in `blocks`."""

    rows: torch.Tensor
    offsets: torch.Tensor
    blocks: torch.Tensor

    @classmethod
    def of_every_token(cls, targets: torch.Tensor) -> WantedBlocks:
        """Return those of the blocks [num_rows, len], one for each token."""
        num_rows, length = targets.shape
        rows = torch.arange(num_rows, device=targets.device).repeat_interleave(length)
        offsets = torch.arange(1, 1 + length, device=targets.device).repeat(num_rows)
        return cls(rows, offsets, targets.flatten())


class RoundedStates:
    """The states of one layer in its blocks.

    Args:
        codec: of the states.
        views: the parts, [num_blocks, …] each: values, and scales if there are any.
        layer: name of the layer, from which its random numbers follow.
    """

    def __init__(self, codec: StateCodec, views: Tensors, layer: str) -> None:
        self.codec = codec
        self.views = views
        self.stream = crc32(layer.encode())

    def read(self, blocks: torch.Tensor) -> torch.Tensor:
        """Return the states [n, …] float32 in `blocks` [n]."""
        return self.codec.decode(tuple(view.index_select(0, blocks) for view in self.views))

    def run(
        self,
        update: Callable[..., Tensors],
        state: torch.Tensor,
        operands: Tensors,
        positions: torch.Tensor,
        wanted: WantedBlocks,
    ) -> torch.Tensor:
        """Run all tokens of each row, one after the other, and store the wanted states.

        Args:
            update: of the states and the operands, as `RecurrentMixer.update`.
            state: [num_rows, …] before the first token, in the dtype of the arithmetic.
            operands: those with three dimensions or more are of tokens, [num_rows, len, …].
            positions: [num_rows, len] int64.

        Returns:
            Outputs [num_rows, len, …].
        """
        outputs = []
        for t in range(positions.shape[1]):
            now = (values[:, t : t + 1] if values.dim() > 2 else values for values in operands)
            y, after = update(state, *now)
            outputs.append(y)
            parts = self.codec.encode(after[:, 0], positions[:, t], self.stream)
            self._store(parts, wanted, t + 1)
            state = self.codec.decode(parts).to(state.dtype)
        return torch.cat(outputs, 1)

    def _store(self, parts: Tensors, wanted: WantedBlocks, offset: int) -> None:
        due = (wanted.offsets == offset).nonzero()[:, 0]
        rows = wanted.rows[due]
        for view, values in zip(self.views, parts, strict=True):
            copy_blocks(view, wanted.blocks[due], values[rows])
