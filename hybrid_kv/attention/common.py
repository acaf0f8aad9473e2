"""What every metadata builder gets each step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from hybrid_kv.kernels.common.ragged import Ragged


@dataclass(frozen=True)
class CommonAttentionMetadata:
    """One step's batch: decodes first, then prefills.

    A *decode* runs one known token of a request that already has a state, and up to K drafts behind it; everything else
    is a *prefill*, however short. Padding rows are one-token decodes on the null block with `PAD_SLOT`; they occur only
    in a step without prefills.

    Shapes: R = `num_reqs_padded` rows, T tokens, padding included.
    """

    num_reqs: int
    num_reqs_padded: int
    num_decodes: int  # padding included
    num_decode_tokens: int  # padding included
    query_lens: npt.NDArray[np.int64]  # [num_reqs_padded]
    num_computed_tokens: npt.NDArray[np.int64]  # [num_reqs_padded], before this step
    positions: torch.Tensor  # [T] int64

    @property
    def num_prefills(self) -> int:
        return self.num_reqs_padded - self.num_decodes

    @cached_property
    def decode_rows(self) -> Ragged | None:
        """The decodes, for all groups; None if there are none."""
        return self._rows(self.query_lens[: self.num_decodes])

    @cached_property
    def prefill_rows(self) -> Ragged | None:
        """The prefills."""
        return self._rows(self.query_lens[self.num_decodes :])

    def _rows(self, lengths: npt.NDArray[np.int64]) -> Ragged | None:
        return Ragged(torch.from_numpy(lengths), self.positions.device) if len(lengths) else None
