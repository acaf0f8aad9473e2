"""Metadata of Mamba layers: the block that each row reads its state from, and those it writes.

A Mamba group's row of the block table has one logical block in mode `none`, and one per
`block_size` tokens in modes `align` and `all`, each with K more for the states of draft tokens. The
*current state block* of a step that runs the tokens `n … n + q - 1` of a request is the logical
block of its last token, `block_idx_last_scheduled_token = (n + q - 1) // block_size` (0 in mode
`none`).

- A prefill writes the state after its last token to the current state block. In mode `all` it also
  writes the state at every block boundary that it passes, to that block's own logical block.
- A decode verifies `q - 1` drafts. It writes the state after its j-th token to logical block
  `state_block_idx + j`, and all its convolution inputs to the current state block alone: the conv
  state after the j-th token is rows `j … j + kernel - 2` of it.

The next step reads what the accepted tokens left: the conv state from row `window_row` of the
*previous* current state block, the SSM state from logical block `previous state_block_idx +
window_row`, where `window_row` is the number of accepted drafts. The previous current state block
is remembered per request (`block_idx_last_scheduled_token_prev_step`). It cannot be derived from
`num_computed_tokens`, which does not say how many drafts were scheduled with the accepted ones
(vllm!41233).

That is scheme `slots`. The rollback scheme decides where decodes write their states
(`attention.rollback`). One that writes none of them has no logical blocks for drafts, and the rules
above hold for conv states and for prefills only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from hybrid_kv.attention.common import CommonAttentionMetadata
from hybrid_kv.attention.rollback import SCHEMES, STAGED_NO_DECODES, Rollback, RollbackStep
from hybrid_kv.cache.spec import MambaSpec
from hybrid_kv.kernels.causal_conv1d import window_places
from hybrid_kv.kernels.common.ragged import Ragged
from hybrid_kv.kernels.common.rounding import StateRounding
from hybrid_kv.kernels.common.spans import Boundaries, Spans
from hybrid_kv.kernels.common.strided import gather_tokens
from hybrid_kv.kernels.common.upload import Array, Staged, move, stage_fields, together
from hybrid_kv.kernels.ssd import CHUNK_BYTES

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class MambaMetadata:
    """Decode rows come first. Block ids are int64; padding rows read and write the null block.

    Shapes: R = `num_reqs_padded` rows, D = `num_decodes`, P = R - D prefills, M boundary states.
    """

    num_decodes: int
    num_decode_tokens: int
    decode_rows: Ragged | None  # lengths 1 … 1 + K
    prefill_rows: Ragged | None
    max_query_len: int  # 1 + K
    rollback: RollbackStep  # of the decodes
    window_indices: torch.Tensor  # [R]: block with the convolution inputs to start from …
    window_rows: torch.Tensor  # [R]: … beginning at this row of it
    # [R]: block with the SSM state to start from; of decodes only without `rollback.history`.
    source_indices: torch.Tensor
    # [R, 1 + blocks for drafts]: where the state after token j goes; null block from the row's
    # length on. The first one gets the convolution inputs.
    state_indices: torch.Tensor
    # [P] bool; a prefill without one must not read its blocks.
    has_initial_state: torch.Tensor | None
    boundaries: Boundaries | None  # inside of prefills, with rows 0 … P - 1
    positions: torch.Tensor  # [num_tokens_padded] int64, of each token in its request
    rounding: StateRounding | None = None  # of the states that are stored
    spans: Spans | None = None  # of the prefills, for Triton kernels
    # What layers of one geometry share.
    plans: dict[Any, torch.Tensor] = field(default_factory=dict)

    def windows(self, conv_state: torch.Tensor, size: int) -> torch.Tensor:
        """Return the convolution inputs [R, size, channels] to start from, of one layer."""
        if conv_state.shape[1] == size:
            return conv_state.index_select(0, self.window_indices)
        key = *conv_state.stride()[:2], size
        if key not in self.plans:
            self.plans[key] = window_places(conv_state, self.window_indices, self.window_rows, size)
        return gather_tokens(conv_state, self.plans[key]).unflatten(0, (-1, size))

    @cached_property
    def decode_targets(self) -> torch.Tensor:
        """`state_indices` of the decodes, padded like their rows: [D * max_len]."""
        assert self.decode_rows is not None
        return self.state_indices[: self.num_decodes, : self.decode_rows.max_len].flatten()

    @cached_property
    def prefill_states(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The states that prefills leave: prefill row, tokens of the row up to it, block.

        They are [P + M] int64 each.
        """
        assert self.prefill_rows is not None
        lengths = self.prefill_rows.lengths
        last = self.state_indices[self.num_decodes :, 0]
        row = torch.arange(len(lengths), device=lengths.device)
        if self.boundaries is None:
            return row, lengths, last
        inside = self.boundaries
        return (
            torch.cat([row, inside.rows]),
            torch.cat([lengths, inside.offsets]),
            torch.cat([last, inside.blocks]),
        )

    @cached_property
    def fresh(self) -> torch.Tensor | None:
        """Prefills without an initial state, [P] bool; None if all have one."""
        initial = self.has_initial_state
        assert initial is not None
        # A GPU's host would wait to know.
        return None if not initial.is_cuda and bool(initial.all()) else ~initial

    @property
    def cu_seqlens(self) -> torch.Tensor:
        """First token of each decode, [D + 1] int64."""
        assert self.decode_rows is not None
        return self.decode_rows.starts

    @cached_property
    def window_targets(self) -> torch.Tensor:
        """Blocks for the decodes' convolution inputs, [D, 1 + K] for `causal_conv1d_update`."""
        targets = self.state_indices[: self.num_decodes]
        if targets.shape[1] == self.max_query_len:
            return targets
        return targets[:, :1].repeat(1, self.max_query_len)


