"""A verifier that accepts every draft."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hybrid_kv.spec_decode.verify import verify


def accepts_everything(
    logits: torch.Tensor, draws: Any, drafts: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A verifier with a bug."""
    tokens, accepted = verify(logits, draws, drafts)
    if accepted is None:
        return tokens, None
    ids, rows = drafts
    tokens[rows[ids >= 0]] = ids[ids >= 0]
    return tokens, (ids >= 0).sum(1)
