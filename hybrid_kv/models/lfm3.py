"""LFM3: gated short convolutions, sliding windows and full attention, each branch normed twice.

Source: Liquid AI's LFM3 (2026) and its implementation in transformers, which is the oracle of the
tests. Windows and full attention have a RoPE each, in float32; attention has a gate for each head.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import nn

from hybrid_kv.cache.spec import FullAttentionSpec, KVCacheSpec, window_of
from hybrid_kv.models.attention import PagedAttention
from hybrid_kv.models.causal_lm import CausalLM, DecoderBlock, rms_norm
from hybrid_kv.models.config_file import ConfigFile, shown
from hybrid_kv.models.layers import ForwardContext, GatedMLP, Linear, RMSNorm
from hybrid_kv.models.lfm2 import NAMES, ShortConv
from hybrid_kv.models.rope import Rope, read_rope
from hybrid_kv.models.specs import WINDOW
from hybrid_kv.models.weights import converted

_ROPES = {
    WINDOW: {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {
        "rope_type": "proportional",
        "rope_theta": 1_000_000.0,
        "partial_rotary_factor": 0.5,
    },
}


class HeadGatedAttention(PagedAttention):
    """Attention whose heads are multiplied by the sigmoid of a number each, `head_gate(x)`."""

    def __init__(
        self,
        file: ConfigFile,
        name: str,
        spec: FullAttentionSpec,
        rope: Rope,
        norms: tuple[RMSNorm, RMSNorm],
    ) -> None:
        super().__init__(file, name, spec, rope=rope, norms=norms)
        self.head_gate = Linear(file.size("hidden_size"), self.heads[0])

    def _project(
        self, x: torch.Tensor, context: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        query, key, value, _ = super()._project(x, context)
        return query, key, value, self.head_gate(x).repeat_interleave(self.head_size, dim=1)


class SandwichBlock(nn.Module):
    """`x += post_norm(mixer(norm(x)))`, then `x += mlp_post_norm(mlp(mlp_norm(x)))`."""

    def __init__(self, block: DecoderBlock, post_norm: nn.Module, mlp_post_norm: nn.Module) -> None:
        super().__init__()
        self.norm = block.norm
        self.mixer = block.mixer
        self.post_norm = post_norm
        self.mlp_norm = block.mlp_norm
        self.mlp = block.mlp
        self.mlp_post_norm = mlp_post_norm

    def forward(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        x = x + self.post_norm(self.mixer(self.norm(x), context))
        return x + self.mlp_post_norm(self.mlp(self.mlp_norm(x), context))


def _rope(file: ConfigFile, spec: FullAttentionSpec) -> Rope:
    """Read the rotation of the layers that see as far as `spec`."""
    layer_type = "full_attention" if window_of(spec) is None else WINDOW
    given = file.get("rope_parameters") or _ROPES
    parameters = given.get(layer_type) if isinstance(given, dict) else None
    if not isinstance(parameters, dict):
        raise file.fail(
            f"rope_parameters={shown(given)} must have an object for {layer_type}; correct the file"
        )
    of_layer = ConfigFile({**file.values, "rope_parameters": parameters}, file.source)
    return replace(read_rope(of_layer, spec.head_size, theta=1e6), wide=True)


def _mixer(file: ConfigFile, name: str, spec: KVCacheSpec) -> nn.Module:
    if not isinstance(spec, FullAttentionSpec):
        kernel = file.size("conv_L_cache", default=7)
        bias = file.flag("conv_bias", default=False)
        return ShortConv(name, file.size("hidden_size"), kernel, bias)
    size = spec.head_size
    eps = file.number("norm_eps", 1e-5)
    gated = file.flag("use_attention_gate", default=True)
    kind = HeadGatedAttention if gated else PagedAttention
    norms = RMSNorm(size, eps), RMSNorm(size, eps)
    return kind(file, name, spec, rope=_rope(file, spec), norms=norms)


def build(file: ConfigFile, layer_specs: dict[str, KVCacheSpec]) -> nn.Module:
    """See `Family.build`."""
    norm = partial(rms_norm, file, "norm_eps", 1e-5)
    has_post_norms = file.flag("use_sandwich_norm", default=True)
    layers: list[nn.Module] = []
    for name, spec in layer_specs.items():
        mlp = GatedMLP(file.size("hidden_size"), file.size("intermediate_size"))
        block = DecoderBlock(norm(), _mixer(file, name, spec), norm(), mlp)
        layers.append(SandwichBlock(block, norm(), norm()) if has_post_norms else block)
    return CausalLM(file, layer_specs, layers, norm(), tied=True)


# Of Liquid's checkpoints, and as transformers has them in memory.
_GATES = {".self_attn.gate_proj.": ".mixer.head_gate.", ".self_attn.g_proj.": ".mixer.head_gate."}
_POST_NORMS = {".post_operator_norm.": ".post_norm.", ".post_ffn_norm.": ".mlp_post_norm."}
convert = partial(converted, prefixes=("model.",), names=_GATES | _POST_NORMS | NAMES)
