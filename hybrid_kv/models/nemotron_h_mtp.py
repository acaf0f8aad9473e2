"""The multi-token-prediction head of NemotronH checkpoints: drafts the token after next.

From the target's hidden state of token p-1 (after `norm_f`) and token p it predicts token p+1. One attention layer
with K and V of its own and one MLP; embedding and `lm_head` are the target's. For more drafts the head is run again
with its own output for the hidden state and the draft for the token.

**Where K and V of a pair lie.** The pair (hidden of token p-1, token p) has position p, and its K and V lie in the slot
of position p. vLLM's EAGLE and MTP proposers use slot p-1: then the last slot of every block depends on the first token
of the *next* block, the block's hash does not tell what it holds, and so each prefix-cache hit must be cut by its last
block, which in a hybrid model costs hundreds of tokens or the whole hit (vllm#38182, vllm#53504, vllm!53923). Here a
block depends on its own tokens and those before it, like every other layer's, and the head joins the target's attention
groups without a rule of its own.

The price: after a hit of e tokens the pair at position e cannot be computed, for the hidden state of token e-1 was not
kept. So keys at multiples of `grid`, the tokens between two places where a hit can end, are invisible to all queries,
hit or no hit: the head computes the same in both cases. It is one key in `grid`; position 0, which has no hidden state
before it, is one of them. On the guard model greedy acceptance of one draft is the same without a grid and with 64.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

from hybrid_kv.attention.paged import TORCH, AttentionPart
from hybrid_kv.cache.spec import FullAttentionSpec, KVCacheSpec
from hybrid_kv.config import ConfigError
from hybrid_kv.models.config_file import ConfigFile
from hybrid_kv.models.layers import ForwardContext, Linear, PagedAttention, RMSNorm, SquaredReluMLP
from hybrid_kv.models.nemotron_h import NemotronH, NemotronHConfig, join_qkv
from hybrid_kv.models.registry import HeadFamily, register_head
from hybrid_kv.models.specs import ATTENTION, MLP, layer_kinds

PREFIX = "mtp."  # of the head's tensors and layers
NAME = f"{PREFIX}layers.0"  # of the one layer that keeps K and V


class GridAttention(PagedAttention):
    """`PagedAttention` over the keys beside the grid."""

    grid: int | None = None

    def attend(
        self, query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, part: AttentionPart
    ) -> torch.Tensor:
        if self.grid is None:
            raise ValueError("set NemotronHMTP.grid to the tokens between two possible ends of a prefix hit")
        return TORCH.attend(query, key_cache, value_cache, part, self.head_size**-0.5, self.grid)


class MTPAttentionLayer(nn.Module):
    """Joins the token's embedding (first) and the hidden state, then `x + attention(norm(x))`."""

    def __init__(self, config: NemotronHConfig) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.layer_norm_epsilon
        self.enorm, self.hnorm, self.norm = RMSNorm(size, eps), RMSNorm(size, eps), RMSNorm(size, eps)
        self.eh_proj = Linear(2 * size, size)
        heads = (config.num_attention_heads, config.num_key_value_heads, config.head_dim)
        self.mixer = GridAttention(NAME, size, *heads)

    def forward(
        self, hidden: torch.Tensor, embedding: torch.Tensor, context: ForwardContext, wanted: torch.Tensor | None
    ) -> torch.Tensor:
        x = self.eh_proj(torch.cat([self.enorm(embedding), self.hnorm(hidden)], dim=-1))
        mixed = self.mixer(self.norm(x), context, wanted)
        return mixed + (x if wanted is None else x[wanted])


class MTPMLPLayer(nn.Module):
    """`final_layernorm(x + mlp(norm(x)))`."""

    def __init__(self, config: NemotronHConfig) -> None:
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, config.layer_norm_epsilon)
        self.mixer = SquaredReluMLP(config.hidden_size, config.intermediate_size, config.mlp_bias)
        self.final_layernorm = RMSNorm(config.hidden_size, config.layer_norm_epsilon)

    def forward(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        return self.final_layernorm(x + self.mixer(self.norm(x), context))


class NemotronHMTP(nn.Module):
    """The head.

    Args:
        config: geometry, the target's.
        target: lends its embedding and `lm_head` (not copied, not among this module's parameters).

    Attributes:
        layer_specs: the target's attention spec, so that the head's layer joins the target's attention groups.
        grid: see above; a multiple of it is never attended. Set by the engine before the first step. Without prefix
            caching any number above the longest request will do.
    """

    def __init__(self, config: NemotronHConfig, target: NemotronH) -> None:
        super().__init__()
        spec = next((spec for spec in target.layer_specs.values() if isinstance(spec, FullAttentionSpec)), None)
        if spec is None:
            raise ConfigError("the model has no attention layer whose cache groups an MTP head could join")
        self.layer_specs: dict[str, KVCacheSpec] = {NAME: spec}
        self._target = (target,)  # in a tuple, so that its parameters are not registered as ours
        self.layers = nn.ModuleList([MTPAttentionLayer(config), MTPMLPLayer(config)])

    @property
    def grid(self) -> int | None:
        return cast(MTPAttentionLayer, self.layers[0]).mixer.grid

    @grid.setter
    def grid(self, num_tokens: int) -> None:
        if num_tokens < 1:
            raise ValueError(f"grid={num_tokens} must be >= 1")
        cast(MTPAttentionLayer, self.layers[0]).mixer.grid = num_tokens

    def forward(
        self,
        hidden: torch.Tensor,
        next_token_ids: torch.Tensor,
        context: ForwardContext,
        wanted: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Writes the K and V of every pair, and drafts from those that are wanted.

        Args:
            hidden: [num_tokens, hidden_size], the target's of token p-1 after `norm_f`, or this head's output for the
                pair at p-1. Where it is unknown (position 0, the end of a hit) anything.
            next_token_ids: [num_tokens] int64, token p.
            context: metadata for p, as the target's attention layers get it for token p; its queries are the wanted.
            wanted: [num_wanted] int64, indices of pairs; None: all of them.

        Returns:
            [num_wanted, hidden_size], from which `compute_logits` predicts token p+1.
        """
        attention, mlp = self.layers
        return mlp(attention(hidden, self._target[0].embeddings(next_token_ids), context, wanted), context)

    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """What `forward` takes of the target: the output of its `forward` after `norm_f`, same shape."""
        return self._target[0].normed(hidden)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[num_tokens, hidden_size] to [num_tokens, vocab_size], float32 or float64; no `norm_f` in between."""
        return self._target[0].logits(hidden)


def _build(file: ConfigFile, target: NemotronH) -> nn.Module:
    if (count := file.get("num_nextn_predict_layers") or 0) != 1:
        raise file.fail(f"num_nextn_predict_layers={count!r}, 1 is supported; draft with n-grams instead")
    if (kinds := tuple(layer_kinds(file, "mtp_"))) != (ATTENTION, MLP):
        raise file.fail(
            f"an MTP head of the layers {kinds} is not supported, {(ATTENTION, MLP)} is; draft with n-grams instead"
        )
    return NemotronHMTP(NemotronHConfig.read(file), target)


register_head(HeadFamily(PREFIX, _build, join_qkv), "nemotron_h")
