"""The states that a Mamba group keeps: one policy for each `mamba_cache_mode`.

All other code queries the policy.

A row of the block table has *logical blocks*: logical block i stands for the state after block i,
or, while the request is inside that block, for its running state. The logical block that a step
writes its running state to is the step's *current state block*.

- `none`: one running state, however long the request; nothing that another request could use.
- `align`: chunks of a prefill end on block boundaries, and the state there is kept. Logical blocks
  before that of the last computed token are freed; logical blocks that a chunk jumps over never get
  a block.
- `all`: the state at every boundary of prefill and decode, kept until the request ends.

A fourth mode is a subclass and an entry in `MODES`. Nothing of the package is imported here, so
that the configuration can use it. All sizes are in tokens unless a name says otherwise.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from math import lcm
from typing import Any, ClassVar, TypeVar

import numpy as np

# A position, logical block or number of tokens: an int, or an int64 array of them.
Ints = TypeVar("Ints", int, Any)


def constant(value: int, like: Ints) -> Ints:
    """Return `value`, or an array of it as long as `like`."""
    return np.full_like(like, value) if isinstance(like, np.ndarray) else value


class Mode(ABC):
    """The interface of a mode; it decides nothing.

    Attributes:
        keeps_states: the state at a block boundary stays, so that it can be published.
        keeps_inside: a chunk leaves a state at each boundary that it passes, not only at its end.
        gives_back: logical blocks are freed while the request runs.
        needs_unit: the block size is a multiple of the model's chunk size, or of the size that the
            user gave.
        takes_match_unit: hits may end inside a block, at a state that a prefill leaves there
            (`cache.partial_blocks`).
    """

    name: ClassVar[str]
    keeps_states: ClassVar[bool]
    keeps_inside: ClassVar[bool]
    gives_back: ClassVar[bool]
    needs_unit: ClassVar[bool]
    takes_match_unit: ClassVar[bool] = False

    @abstractmethod
    def num_logical_blocks(self, num_tokens: Ints, block_size: int) -> Ints:
        """Return the logical blocks of a row of `num_tokens` tokens, without those for drafts."""

    @abstractmethod
    def num_covered(self, num_logical_blocks: int, block_size: int) -> int:
        """Return for how many tokens so many logical blocks are enough.

        It is the inverse of `num_logical_blocks`.
        """

    @abstractmethod
    def state_block_idx(self, last_token: Ints, block_size: int) -> Ints:
        """Return the logical block for the running state of a step.

        Args:
            last_token: position of the step's last scheduled token.
        """

    @abstractmethod
    def num_blocks(self, num_logical_blocks: int, is_decode: bool) -> int:
        """Return how many of a step's new logical blocks get a block: the last ones."""

    @abstractmethod
    def first_needed(self, num_seen: Ints, block_size: int) -> Ints:
        """Return the first logical block that is kept; those before it are freed.

        Args:
            num_seen: tokens, at least 1, that the state to go on from has seen.
        """

    @abstractmethod
    def held_at_most(self, num_logical_blocks: int, num_behind: int) -> int:
        """Return the most blocks that a row of `num_logical_blocks` logical blocks holds at once.

        Args:
            num_behind: logical blocks before the current state block whose states the rollback
                scheme may still read.
        """

    @abstractmethod
    def first_published(
        self, first: int, end: int, num_tokens: int, block_size: int, is_decode: bool
    ) -> int:
        """Return the first logical block to publish among `first … end - 1`.

        A step to `num_tokens` tokens has completed these.
        """

    @abstractmethod
    def chunk_end(
        self,
        start: int,
        end: int,
        num_tokens: int,
        block_size: int,
        hit_granularity: int,
        junction: int,
    ) -> int:
        """Return where a chunk from `start` should end if it can reach `end`.

        Args:
            num_tokens: known tokens of the request.
            hit_granularity: every prefix that can be restored is a multiple of it.
            junction: where another prompt with the same beginning wants a state
                (`cache.retention`); 0: nowhere.
        """

    @abstractmethod
    def unit(self, alignment: int, chunk_size: int | None) -> int:
        """Return the number of which the block size of a hybrid model is a multiple.

        Args:
            alignment: that of its attention layers.
            chunk_size: the user's Mamba block size, or the model's chunk size; None only if not
                `needs_unit`.
        """

    @abstractmethod
    def block_size(
        self, given: int | None, aligned: int, attention: int, max_model_len: int
    ) -> int:
        """Return the Mamba block size of a hybrid model.

        Args:
            given: by the user.
            aligned: the least multiple of `unit` in which an attention page holds a state.
            attention: the attention block size, at least `aligned`.
        """

    @abstractmethod
    def may_replace(self, given: int, chosen: int) -> bool:
        """Return whether `chosen` may stand in for the user's Mamba block size, with a note."""

    @abstractmethod
    def lone_block_size(
        self, given: int | None, chunk_size: int | None, max_model_len: int
    ) -> int | None:
        """Return the Mamba block size of a model without attention; None if nothing decides it."""


