"""Rows of different lengths: flat and padded, and the states that are wanted of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch

from hybrid_kv.kernels.common.upload import Array, Staged, upload


class Ragged:
    """The tokens of several requests lie back to back; row operations want `[num_rows, max_len, …]`.

    Args:
        lengths: [num_rows] int64 on the CPU, tokens of each row, >= 1.
        device: where the tokens are.
        moved: what `stage` has brought there.

    Attributes:
        starts: [num_rows + 1] int64, first token of each row, and the number of tokens.
    """

    def __init__(self, lengths: torch.Tensor, device: torch.device, moved: Sequence[torch.Tensor] = ()) -> None:
        known = lengths.tolist()
        self.num_rows = len(known)
        self.max_len = max(known)
        self.device = device
        self.uniform = self.max_len == min(known)
        if self.uniform:
            self.lengths, self.starts = _uniform(self.num_rows, self.max_len, device)
        else:
            self.lengths, self._padded, self._flat, self.starts = moved or upload(device, *_indices(lengths))

    @classmethod
    def stage(cls, lengths: torch.Tensor, device: torch.device) -> Staged[Ragged]:
        """Rows whose indices, if they need any, come with the step's upload."""
        arrays = _indices(lengths) if len(set(lengths.tolist())) > 1 else []
        return arrays, lambda *moved: cls(lengths, device, moved)

    def padded(self, tokens: torch.Tensor) -> torch.Tensor:
        """[num_tokens, …] to [num_rows, max_len, …]; the content of padding is arbitrary but finite."""
        shape = (self.num_rows, self.max_len, *tokens.shape[1:])
        return tokens.view(shape) if self.uniform else tokens.index_select(0, self._padded).view(shape)

    def flat(self, rows: torch.Tensor) -> torch.Tensor:
        """The inverse of `padded`."""
        tokens = rows.reshape(-1, *rows.shape[2:])
        return tokens if self.uniform else tokens.index_select(0, self._flat)


def _indices(lengths: torch.Tensor) -> list[Array]:
    """Of rows of different lengths: these, where each padded token comes from, and each flat one, and `starts`."""
    steps = torch.arange(int(lengths.max()))
    bounds = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    # Padding repeats the row's last token: any valid index will do, since `flat` drops it.
    padded = bounds[:-1, None] + torch.minimum(steps, lengths[:, None] - 1)
    flat = (steps < lengths[:, None]).flatten().nonzero()[:, 0]
    # Flat, since `index_select` copies token by token, several times as fast as an index of two dimensions.
    return [part.numpy() for part in (lengths, padded.flatten(), flat, bounds)]


@cache  # a captured graph goes on reading them
def _uniform(num_rows: int, length: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    starts = torch.arange(0, num_rows * length + 1, length, device=device)
    return torch.full((num_rows,), length, device=device), starts


class WantedStates:
    """The wanted states of each chunk, and all of them in the order in which they are wanted.

    Args:
        rows, offsets: [M] int64, the wanted states: after `offsets[m]` tokens, at least one, of row `rows[m]`.
        chunk_size: tokens of every chunk but the last.
    """

    def __init__(self, rows: torch.Tensor, offsets: torch.Tensor, chunk_size: int) -> None:
        self._rows, self._last, self._chunk_size = rows, offsets - 1, chunk_size
        self._chunk_of = (self._last // chunk_size).tolist()
        self._order = list[int]()
        self._found = list[torch.Tensor]()

    def inside(self, start: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Row and last token, counted from the chunk's first, of those in the chunk at `start`; None if there are none.

        The states that `add` gets next are theirs.
        """
        chunk = start // self._chunk_size
        here = [m for m, other in enumerate(self._chunk_of) if other == chunk]
        if not here:
            return None
        self._order += here
        if len(here) == len(self._chunk_of):
            return self._rows, self._last - start
        chosen = torch.tensor(here, device=self._rows.device)
        return self._rows[chosen], self._last[chosen] - start

    def add(self, states: torch.Tensor) -> None:
        """[m, …] of those that `inside` named."""
        self._found.append(states)

    def gather(self, like: torch.Tensor) -> torch.Tensor:
        """All of them, [M, …]; of none, the shape and dtype are those of `like` [num_rows, …]."""
        if not self._found:
            return like.new_empty(0, *like.shape[1:])
        if len(self._found) == 1:
            return self._found[0]
        return torch.cat(self._found)[torch.tensor(self._order, device=self._rows.device).argsort()]
