"""How a Mamba layer undoes rejected drafts: one class for each `state_scheme`. Everybody else asks it.

An attention layer overwrites what a rejected draft left in its slot. A recurrent state cannot be overwritten: it has
seen the draft. Two schemes:

- `Slots`: a verify step writes the state after every token into a block of its own; the next step starts from the one
  after the last accepted token.
- `Replay`: a request keeps one state and, in a ring, the inputs of the tokens since. A step lets its tokens see both;
  the inputs of rejected tokens are overwritten. Now and then the oldest inputs are folded into the state (see
  `kernels.replay`).

The interface. `memory` says what the scheme takes of the cache (an `UndoSpec`, which the cache asks without knowing the
scheme). An instance serves one group: `prepare` decides, once per step and before the layers run, what its decodes
read and write, and returns a *step* that the layers are given; `copies_states` says whether the states at block
boundaries are brought to their own blocks behind a verify step (`mamba.postprocess_mamba`) or only the windows; `fold`
writes the state of a request that leaves, `settle` that of one that another engine goes on with.

A third scheme is a class and an entry in `SCHEMES`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt
import torch

from hybrid_kv.attention.common import CommonAttentionMetadata
from hybrid_kv.cache.spec import KVCacheSpec, MambaSpec, StatePart, UndoSpec
from hybrid_kv.config import CacheConfig, ConfigError
from hybrid_kv.kernels.common.integers import cdiv
from hybrid_kv.kernels.replay import (
    ReplayCursors,
    ReplayRing,
    ReplayStep,
    commit,
    commit_reference,
    default_ring_len,
    shortest_ring_len,
)

Ints = npt.NDArray[np.int64]


class Recurrence(Protocol):
    """What a scheme asks of a layer for the decodes of a step. Only the layer looks into its `tokens`."""

    def scan(self, tokens: Any, states: Any) -> tuple[Any, Any]:
        """From the states before the step: the outputs, and the states [D * len, …] behind all tokens, padding too."""

    def write_states(self, state: Any, blocks: Any, states: Any) -> None:
        """Put states [D * len, …] into blocks of the cache; what goes to the null block is never read."""

    def scan_behind(self, tokens: Any, state: Any, memory: Any, step: ReplayStep, cu_seqlens: torch.Tensor) -> Any:
        """The outputs of tokens behind a history; folds what is due into `state`, and appends the tokens' inputs."""

    def write_behind(self, state: Any, memory: Any, step: ReplayStep, launches: bool) -> None:
        """Fold what is due into `state`."""

    def launch_scan(self, tokens: Any, state: Any, sources: torch.Tensor, targets: torch.Tensor) -> Any:
        """`scan` and `write_states` in one kernel."""

    def launch_behind(self, tokens: Any, state: Any, memory: Any, step: ReplayStep) -> Any:
        """`scan_behind` in one kernel."""


class UndoStep(Protocol):
    """What the decodes of one step do to their states, for all layers of a group.

    Attributes:
        reads_states: a layer reads the states that its decodes start from, at `source_indices`.
        is_constant: it does not change from step to step.
        cu_seqlens: [D + 1] int64, first token of each decode, if the scheme has it anyway.
        history: what each decode lets its tokens see behind its state, if the scheme keeps that.
    """

    reads_states: ClassVar[bool]
    is_constant: ClassVar[bool]

    @property
    def cu_seqlens(self) -> torch.Tensor | None: ...

    @property
    def history(self) -> ReplayStep | None: ...

    def advance(self, layer: Recurrence, tokens: Any, states: Any, state: Any, memory: Any, metadata: Any) -> Any:
        """The outputs of the decodes of a layer, in plain torch or numpy.

        Args:
            states: [D, …], those before the step if `reads_states`.
            state: the layer's part of the cache.
            memory: of the layer, what `UndoSpec.allocate` gave.
            metadata: of the group (`attention.mamba.MambaMetadata`).
        """

    def launch(self, layer: Recurrence, tokens: Any, state: Any, memory: Any, metadata: Any) -> Any:
        """`advance` in one kernel."""

    def fold(self, layer: Recurrence, state: Any, memory: Any, launches: bool) -> None:
        """Write the states that are due, in a step that runs no tokens."""