class NoStates(Mode):
    """Mode `none`: one logical block, overwritten by every step."""

    name = "none"
    keeps_states = False
    keeps_inside = False
    gives_back = False
    needs_unit = False

    def num_logical_blocks(self, num_tokens: Ints, block_size: int) -> Ints:
        return constant(1, num_tokens)

    def num_covered(self, num_logical_blocks: int, block_size: int) -> int:
        return sys.maxsize

    def state_block_idx(self, last_token: Ints, block_size: int) -> Ints:
        return constant(0, last_token)

    def num_blocks(self, num_logical_blocks: int, is_decode: bool) -> int:
        return num_logical_blocks

    def first_needed(self, num_seen: Ints, block_size: int) -> Ints:
        return constant(0, num_seen)

    def held_at_most(self, num_logical_blocks: int, num_behind: int) -> int:
        return num_logical_blocks

    def first_published(
        self, first: int, end: int, num_tokens: int, block_size: int, is_decode: bool
    ) -> int:
        return first

    def chunk_end(
        self,
        start: int,
        end: int,
        num_tokens: int,
        block_size: int,
        hit_granularity: int,
        junction: int,
    ) -> int:
        return end

    def unit(self, alignment: int, chunk_size: int | None) -> int:
        return alignment

    def block_size(
        self, given: int | None, aligned: int, attention: int, max_model_len: int
    ) -> int:
        return given or max_model_len

    def may_replace(self, given: int, chosen: int) -> bool:
        return True

    def lone_block_size(
        self, given: int | None, chunk_size: int | None, max_model_len: int
    ) -> int | None:
        return given or max_model_len


class States(Mode):
    """The logical blocks of a mode that keeps states: one for every block of tokens."""

    keeps_states = True

    def num_logical_blocks(self, num_tokens: Ints, block_size: int) -> Ints:
        return -(-num_tokens // block_size)

    def num_covered(self, num_logical_blocks: int, block_size: int) -> int:
        return num_logical_blocks * block_size

    def state_block_idx(self, last_token: Ints, block_size: int) -> Ints:
        return last_token // block_size

    def lone_block_size(
        self, given: int | None, chunk_size: int | None, max_model_len: int
    ) -> int | None:
        return given or chunk_size


class Align(States):
    """Mode `align`: at most the states that the next step may read, and one more."""

    name = "align"
    keeps_inside = False
    gives_back = True
    needs_unit = False
    takes_match_unit = True

    def num_blocks(self, num_logical_blocks: int, is_decode: bool) -> int:
        return num_logical_blocks if is_decode else min(num_logical_blocks, 1)

    def first_needed(self, num_seen: Ints, block_size: int) -> Ints:
        return (num_seen - 1) // block_size

    def held_at_most(self, num_logical_blocks: int, num_behind: int) -> int:
        return min(1 + num_behind, num_logical_blocks)

    def first_published(
        self, first: int, end: int, num_tokens: int, block_size: int, is_decode: bool
    ) -> int:
        if is_decode:
            return first
        # A chunk leaves a state at its end and nowhere else, on a boundary or not.
        return end - 1 if num_tokens % block_size == 0 else end

    def chunk_end(
        self,
        start: int,
        end: int,
        num_tokens: int,
        block_size: int,
        hit_granularity: int,
        junction: int,
    ) -> int:
        # The state that a repeated prompt can use: its last token is always computed.
        last_boundary = (num_tokens - 1) // hit_granularity * hit_granularity
        if start >= last_boundary:
            return end
        end = min(end, last_boundary)
        if start < junction < end:
            return junction
        # Where groups have other block sizes, a boundary of all is worth more than one of the
        # states alone.
        boundary = end // hit_granularity * hit_granularity
        if boundary <= start:
            boundary = end // block_size * block_size
        return boundary if boundary > start else end

    def unit(self, alignment: int, chunk_size: int | None) -> int:
        return alignment

    def block_size(
        self, given: int | None, aligned: int, attention: int, max_model_len: int
    ) -> int:
        return attention

    def may_replace(self, given: int, chosen: int) -> bool:
        return given == chosen


class All(States):
    """Mode `all`: a block for every logical block, kept until the request ends.

    Blocks are whole chunks, in which prefill kernels give states anyway.
    """

    name = "all"
    keeps_inside = True
    gives_back = False
    needs_unit = True

    def num_blocks(self, num_logical_blocks: int, is_decode: bool) -> int:
        return num_logical_blocks

    def first_needed(self, num_seen: Ints, block_size: int) -> Ints:
        return constant(0, num_seen)

    def held_at_most(self, num_logical_blocks: int, num_behind: int) -> int:
        return num_logical_blocks

    def first_published(
        self, first: int, end: int, num_tokens: int, block_size: int, is_decode: bool
    ) -> int:
        return first

    def chunk_end(
        self,
        start: int,
        end: int,
        num_tokens: int,
        block_size: int,
        hit_granularity: int,
        junction: int,
    ) -> int:
        return end

    def unit(self, alignment: int, chunk_size: int | None) -> int:
        assert chunk_size is not None
        return lcm(chunk_size, alignment)

    def block_size(
        self, given: int | None, aligned: int, attention: int, max_model_len: int
    ) -> int:
        return aligned

    def may_replace(self, given: int, chosen: int) -> bool:
        return True


MODES: dict[str, Mode] = {mode.name: mode for mode in (NoStates(), Align(), All())}
