"""A block drafter with a checkpoint of its own: DFlash (Z Lab, 2026).

Layers like Qwen3's, whose keys and values come from the target: the outputs of its layers
`dflash_config.target_layer_ids`, next to each other, are mixed by `fc` and normed to one *context
state* for each token, and every layer projects its K and V of that. The queries are the embeddings
of the last token and of `mask_token_id`, which go through the layers as any token does; their K and
V follow those of the context. Embedding and `lm_head` are the target's.

The keys of config.json, the names of tensors and the defaults are those that vLLM 0.33 reads
(`qwen3_dflash.py`). Here a query sees no mask after its own, as layers with a window do there by
default; drafters whose queries see all masks are refused (`models.drafter_file`).
"""

from __future__ import annotations

from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import nn

from hybrid_kv.attention.paged import PagedAttentionMetadata
from hybrid_kv.cache.spec import KVCacheSpec
from hybrid_kv.config import CacheConfig
from hybrid_kv.models.attention import PagedAttention
from hybrid_kv.models.causal_lm import CausalLM, DecoderBlock, rms_norm
from hybrid_kv.models.config_file import ConfigFile, shown
from hybrid_kv.models.drafter_file import as_target_file, drafter_layers
from hybrid_kv.models.layers import ForwardContext, GatedMLP, Linear, RMSNorm
from hybrid_kv.models.rope import Rope, read_rope, rotate
from hybrid_kv.models.weights import Tensors, converted

_ROPE_THETA = 1e6


class ContextAttention(PagedAttention):
    """`PagedAttention` that stores K and V of context states, too, which have no queries."""

    def store(self, states: torch.Tensor, context: ForwardContext) -> None:
        """Write K and V of context states [num_tokens, hidden_size] in the step's slots."""
        metadata: PagedAttentionMetadata = context.metadata[self.name]
        key_cache, value_cache = context.views[self.name]
        caches = key_cache, value_cache
        projection = cast(Linear, self.qkv_proj)
        begin = self.widths[0]
        bias = None if projection.bias is None else projection.bias[begin:]
        projected = F.linear(states, projection.weight[begin:], bias)
        key, value = projected.view(len(states), 2, -1, self.head_size).unbind(1)
        key = cast(RMSNorm, self.k_norm)(key)
        key = rotate(key, metadata.rotation(cast(Rope, self.rope), key.dtype))
        dtype = key_cache.dtype
        compute = metadata.parts[0].compute
        compute.store(key.to(dtype), value.to(dtype), caches, metadata.slot_mapping)


