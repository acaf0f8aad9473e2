"""Rows of different lengths, flat and padded, and the states that are kept inside of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch

from hybrid_kv.kernels.common.upload import Array, Staged, upload


class Ragged:
    """The tokens of several requests, back to back; row operations take `[num_rows, max_len, …]`.

    Args:
        lengths: [num_rows] int64 on the CPU, tokens of each row, >= 1.
        device: where the tokens are.
        moved: what `stage` has brought there.

    Attributes:
        starts: [num_rows + 1] int64, first token of each row, and the number of tokens.
    """

    def __init__(
        self, lengths: torch.Tensor, device: torch.device, moved: Sequence[torch.Tensor] = ()
    ) -> None:
        known = lengths.tolist()
        self.num_rows = len(known)
        self.max_len = max(known)
        self.device = device
        self.uniform = self.max_len == min(known)
        if self.uniform:
            self.lengths, self.starts = _uniform(self.num_rows, self.max_len, device)
        else:
            self.lengths, self._padded, self._flat, self.starts = moved or upload(
                device, *_indices(lengths)
            )

    @classmethod
    def stage(cls, lengths: torch.Tensor, device: torch.device) -> Staged[Ragged]:
        """Stage the rows: the indices that they need, if any, come with the step's upload."""
        arrays = _indices(lengths) if len(set(lengths.tolist())) > 1 else []

        def make(*moved: torch.Tensor) -> Ragged:
            return cls(lengths, device, moved)

        return arrays, make

    def padded(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return tokens [num_tokens, …] as [num_rows, max_len, …].

        The content of padding is arbitrary but finite.
        """
        shape = (self.num_rows, self.max_len, *tokens.shape[1:])
        return (
            tokens.view(shape) if self.uniform else tokens.index_select(0, self._padded).view(shape)
        )

    def flat(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows [num_rows, max_len, …] as tokens [num_tokens, …]: the inverse of `padded`."""
        tokens = rows.reshape(-1, *rows.shape[2:])
        return tokens if self.uniform else tokens.index_select(0, self._flat)


def _indices(lengths: torch.Tensor) -> list[Array]:
    """Return lengths, padded indices, flat indices and `starts` of rows of different lengths.

    Indices are those to gather from: of each padded token in the flat ones, and the other way
    round.
    """
    steps = torch.arange(int(lengths.max()))
    bounds = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    # Padding repeats the row's last token: any valid index will do, since `flat` drops it.
    padded = bounds[:-1, None] + torch.minimum(steps, lengths[:, None] - 1)
    flat = (steps < lengths[:, None]).flatten().nonzero()[:, 0]
    # Flat, since `index_select` copies token by token, several times as fast as an index of two
    # dimensions.
    return [indices.numpy() for indices in (lengths, padded.flatten(), flat, bounds)]


@cache  # a captured graph goes on reading them
def _uniform(num_rows: int, length: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    starts = torch.arange(0, num_rows * length + 1, length, device=device)
    return torch.full((num_rows,), length, device=device), starts


class WantedStates:
    """The wanted states of each chunk, and all of them in the order in which they are wanted.

    Args:
        rows, offsets: [M] int64, the wanted states: after `offsets[m]` tokens, at least one, of row
            `rows[m]`.
        chunk_size: tokens of every chunk but the last.
    """

    def __init__(self, rows: torch.Tensor, offsets: torch.Tensor, chunk_size: int) -> None:
        self._rows = rows
        self._last = offsets - 1
        self._chunk_size = chunk_size
        self._chunk_of = (self._last // chunk_size).tolist()
        self._order = list[int]()
        self._found = list[torch.Tensor]()

    def inside(self, start: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return rows and last tokens of the wanted states in the chunk at `start`, or None.

        Tokens count from the chunk's first. The states that `add` gets next are theirs.

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
        """Add the states [m, …] that `inside` named last."""
        self._found.append(states)

    def gather(self, like: torch.Tensor) -> torch.Tensor:
        """Return all wanted states [M, …].

        Of none, the shape and dtype are those of `like` [num_rows, …].
        """
        if not self._found:
            return like.new_empty(0, *like.shape[1:])
        if len(self._found) == 1:
            return self._found[0]
        return torch.cat(self._found)[torch.tensor(self._order, device=self._rows.device).argsort()]
