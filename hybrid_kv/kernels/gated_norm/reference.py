"""The gated norm in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def gated_rms_norm_reference(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, groups: int, eps: float
) -> torch.Tensor:
    """`gated_rms_norm` in plain torch."""
    gated = x.float() * F.silu(gate.float())
    grouped = gated.unflatten(-1, (groups, -1))
    normed = F.rms_norm(grouped, grouped.shape[-1:], eps=eps).flatten(-2)
    return (normed * weight.float()).to(gate.dtype)
