"""The step's batch as every metadata builder gets it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from hybrid_kv.kernels.common.ragged import Ragged
from hybrid_kv.kernels.common.upload import Staged, together


class PartialStates(NamedTuple):
    """Places inside of prefills whose states go to partial blocks (`cache.partial_blocks`).

    All int64, on the host.
    """

    rows: npt.NDArray[np.int64]  # [n], of the prefills
    offsets: npt.NDArray[np.int64]  # [n], tokens of the row up to there
    blocks: npt.NDArray[np.int64]  # [num_groups, n]; 0 of groups without states


@dataclass(frozen=True)
class CommonAttentionMetadata:
    """One step's batch: decodes first, then prefills.

    A *decode* runs one known token of a request that already has a state, and up to K drafts after
    it; everything else is a *prefill*, however short. Padding rows are one-token decodes on the
    null block with `PAD_SLOT`; they occur only in a step without prefills.

    Shapes: R = `num_reqs_padded` rows, T tokens, padding included.

    Attributes:
        decode_rows, prefill_rows: their lengths, for all groups, once `stage_rows` has made them;
            None if there are none.
    """

    num_reqs: int
    num_reqs_padded: int
    num_decodes: int  # padding included
    num_decode_tokens: int  # padding included
    query_lens: npt.NDArray[np.int64]  # [num_reqs_padded]
    num_computed_tokens: npt.NDArray[np.int64]  # [num_reqs_padded], before this step
    positions: torch.Tensor  # [T] int64
    partial: PartialStates | None = None
    decode_rows: Ragged | None = field(init=False, default=None)
    prefill_rows: Ragged | None = field(init=False, default=None)

    def stage_rows(self) -> Staged[None]:
        """Make `decode_rows` and `prefill_rows`."""
        split = self.num_decodes
        device = self.positions.device
        parts = {"decode_rows": self.query_lens[:split], "prefill_rows": self.query_lens[split:]}
        present = {
            name: torch.from_numpy(lengths) for name, lengths in parts.items() if len(lengths)
        }
        arrays, make = together(*(Ragged.stage(lengths, device) for lengths in present.values()))

        def keep(*moved: torch.Tensor) -> None:
            for name, rows in zip(present, make(*moved), strict=True):
                object.__setattr__(self, name, rows)  # it is frozen

        return arrays, keep

    @property
    def num_prefills(self) -> int:
        return self.num_reqs_padded - self.num_decodes
