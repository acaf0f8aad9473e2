"""Nemotron-Labs-Dory: hidden states of length 1, and layers in the middle that run several times.

Source: NVIDIA's Dory (2026), its nGPT (2024, arXiv 2410.01131) and its implementation in
transformers, which is the oracle of the tests. Each pass through the looped layers starts from the
output of the layers before them, added to that of the last pass, and keeps its own K and V: a cache
belongs to a layer and a pass. Most layers see a window of tokens.
"""

from __future__ import annotations

import re
from typing import cast

import torch
import torch.nn.functional as F
from torch import nn

from hybrid_kv.attention.paged import AttentionPart, Caches
from hybrid_kv.cache.spec import FullAttentionSpec, KVCacheSpec, window_of
from hybrid_kv.models.attention import PagedAttention
from hybrid_kv.models.causal_lm import CausalLM
from hybrid_kv.models.config_file import ConfigFile, shown
from hybrid_kv.models.families import dory_entries, dory_loop
from hybrid_kv.models.layers import ForwardContext, Leaf, Linear, empty, upcast
from hybrid_kv.models.rope import Rope, read_rope
from hybrid_kv.models.specs import LOOP, WINDOW
from hybrid_kv.models.weights import Tensors, converted, joined, renamed

_THETAS = {WINDOW: 1e4, "full_attention": 1e7}


def unit(x: torch.Tensor) -> torch.Tensor:
    """Scale vectors [..., size] to length 1, in float32 at least."""
    wide = upcast(x)
    return (wide * (wide.square().sum(-1, keepdim=True) + 1e-6).rsqrt()).to(x.dtype)


class Unit(Leaf):
    """The norm: `unit`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return unit(x)


class UnitLinear(Linear):
    """`unit(x) @ weight.T + bias`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(unit(x))


