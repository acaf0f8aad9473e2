"""Which states a Mamba group keeps: one policy for each `mamba_cache_mode`, which all other code queries.

A row of the block table has *logical blocks*: logical block i stands for the state after block i, or, while the request
is inside that block, for its running state. The logical block that a step writes its running state to is the step's
*current state block*.

- `none`: one running state, however long the request; nothing that another request could use.
- `align`: chunks of a prefill end on block boundaries, and the state there is kept. Logical blocks before that of the
  last computed token are freed; logical blocks that a chunk jumps over never get a block.
- `all`: the state at every boundary of prefill and decode, kept until the request ends.

A fourth mode is a subclass and an entry in `MODES`. Nothing of the package is imported here, so that the configuration
can use it. All sizes are in tokens unless a name says otherwise.
"""

from __future__ import annotations

import sys
from math import lcm
from typing import Any, ClassVar, TypeVar

# A position, logical block or number of tokens: an int, or an int64 array of them.
Ints = TypeVar("Ints", int, Any)


class Mode:
    """The rules that modes with a logical block for every block share; they are those of mode `all`.

    Attributes:
        keeps_states: the state at a block boundary stays, so that it can be published.
        keeps_inside: a chunk leaves a state at each boundary that it passes, not only at its end.
        gives_back: logical blocks are freed while the request runs.
        needs_unit: the block size is a multiple of the model's chunk size, or of the size that the user gave.
    """

    name: ClassVar[str]
    keeps_states: ClassVar[bool] = True
    keeps_inside: ClassVar[bool] = True
    gives_back: ClassVar[bool] = False
    needs_unit: ClassVar[bool] = False

    def num_logical_blocks(self, num_tokens: Ints, block_size: int) -> Ints:
        """Logical blocks that a row of `num_tokens` tokens has, those for drafts not counted."""
        return -(-num_tokens // block_size)

    def num_covered(self, num_logical_blocks: int, block_size: int) -> int:
        """The inverse of `num_logical_blocks`: how many tokens so many logical blocks are enough for."""
        return num_logical_blocks * block_size

    def current_block(self, last_token: Ints, block_size: int) -> Ints:
        """The logical block for the running state of a step whose last scheduled token has position `last_token`."""
        return last_token // block_size

    def num_blocks(self, num_logical_blocks: int, is_decode: bool) -> int:
        """How many of a step's new logical blocks get a block: the last ones."""
        return num_logical_blocks

    def first_needed(self, num_seen: Ints, block_size: int) -> Ints:
        """Logical blocks before it are freed once the state to go on from has seen `num_seen` >= 1 tokens."""
        return num_seen * 0

    def held_at_most(self, num_logical_blocks: int, num_behind: int) -> int:
        """The most blocks that a row of `num_logical_blocks` logical blocks holds at once.

        Args:
            num_behind: logical blocks before the current state block whose states the rollback scheme may still read.
        """
        return num_logical_blocks

    def first_published(self, first: int, end: int, num_tokens: int, block_size: int, is_decode: bool) -> int:
        """The first logical block to publish among `first … end - 1`, which a step to `num_tokens` tokens has
        completed.
        """
        return first

    def chunk_end(self, start: int, end: int, num_tokens: int, block_size: int, hit_granularity: int) -> int:
        """Where a chunk from `start` should end if it can reach `end`, in a request of `num_tokens` known tokens.

        Args:
            hit_granularity: every prefix that can be restored is a multiple of it.
        """
        return end

    def unit(self, alignment: int, chunk_size: int | None) -> int:
        """What the block size of a hybrid model is a multiple of.

        Args:
            alignment: the same for its attention layers.
            chunk_size: the user's Mamba block size, or the model's chunk size; None only if not `needs_unit`.
        """
        return alignment

    def block_size(self, given: int | None, aligned: int, attention: int, max_model_len: int) -> int:
        """The Mamba block size of a hybrid model.

        Args:
            given: by the user.
            aligned: the least multiple of `unit` in which an attention page holds a state.
            attention: the attention block size, at least `aligned`.
        """
        return aligned

    def may_replace(self, given: int, chosen: int) -> bool:
        """Whether `chosen` may stand in for the user's Mamba block size, with a note."""
        return True

    def lone_block_size(self, given: int | None, chunk_size: int | None, max_model_len: int) -> int | None:
        """The Mamba block size of a model without attention; None if nothing says how long it should be."""
        return given or chunk_size


class NoStates(Mode):
    """Mode `none`: one logical block, overwritten by every step."""

    name = "none"
    keeps_states = False
    keeps_inside = False

    def num_logical_blocks(self, num_tokens: Ints, block_size: int) -> Ints:
        return num_tokens * 0 + 1

    def num_covered(self, num_logical_blocks: int, block_size: int) -> int:
        return sys.maxsize

    def current_block(self, last_token: Ints, block_size: int) -> Ints:
        return last_token * 0

    def block_size(self, given: int | None, aligned: int, attention: int, max_model_len: int) -> int:
        return given or max_model_len

    def lone_block_size(self, given: int | None, chunk_size: int | None, max_model_len: int) -> int | None:
        return given or max_model_len


class Align(Mode):
    """Mode `align`: at most the states that the next step may read, and one more."""

    name = "align"
    keeps_inside = False
    gives_back = True

    def num_blocks(self, num_logical_blocks: int, is_decode: bool) -> int:
        return num_logical_blocks if is_decode else min(num_logical_blocks, 1)

    def first_needed(self, num_seen: Ints, block_size: int) -> Ints:
        return (num_seen - 1) // block_size

    def held_at_most(self, num_logical_blocks: int, num_behind: int) -> int:
        return min(1 + num_behind, num_logical_blocks)

    def first_published(self, first: int, end: int, num_tokens: int, block_size: int, is_decode: bool) -> int:
        if is_decode:
            return first
        # A chunk leaves a state at its end and nowhere else, on a boundary or not.
        return end - 1 if num_tokens % block_size == 0 else end

    def chunk_end(self, start: int, end: int, num_tokens: int, block_size: int, hit_granularity: int) -> int:
        # The state that a repeated prompt can use: its last token is always computed.
        last_boundary = (num_tokens - 1) // hit_granularity * hit_granularity
        if start >= last_boundary:
            return end
        end = min(end, last_boundary)
        # Where groups have other block sizes, a boundary of all is worth more than one of the states alone.
        boundary = end // hit_granularity * hit_granularity
        if boundary <= start:
            boundary = end // block_size * block_size
        return boundary if boundary > start else end

    def block_size(self, given: int | None, aligned: int, attention: int, max_model_len: int) -> int:
        return attention

    def may_replace(self, given: int, chosen: int) -> bool:
        return given == chosen


class All(Mode):
    """Mode `all`: see `Mode`; blocks are whole chunks, in which prefill kernels give states anyway."""

    name = "all"
    needs_unit = True

    def unit(self, alignment: int, chunk_size: int | None) -> int:
        assert chunk_size is not None
        return lcm(chunk_size, alignment)


MODES: dict[str, Mode] = {mode.name: mode for mode in (NoStates(), Align(), All())}