class RowBlocks(NamedTuple):
    """The block ids of each row of a step, on the device."""

    windows: torch.Tensor  # [R]
    sources: torch.Tensor  # [R]
    targets: torch.Tensor  # [R, 1 + blocks for drafts]


@dataclass(frozen=True)
class MambaIndices:
    """The indices of one step of a Mamba group: arrays of the host, then tensors of the device.

    A *cell* is a place in the group's block table, all rows back to back. Shapes as in
    `MambaMetadata`; all are int64 unless a comment says otherwise.
    """

    window_rows: Any  # [R]
    # Cells of the R windows, of the R sources, and of the targets of each row: the device gathers
    # all of them at once.
    cells: Any
    is_block: Any  # as `cells`: 1, or 0 where a row has no token and the null block is meant
    has_initial_state: Any  # [P] bool
    boundary_rows: Any  # [M], of the prefills
    boundary_cells: Any  # [M], without the last ones, which go to partial blocks
    boundary_offsets: Any  # [M], tokens of the row up to the boundary

    @staticmethod
    def row_cells(
        windows: Ints, sources: Ints, targets: Ints, is_target: npt.NDArray[np.bool_]
    ) -> tuple[Ints, Ints]:
        """Return `cells` and `is_block` of [R] windows, [R] sources and [R, n] targets."""
        is_block = np.concatenate([np.ones(2 * len(windows), dtype=np.int64), is_target.ravel()])
        return np.concatenate([windows, sources, targets.ravel()]), is_block

    def row_blocks(self, table: torch.Tensor, out: torch.Tensor) -> RowBlocks:
        """Gather the blocks of all rows from the flat block table, on the device."""
        # Times 0 is the null block, where a row has no token.
        blocks = torch.mul(table.index_select(0, self.cells), self.is_block, out=out)
        num_rows = len(self.window_rows)
        return RowBlocks(
            windows=blocks[:num_rows],
            sources=blocks[num_rows : 2 * num_rows],
            targets=blocks[2 * num_rows :].view(num_rows, -1),
        )

    def boundaries(
        self, table: torch.Tensor, partial_blocks: Sequence[torch.Tensor]
    ) -> Boundaries | None:
        """Gather the blocks of the states inside of prefills; None if there are none.

        Args:
            partial_blocks: of the last ones, which are in no table; nothing if there are none.
        """
        if not len(self.boundary_rows):
            return None
        blocks = torch.cat([table.index_select(0, self.boundary_cells).long(), *partial_blocks])
        return Boundaries(self.boundary_rows, self.boundary_offsets, blocks)


