"""The parts that all families share: a decoder around its layers, and the two shapes of a layer."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import cast

import torch
from torch import nn

from hybrid_kv.cache.spec import KVCacheSpec
from hybrid_kv.kernels.recompute import RecomputeStep
from hybrid_kv.models.config_file import ConfigFile
from hybrid_kv.models.layers import ForwardContext, Linear, RMSNorm, upcast
from hybrid_kv.models.mixers.conv import RecurrentMixer
from hybrid_kv.models.specs import chunk_size


class MixerBlock(nn.Module):
    """`x + mixer(norm(x))`."""

    def __init__(self, norm: nn.Module, mixer: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.mixer = mixer

    def forward(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        return x + self.mixer(self.norm(x), context)


class DecoderBlock(nn.Module):
    """`x += scale * mixer(norm(x))`, then `x += scale * mlp(mlp_norm(x))`.

    With `query_tokens`, which only an attention mixer takes, all tokens are stored and those alone
    go on.
    """

    def __init__(
        self,
        norm: nn.Module,
        mixer: nn.Module,
        mlp_norm: nn.Module,
        mlp: nn.Module,
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.norm = norm
        self.mixer = mixer
        self.mlp_norm = mlp_norm
        self.mlp = mlp
        self.scale = scale

    def forward(
        self, x: torch.Tensor, context: ForwardContext, query_tokens: torch.Tensor | None = None
    ) -> torch.Tensor:
        if query_tokens is None:
            x = self._add(x, self.mixer(self.norm(x), context))
        else:
            x = self._add(x[query_tokens], self.mixer(self.norm(x), context, query_tokens))
        return self._add(x, self.mlp(self.mlp_norm(x), context))

    def _add(self, x: torch.Tensor, branch: torch.Tensor) -> torch.Tensor:
        return x + branch if self.scale == 1.0 else x + branch * self.scale


class CausalLM(nn.Module):
    """Embedding, layers, norm, head.

    Args:
        file: config.json; `vocab_size`, `hidden_size` and `tie_word_embeddings` are read here.
        layer_specs: the cache of every layer that keeps one, by name, in layer order. They come
            from `models.shapes`, the one place that computes state shapes (vllm!47635: two places
            disagreed).
        layers: each called with (x, context).
        norm: before the head.
        mamba_chunk_size: tokens that a scan takes at a time, `specs.chunk_size` by default;
            prefills of a planned size are multiples of it.
        embedding_scale, logits_scale: multiply the embeddings and the logits.
        tied: the default of `tie_word_embeddings`, transformers' for the family.

    Attributes:
        kept_layers: by number, in order, whose outputs a block drafter reads: `forward` returns
            them after that of the last layer.
    """

    def __init__(
        self,
        file: ConfigFile,
        layer_specs: dict[str, KVCacheSpec],
        layers: Iterable[nn.Module],
        norm: nn.Module,
        *,
        mamba_chunk_size: int | None = None,
        embedding_scale: float = 1.0,
        logits_scale: float = 1.0,
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.vocab_size = file.size("vocab_size")
        hidden_size = file.size("hidden_size")
        self.mamba_chunk_size: int | None = mamba_chunk_size or chunk_size(file)
        self.layer_specs = layer_specs
        self.embedding_scale = embedding_scale
        self.logits_scale = logits_scale
        # To draw one on the meta device imports torch's compiler.
        weight = torch.empty(self.vocab_size, hidden_size)
        self.embed_tokens = nn.Embedding(self.vocab_size, hidden_size, _weight=weight)
        self.layers = nn.ModuleList(layers)
        self.kept_layers: tuple[int, ...] = ()
        self.norm = norm
        self.lm_head = Linear(hidden_size, self.vocab_size)
        if file.flag("tie_word_embeddings", tied):
            self.lm_head.weight = cast(nn.Parameter, self.embed_tokens.weight)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the embeddings [num_tokens, hidden_size] of token ids [num_tokens] int64."""
        x: torch.Tensor = self.embed_tokens(token_ids)
        return x if self.embedding_scale == 1.0 else x * self.embedding_scale

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        """Return [num_tokens, (1 + kept layers) * hidden_size]: hidden states, and what is kept."""
        x = embedding = self.embed(input_ids)
        kept = []
        for number, layer in enumerate(self.layers):
            x = self.run(layer, x, context, embedding)
            if number in self.kept_layers:
                kept.append(x)
        return torch.cat([x, *kept], dim=-1) if kept else x

    def run(
        self,
        layer: nn.Module,
        x: torch.Tensor,
        context: ForwardContext,
        embedding: torch.Tensor,
    ) -> torch.Tensor:
        """Return the output of a layer; `embedding`: of the step's tokens."""
        output: torch.Tensor = layer(x, context)
        return output

    def kept(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the kept outputs of layers [num_tokens, kept layers * hidden_size]."""
        return hidden[..., self.embed_tokens.embedding_dim :]

    def flush(self, steps: dict[str, RecomputeStep], context: ForwardContext) -> None:
        """See `models.interface.Model`."""
        for mixer in self.modules():
            if isinstance(mixer, RecurrentMixer) and mixer.name in steps:
                mixer.flush(steps[mixer.name], context)

    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """Apply the final norm to the output of `forward`; `logits` and a draft head read it."""
        if self.kept_layers:
            hidden = hidden[..., : self.embed_tokens.embedding_dim]
        normed: torch.Tensor = self.norm(hidden)
        return normed

    def logits(self, normed: torch.Tensor) -> torch.Tensor:
        """Return the logits of hidden states [num_tokens, hidden_size] after the final norm.

        They are [num_tokens, vocab_size], float32 or float64.
        """
        logits = upcast(self.lm_head(normed))
        return logits if self.logits_scale == 1.0 else logits * self.logits_scale

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the `logits` of the output of `forward`."""
        return self.logits(self.normed(hidden))


def rms_norm(
    file: ConfigFile, key: str = "rms_norm_eps", default: float = 1e-6, centred: bool = False
) -> RMSNorm:
    """Build a norm over the hidden size.

    Args:
        key, default: of its epsilon.
        centred: the weight is kept as its distance from 1.
    """
    return RMSNorm(file.size("hidden_size"), file.number(key, default), centred)


# Of files with the names of Mamba's own.
mamba_norm = partial(rms_norm, key="layer_norm_epsilon", default=1e-5)
