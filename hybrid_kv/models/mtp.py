"""A multi-token-prediction head: drafts the token after next.

From the target's hidden state of token p-1 (after its final norm) and token p it predicts token
p+1. One decoder layer with K and V of its own; embedding and `lm_head` are the target's. For more
drafts the head is run again with its own output for the hidden state and the draft for the token.
Nemotron-H's, Qwen3-Next's and Qwen3.5's heads have this form.

**Where K and V of a pair lie.** The pair (hidden of token p-1, token p) has position p, and its K
and V lie in the slot of position p. vLLM's EAGLE and MTP proposers use slot p-1: then the last slot
of every block depends on the first token of the *next* block, the block's hash does not tell what
it holds, and so each prefix-cache hit must be cut by its last block, which in a hybrid model costs
hundreds of tokens or the whole hit (vllm#38182, vllm#53504, vllm!53923). Here a block depends on
its own tokens and those before it, like every other layer's, and the head joins the target's
attention groups without a rule of its own.

The price: after a hit of e tokens the pair at position e cannot be computed, for the hidden state
of token e-1 was not kept. So keys at multiples of `grid`, the tokens between two places where a hit
can end, are invisible to all queries, hit or no hit: the head computes the same in both cases. It
is one key in `grid`; position 0, which has no hidden state before it, is one of them. On the guard
model greedy acceptance of one draft is the same without a grid and with 64.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

from hybrid_kv.cache.spec import KVCacheSpec
from hybrid_kv.models.attention import GridAttention
from hybrid_kv.models.causal_lm import CausalLM, DecoderBlock
from hybrid_kv.models.families import MTP_PREFIX
from hybrid_kv.models.layers import ForwardContext, Linear, RMSNorm

NAME = f"{MTP_PREFIX}layers.0"  # of the one layer that keeps K and V


class MTPHead(nn.Module):
    """The head: `norm(layer(fc([enorm(embedding), hnorm(hidden)])))`.

    Args:
        target: lends its embedding and `lm_head` (not copied, not among this module's parameters).
        enorm, hnorm, norm: of the embedding, of the hidden state, and of the output.
        layer: with a `GridAttention` called `NAME`.

    Attributes:
        layer_specs: that of the layer, `head_spec` of the target.
        grid: see above; a multiple of it is never attended. Set by the engine before the first
            step. Without prefix caching any number above the longest request will do.
    """

    def __init__(
        self, target: CausalLM, enorm: RMSNorm, hnorm: RMSNorm, layer: DecoderBlock, norm: RMSNorm
    ) -> None:
        super().__init__()
        self.layer_specs: dict[str, KVCacheSpec] = {NAME: cast(GridAttention, layer.mixer).spec}
        self._target = (target,)  # in a tuple, so that its parameters are not registered as ours
        size = target.embed_tokens.embedding_dim
        self.enorm = enorm
        self.hnorm = hnorm
        self.fc = Linear(2 * size, size)
        self.layer = layer
        self.norm = norm

    @property
    def grid(self) -> int | None:
        return cast(GridAttention, self.layer.mixer).grid

    @grid.setter
    def grid(self, num_tokens: int) -> None:
        if num_tokens < 1:
            raise ValueError(f"grid={num_tokens} must be >= 1")
        cast(GridAttention, self.layer.mixer).grid = num_tokens

    def forward(
        self,
        hidden: torch.Tensor,
        next_token_ids: torch.Tensor,
        context: ForwardContext,
        query_tokens: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write the K and V of every pair, and draft from the query tokens.

        Args:
            hidden: [num_tokens, hidden_size], the target's of token p-1 after its final norm, or
                this head's output for the pair at p-1. Where it is unknown (position 0, the end of
                a hit) anything.
            next_token_ids: [num_tokens] int64, token p.
            context: metadata for p, as the target's attention layers get it for token p; its
                queries are the query tokens.
            query_tokens: [num_queries] int64, indices of pairs; None: all of them.

        Returns:
            [num_queries, hidden_size], from which `compute_logits` predicts token p+1.
        """
        embedding = self._target[0].embed(next_token_ids)
        x = self.fc(torch.cat([self.enorm(embedding), self.hnorm(hidden)], dim=-1))
        return self.norm(self.layer(x, context, query_tokens))

    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the input of `forward`: the output of the target after its final norm."""
        return self._target[0].normed(hidden)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [num_tokens, vocab_size], float32 or float64, of [num_tokens, hidden_size].

        There is no final norm in between.
        """
        return self._target[0].logits(hidden)