class UnitAttention(PagedAttention):
    """Attention of queries and keys of length 1, with a gate for each channel.

    A query's channel is multiplied by `(sqk * head_size ** 0.5 / s) ** 2` after the rotation, and a
    gate by `(s_gate * hidden_size ** 0.25 / s) ** 2` before its sigmoid, where s is
    `initializer_range`. Outputs of all heads together get length 1.
    """

    def __init__(self, file: ConfigFile, name: str, spec: FullAttentionSpec, rope: Rope) -> None:
        super().__init__(file, name, spec, rope=rope)
        hidden_size = file.size("hidden_size")
        width = self.heads[0] * self.head_size
        start = _start(file)
        self.query_factor = self.head_size**0.5 / start
        self.gate_factor = hidden_size**0.25 / start
        self.sqk = empty(width)
        self.s_gate = empty(width)
        self.out_gate = Linear(hidden_size, width)
        self.o_proj = UnitLinear(width, hidden_size, file.flag("attention_bias", default=False))

    def _project(
        self, x: torch.Tensor, context: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        query, key, value, _ = super()._project(x, context)
        gate = self.out_gate(x) * (self.s_gate * self.gate_factor).square()
        return unit(query), unit(key), value, gate

    def attend(self, query: torch.Tensor, caches: Caches, segment: AttentionPart) -> torch.Tensor:
        factors = (self.sqk * self.query_factor).square().view(-1, self.head_size)
        return super().attend(query * factors.to(query.dtype), caches, segment)


class UnitMLP(nn.Module):
    """`down(unit(silu(gate(x)) * up(x)))`, gate and up times `suv * hidden_size ** 0.5`."""

    def __init__(self, file: ConfigFile) -> None:
        super().__init__()
        hidden_size, inner = file.size("hidden_size"), file.size("intermediate_size")
        bias = file.flag("mlp_bias", default=False)
        self.factor = hidden_size**0.5
        self.suv = empty(2 * inner)
        self.gate_up_proj = Linear(hidden_size, 2 * inner, bias)
        self.down_proj = UnitLinear(inner, hidden_size, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = (self.gate_up_proj(x) * (self.suv * self.factor)).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


class UnitBlock(nn.Module):
    """A step from unit(x) towards `unit(mixer(x))`, then one towards `unit(mlp(x))`.

    Each channel goes a share of the way, `abs(lambda * ngpt_alpha_init / initializer_range)`.
    """

    def __init__(self, file: ConfigFile, mixer: UnitAttention) -> None:
        super().__init__()
        size = file.size("hidden_size")
        self.factor = file.number("ngpt_alpha_init", 0.05) / _start(file)
        self.mixer = mixer
        self.mlp = UnitMLP(file)
        self.lambda_1 = empty(size)
        self.lambda_2 = empty(size)

    def forward(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        x = unit(x)
        x = x + (self.lambda_1 * self.factor).abs() * (unit(self.mixer(x, context)) - x)
        x = unit(x)
        return x + (self.lambda_2 * self.factor).abs() * (unit(self.mlp(x)) - x)


class Dory(CausalLM):
    """A causal model that runs some of its layers several times, and scales each token's logit."""

    def __init__(
        self,
        file: ConfigFile,
        layer_specs: dict[str, KVCacheSpec],
        layers: list[UnitBlock],
    ) -> None:
        super().__init__(file, layer_specs, layers, Unit())
        looped, self.num_loops = dory_loop(file)
        entries = dory_entries(file)
        self.looped = slice(looped.start // entries, looped.stop // entries)
        self.token_factor = 1 / _start(file)
        self.token_scale = empty(self.vocab_size)

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        x = self.embed(input_ids)
        for layer in self.layers[: self.looped.start]:
            x = layer(x, context)
        before = unit(x)
        for loop in range(self.num_loops):
            x = unit(x) + before
            of_loop = context.of_loop(loop)
            for layer in self.layers[self.looped]:
                x = layer(x, of_loop)
        for layer in self.layers[self.looped.stop :]:
            x = layer(x, context)
        return x

    def logits(self, normed: torch.Tensor) -> torch.Tensor:
        return super().logits(normed) * (upcast(self.token_scale) * self.token_factor)


def _start(file: ConfigFile) -> float:
    return file.number("initializer_range", 0.0177)


def _rope(file: ConfigFile, spec: FullAttentionSpec) -> Rope:
    """Read the rotation of the layers that see as far as `spec`."""
    layer_type = "full_attention" if window_of(spec) is None else WINDOW
    given = file.get("rope_parameters") or {}
    if not isinstance(given, dict) or not isinstance(given.get(layer_type, {}), dict):
        raise file.fail(
            f"rope_parameters={shown(given)} must have an object for {layer_type}; correct the file"
        )
    values = {**file.values, "rope_parameters": given.get(layer_type, {})}
    return read_rope(ConfigFile(values, file.source), spec.head_size, theta=_THETAS[layer_type])


def build(file: ConfigFile, layer_specs: dict[str, KVCacheSpec]) -> nn.Module:
    """See `Family.build`."""
    file.only("hidden_act", "silu")
    # Its earlier passes read what the last one kept, and their own K and V of the tokens that run
    # with them: answers would depend on how a prompt is cut into chunks.
    file.only("recurrent_kv_cache_mode", "per_loop")
    specs = {
        name: cast(FullAttentionSpec, spec)
        for name, spec in layer_specs.items()
        if LOOP not in name
    }
    layers = [
        UnitBlock(file, UnitAttention(file, name, spec, _rope(file, spec)))
        for name, spec in specs.items()
    ]
    return Dory(file, layer_specs, layers)


_NAMES = {
    "embeddings.": "embed_tokens.",
    ".self_attn.g_proj.": ".mixer.out_gate.",
    ".self_attn.gate_proj.": ".mixer.out_gate.",
    ".self_attn.": ".mixer.",
    ".suv_gate": ".suv_gate.weight",
    ".suv_up": ".suv_up.weight",
    "lm_head.logit_scale": "token_scale",
}
_PAIRED = re.compile(r"layers\.(\d+)\.(mixer|attn_alpha|mlp_alpha)(?=\.|$)")


def convert(tensors: Tensors) -> Tensors:
    """Convert a checkpoint, under the names of the hub or those of transformers.

    The hub numbers attention and MLP of a layer one after the other.
    """
    tensors = {_PAIRED.sub(_unpaired, name): tensor for name, tensor in tensors.items()}
    named = converted(tensors, ("model.", "backbone."), _NAMES)
    return renamed(joined(named, ("suv_gate", "suv_up"), "suv"), (), {".suv.weight": ".suv"})


def _unpaired(name: re.Match[str]) -> str:
    layer, of_mlp = divmod(int(name[1]), 2)
    whole = ("self_attn", "mlp")[of_mlp]
    rates = {"attn_alpha": "lambda_1", "mlp_alpha": "lambda_2"}
    return f"layers.{layer}.{rates.get(name[2], whole)}"