class Undo(Protocol):
    """A scheme, bound to one group of layers. See the module's first paragraph."""

    copies_states: ClassVar[bool]
    spec_type: ClassVar[type[UndoSpec]]  # of what `memory` returns

    def __init__(self, spec: MambaSpec, max_num_seqs: int, device: torch.device, launches: bool) -> None: ...

    @staticmethod
    def memory(
        cache: CacheConfig, num_speculative_tokens: int, is_async: bool, specs: Sequence[KVCacheSpec]
    ) -> UndoSpec:
        """What the scheme takes of the cache, as the user configured it.

        Raises:
            ConfigError: an option that is not the scheme's, or one that it cannot keep.
        """

    def source_columns(self, anchors: torch.Tensor, window_rows: torch.Tensor) -> torch.Tensor:
        """Columns of the states to start from, of each row: the previous anchor, and the window's row in it."""

    def prepare(
        self, rows: Ints, new: Sequence[int], num_gained: Ints, common: CommonAttentionMetadata, table: torch.Tensor
    ) -> UndoStep:
        """What the decodes of a step do.

        Args:
            rows: [num_reqs_padded], of the engine; -1 for padding.
            new: places in the batch of rows with a new owner.
            num_gained: [num_reqs_padded], tokens that the request has gained since its last step began.
            table: [num_reqs_padded, width] int32.
        """

    def fold(self, rows: Ints, num_gained: Ints, table: torch.Tensor) -> UndoStep:
        """What writes the states at the last boundary among the tokens of requests that run nothing.

        Args:
            rows, num_gained: [n].
            table: [n, width] int32.
        """

    def settle(self, rows: Ints, num_gained: Ints, anchors: Ints, table: torch.Tensor) -> UndoStep:
        """What writes the states after all tokens of requests that leave, to the columns of `source_columns`.

        No boundary lies between them and the states that are written: `fold` was there before.

        Args:
            rows, num_gained, anchors: [n].
            table: [n, width] int32.
        """


class SlotsStep:
    """Each decode reads one state and writes one for every token."""

    reads_states: ClassVar[bool] = True
    is_constant: ClassVar[bool] = True
    cu_seqlens = history = None

    def advance(self, layer: Recurrence, tokens: Any, states: Any, state: Any, memory: Any, metadata: Any) -> Any:
        y, after = layer.scan(tokens, states)
        layer.write_states(state, metadata.decode_targets, after)
        return y

    def launch(self, layer: Recurrence, tokens: Any, state: Any, memory: Any, metadata: Any) -> Any:
        split = metadata.num_decodes
        return layer.launch_scan(tokens, state, metadata.source_indices[:split], metadata.state_indices[:split])

    def fold(self, layer: Recurrence, state: Any, memory: Any, launches: bool) -> None:
        pass  # every state is in its block already


class Slots:
    """Scheme `slots`: 1 + K states are written per step, and the next step picks one."""

    copies_states: ClassVar[bool] = True
    spec_type: ClassVar[type[UndoSpec]] = UndoSpec
    _STEP = SlotsStep()

    def __init__(self, spec: MambaSpec, max_num_seqs: int, device: torch.device, launches: bool) -> None:
        pass

    @staticmethod
    def memory(
        cache: CacheConfig, num_speculative_tokens: int, is_async: bool, specs: Sequence[KVCacheSpec]
    ) -> UndoSpec:
        if cache.replay_ring_len is not None:
            raise ConfigError(
                f"replay_ring_len={cache.replay_ring_len} sizes the ring of state_scheme replay, which is off; add "
                'state_scheme="replay"'
            )
        return UndoSpec(num_speculative_tokens)

    def source_columns(self, anchors: torch.Tensor, window_rows: torch.Tensor) -> torch.Tensor:
        return anchors + window_rows

    def prepare(
        self, rows: Ints, new: Sequence[int], num_gained: Ints, common: CommonAttentionMetadata, table: torch.Tensor
    ) -> SlotsStep:
        return self._STEP

    def fold(self, rows: Ints, num_gained: Ints, table: torch.Tensor) -> SlotsStep:
        return self._STEP

    def settle(self, rows: Ints, num_gained: Ints, anchors: Ints, table: torch.Tensor) -> SlotsStep:
        return self._STEP


