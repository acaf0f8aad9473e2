"""What every metadata builder gets each step."""

from __future__ import annotations

from dataclasses import dataclass, field

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

    Attributes:
        decode_rows, prefill_rows: their lengths, for all groups; None if there are none.
    """

    num_reqs: int
    num_reqs_padded: int
    num_decodes: int  # padding included
    num_decode_tokens: int  # padding included
    query_lens: npt.NDArray[np.int64]  # [num_reqs_padded]
    num_computed_tokens: npt.NDArray[np.int64]  # [num_reqs_padded], before this step
    positions: torch.Tensor  # [T] int64
    decode_rows: Ragged | None = field(init=False)
    prefill_rows: Ragged | None = field(init=False)

    def __post_init__(self) -> None:
        split, device = self.num_decodes, self.positions.device
        for name, lengths in (("decode_rows", self.query_lens[:split]), ("prefill_rows", self.query_lens[split:])):
            rows = Ragged(torch.from_numpy(lengths), device) if len(lengths) else None
            object.__setattr__(self, name, rows)  # it is frozen

    @property
    def num_prefills(self) -> int:
        return self.num_reqs_padded - self.num_decodes