class MambaMetadataBuilder:
    """Builds the metadata of one Mamba group, in buffers that a captured graph may keep reading.

    Buffers have one entry per *request*, never per token: with drafts there are more tokens than
    requests (vllm!41233).

    Args:
        spec: the group's.
        max_num_seqs: rows.
        launches: for layers that launch Triton kernels.
        group_id: of the group.

    Attributes:
        rollback: the group's scheme.
    """

    def __init__(
        self,
        spec: MambaSpec,
        max_num_seqs: int,
        device: torch.device,
        launches: bool,
        group_id: int = 0,
    ) -> None:
        self.spec = spec
        self.group_id = group_id
        self.launches = launches
        self._chunk_size = CHUNK_BYTES // spec.parts[0].dtype.itemsize
        self.offsets = np.arange(1 + spec.num_speculative_blocks)
        self.window_rows = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        # Window and source of each row, and where its states go.
        self.blocks = torch.zeros(
            max_num_seqs * (2 + len(self.offsets)), dtype=torch.int64, device=device
        )
        self._built: tuple[tuple[object, ...], MambaMetadata] | None = None
        self.rollback: Rollback = SCHEMES[spec.rollback.scheme](
            spec, max_num_seqs, device, launches
        )

    def build(
        self,
        common: CommonAttentionMetadata,
        block_table: torch.Tensor,
        state_block_idx: Ints,
        prev_state_block_idx: Ints,
        window_rows: Ints,
        rollback: Staged[RollbackStep] = STAGED_NO_DECODES,
        num_gathers: int | None = None,
    ) -> Staged[MambaMetadata]:
        """Stage the metadata of one step.

        It is that of the step before where nothing of it would differ, as in most steps of decodes.

        Args:
            block_table: [num_reqs_padded, width] int32, contiguous, read on the device; padding
                rows hold the null block.
            state_block_idx, prev_state_block_idx: [num_reqs_padded], the current state blocks of
                this step and of the previous one.
            window_rows: [num_reqs_padded], where the window begins there; 0 for padding.
            rollback: what the scheme's `prepare` gave.
            num_gathers: changes whenever `block_table` may (`BlockTables.num_gathers`); None: it
                may have.
        """
        key = self._key(
            common, state_block_idx, prev_state_block_idx, window_rows, rollback, num_gathers
        )
        if key is not None and self._built is not None and self._built[0] == key:
            return (), partial(_same, self._built[1])
        indices = self._indices(
            common, block_table.shape[1], state_block_idx, prev_state_block_idx, window_rows
        )
        cuts: Sequence[Array] = ()
        if common.num_prefills and self.launches:
            cuts = Spans.cuts(
                common.query_lens[common.num_decodes :],
                indices.boundary_rows,
                indices.boundary_offsets,
                self._chunk_size,
            )
        kept: Sequence[Array] = ()
        if common.partial is not None:
            kept = (common.partial.blocks[self.group_id],)
        arrays, make_all = together(stage_fields(indices), move(*cuts), move(*kept), rollback)

        def make(*moved: torch.Tensor) -> MambaMetadata:
            built = self._make(common, block_table, *make_all(*moved))
            self._built = (key, built) if key is not None else None
            return built

        return arrays, make

    @staticmethod
    def _key(
        common: CommonAttentionMetadata,
        state_block_idx: Ints,
        prev_state_block_idx: Ints,
        window_rows: Ints,
        rollback: Staged[RollbackStep],
        num_gathers: int | None,
    ) -> tuple[object, ...] | None:
        """Return what the metadata of a step depends on; None if it must be made anew."""
        if num_gathers is None or rollback[0] or common.num_prefills:
            return None
        known = common.query_lens, state_block_idx, prev_state_block_idx, window_rows
        return num_gathers, *(values.tobytes() for values in known)

    def _indices(
        self,
        common: CommonAttentionMetadata,
        width: int,
        state_block_idx: Ints,
        prev_state_block_idx: Ints,
        window_rows: Ints,
    ) -> MambaIndices:
        """Return the indices of one step, on the host.

        Args:
            width: of the block table.
        """
        num_rows = common.num_reqs_padded
        split = common.num_decodes
        # A prefill has one state to write, whatever its length.
        num_states = np.where(np.arange(num_rows) < split, common.query_lens, 1)
        row = block_idx = offset = num_states[:0]
        if common.num_prefills and self.spec.mode.keeps_inside:
            row, block_idx, offset = boundaries_inside(
                self.spec, common.num_computed_tokens[split:], state_block_idx[split:]
            )
        boundary_rows = row
        if common.partial is not None:
            boundary_rows = np.concatenate([row, common.partial.rows])
            offset = np.concatenate([offset, common.partial.offsets])
        starts = np.arange(num_rows) * width
        sources = self.rollback.source_logical_blocks(prev_state_block_idx, window_rows)
        is_target = self.offsets < num_states[:, None]
        targets = np.where(is_target, state_block_idx[:, None] + self.offsets, 0)
        cells, is_block = MambaIndices.row_cells(
            starts + prev_state_block_idx, starts + sources, starts[:, None] + targets, is_target
        )
        return MambaIndices(
            window_rows=window_rows,
            cells=cells,
            is_block=is_block,
            has_initial_state=common.num_computed_tokens[split:] > 0,
            boundary_rows=boundary_rows,
            boundary_cells=starts[row + split] + block_idx,
            boundary_offsets=offset,
        )

    def _make(
        self,
        common: CommonAttentionMetadata,
        block_table: torch.Tensor,
        indices: MambaIndices,
        cuts: Sequence[torch.Tensor],
        partial_blocks: Sequence[torch.Tensor],
        rollback: RollbackStep,
    ) -> MambaMetadata:
        """Make the metadata of what `build` staged, on the device."""
        split = common.num_decodes
        window_rows = self.window_rows[: common.num_reqs_padded]
        window_rows.copy_(indices.window_rows)
        table = block_table.view(-1)
        blocks = indices.row_blocks(table, self.blocks[: len(indices.cells)])
        boundaries = indices.boundaries(table, partial_blocks)
        spans = None
        if cuts:
            lengths = torch.from_numpy(common.query_lens[split:])
            spans = Spans(lengths, blocks.targets[split:, 0], boundaries, self._chunk_size, cuts)
        return MambaMetadata(
            num_decodes=split,
            num_decode_tokens=common.num_decode_tokens,
            decode_rows=common.decode_rows,
            prefill_rows=common.prefill_rows,
            window_indices=blocks.windows,
            window_rows=window_rows,
            max_query_len=1 + self.spec.num_speculative_tokens,
            rollback=rollback,
            source_indices=blocks.sources,
            state_indices=blocks.targets,
            has_initial_state=indices.has_initial_state if common.num_prefills else None,
            boundaries=boundaries,
            positions=common.positions,
            rounding=self.spec.rounding,
            spans=spans,
        )


