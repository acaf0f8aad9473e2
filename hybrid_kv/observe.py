"""Notifications of what the engine does, step by step.

The order in a step: `on_schedule`, `on_prepare`, `on_step`, then the model runs, `on_hidden`,
`on_copy` for each group with boundary states, `on_store`, `on_draft`, `on_block`, `on_commit`,
`on_propose`.
`on_flush` and `on_arrival` come between steps. An observer may look at everything and raise; what
it may change is said where it may.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hybrid_kv.attention.mamba import BoundaryCopies
from hybrid_kv.attention.paged import AttentionPart
from hybrid_kv.attention.rollback import RollbackStep
from hybrid_kv.cache.block_pool import BlockIds
from hybrid_kv.cache.observe import CacheObserver
from hybrid_kv.request import Request, ScheduledRequest


class EngineObserver(CacheObserver):
    """An observer of one engine: of its manager, its runner and its drafter."""

    def on_schedule(self, scheduled: Sequence[ScheduledRequest]) -> None:
        """Hear that a step begins.

        Drafts may still be the runner's to fill in. Requests may be aborted here.
        """

    def on_prepare(self, batch: Sequence[ScheduledRequest]) -> None:
        """Hear that the batch is in order, and nothing of it is staged.

        What the block tables will write may be spoiled here.
        """

    def on_step(
        self,
        batch: Sequence[ScheduledRequest],
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        metadata: dict[str, Any],
    ) -> None:
        """Hear that the model is about to run.

        Args:
            input_ids, positions: [max_num_tokens] int64, the step's tokens first.
            metadata: of each layer, by name.
        """

    def on_hidden(self, batch: Sequence[ScheduledRequest], hidden: torch.Tensor) -> None:
        """Hear that the model has run.

        Args:
            hidden: [num_tokens or more, hidden_size], of the batch's tokens in order; then padding.
        """

    def on_copy(
        self,
        group: int,
        copies: BoundaryCopies,
        block_table: torch.Tensor,
        layers: Sequence[tuple[torch.Tensor, ...]],
        copies_states: bool,
    ) -> None:
        """Hear that boundary states of a group are about to be copied.

        Args:
            copies: on the device; those of rejected drafts are copies of a block to itself.
            block_table: [num_rows, num_columns] int32, in batch order.
            layers: of each layer the parts of its state.
            copies_states: those that are no window are copied, too.
        """

    def on_commit(self, tokens: Sequence[Sequence[int]]) -> None:
        """Hear that the step has run.

        Args:
            tokens: for each request of the batch none, or its accepted drafts and one more.
        """

    def on_draft(
        self, group: int, rows: npt.NDArray[np.int64], positions: torch.Tensor, slots: torch.Tensor
    ) -> None:
        """Hear that a head is about to write K and V of a group, also after rejected drafts.

        Args:
            rows, positions, slots: [num_tokens] int64 each, `rows` of the batch. `PAD_SLOT` writes
                nothing.
        """

    def on_store(self, group: int) -> None:
        """Hear that a block drafter has stored K and V of all tokens of the step in a group."""

    def on_block(self, group: int, rows: npt.NDArray[np.int64], segment: AttentionPart) -> None:
        """Hear what the queries of a block drafter are about to read of a group.

        Args:
            rows: [num_requests], of the batch.
            segment: the queries of these, 1 + K each.
        """

    def on_propose(
        self,
        requests: Sequence[Request],
        token_ids: Sequence[npt.NDArray[np.int64]],
        num_tokens: npt.NDArray[np.int64],
        drafts: Sequence[Sequence[int]],
    ) -> None:
        """Hear that `drafts` were proposed, by a proposer (`engine.runner.Proposer`) or a head.

        Args:
            token_ids: of each request [max_model_len + 1].
            num_tokens: [num_requests], how many of these are known.
        """

    def on_flush(self, request: Request, group: int, step: RollbackStep) -> None:
        """Hear that a request is about to give up its row.

        What is due of its history will be flushed into a state.
        """

    def on_arrival(self, request: Request, logical_blocks: Sequence[BlockIds]) -> None:
        """Hear that a request that another engine has begun got its row.

        Its blocks hold all of its tokens but the last.

        Args:
            logical_blocks: group by group; of states one block holds the last.
        """

    def on_failure(self) -> None:
        """Hear that a step raised; the engine clears up, whatever state it is in."""
