"""States after chosen tokens of rows that are worked through chunk by chunk."""

from __future__ import annotations

import torch


class WantedStates:
    """Says which states each chunk owes, and puts them in the order in which they were asked for.

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
