"""Zamba2: Mamba-2 layers, and before some of them a transformer block with shared weights.

The block reads the hidden state and the embedding side by side; what it makes of them is added to
the input of its Mamba-2 layer alone. Each layer adapts the shared projections by products of low
rank. Source: Zyphra's Zamba2 (2024, arXiv 2411.15242) and its implementation in transformers, which
is the oracle of the tests. As in `models.nemotron_h` the time step is never clamped.
"""

from __future__ import annotations

import re
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import nn

from hybrid_kv.cache.spec import FullAttentionSpec, KVCacheSpec
from hybrid_kv.models.attention import PagedAttention
from hybrid_kv.models.causal_lm import CausalLM, MixerBlock, rms_norm
from hybrid_kv.models.config_file import ConfigFile
from hybrid_kv.models.layers import Adapted, ForwardContext, Linear, RMSNorm
from hybrid_kv.models.mixers.mamba2 import Mamba2Mixer
from hybrid_kv.models.rope import read_rope
from hybrid_kv.models.specs import HYBRID, hybrid_kinds
from hybrid_kv.models.weights import Tensors, converted, joined, renamed

Specs = dict[str, KVCacheSpec]
_norm = partial(rms_norm, default=1e-5)


class Shared(nn.Module):
    """The weights of a block that several layers run."""

    def __init__(self, file: ConfigFile, spec: FullAttentionSpec) -> None:
        super().__init__()
        size = file.size("hidden_size")
        inner = file.size("intermediate_size", default=4 * file.size("hidden_size"))
        heads = file.size("num_attention_heads")
        bias = file.flag("add_bias_linear", default=False)
        self.norm = RMSNorm(2 * size, file.number("rms_norm_eps", 1e-5))
        self.qkv_proj = Linear(2 * size, (heads + 2 * spec.num_kv_heads) * spec.head_size)
        self.o_proj = Linear(heads * spec.head_size, size)
        self.mlp_norm = _norm(file)
        self.gate_up_proj = Linear(size, 2 * inner, bias)
        self.down_proj = Linear(inner, size, bias)


class Zamba2Block(nn.Module):
    """`x += mamba(norm(x + linear(block([x, embedding]))))`; the block has no residual inside."""

    def __init__(self, file: ConfigFile, name: str, specs: Specs, shared: Shared) -> None:
        super().__init__()
        spec = cast(FullAttentionSpec, specs[f"{name}.attention"])
        size = file.size("hidden_size")
        heads = file.size("num_attention_heads")
        rank = file.size("adapter_rank", default=128)
        rope = read_rope(file, spec.head_size) if file.flag("use_mem_rope", default=False) else None
        # Half of the input is the embedding, so scores are scaled as if heads had half their
        # channels.
        scale = (spec.head_size / 2) ** -0.5
        self.shared = shared
        self.attention = PagedAttention(file, f"{name}.attention", spec, rope=rope, scale=scale)
        self.attention.qkv_proj = shared.qkv_proj
        self.attention.o_proj = shared.o_proj
        if file.flag("use_shared_attention_adapter", default=False):
            if spec.num_kv_heads != heads:
                raise file.fail(
                    f"num_key_value_heads={spec.num_kv_heads} must be {heads} where attention has "
                    "adapters"
                )
            self.attention.qkv_proj = Adapted(shared.qkv_proj, 3, rank)
        self.gate_up = Adapted(shared.gate_up_proj, 1, rank)
        self.linear = Linear(size, size)
        self.norm = _norm(file)
        self.mixer = _mamba2(file, f"{name}.mamba", specs)

    def forward(
        self, x: torch.Tensor, context: ForwardContext, embedding: torch.Tensor
    ) -> torch.Tensor:
        attended = self.attention(self.shared.norm(torch.cat([x, embedding], dim=-1)), context)
        gate, up = self.gate_up(self.shared.mlp_norm(attended)).chunk(2, dim=-1)
        block = self.linear(self.shared.down_proj(F.gelu(gate) * up))
        return x + self.mixer(self.norm(x + block), context)


def _mamba2(file: ConfigFile, name: str, specs: Specs) -> nn.Module:
    chunk_size = file.size("chunk_size", default=256)
    bias = file.flag("add_bias_linear", default=False)
    size = file.size("hidden_size")
    spec = specs[name]
    return Mamba2Mixer(name, size, spec, chunk_size, eps=1e-5, conv_bias=True, bias=bias)


class Zamba2(CausalLM):
    """A causal model whose layers see the embedding, too."""

    def run(
        self,
        layer: nn.Module,
        x: torch.Tensor,
        context: ForwardContext,
        embedding: torch.Tensor,
    ) -> torch.Tensor:
        if isinstance(layer, Zamba2Block):
            return cast(torch.Tensor, layer(x, context, embedding))
        return super().run(layer, x, context, embedding)


def build(file: ConfigFile, specs: Specs) -> nn.Module:
    """See `Family.build`."""
    for key, value in (
        ("hidden_act", "gelu"),
        ("use_conv_bias", True),
        ("use_long_context", False),
    ):
        file.only(key, value)
    kinds = hybrid_kinds(file)
    first = next(
        (
            cast(FullAttentionSpec, spec)
            for name, spec in specs.items()
            if name.endswith(".attention")
        ),
        None,
    )
    blocks = (
        [Shared(file, first) for _ in range(file.size("num_mem_blocks", default=1))]
        if first
        else []
    )
    layers: list[nn.Module] = []
    for i, kind in enumerate(kinds):
        if kind == HYBRID:
            layers.append(
                Zamba2Block(
                    file, f"layers.{i}", specs, blocks[kinds[:i].count(HYBRID) % len(blocks)]
                )
            )
        else:
            layers.append(MixerBlock(_norm(file), _mamba2(file, f"layers.{i}", specs)))
    return Zamba2(
        file,
        specs,
        layers,
        _norm(file),
        mamba_chunk_size=file.size("chunk_size", default=256),
        tied=True,
    )


_NAMES = {
    **{
        "final_layernorm.": "norm.",
        "shared_transformer.": "shared.",
        "self_attn.": "",
        "feed_forward.": "",
    },
    **{
        "pre_ff_layernorm.": "mlp_norm.",
        "mamba_decoder.": "",
        "input_layernorm.": "norm.",
        "mamba.": "mixer.",
    },
}
_ADAPTER = re.compile(
    r"layers\.\d+\.shared\.(?:linear_([qkv])|gate_up_proj)_adapter_list\.(\d+)\.([01])\.weight"
)


def convert(tensors: Tensors) -> Tensors:
    """See `Family.convert_weights`."""
    # The adapters of a block lie with the first layer that runs it; they are numbered by the layers
    # that run any.
    named = renamed(tensors, ("model.",), _NAMES)
    hybrid = sorted(int(name.split(".")[1]) for name in named if name.endswith(".linear.weight"))
    result: Tensors = {}
    for name, tensor in named.items():
        adapter = _ADAPTER.fullmatch(name)
        if adapter and int(adapter[2]) < len(hybrid):
            half = ("down", "up")[int(adapter[3])]
            letter = adapter[1]
            module = f"attention.qkv_proj.{letter}_{half}" if letter else f"gate_up.{half}"
            result[f"layers.{hybrid[int(adapter[2])]}.{module}.weight"] = tensor
        else:
            result[name] = tensor
    for half in ("down", "up"):
        result = joined(result, [f"{letter}_{half}" for letter in "qkv"], half)
    return converted(result, (), {})
