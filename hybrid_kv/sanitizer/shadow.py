"""The memory of the sanitizer: requests, blocks, the step in flight.

An *entry* is what one slot, window row or state holds: a hash of all tokens up to it, how many
these are, and which step and request wrote it. An entry of zeros is nothing that a request could
want.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from hybrid_kv.cache.backend import AttentionGroup
from hybrid_kv.cache.spec import MambaSpec
from hybrid_kv.request import Request, ScheduledRequest

Array = npt.NDArray[Any]

HASH, TOKENS, ORIGIN = range(3)  # of an entry


def to_numpy(tensor: torch.Tensor) -> Array:
    """Copy a tensor of any device."""
    array: Array = tensor.cpu().numpy()
    return array


class Owner:
    """A request that holds blocks."""

    def __init__(self, name: str, index: int, serial: int, max_tokens: int) -> None:
        self.name = name
        self.index = index
        self.serial = serial
        self.request: Request | None = None  # from its first step on
        self.known = 0  # tokens; after them lie the step's drafts
        self.computed: int | None = None  # of them in the cache
        self.tokens = np.zeros(max_tokens, dtype=np.int64)
        self.prefix = np.zeros(max_tokens + 1, dtype=np.int64)  # [n]: hash of the first n tokens
        self.flushed = 0  # tokens that its last written states have seen
        # What the first step does not compute: of hits the last token and the block, …
        self.restored: list[tuple[Shadow, int, int]] = []
        # … of what came from elsewhere the logical block and the block.
        self.loaded: list[tuple[Shadow, int, int]] = []


class DraftLayers(NamedTuple):
    """The layers of a drafting head, by who writes them.

    Attributes:
        in_passes: a head in passes of its own; they follow no step.
        stored: a block drafter, once the model has run.
    """

    in_passes: Collection[str] = ()
    stored: Collection[str] = ()


class Shadow:
    """The content of the blocks of one group.

    Attributes:
        is_stored: all of its layers are those of a block drafter.
    """

    def __init__(self, group: AttentionGroup, num_blocks: int, heads: DraftLayers) -> None:
        spec = group.spec
        self.group = group
        self.id = group.group_id
        self.block_size = spec.block_size
        self.layers = [i for i, name in enumerate(group.layer_names) if name not in heads.in_passes]
        self.is_stored = all(name in heads.stored for name in group.layer_names)
        self.is_mamba = isinstance(spec, MambaSpec)
        width = 1 + spec.num_speculative_tokens if isinstance(spec, MambaSpec) else spec.block_size
        # [block, slot in the block]; of a Mamba group [block, row where a convolution window
        # begins].
        self.cells = np.zeros((num_blocks, width, 3), dtype=np.int64)
        self.slots = self.cells.reshape(-1, 3)
        self.state = np.zeros((num_blocks, 3), dtype=np.int64)
        self.keeps_boundaries = isinstance(spec, MambaSpec) and spec.mode.keeps_states

    def copy(self, source: int, target: int, num_tokens: int) -> None:
        """Copy what a block has of a prefix that ends in it; the rest counts as nothing.

        Of attention these are the slots of its tokens, of states the window and the state there.
        """
        size = 1 if self.is_mamba else (num_tokens - 1) % self.block_size + 1
        self.cells[target] = 0
        self.cells[target, :size] = self.cells[source, :size]
        self.state[target] = self.state[source]


class TrackedStep:
    """A step's batch without padding, and the entries of its tokens."""

    def __init__(self, owners: list[Owner], batch: Sequence[ScheduledRequest], number: int) -> None:
        self.owners = owners
        self.drafts = [item.drafts or () for item in batch]
        self.lengths = np.array([item.num_tokens for item in batch])
        self.computed = np.array([item.num_computed_tokens for item in batch])
        self.ends = self.computed + self.lengths
        self.starts = np.cumsum(self.lengths) - self.lengths
        self.all_rows = np.arange(len(owners))
        self.rows = np.repeat(self.all_rows, self.lengths)  # of each token
        self.index = np.array([owner.index for owner in owners])
        spans = list(zip(owners, self.computed.tolist(), self.ends.tolist(), strict=True))
        self.begin = np.array([owner.prefix[begin] for owner, begin, _ in spans])
        self.tokens = np.concatenate([owner.tokens[begin:end] for owner, begin, end in spans])
        self.positions = np.arange(len(self.rows)) + (self.computed - self.starts)[self.rows]
        hashes = np.concatenate([owner.prefix[begin + 1 : end + 1] for owner, begin, end in spans])
        origin = (number << 32) + np.array([owner.serial for owner in owners])
        self.entries = np.stack([hashes, self.positions + 1, origin[self.rows]], axis=1)
        # Attention reads every position of a row.
        self.seen = np.concatenate([owner.prefix[1 : end + 1] for owner, _, end in spans])
        self.seen_rows = np.repeat(self.all_rows, self.ends)
        self.seen_positions = np.arange(len(self.seen)) - np.repeat(
            np.cumsum(self.ends) - self.ends, self.ends
        )