@dataclass(frozen=True)
class ReplaySpec(UndoSpec):
    """Scheme `replay`: states are written now and then, the inputs of the tokens since are kept in a ring.

    `ring_len` tokens for each row of the engine. With asynchronous scheduling `num_uncertain_tokens` more of a step
    that is under way are not known when columns are chosen.
    """

    ring_len: int = 0
    num_uncertain_tokens: int = 0
    scheme: ClassVar[str] = "replay"
    needs_inputs: ClassVar[bool] = True
    writes_late: ClassVar[bool] = True

    @property
    def max_query_len(self) -> int:
        """The most tokens of a verify step."""
        return 1 + self.num_speculative_tokens

    @property
    def num_blocks(self) -> int:
        return 0

    def most_columns_behind(self, block_size: int) -> int:
        """The oldest column is that of the base, the state that the last step started from.

        The tokens behind the base lie in the ring, and so will the step's, and a step that finds a boundary passed
        folds them up to there: the one before found less than a block behind the base, and left at most 1 + K more.
        """
        span = min(self.ring_len, block_size - 1 + 2 * self.max_query_len) + self.num_uncertain_tokens
        return cdiv(span, block_size)

    def bytes_per_row(self, inputs: Sequence[StatePart]) -> int:
        return self.ring_len * sum(part.nbytes for part in inputs)

    def stored(self, part: StatePart) -> StatePart:
        """A float32 state is two int16 planes of the same bytes (`kernels.replay.split_state`)."""
        if part.role != "state" or part.dtype != torch.float32:
            return part
        return StatePart(part.name, (2, *part.shape), torch.int16)

    def allocate(self, inputs: Sequence[StatePart], num_rows: int, device: torch.device) -> ReplayRing | None:
        if not inputs:
            return None  # a layer of windows alone
        (heads, head_dim), (groups, state_size) = inputs[0].shape, inputs[1].shape
        return ReplayRing.allocate(
            num_rows, self.ring_len, heads, head_dim, groups, state_size, inputs[0].dtype, device
        )

    def describe(self) -> dict[str, Any]:
        return {"ring_len": self.ring_len}

    def num_seen(self, num_flushed_tokens: int, num_computed_tokens: int) -> int:
        return num_flushed_tokens

    def num_flushed(
        self, before: int, start: int, num_tokens: int, num_computed_tokens: int, block_size: int | None
    ) -> int:
        """The rule of `kernels.replay` for `n_flush`, on the host: it follows from lengths alone."""
        if block_size is not None and start >= (boundary := (before // block_size + 1) * block_size):
            return boundary
        is_full = start - before + num_tokens + self.max_query_len > self.ring_len
        return start if is_full else before


@dataclass(frozen=True)
class ReplayDecodes:
    """What the decodes of a step replay and fold, and where each one's tokens begin, [D + 1]."""

    history: ReplayStep
    cu_seqlens: torch.Tensor
    reads_states: ClassVar[bool] = False
    is_constant: ClassVar[bool] = False

    def advance(self, layer: Recurrence, tokens: Any, states: Any, state: Any, memory: Any, metadata: Any) -> Any:
        return layer.scan_behind(tokens, state, memory, self.history, self.cu_seqlens)

    def launch(self, layer: Recurrence, tokens: Any, state: Any, memory: Any, metadata: Any) -> Any:
        return layer.launch_behind(tokens, state, memory, self.history)

    def fold(self, layer: Recurrence, state: Any, memory: Any, launches: bool) -> None:
        layer.write_behind(state, memory, self.history, launches)


class Replay:
    """Scheme `replay`: one state and the inputs since, run again on demand.

    Attributes:
        cursors: where the state and the history of each row of the engine are; the groups' are equal, but for the
            blocks that they mean.
    """

    copies_states: ClassVar[bool] = False  # the state at a boundary is not written yet
    spec_type: ClassVar[type[UndoSpec]] = ReplaySpec

    def __init__(self, spec: MambaSpec, max_num_seqs: int, device: torch.device, launches: bool) -> None:
        undo = spec.undo
        assert isinstance(undo, ReplaySpec)
        self._commit = commit if launches else commit_reference
        self._block_size = spec.block_size if spec.mode.keeps_states else None
        self.cursors = ReplayCursors.allocate(max_num_seqs, undo.ring_len, undo.max_query_len, device)

    @staticmethod
    def memory(
        cache: CacheConfig, num_speculative_tokens: int, is_async: bool, specs: Sequence[KVCacheSpec]
    ) -> ReplaySpec:
        if not any(isinstance(spec, MambaSpec) for spec in specs):
            raise ConfigError('state_scheme="replay": the model has no Mamba layer; use slots')
        longest = 1 + num_speculative_tokens
        ring_len = cache.replay_ring_len or default_ring_len(longest)
        if ring_len < (least := shortest_ring_len(longest)):
            raise ConfigError(
                f"replay_ring_len={ring_len} is too short for num_speculative_tokens={num_speculative_tokens}, which "
                f"needs {least}; raise it or leave it out"
            )
        return ReplaySpec(num_speculative_tokens, ring_len, longest if is_async else 0)

    def source_columns(self, anchors: torch.Tensor, window_rows: torch.Tensor) -> torch.Tensor:
        return anchors  # a prefill leaves its state beside its window

    def prepare(
        self, rows: Ints, new: Sequence[int], num_gained: Ints, common: CommonAttentionMetadata, table: torch.Tensor
    ) -> UndoStep:
        """Prefills start anew behind their last token."""
        computed, split = common.num_computed_tokens, common.num_decodes
        if new:
            self._restart(rows[new], computed[new])
        step: UndoStep = NO_DECODES
        if split:
            step = self._step(rows[:split], num_gained[:split], common.query_lens[:split], table[:split])
        if common.num_prefills:
            self._restart(rows[split:], (computed + common.query_lens)[split:])
        return step

    def fold(self, rows: Ints, num_gained: Ints, table: torch.Tensor) -> ReplayDecodes:
        return self._step(rows, num_gained, np.zeros_like(rows), table)

    def settle(self, rows: Ints, num_gained: Ints, anchors: Ints, table: torch.Tensor) -> ReplayDecodes:
        """All of the history goes into the anchor's block, not into the state's own, which may be published."""
        device, cursors = table.device, self.cursors
        row, gained, target = (torch.from_numpy(part).to(device) for part in (rows, num_gained, anchors))
        source = torch.zeros_like(row)
        if self._block_size is not None:
            source = (cursors.base_pos[row] - 1) // self._block_size
        src, dst = (table.gather(1, column[:, None])[:, 0].long() for column in (source, target))
        n_hist = cursors.n_hist[row] + torch.minimum(gained, cursors.prev_t[row])
        step = ReplayStep(row, src, dst, cursors.ring_start[row], n_hist, n_hist, cursors.max_query_len)
        return ReplayDecodes(step, torch.zeros(len(rows) + 1, dtype=torch.int64, device=device))

    def _step(self, rows: Ints, num_gained: Ints, query_lens: Ints, table: torch.Tensor) -> ReplayDecodes:
        """Decide what each decode folds and replays, and move the cursors past it."""
        device = table.device
        cu_seqlens = torch.from_numpy(np.concatenate([[0], np.cumsum(query_lens)])).to(device)
        gained = torch.from_numpy(num_gained).to(device)
        step = self._commit(
            self.cursors, torch.from_numpy(rows).to(device), gained, cu_seqlens, table, self._block_size
        )
        return ReplayDecodes(step, cu_seqlens)

    def _restart(self, rows: Ints, num_computed_tokens: Ints) -> None:
        """These rows have no history behind so many tokens: new owners, and prefills that will run."""
        device = self.cursors.base_pos.device
        self.cursors.restart(torch.from_numpy(rows).to(device), torch.from_numpy(num_computed_tokens).to(device))


NO_DECODES: UndoStep = SlotsStep()
SCHEMES: dict[str, type[Undo]] = {"slots": Slots, "replay": Replay}


def undo_spec(
    cache: CacheConfig, num_speculative_tokens: int, is_async: bool, specs: Sequence[KVCacheSpec]
) -> UndoSpec:
    """What the scheme that the user chose takes of the cache.

    Raises:
        ConfigError: no such scheme, or its options contradict each other or the layers.
    """
    if cache.state_scheme not in SCHEMES:
        raise ConfigError(f"state_scheme={cache.state_scheme!r}; use {' or '.join(SCHEMES)}")
    return SCHEMES[cache.state_scheme].memory(cache, num_speculative_tokens, is_async, specs)