def _same(built: MambaMetadata) -> MambaMetadata:
    return built


def boundaries_inside(
    spec: MambaSpec, num_computed_tokens: Ints, state_block_idx: Ints
) -> tuple[Ints, Ints, Ints]:
    """Return the block boundaries that prefills pass before their last token.

    Returns:
        Row, logical block, and tokens of the row up to there, [n] each.
    """
    first = num_computed_tokens // spec.block_size
    counts = state_block_idx - first
    row = np.repeat(np.arange(len(counts)), counts)
    block_idx = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts - first, counts)
    return row, block_idx, (block_idx + 1) * spec.block_size - num_computed_tokens[row]


class BoundaryCopies(NamedTuple):
    """States at block boundaries that a verify step leaves in a draft's logical block.

    All [n] int64, arrays on the host or tensors on the device.
    """

    rows: Any  # of the batch
    state_block_idx: Any  # logical block with the convolution inputs
    token_idx: Any  # j: the boundary is after the step's token j, counted from 0
    logical_blocks: Any  # the boundary's own


def boundary_copies(
    spec: MambaSpec | None, num_computed_tokens: Ints, query_lens: Ints, state_block_idx: Ints
) -> BoundaryCopies:
    """Return the copies of `postprocess_mamba` after a step's decodes if all drafts are accepted.

    A step of at most 1 + K <= `block_size` tokens passes at most one boundary, the end of block
    `num_computed_tokens // block_size`. A state that is written to the boundary's own block at once
    needs no copy.

    Args:
        spec: of the Mamba layers, if there are any.
        num_computed_tokens, query_lens, state_block_idx: [num_decodes].
    """
    if spec is None or not spec.mode.keeps_states:
        none = np.empty(0, dtype=np.int64)
        return BoundaryCopies(none, none, none, none)
    logical_blocks = num_computed_tokens // spec.block_size
    token_idx = (logical_blocks + 1) * spec.block_size - 1 - num_computed_tokens
    is_elsewhere = state_block_idx + token_idx != logical_blocks
    rows = np.flatnonzero((token_idx < query_lens) & is_elsewhere)
    return BoundaryCopies(rows, state_block_idx[rows], token_idx[rows], logical_blocks[rows])


