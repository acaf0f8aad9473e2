"""Layers of the exact model in SGLang: its own, with other weights and kernels."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.attention.mamba import mamba
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.layers.radix_linear_attention import RadixLinearAttention
from sglang.srt.model_executor.forward_context import get_attn_backend
from torch import nn

from . import kernels, mamba2
from .kernels import PRIME

NUM_PARTS = 3  # of what a layer convolves: queries, keys, values; or x, B, C


def padded(conv: torch.Tensor, num_parts: int) -> torch.Tensor:
    """Return weights [parts * width, kernel] of a convolution [windows, kernel, width].

    Parts that the exact model lacks have weights of zero, and so add nothing.
    """
    weight = torch.zeros(num_parts, *conv.shape[:0:-1], dtype=torch.int64)
    weight[: len(conv)] = conv.transpose(1, 2)
    return weight.flatten(0, 1)


def parts_of(x: torch.Tensor, count: int) -> torch.Tensor:
    """Return what is convolved [tokens, count * width] of tokens [tokens, width]."""
    return torch.cat([x, *((x * (i + 2) + i) % PRIME for i in range(count - 1))], 1)


class SglangAttention(RadixAttention):
    """An attention layer."""

    def __init__(self, weights: dict[str, Any], width: int, layer_id: int) -> None:
        super().__init__(1, width, 1.0, 1, layer_id)
        for name in ("qkv", "write_mark", "read_mark"):
            setattr(self, name, torch.tensor(weights[name], dtype=torch.int64))

    def run(self, x: torch.Tensor, positions: torch.Tensor, batch: Any) -> torch.Tensor:
        """Return the output [num_tokens, width] for x."""
        q, k, v = x * self.qkv[:, None] % PRIME
        mark = (positions[: len(x), None] + 1) * self.write_mark % PRIME
        return self(q, (k + mark * mark) % PRIME, v, batch).view(len(x), -1)


class SglangDeltaNet(RadixLinearAttention):
    """A layer of a gated delta net."""

    def __init__(self, weights: dict[str, Any], width: int, layer_id: int) -> None:
        conv, to_map, out = (
            torch.tensor(weights[name], dtype=torch.int64) for name in ("conv", "to_map", "out")
        )
        num_states = len(out)
        self.num_parts = NUM_PARTS - 1 + num_states
        weight = padded(conv, self.num_parts)
        super().__init__(layer_id, 1, 1, num_states, width, width, width, weight, None, "none")
        self.A_log = to_map
        self.dt_bias = out

    def run(self, x: torch.Tensor, positions: torch.Tensor, batch: Any) -> torch.Tensor:
        """Return the output [num_tokens, width] for x."""
        nothing = torch.zeros(len(x), 1, dtype=torch.int64)
        y = self(batch, parts_of(x, self.num_parts), nothing, nothing)
        return y[0, :, 0]


class SglangMamba2(mamba.MambaMixer2):
    """A Mamba-2 layer: SGLang's mixer, whose linear layers and norm are stand-ins."""

    tp_size = num_heads = n_groups = 1
    activation = "none"

    def __init__(self, weights: dict[str, Any], width: int, layer_id: int) -> None:
        nn.Module.__init__(self)
        conv, to_map, out = (
            torch.tensor(weights[name], dtype=torch.int64) for name in ("conv", "to_map", "out")
        )
        self.layer_id = layer_id
        self.head_dim = self.intermediate_size = width
        self.ssm_state_size = self.groups_ssm_state_size = out.shape[1]
        self.conv_dim = NUM_PARTS * width
        self.A = self.dt_bias = torch.zeros(1)
        self.D = mamba2.LayerWeights(to_map, out)
        self.conv1d = SimpleNamespace(weight=padded(conv, NUM_PARTS)[:, None], bias=None)

    def in_proj(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return a gate, what is convolved, and a step [tokens, …] of x."""
        return torch.cat([torch.zeros_like(x), parts_of(x, NUM_PARTS), x[:, :1]], 1), None

    def norm(self, y: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Return y as it is."""
        return y

    def out_proj(self, y: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return y as it is."""
        return y, None

    def run(self, x: torch.Tensor, positions: torch.Tensor, batch: Any) -> torch.Tensor:
        """Return the output [num_tokens, width] for x."""
        backend: Any = get_attn_backend()
        return backend.linear_attn_backend.forward(
            mixer=self,
            hidden_states=x,
            output=None,
            layer_id=self.layer_id,
            forward_batch=batch,
            use_triton_causal_conv=True,
        )


def short_conv(weights: dict[str, Any], width: int, layer_id: int) -> nn.Module:
    """Return a layer of a gated short convolution: LFM2's, whose linear layers are stand-ins."""
    lfm2: Any = import_module("sglang.srt.models.lfm2")  # imports much that no other layer needs
    lfm2.causal_conv1d_fn = kernels.causal_conv1d_fn
    lfm2.causal_conv1d_update = kernels.causal_conv1d_update
    lfm2.causal_conv1d_update_triton = kernels.causal_conv1d_update

    class SglangShortConv(lfm2.Lfm2ShortConv):
        def __init__(self) -> None:
            nn.Module.__init__(self)
            self.layer_idx = layer_id
            self.conv_weight = padded(torch.tensor(weights["conv"], dtype=torch.int64), 1)
            self.conv_bias = None
            lfm2.register_shortconv_verify_buffers(self)

        def in_proj(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
            return torch.cat([torch.ones_like(x)] * 2 + [x], 1), None  # both gates are open

        def out_proj(self, y: torch.Tensor) -> tuple[torch.Tensor, None]:
            return y * y % PRIME, None

        def run(self, x: torch.Tensor, positions: torch.Tensor, batch: Any) -> torch.Tensor:
            return self(x, batch)

    return SglangShortConv()


def install_kernels() -> None:
    """Give SGLang's mixer of Mamba-2 its kernels, which a CPU has none of."""
    module: Any = mamba
    for suffix in ("", "_triton"):
        setattr(module, f"causal_conv1d_fn{suffix}", kernels.causal_conv1d_fn)
        setattr(module, f"causal_conv1d_update{suffix}", kernels.causal_conv1d_update)
    module.mamba_chunk_scan_combined = mamba2.chunk_scan
    module.selective_state_update = mamba2.state_update


# By the kind of a layer with states.
LAYERS: dict[str, Any] = {
    "GDN_ATTN": SglangDeltaNet,
    "MAMBA2": SglangMamba2,
    "SHORT_CONV": short_conv,
    "": SglangAttention,
}
