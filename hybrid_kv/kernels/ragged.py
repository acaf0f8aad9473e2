"""Rows of different lengths, flat and padded."""

from __future__ import annotations

import torch


class Ragged:
    """The tokens of several requests lie back to back; row operations want `[num_rows, max_len, …]`.

    Args:
        lengths: [num_rows] int64 on the CPU, tokens of each row, >= 1.
        device: where the tokens are.
    """

    def __init__(self, lengths: torch.Tensor, device: torch.device) -> None:
        known = lengths.tolist()
        self.num_rows = len(known)
        self.max_len = max(known)
        self.lengths = lengths.to(device)
        self.uniform = self.max_len == min(known)
        if not self.uniform:
            steps = torch.arange(self.max_len, device=device)
            starts = self.lengths.cumsum(0) - self.lengths
            self.mask = steps < self.lengths[:, None]
            # Padding repeats the row's last token: any valid index will do, since `flat` drops it.
            self._index = starts[:, None] + torch.minimum(steps, self.lengths[:, None] - 1)

    def padded(self, tokens: torch.Tensor) -> torch.Tensor:
        """[num_tokens, …] to [num_rows, max_len, …]; the content of padding is arbitrary but finite."""
        if self.uniform:
            return tokens.view(self.num_rows, self.max_len, *tokens.shape[1:])
        return tokens[self._index]

    def flat(self, rows: torch.Tensor) -> torch.Tensor:
        """The inverse of `padded`."""
        if self.uniform:
            return rows.reshape(-1, *rows.shape[2:])
        return rows[self.mask]
