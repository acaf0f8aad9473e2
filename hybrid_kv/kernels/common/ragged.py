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
            steps = torch.arange(self.max_len)
            starts = lengths.cumsum(0) - lengths
            # Padding repeats the row's last token: any valid index will do, since `flat` drops it.
            padded = starts[:, None] + torch.minimum(steps, lengths[:, None] - 1)
            flat = (steps < lengths[:, None]).flatten().nonzero()[:, 0]
            # Flat, since `index_select` copies token by token, several times as fast as an index of two dimensions.
            self._padded, self._flat = padded.flatten().to(device), flat.to(device)

    def starts(self) -> torch.Tensor:
        """[num_rows + 1] int64, first token of each row, and the number of tokens."""
        return torch.nn.functional.pad(self.lengths.cumsum(0), (1, 0))

    def padded(self, tokens: torch.Tensor) -> torch.Tensor:
        """[num_tokens, …] to [num_rows, max_len, …]; the content of padding is arbitrary but finite."""
        shape = (self.num_rows, self.max_len, *tokens.shape[1:])
        return tokens.view(shape) if self.uniform else tokens.index_select(0, self._padded).view(shape)

    def flat(self, rows: torch.Tensor) -> torch.Tensor:
        """The inverse of `padded`."""
        tokens = rows.reshape(-1, *rows.shape[2:])
        return tokens if self.uniform else tokens.index_select(0, self._flat)
