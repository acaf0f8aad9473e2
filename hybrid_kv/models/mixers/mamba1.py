"""A Mamba-1 layer (Gu and Dao, 2023, arXiv 2312.00752): convolution, selective scan, gate."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from hybrid_kv.cache.spec import MambaSpec
from hybrid_kv.kernels.common.integers import cdiv
from hybrid_kv.kernels.selective_scan import selective_scan, selective_scan_update
from hybrid_kv.models.config_file import ConfigFile
from hybrid_kv.models.layers import Derived, Linear, empty, upcast
from hybrid_kv.models.mixers.conv import Projected, RecurrentMixer, Tensors, rates, sizes_of


class Mamba1Mixer(RecurrentMixer):
    """The layer.

    Args:
        spec: of its cache, whose state is [channels, state_size].
        dt_rank: size of a time step before it is projected to one for each channel.
        norm: makes that of so many channels: of a time step, of B and of C.
        conv_bias: of the convolution; `bias`: of the first and the last projection.
    """

    # Tokens whose states are held at a time: with 8,192 channels of 16 in float32, 8 MiB each.
    chunk_size = 16
    update = staticmethod(selective_scan_update)
    scan = staticmethod(selective_scan)

    def __init__(
        self,
        name: str,
        hidden_size: int,
        spec: MambaSpec,
        dt_rank: int,
        norm: Callable[[int], nn.Module],
        conv_bias: bool,
        bias: bool,
    ) -> None:
        super().__init__(name, *sizes_of(spec), conv_bias)
        channels, state_size = spec.parts[1].shape
        self.splits = (dt_rank, state_size, state_size)
        self.in_proj = Linear(hidden_size, 2 * channels, bias)
        self.x_proj = Linear(channels, sum(self.splits))
        self.dt_norm, self.B_norm, self.C_norm = map(norm, self.splits)
        self.dt_proj = Linear(dt_rank, channels, bias=True)
        self.A_log = empty(channels, state_size)
        self.D = empty(channels)
        self._rates = Derived(rates)
        self.out_proj = Linear(channels, hidden_size, bias)

    def project(self, x: torch.Tensor) -> Projected:
        conv_in, gate = self.in_proj(x).chunk(2, dim=-1)
        return Projected(conv_in, (), (gate,))

    def finish(self, mixed: torch.Tensor, rest: Tensors) -> torch.Tensor:
        (gate,) = rest
        return self.out_proj((mixed * F.silu(upcast(gate))).to(gate.dtype))

    def operands(self, conv_out: torch.Tensor, inputs: Tensors, dtype: torch.dtype) -> Tensors:
        """Return x, dt after the softplus, A, B, C, D."""
        A, D = self._rates(self.A_log, self.D, dtype=dtype)
        dt, B, C = self.x_proj(conv_out).split(self.splits, dim=-1)
        dt = F.softplus(self.dt_proj(self.dt_norm(dt)).to(dtype))
        return conv_out.to(dtype), dt, A, self.B_norm(B).to(dtype), self.C_norm(C).to(dtype), D


def dt_rank(file: ConfigFile, key: str) -> int:
    """Return the size of a time step before its projection.

    `auto` is a sixteenth of the hidden size.
    """
    return cdiv(file.size("hidden_size"), 16) if file.get(key) in (None, "auto") else file.size(key)
