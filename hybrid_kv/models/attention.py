"""Attention layers over the paged cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hybrid_kv.attention.paged import (
    TORCH,
    TRITON,
    AttentionPart,
    Caches,
    Compute,
    PagedAttentionMetadata,
    TorchCompute,
    computed_dtype,
)
from hybrid_kv.cache.spec import FullAttentionSpec, KVCacheSpec
from hybrid_kv.models.config_file import ConfigFile
from hybrid_kv.models.layers import ForwardContext, Linear, RMSNorm, empty
from hybrid_kv.models.rope import Rope, rotate


class PagedAttention(nn.Module):
    """Grouped-query attention.

    Args:
        file: config.json; `hidden_size`, `num_attention_heads` and `attention_bias`, of the
            projections, are read here.
        name: of the layer's cache.
        spec: of that, which has the other sizes.
        rope: rotates queries and keys; None: order comes from the Mamba layers.
        norms: of queries and of keys before the rotation; over each head, or over all of them at
            once, as their size says.
        gated: `q_proj` gives each head a gate after its query; outputs are multiplied by its
            sigmoid (Qwen3-Next).
        scale: of the scores; None: `head_size ** -0.5`.
    """

    def __init__(
        self,
        file: ConfigFile,
        name: str,
        spec: KVCacheSpec,
        *,
        rope: Rope | None = None,
        norms: tuple[RMSNorm, RMSNorm] | None = None,
        gated: bool = False,
        scale: float | None = None,
    ) -> None:
        assert isinstance(spec, FullAttentionSpec)
        super().__init__()
        hidden_size = file.size("hidden_size")
        num_heads = file.size("num_attention_heads")
        head_size = spec.head_size
        bias = file.flag("attention_bias", default=False)
        self.name = name
        self.spec = spec
        self.rope = rope
        self.gated = gated
        self.heads = (num_heads, spec.num_kv_heads, spec.num_kv_heads)
        self.head_size = head_size
        self.scale = head_size**-0.5 if scale is None else scale
        self.widths = [
            (num_heads + num_heads * gated) * head_size,
            *[spec.num_kv_heads * head_size] * 2,
        ]
        self.qkv_proj: nn.Module = Linear(hidden_size, sum(self.widths), bias)
        self.q_norm: RMSNorm | None
        self.k_norm: RMSNorm | None
        self.q_norm, self.k_norm = norms or (None, None)
        self.o_proj = Linear(num_heads * head_size, hidden_size, bias)

    def forward(
        self, x: torch.Tensor, context: ForwardContext, query_tokens: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Store K and V of all tokens, and attend from the metadata's queries.

        Args:
            x: [num_tokens, hidden_size].
            query_tokens: [num_queries] int64, the tokens that are the queries; None: all.

        Returns:
            [num_queries, hidden_size].
        """
        metadata: PagedAttentionMetadata = context.metadata[self.name]
        key_cache, value_cache = context.views[self.name]
        caches = key_cache, value_cache
        query, key, value, gate = self._project(x, context)
        if self.rope is not None:
            rotation = metadata.rotation(self.rope, query.dtype)
            query = rotate(query, rotation)
            key = rotate(key, rotation)
        dtype = computed_dtype(caches[0].dtype, x.dtype)
        query = query.to(dtype)
        key = key.to(dtype)
        value = value.to(dtype)
        metadata.parts[0].compute.store(key, value, caches, metadata.slot_mapping)
        if query_tokens is not None:
            query = query[query_tokens]
            gate = None if gate is None else gate[query_tokens]
        outputs = [
            self.attend(query[segment.start : segment.start + segment.num_tokens], caches, segment)
            for segment in metadata.parts
        ]
        mixed = (outputs[0] if len(outputs) == 1 else torch.cat(outputs)).flatten(1).to(x.dtype)
        return self.o_proj(mixed if gate is None else mixed * gate.sigmoid())

    def _project(
        self, x: torch.Tensor, context: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return queries, keys and values [num_tokens, heads, head_size], normed; gates or None.

        Gates are [num_tokens, channels]. The context is for what a layer has in its projections.
        """
        projected = self.qkv_proj(x)
        gate = None
        if self.gated:
            queries, keys, values = projected.split(self.widths, dim=1)
            query, gate = queries.unflatten(1, (self.heads[0], 2, self.head_size)).unbind(2)
            key, value = (heads.unflatten(1, (-1, self.head_size)) for heads in (keys, values))
            gate = gate.flatten(1)
        else:
            query, key, value = projected.view(len(x), -1, self.head_size).split(self.heads, dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            query = _normed(query, self.q_norm)
            key = _normed(key, self.k_norm)
        return query, key, value, gate

    def lacking(self, compute: Compute) -> tuple[str, str] | None:
        """Return what of this layer a compute cannot run, and what to use instead; None: it can."""
        return None

    def attend(self, query: torch.Tensor, caches: Caches, segment: AttentionPart) -> torch.Tensor:
        """Attend from the queries [num_tokens, num_heads, head_size] of a part.

        Returns:
            [num_tokens, num_heads, head_size].
        """
        return segment.compute.attend(query, caches, segment, self.scale)


class GridAttention(PagedAttention):
    """`PagedAttention` over the keys off the grid (`models.mtp`)."""

    grid: int | None = None

    def attend(self, query: torch.Tensor, caches: Caches, segment: AttentionPart) -> torch.Tensor:
        if self.grid is None:
            raise ValueError(
                "set the draft head's grid to the tokens between two possible ends of a prefix hit"
            )
        # No library knows a grid.
        compute = TORCH if isinstance(segment.compute, TorchCompute) else TRITON
        return compute.attend(query, caches, segment, self.scale, self.grid)


class SinkAttention(PagedAttention):
    """`PagedAttention` with a sink for each head: a learned score in its softmax, without a value.

    A head whose queries want none of the keys they see can attend to it instead (gpt-oss,
    Granite-SWA).
    """

    def __init__(self, file: ConfigFile, name: str, spec: KVCacheSpec, **options: Any) -> None:
        super().__init__(file, name, spec, **options)
        self.sinks = empty(file.size("num_attention_heads"))

    def lacking(self, compute: Compute) -> tuple[str, str] | None:
        return None if compute.has_sinks else ("attention sinks", "--attention-backend TORCH")

    def attend(self, query: torch.Tensor, caches: Caches, segment: AttentionPart) -> torch.Tensor:
        return segment.compute.attend(query, caches, segment, self.scale, sinks=self.sinks)


class BiasedAttention(PagedAttention):
    """`PagedAttention` with a bias of the scores by distance, which each query makes (Inkling).

    A query's last channels are its relative states; their product with `profiles` [channels,
    extent] is the bias of the key that many tokens before. Plain torch alone computes it.
    """

    def __init__(
        self,
        file: ConfigFile,
        name: str,
        spec: KVCacheSpec,
        *,
        channels: int,
        extent: int,
        **options: Any,
    ) -> None:
        super().__init__(file, name, spec, **options)
        self.profiles = empty(channels, extent)

    def lacking(self, compute: Compute) -> tuple[str, str] | None:
        is_torch = isinstance(compute, TorchCompute)
        return None if is_torch else ("a bias of scores by distance", "--kernels torch")

    def attend(self, query: torch.Tensor, caches: Caches, segment: AttentionPart) -> torch.Tensor:
        assert isinstance(segment.compute, TorchCompute), "`lacking` says that no other runs it"
        query, relative = query.split((self.head_size, len(self.profiles)), dim=-1)
        bias = relative @ self.profiles.to(relative.dtype)
        return segment.compute.attend_with_bias(query, caches, segment, self.scale, bias)


def attention_layers(model: object) -> list[PagedAttention]:
    """Return the attention layers of a model."""
    modules = model.modules() if isinstance(model, nn.Module) else ()
    return [module for module in modules if isinstance(module, PagedAttention)]


def _normed(x: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
    size = norm.weight.shape[0]
    return norm(x) if size == x.shape[-1] else norm(x.flatten(1)).view(x.shape)
