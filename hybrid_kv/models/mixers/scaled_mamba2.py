"""Mamba-2 with multipliers, as in Falcon-H1."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F

from hybrid_kv.models.layers import Derived, upcast
from hybrid_kv.models.mixers.conv import Projected
from hybrid_kv.models.mixers.mamba2 import Mamba2Mixer

Order = Literal["gate_first", "norm_first", "none"]


def _repeated(weight: torch.Tensor, values: tuple[float, ...], sizes: tuple[int, ...]) -> torch.Tensor:
    return torch.cat([weight.new_full((size,), value) for value, size in zip(values, sizes, strict=True)])


class ScaledMamba2Mixer(Mamba2Mixer):
    """Mamba-2 with multipliers, and a norm before the gate, behind it or none.

    Args:
        scale_in: of the input; `scales`: of gate, x, B, C and dt behind the projection.
        order: whether the norm stands behind the gate or before it, or there is none.
    """

    def __init__(self, *args: Any, scale_in: float, scales: list[float], order: Order, **options: Any) -> None:
        super().__init__(*args, **options)
        self.scale_in, self.order, self._scales = scale_in, order, Derived(_repeated)
        shared = self.groups * self.state_size
        self._parts_scaled = {
            "values": tuple(scales),
            "sizes": (self.splits[0], self.splits[0], shared, shared, self.num_heads),
        }
        if order == "none":
            del self.norm

    def project(self, x: torch.Tensor) -> Projected:
        projected = self.in_proj(x * self.scale_in) * self._scales(self.in_proj.weight, **self._parts_scaled)
        gate, conv_in, raw_dt = projected.split(self.splits, dim=-1)
        return Projected(conv_in, (raw_dt,), (gate,))

    def gated(self, mixed: torch.Tensor, gate: torch.Tensor, launches: bool) -> torch.Tensor:
        if self.order == "gate_first":
            return super().gated(mixed, gate, launches)
        wide = upcast(mixed)
        if self.order == "norm_first":
            grouped = wide.unflatten(-1, (self.groups, -1))
            normed = F.rms_norm(grouped, grouped.shape[-1:], eps=self.norm.eps).flatten(-2)
            wide = normed * upcast(self.norm.weight)
        return (wide * F.silu(upcast(gate))).to(gate.dtype)
