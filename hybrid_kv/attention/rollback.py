"""The ways to roll back rejected drafts in a Mamba layer: one class for each `state_scheme`.

All other code queries the class, and none compares its name.

An attention layer overwrites what a rejected draft left in its slot. A recurrent state cannot be
overwritten: it has seen the draft. Two schemes:

- `slots`: a verify step writes the state after every token into a block of its own; the next step
  starts from the one after the last accepted token.
- `recompute`: a request keeps one state and, in a ring, the inputs of the tokens since. A step lets
  its tokens see both; the inputs of rejected tokens are overwritten. Now and then the oldest inputs
  are flushed into the state (see `kernels.recompute`).

The interface. `memory` says what the scheme takes of the cache (a `RollbackSpec`; the cache does
not know the scheme). An instance serves one group: `prepare` decides, once per step and before the
layers run, what its decodes read and write, and returns it as indices (`RollbackStep`); layers read
these and do the rest. `copies_states` says whether the states at block boundaries are copied to
their own blocks after a verify step (`mamba.postprocess_mamba`) or only the windows; `flush` writes
the state of a request that leaves, `flush_all` that of one that another engine goes on with.

A third scheme is a subclass of `Rollback` and an entry in `SCHEMES`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from hybrid_kv.cache.spec import (
    KVCacheSpec,
    MambaSpec,
    RollbackSpec,
    SlotsSpec,
    StatePart,
    StateProgress,
)
from hybrid_kv.config import CacheConfig, ConfigError
from hybrid_kv.kernels.common.integers import cdiv, default_ring_len, shortest_ring_len

# A plan reads `memory`, and needs neither: they are imported where tensors and arrays are.
if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

    from hybrid_kv.attention.common import CommonAttentionMetadata
    from hybrid_kv.kernels.common.upload import Staged
    from hybrid_kv.kernels.recompute import RecomputeRing, RecomputeStep

    Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class RollbackStep:
    """The reads and writes of one step's decodes, for all layers of a group.

    Attributes:
        history: where their states and the inputs after these lie, which tokens see both of, and
            what is flushed. None: a decode reads the state at `MambaMetadata.source_indices` and
            writes those after its tokens to `state_indices`. Such a step is the same whenever these
            are.
    """

    history: RecomputeStep | None = None


NO_DECODES = RollbackStep()


def _no_decodes() -> RollbackStep:
    return NO_DECODES


STAGED_NO_DECODES: Staged[RollbackStep] = ((), _no_decodes)


class Rollback(ABC):
    """A scheme, bound to one group of layers.

    Attributes:
        copies_states: states at block boundaries are copied to their blocks after a verify step,
            not only the windows.
        spec_type: of the result of `memory`.
    """

    copies_states: ClassVar[bool]
    spec_type: ClassVar[type[RollbackSpec]]

    @abstractmethod
    def __init__(
        self, spec: MambaSpec, max_num_seqs: int, device: torch.device, launches: bool
    ) -> None: ...

    @staticmethod
    @abstractmethod
    def memory(
        cache: CacheConfig,
        num_speculative_tokens: int,
        is_async: bool,
        specs: Sequence[KVCacheSpec],
    ) -> RollbackSpec:
        """Return the memory that the scheme takes of the cache, as the user configured it.

        Raises:
            ConfigError: an option that is not the scheme's, or one that it cannot keep.
        """

    @abstractmethod
    def source_logical_blocks(self, prev_state_block_idx: Ints, window_rows: Ints) -> Ints:
        """Return the logical blocks of the states to start from, of each row.

        Of a scheme with a history this holds after a prefill and for a request that is handed over;
        a decode there reads what `kernels.recompute.rule` says.

        Args:
            prev_state_block_idx: the state blocks of the previous step.
            window_rows: the window's row in them.
        """

    @abstractmethod
    def prepare(
        self,
        rows: Ints,
        new: Sequence[int],
        num_gained: Ints,
        common: CommonAttentionMetadata,
        table: torch.Tensor,
    ) -> Staged[RollbackStep]:
        """Build the step of a batch's decodes.

        Args:
            rows: [num_reqs_padded], of the engine; -1 for padding.
            new: places in the batch of rows with a new owner.
            num_gained: [num_reqs_padded], tokens that the request has gained since its last step
                began.
            table: [num_reqs_padded, width] int32.
        """

    @abstractmethod
    def flush(self, rows: Ints, num_gained: Ints, table: torch.Tensor) -> RollbackStep:
        """Build the step that writes the states at the last boundary of requests that run nothing.

        The boundary is the last one among their tokens.

        Args:
            rows, num_gained: [n].
            table: [n, width] int32.
        """

    @abstractmethod
    def flush_all(
        self, rows: Ints, num_gained: Ints, state_block_idx: Ints, table: torch.Tensor
    ) -> RollbackStep:
        """Build the step that flushes the final state of departing requests.

        The states go to the logical blocks of `source_logical_blocks`.

        No boundary lies between them and the states that are written: `flush` was there before.

        Args:
            rows, num_gained, state_block_idx: [n], the last one the current state blocks.
            table: [n, width] int32.
        """


class Slots(Rollback):
    """Scheme `slots`: 1 + K states are written, the next step picks one; nothing is due later."""

    copies_states: ClassVar[bool] = True
    spec_type: ClassVar[type[RollbackSpec]] = SlotsSpec

    def __init__(
        self, spec: MambaSpec, max_num_seqs: int, device: torch.device, launches: bool
    ) -> None:
        pass

    @staticmethod
    def memory(
        cache: CacheConfig,
        num_speculative_tokens: int,
        is_async: bool,
        specs: Sequence[KVCacheSpec],
    ) -> SlotsSpec:
        if cache.recompute_ring_len is not None:
            raise ConfigError(
                f"recompute_ring_len={cache.recompute_ring_len} sizes the ring of state_scheme "
                'recompute, which is off; add state_scheme="recompute"'
            )
        return SlotsSpec(num_speculative_tokens)

    def source_logical_blocks(self, prev_state_block_idx: Ints, window_rows: Ints) -> Ints:
        return prev_state_block_idx + window_rows

    def prepare(
        self,
        rows: Ints,
        new: Sequence[int],
        num_gained: Ints,
        common: CommonAttentionMetadata,
        table: torch.Tensor,
    ) -> Staged[RollbackStep]:
        return STAGED_NO_DECODES

    def flush(self, rows: Ints, num_gained: Ints, table: torch.Tensor) -> RollbackStep:
        return NO_DECODES

    def flush_all(
        self, rows: Ints, num_gained: Ints, state_block_idx: Ints, table: torch.Tensor
    ) -> RollbackStep:
        return NO_DECODES


@dataclass(frozen=True)
class RecomputeSpec(RollbackSpec):
    """Scheme `recompute`: states are written now and then; a ring keeps the inputs of later tokens.

    `ring_len` tokens for each row of the engine. With asynchronous scheduling
    `num_uncertain_tokens` more of a step in flight are not known when logical blocks are chosen.
    """

    ring_len: int = 0
    num_uncertain_tokens: int = 0
    scheme: ClassVar[str] = "recompute"
    needs_inputs: ClassVar[bool] = True
    writes_late: ClassVar[bool] = True

    @property
    def max_query_len(self) -> int:
        """The most tokens of a verify step."""
        return 1 + self.num_speculative_tokens

    @property
    def num_blocks(self) -> int:
        return 0

    def most_logical_blocks_behind(self, block_size: int) -> int:
        """Return how far back the base is: the state that the last step started from.

        The tokens after the base lie in the ring, and so will the step's, and a step that finds a
        boundary passed flushes them up to there: the one before found less than a block after the
        base, and left at most 1 + K more.
        """
        span = (
            min(self.ring_len, block_size - 1 + 2 * self.max_query_len) + self.num_uncertain_tokens
        )
        return cdiv(span, block_size)

    def bytes_per_row(self, inputs: Sequence[StatePart]) -> int:
        return self.ring_len * sum(state_part.nbytes for state_part in inputs)

    def stored(self, state_part: StatePart) -> StatePart:
        """Return a float32 state as two int16 planes of the same bytes, other parts as they are.

        See `kernels.recompute.split_state`.
        """
        import torch

        if state_part.role != "state" or state_part.dtype != torch.float32:
            return state_part
        return StatePart(state_part.name, (2, *state_part.shape), torch.int16)

    def allocate(
        self, inputs: Sequence[StatePart], num_rows: int, device: torch.device
    ) -> RecomputeRing | None:
        from hybrid_kv.kernels.recompute import RecomputeRing

        if not inputs:
            return None  # a layer of windows alone
        x, B, dt = inputs
        return RecomputeRing.allocate(
            num_rows, self.ring_len, x.shape, B.shape, x.dtype, device, dt.shape
        )

    def describe(self) -> dict[str, Any]:
        return {"ring_len": self.ring_len}

    def num_seen(self, progress: StateProgress, start: int) -> int:
        return progress.flushed

    def advance(
        self,
        progress: StateProgress,
        start: int,
        num_tokens: int,
        computed: int,
        block_size: int | None,
    ) -> None:
        """Follow the rule of `kernels.recompute.rule` on the host: it depends on lengths alone.

        `flushed` is `base_pos` there, `start - flushed` is `n_hist`.
        """
        progress.computed = computed
        boundary = None if block_size is None else (progress.flushed // block_size + 1) * block_size
        if boundary is not None and start >= boundary:
            progress.flushed = boundary
        elif start - progress.flushed + num_tokens + self.max_query_len > self.ring_len:
            progress.flushed = start


class Recompute(Rollback):
    """Scheme `recompute`: one state and the inputs since, run again on demand.

    Attributes:
        cursors: where the state and the history of each row of the engine are; the groups' are
            equal, but for the blocks that they mean.
    """

    copies_states: ClassVar[bool] = False  # the state at a boundary is not written yet
    spec_type: ClassVar[type[RollbackSpec]] = RecomputeSpec

    def __init__(
        self, spec: MambaSpec, max_num_seqs: int, device: torch.device, launches: bool
    ) -> None:
        from hybrid_kv.kernels.recompute import RecomputeCursors, commit, commit_reference

        rollback = spec.rollback
        assert isinstance(rollback, RecomputeSpec)
        self._commit = commit if launches else commit_reference
        self._block_size = spec.block_size if spec.mode.keeps_states else None
        self.cursors = RecomputeCursors.allocate(
            max_num_seqs, rollback.ring_len, rollback.max_query_len, device
        )

    @staticmethod
    def memory(
        cache: CacheConfig,
        num_speculative_tokens: int,
        is_async: bool,
        specs: Sequence[KVCacheSpec],
    ) -> RecomputeSpec:
        if not any(isinstance(spec, MambaSpec) for spec in specs):
            raise ConfigError('state_scheme="recompute": the model has no Mamba layer; use slots')
        longest = 1 + num_speculative_tokens
        ring_len = cache.recompute_ring_len or default_ring_len(longest)
        least = shortest_ring_len(longest)
        if ring_len < least:
            raise ConfigError(
                f"recompute_ring_len={ring_len} is too short for "
                f"num_speculative_tokens={num_speculative_tokens}, "
                f"which needs {least}; raise it or leave it out"
            )
        return RecomputeSpec(num_speculative_tokens, ring_len, longest if is_async else 0)

    def source_logical_blocks(self, prev_state_block_idx: Ints, window_rows: Ints) -> Ints:
        return prev_state_block_idx  # a prefill leaves its state with its window

    def prepare(
        self,
        rows: Ints,
        new: Sequence[int],
        num_gained: Ints,
        common: CommonAttentionMetadata,
        table: torch.Tensor,
    ) -> Staged[RollbackStep]:
        """Build the step of the decodes, restart rows with a new owner, and restart prefills.

        Rows with a new owner have no history yet; prefills start anew after their last token.
        """
        from hybrid_kv.kernels.common.upload import together

        computed = common.num_computed_tokens
        split = common.num_decodes
        restart = self.cursors.restart
        parts: list[Staged[RollbackStep | None]] = (
            [((rows[new], computed[new]), restart)] if new else []
        )
        if split:
            parts.append(self._step(rows[:split], num_gained[:split], common, table[:split]))
        if common.num_prefills:
            parts.append(((rows[split:], (computed + common.query_lens)[split:]), restart))
        arrays, make_all = together(*parts)

        def make(*moved: torch.Tensor) -> RollbackStep:
            return next((step for step in make_all(*moved) if step is not None), NO_DECODES)

        return arrays, make

    def flush(self, rows: Ints, num_gained: Ints, table: torch.Tensor) -> RollbackStep:
        from hybrid_kv.kernels.common.upload import now

        return now(table.device, self._step(rows, num_gained, None, table))

    def flush_all(
        self, rows: Ints, num_gained: Ints, state_block_idx: Ints, table: torch.Tensor
    ) -> RollbackStep:
        """Flush all of the history into the current state block, for KV transfer.

        Not into the state's own block, which may be published: others read it.
        """
        from hybrid_kv.kernels.common.upload import upload
        from hybrid_kv.kernels.recompute import RecomputeStep

        cursors = self.cursors
        row, gained, target = upload(table.device, rows, num_gained, state_block_idx)
        source = row.new_zeros(len(rows))
        if self._block_size is not None:
            source = (cursors.base_pos[row] - 1) // self._block_size
        src, dst = (
            table.gather(1, block_idx[:, None])[:, 0].long() for block_idx in (source, target)
        )
        n_hist = cursors.n_hist[row] + gained.minimum(cursors.prev_t[row])
        step = RecomputeStep(
            row, src, dst, cursors.ring_start[row], n_hist, n_hist, cursors.max_query_len
        )
        return RollbackStep(step)

    def _step(
        self,
        rows: Ints,
        num_gained: Ints,
        common: CommonAttentionMetadata | None,
        table: torch.Tensor,
    ) -> Staged[RollbackStep]:
        """Decide by `kernels.recompute.rule` what each decode reads, flushes and recomputes.

        The cursors move past it.

        Args:
            common: of the step; None: the rows run no tokens.
        """

        def commit(row: torch.Tensor, gained: torch.Tensor) -> RollbackStep:
            decodes = common.decode_rows if common is not None else None
            cu_seqlens = row.new_zeros(len(row) + 1) if decodes is None else decodes.starts
            return RollbackStep(
                self._commit(self.cursors, row, gained, cu_seqlens, table, self._block_size)
            )

        return (rows, num_gained), commit


SCHEMES: dict[str, type[Rollback]] = {"slots": Slots, "recompute": Recompute}


def rollback_spec(
    cache: CacheConfig, num_speculative_tokens: int, is_async: bool, specs: Sequence[KVCacheSpec]
) -> RollbackSpec:
    """Return the memory that the scheme chosen by the user takes of the cache.

    Raises:
        ConfigError: no such scheme, or its options contradict each other or the layers.
    """
    if cache.state_scheme not in SCHEMES:
        raise ConfigError(f"state_scheme={cache.state_scheme!r}; use {' or '.join(SCHEMES)}")
    return SCHEMES[cache.state_scheme].memory(cache, num_speculative_tokens, is_async, specs)
