"""The interfaces of a model and of a draft head to the engine."""

from __future__ import annotations

from typing import Protocol

import torch

from hybrid_kv.cache.spec import KVCacheSpec
from hybrid_kv.kernels.recompute import RecomputeStep
from hybrid_kv.models.layers import ForwardContext


class Model(Protocol):
    """A model. Layer names are the keys of `layer_specs`; their block sizes are ignored."""

    vocab_size: int
    mamba_chunk_size: int | None
    layer_specs: dict[str, KVCacheSpec]

    def __call__(
        self, input_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        """Return hidden states [num_tokens, …] of tokens and positions, [num_tokens] int64 each."""

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits [num_tokens, vocab_size] of hidden states [num_tokens, …]."""

    def flush(self, steps: dict[str, RecomputeStep], context: ForwardContext) -> None:
        """Write the states that are due, by layer name, of requests that run no tokens.

        A model whose Mamba specs have no `inputs` needs none.
        """


class DraftHead(Protocol):
    """A head whose pair (hidden state of token p - 1, token p) has position p.

    See `models.nemotron_h_mtp`.

    The keys of `layer_specs` are its own layers. Keys at multiples of `grid`, the tokens between
    two places where a prefix hit can end, are never attended; the engine sets it before the first
    step.
    """

    layer_specs: dict[str, KVCacheSpec]
    grid: int | None

    def __call__(
        self,
        hidden: torch.Tensor,
        next_token_ids: torch.Tensor,
        context: ForwardContext,
        query_tokens: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return hidden states [num_queries, hidden_size], for `compute_logits` and the next pass.

        Args:
            query_tokens: [num_queries] int64, the tokens that are the queries of the context's
                metadata; None: all.
        """

    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the target's hidden states as the head reads them, same shape."""

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits [num_tokens, vocab_size]."""


class BlockDraftHead(Protocol):
    """A head that drafts a block of tokens at once, as DFlash and DSpark do.

    Its layers attend within a sliding window: to K and V of the target's hidden states, one row for
    each token, and to those of its queries, the last token and a mask for each draft. It sees no
    draft of its own. The keys of `layer_specs` are its own layers.
    """

    layer_specs: dict[str, KVCacheSpec]

    def store(self, hidden: torch.Tensor, context: ForwardContext) -> None:
        """Write K and V of the target's tokens in each layer.

        Args:
            hidden: [num_tokens, hidden_size], the target's.
            context: that of the target's step, with the metadata of the head's layers.
        """

    def __call__(
        self, token_ids: torch.Tensor, num_drafts: int, context: ForwardContext
    ) -> torch.Tensor:
        """Return hidden states [num_requests, K, hidden_size] of the masks, for `compute_logits`.

        Args:
            token_ids: [num_requests] int64, the last token of each, which the target has not seen.
            num_drafts: K.
            context: its queries are these tokens, each with K masks after it; their K and V are
                written first.
        """

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits [num_requests, K, vocab_size]."""