def stage_copies(copies: BoundaryCopies) -> Staged[BoundaryCopies]:
    """Stage the copies of arrays as copies of tensors."""
    return copies, BoundaryCopies


def due_copies(copies: BoundaryCopies, accepted: torch.Tensor) -> BoundaryCopies:
    """Return the copies that are due on the device, where the accepted drafts are known.

    The state of a rejected one must never reach a block that will be published: the block of its
    boundary is copied to itself. `accepted` counts drafts, without the bonus token, of each row
    that samples; decodes come first in the batch and all of them sample.
    """
    is_due = copies.token_idx <= accepted[copies.rows]
    state_block_idx = torch.where(is_due, copies.state_block_idx, copies.logical_blocks)
    return copies._replace(state_block_idx=state_block_idx, token_idx=copies.token_idx * is_due)


def postprocess_mamba(
    copies: BoundaryCopies,
    block_table: torch.Tensor,
    layers: Sequence[tuple[torch.Tensor, ...]],
    spec: MambaSpec,
    copies_states: bool,
) -> None:
    """Bring boundary states home, in all layers of a group.

    Args:
        copies: on the device.
        block_table: [num_reqs, width] int32, the group's rows of the step's batch.
        layers: of each layer the parts of its state, [num_blocks, …] each.
        spec: of the layers.
        copies_states: also those that are no window (`Rollback.copies_states`).
    """
    rows, state_block_idx, token_idx, logical_blocks = copies
    home = block_table[rows, logical_blocks].long()
    window_from = block_table[rows, state_block_idx].long()
    state_from = block_table[rows, state_block_idx + token_idx].long() if copies_states else None
    for parts in layers:
        for state, kept in zip(spec.parts, parts, strict=True):
            if state.role == "window":
                size = kept.shape[1] - spec.num_speculative_tokens
                window_rows = token_idx[:, None] + torch.arange(size, device=token_idx.device)
                # Row by row: rows `j …` of a window are no contiguous range in every layout
                # (vllm!45682).
                kept[home, :size] = kept[window_from[:, None], window_rows]
            elif state_from is not None:
                kept[home] = kept[state_from]
