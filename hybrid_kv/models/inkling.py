"""Inkling: attention with a bias by distance, and four short convolutions in every layer.

Source: Thinking Machines' Inkling (2026) and its implementation in transformers, which is the
oracle of the tests. K and V are convolved before they are cached, and so is what attention and the
MLP or experts give; each convolution is added to its input. Most layers see a window of tokens, and
have other heads than those with full attention. There is no RoPE: a query says how much a key's
distance counts.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from hybrid_kv.cache.spec import KVCacheSpec, MambaSpec, window_of
from hybrid_kv.models.attention import BiasedAttention
from hybrid_kv.models.causal_lm import CausalLM, rms_norm
from hybrid_kv.models.config_file import ConfigFile
from hybrid_kv.models.families import inkling_attention
from hybrid_kv.models.kimi_linear import dense_layers
from hybrid_kv.models.layers import ForwardContext, GatedMLP, Linear, RMSNorm, empty, upcast
from hybrid_kv.models.mixers.conv import ConvMixer, Projected, sizes_of
from hybrid_kv.models.mixers.conv import Tensors as Parts
from hybrid_kv.models.moe import Experts, gated_silu
from hybrid_kv.models.weights import Tensors, converted, joined, renamed

_KV, _ATTENTION, _MLP = slice(0, 2), slice(2, 3), slice(3, 4)  # parts of a layer's state


class ResidualConv(ConvMixer):
    """`x + conv(x)`, over some of the windows that a layer keeps."""

    def __init__(self, name: str, spec: MambaSpec, windows: slice) -> None:
        _, kernel = sizes_of(spec)
        channels = sum(window.shape[1] for window in spec.parts[windows])
        super().__init__(name, channels, kernel, conv_bias=False, silu=False)
        self.windows = windows

    def parts(self, context: ForwardContext, role: str) -> Parts:
        return context.views[self.name][self.windows]

    def project(self, x: torch.Tensor) -> Projected:
        return Projected(x, (), (x,))

    def finish(self, mixed: torch.Tensor, rest: Parts) -> torch.Tensor:
        return mixed + rest[0]


class InklingAttention(BiasedAttention):
    """Attention whose K and V are convolved, and whose queries grow with the length of a text."""

    def __init__(
        self, file: ConfigFile, name: str, spec: KVCacheSpec, conv: ResidualConv, extent: int
    ) -> None:
        channels = file.size("d_rel", default=16)
        size = file.size("head_dim")
        eps = file.number("rms_norm_eps", 1e-6)
        super().__init__(
            file,
            name,
            spec,
            channels=channels,
            extent=extent,
            norms=(RMSNorm(size, eps), RMSNorm(size, eps)),
            scale=1 / size,
        )
        self.conv = conv
        self.r_proj = Linear(file.size("hidden_size"), self.heads[0] * channels)
        floor = file.maybe_size("log_scaling_n_floor") if window_of(spec) is None else None
        self.floor = floor
        self.alpha = file.number("log_scaling_alpha", 0.1)

    def _project(
        self, x: torch.Tensor, context: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        query, key_value = self.qkv_proj(x).split((self.widths[0], 2 * self.widths[1]), dim=1)
        key, value = self.conv(key_value, context).view(len(x), 2, -1, self.head_size).unbind(1)
        query = query.view(len(x), -1, self.head_size)
        relative = self.r_proj(x).view(len(x), self.heads[0], -1)
        assert self.q_norm is not None and self.k_norm is not None
        query = torch.cat([self.q_norm(query), relative], dim=-1)
        if self.floor is not None:
            seen = context.metadata[self.name].positions[: len(x), None, None] + 1
            growth = 1 + self.alpha * (seen.float() / self.floor).clamp(min=1).log()
            query = (upcast(query) * growth).to(query.dtype)
        return query, self.k_norm(key), value, None


class InklingExperts(nn.Module):
    """Experts of which the last ones see every token; weights are shares of sigmoids.

    Args:
        num_experts: among which `top_k` are chosen, by their sigmoid and a bias.
        num_shared: the others, after them.
        scale: of all weights, times `global_scale`.
    """

    as_stored = ("correction_bias", "global_scale")

    def __init__(self, file: ConfigFile) -> None:
        super().__init__()
        hidden_size, size = file.size("hidden_size"), file.size("moe_intermediate_size")
        self.num_experts = file.size("n_routed_experts", "num_local_experts")
        self.top_k = file.size("num_experts_per_tok", most=self.num_experts)
        self.num_shared = file.size("n_shared_experts", default=2)
        self.scale = file.number("route_scale", 8.0)
        num_all = self.num_experts + self.num_shared
        self.gate = Linear(hidden_size, num_all)
        self.correction_bias = empty(self.num_experts)
        self.global_scale = empty(1)
        self.experts = Experts(num_all, hidden_size, size, gated_silu)

    def forward(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        logits = F.linear(upcast(x), upcast(self.gate.weight))
        scores = logits[:, : self.num_experts].sigmoid() + upcast(self.correction_bias)
        chosen = scores.topk(self.top_k, dim=-1, sorted=False).indices
        shared = torch.arange(self.num_experts, logits.shape[1], device=x.device)
        ids = torch.cat([chosen, shared.expand(len(x), -1)], dim=-1)
        shares = F.logsigmoid(logits.gather(1, ids)).softmax(dim=-1)
        weights = shares * self.scale * upcast(self.global_scale)
        return self.experts(x, weights.to(x.dtype), ids)


class OutputScaledMLP(GatedMLP):
    """`GatedMLP`, its output multiplied by a number of the checkpoint."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__(hidden_size, intermediate_size)
        self.global_scale = empty(1)

    def forward(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        return super().forward(x, context) * self.global_scale


class InklingBlock(nn.Module):
    """`x += conv(attention(norm(x)))`, then `x += mlp_conv(mlp(mlp_norm(x)))`."""

    def __init__(self, file: ConfigFile, mixer: InklingAttention, spec: MambaSpec, mlp: nn.Module):
        super().__init__()
        conv = partial(ResidualConv, mixer.conv.name, spec)
        self.norm = rms_norm(file)
        self.mixer = mixer
        self.conv = conv(_ATTENTION)
        self.mlp_norm = rms_norm(file)
        self.mlp = mlp
        self.mlp_conv = conv(_MLP)

    def forward(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        x = x + self.conv(self.mixer(self.norm(x), context), context)
        return x + self.mlp_conv(self.mlp(self.mlp_norm(x), context), context)


class Inkling(CausalLM):
    """A causal model with a norm of the embeddings."""

    def __init__(
        self, file: ConfigFile, layer_specs: dict[str, KVCacheSpec], layers: list[InklingBlock]
    ) -> None:
        scale = 1 / file.number("logits_mup_width_multiplier", 24.0)
        super().__init__(file, layer_specs, layers, rms_norm(file), logits_scale=scale)
        self.embed_norm = rms_norm(file)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self.embed_norm(super().embed(token_ids))


def _block(
    file: ConfigFile, specs: dict[str, KVCacheSpec], name: str, is_dense: bool
) -> InklingBlock:
    spec, kept = specs[f"{name}.attention"], specs[f"{name}.conv"]
    assert isinstance(kept, MambaSpec)
    window = window_of(spec)
    extent = file.size("rel_extent", default=1024) if window is None else window
    own = inkling_attention(file, is_window=window is not None)
    conv = ResidualConv(f"{name}.conv", kept, _KV)
    mixer = InklingAttention(own, f"{name}.attention", spec, conv, extent)
    sizes = file.size("hidden_size"), file.size("intermediate_size")
    return InklingBlock(
        file, mixer, kept, OutputScaledMLP(*sizes) if is_dense else InklingExperts(file)
    )


def build(file: ConfigFile, layer_specs: dict[str, KVCacheSpec]) -> nn.Module:
    """See `Family.build`."""
    for key, value in (
        ("hidden_act", "silu"),
        ("shared_expert_sink", True),
        ("unpadded_vocab_size", file.size("vocab_size")),
    ):
        file.only(key, value)
    num_layers = file.size("num_hidden_layers")
    layers = [
        _block(file, layer_specs, f"layers.{i}", is_dense)
        for i, is_dense in enumerate(dense_layers(file, num_layers, default=0))
    ]
    return Inkling(file, layer_specs, layers)


_NAMES = {
    "embed_tokens.embed_norm.": "embed_norm.",
    "input_layernorm.": "norm.",
    "post_attention_layernorm.": "mlp_norm.",
    ".attn_sconv.": ".conv.",
    ".mlp_sconv.": ".mlp_conv.",
    ".self_attn.rel_logits_proj.proj": ".mixer.profiles",
    ".self_attn.": ".mixer.",
    ".mlp.gate.global_scale": ".mlp.global_scale",
    ".gate.e_score_correction_bias": ".correction_bias",
}


def convert(tensors: Tensors) -> Tensors:
    """Convert a checkpoint of transformers.

    Its shared experts become the last ones of all, and the two convolutions of K and V one.
    """
    named = joined(tensors, ("k_sconv.conv1d", "v_sconv.conv1d"), "conv.conv1d")
    flat: Tensors = {}
    for name, tensor in named.items():
        stem, shared, part = name.partition(".shared_experts.")
        if not shared:
            flat[name] = tensor
        elif part == "down_proj":
            routed = named[f"{stem}.experts.down_proj"]
            flat[f"{stem}.experts.down_proj"] = torch.cat([routed, tensor])
        elif part == "gate_proj":
            gate_up = torch.cat([tensor, named[f"{stem}.shared_experts.up_proj"]], dim=1)
            routed = named[f"{stem}.experts.gate_up_proj"]
            flat[f"{stem}.experts.gate_up_proj"] = torch.cat([routed, gate_up])
    return converted(renamed(flat, ("model.",), _NAMES), (), {})