class DFlashHead(nn.Module):
    """A block drafter (`models.interface.BlockDraftHead`).

    Args:
        file: the drafter's config.json; `hidden_size` and `rms_norm_eps` are read here.
        target: lends its embedding and `lm_head`, and keeps the outputs of `target_layer_ids`.
        target_layer_ids: of the target, from 0.
        mask_token_id: whose embedding stands in for a token that is not known yet.
        layers: each with a `ContextAttention`.
        layer_specs: of these, by name.
    """

    def __init__(
        self,
        file: ConfigFile,
        target: CausalLM,
        target_layer_ids: tuple[int, ...],
        mask_token_id: int,
        layers: list[DecoderBlock],
        layer_specs: dict[str, KVCacheSpec],
    ) -> None:
        super().__init__()
        self.layer_specs = layer_specs
        self.mask_token_id = mask_token_id
        self._target = (target,)  # in a tuple, so that its parameters are not registered as ours
        target.kept_layers = target_layer_ids
        hidden_size = file.size("hidden_size")
        self.fc = Linear(len(target_layer_ids) * hidden_size, hidden_size)
        self.hidden_norm = rms_norm(file)
        self.layers = nn.ModuleList(layers)
        self.norm = rms_norm(file)

    def store(self, hidden: torch.Tensor, context: ForwardContext) -> None:
        """See `models.interface.BlockDraftHead`."""
        states = self.hidden_norm(self.fc(self._target[0].kept(hidden)))
        for layer in self.layers:
            cast(ContextAttention, layer.mixer).store(states, context)

    def forward(
        self, token_ids: torch.Tensor, num_drafts: int, context: ForwardContext
    ) -> torch.Tensor:
        """See `models.interface.BlockDraftHead`."""
        masks = token_ids.new_full((len(token_ids), num_drafts), self.mask_token_id)
        queries = torch.cat([token_ids[:, None], masks], dim=1)
        x = self._target[0].embed(queries.flatten())
        for layer in self.layers:
            x = layer(x, context)
        return self.norm(x.view(*queries.shape, -1)[:, 1:])

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `models.interface.BlockDraftHead`."""
        return self._target[0].logits(hidden)


def build(file: ConfigFile, target: CausalLM, cache: CacheConfig, dtype: str) -> DFlashHead:
    """Build a drafter for a target.

    Args:
        file: the drafter's config.json.
        cache: its `kv_cache_dtype` is that of the drafter, too.
        dtype: the target's.

    Raises:
        ConfigError: another kind of drafter, or one for another target.
    """
    specs = drafter_layers(file, cache=cache, dtype=dtype)
    file = as_target_file(file)
    file.only("hidden_act", "silu")
    file.only("attention_sink_bias", supported=False)
    hidden_size = file.size("hidden_size")
    width = target.embed_tokens.embedding_dim
    if hidden_size != width:
        raise file.fail(f"hidden_size={hidden_size}, the target has {width}; use its own drafter")
    norm = partial(rms_norm, file)
    layers = [
        DecoderBlock(norm(), _attention(file, name, spec), norm(), _mlp(file))
        for name, spec in specs.items()
    ]
    return DFlashHead(file, target, *_of_target(file, target), layers, specs)


def _of_target(file: ConfigFile, target: CausalLM) -> tuple[tuple[int, ...], int]:
    """Return `target_layer_ids` and `mask_token_id`.

    Raises:
        ConfigError: the target has no such layer, or no such token.
    """
    listed = file.get("target_layer_ids")
    known = range(len(target.layers))
    if (
        not isinstance(listed, list)
        or not listed
        or any(isinstance(number, bool) or number not in known for number in listed)
        or sorted(set(listed)) != listed
    ):
        raise file.fail(
            f"target_layer_ids={shown(listed)} must list layers of the target, 0 to {known[-1]}, "
            "in order; use its own drafter"
        )
    mask = file.count("mask_token_id", default=target.vocab_size)
    if mask >= target.vocab_size:
        raise file.fail(
            f"mask_token_id={shown(file.get('mask_token_id'))} must be a token of the target, below"
            f" {target.vocab_size}"
        )
    return tuple(listed), mask


def _attention(file: ConfigFile, name: str, spec: KVCacheSpec) -> ContextAttention:
    size = spec.head_size  # type: ignore[attr-defined]
    eps = file.number("rms_norm_eps", 1e-6)
    norms = RMSNorm(size, eps), RMSNorm(size, eps)
    return ContextAttention(
        file, name, spec, rope=read_rope(file, size, theta=_ROPE_THETA), norms=norms
    )


def _mlp(file: ConfigFile) -> GatedMLP:
    return GatedMLP(file.size("hidden_size"), file.size("intermediate_size"))


def convert(tensors: Tensors) -> Tensors:
    """Convert a checkpoint's tensors to those of `DFlashHead`."""
    return converted(tensors, ("model.",), _NAMES)


_NAMES = {
    ".self_attn.": ".mixer.",
    ".input_layernorm.": ".norm.",
    ".post_attention_layernorm.": ".mlp_norm.",
}


def shapes(file: ConfigFile) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a checkpoint's tensors by name, for checkpoints with random weights."""
    size, inner = file.size("hidden_size"), file.size("intermediate_size")
    head, heads = file.size("head_dim"), file.size("num_attention_heads")
    kv_heads = file.size("num_key_value_heads")
    of_layer = {
        "input_layernorm": (size,),
        "self_attn.q_proj": (heads * head, size),
        "self_attn.k_proj": (kv_heads * head, size),
        "self_attn.v_proj": (kv_heads * head, size),
        "self_attn.o_proj": (size, heads * head),
        "self_attn.q_norm": (head,),
        "self_attn.k_norm": (head,),
        "post_attention_layernorm": (size,),
        "mlp.gate_proj": (inner, size),
        "mlp.up_proj": (inner, size),
        "mlp.down_proj": (size, inner),
    }
    num_kept = len(file.get("dflash_config")["target_layer_ids"])
    return {
        "fc.weight": (size, num_kept * size),
        "hidden_norm.weight": (size,),
        **{
            f"layers.{i}.{name}.weight": shape
            for i in range(file.size("num_hidden_layers"))
            for name, shape in of_layer.items()
        },
        "norm.weight": (size,),
    }
