"""Block tables of all groups in host memory, in numpy: a step costs what changed.

Contract. Three methods are the parts of a step. `append` brings staged manager block ids into the tables, and behind
the others of their row wherever the input tables hold that row. `place` brings the batch's rows into the input tables:
those that are where they were cost nothing. `map_slots` gives each token its slot. Together they do what
`update_block_tables` does in one launch.

The input tables hold a row's blocks, all of them, at a batch position if the row and the position both say so. A row
that moves or gets another owner says otherwise from then on, and so does a position that is given to another row: no
third party is told. Adjacent groups with tables of one shape form a *stack*, [groups, rows, width], and numpy is called
once for each; a call costs a microsecond, an entry a nanosecond.

Shapes considered. (a) The batch gathered anew whenever a row changed: 620 us at 256 rows of 40 blocks, two groups.
(b) A loop over the rows that changed: 4 us each, too much where a request ends and 200 others move up. (c) One index
for each new block of rows that kept their place (30 us for 16 of them). Rows that came or moved: rectangles of rows
whose lengths differ by less than a factor of two, so that at most twice the bytes move. This is (c).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import numpy as np
import numpy.typing as npt
import torch

from hybrid_kv.kernels.block_tables.tables import TableLayout, Tables
from hybrid_kv.kernels.slot_mapping import PAD_SLOT

Ints = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]

_NULL, _NOBODY = -1, -2  # in the place of a row: null blocks, and what no reader may use
_LONG = 32  # ids in a row, from which on a copy of its own costs less than an index for each
_WIDE = 16  # kernel blocks of a block, from which on torch expands faster: at 8 in 0.6 of numpy's speed, at 34 in twice
_any = np.count_nonzero  # of few flags, a fifth of the time that `any` takes


def _ragged(first: Ints, counts: Ints | Int32s) -> Ints:
    """`first[i], first[i] + 1, …`, `counts[i]` of them, for every i."""
    ends = counts.cumsum()
    return (first - ends + counts).repeat(counts) + np.arange(ends[-1])


def _like_lengths(lengths: Ints) -> Iterator[tuple[Ints | slice, int]]:
    """Which lengths differ by less than a factor of two, and the longest of them; none of length 0.

    Args:
        lengths: [num_rows, num_groups]; of a row the longest counts.
    """
    known = lengths.ravel().tolist()
    if (longest := max(known)) < 2 * min(known):
        yield slice(None), longest
        return
    rows = lengths.max(axis=1)
    powers = np.frexp(rows)[1]
    for power in set(powers[rows > 0].tolist()):
        part = np.flatnonzero(powers == power)
        yield part, int(rows[part].max())


class Stack:
    """Adjacent groups with tables of one shape.

    Attributes:
        groups: of the axis of all groups.
        flat, tables: [groups * rows * width] and [groups, rows, width] int32, manager blocks.
        inputs: [groups, rows, width * blocks_per_kv_block] int32, kernel blocks in batch order.
        flat_inputs: the same, a row for each manager block.
        slots: [groups, max_num_batched_tokens] int64, or None.
    """

    def __init__(self, tables: Tables, layout: TableLayout, groups: Sequence[int]) -> None:
        rows, first, shape = tables.max_num_reqs, groups[0], (len(groups), tables.max_num_reqs, layout.width)
        self.groups = slice(first, first + len(groups))
        self.width, self.block_size, self.stride = layout.width, layout.block_size, layout.kernel_block_stride
        size, input_start = len(groups) * rows * layout.width, tables.input_starts[first]
        start = tables.starts[first]
        self.flat: Int32s = tables.flat_tables.numpy()[start : start + size]
        self.tables = self.flat.reshape(shape)
        inputs = tables.flat_input_tables[input_start : input_start + size * layout.blocks_per_kv_block]
        self.inputs: Int32s = inputs.view(*shape[:2], -1).numpy()
        self.flat_inputs = self.inputs.reshape(size, -1)
        self._torch_offsets = torch.arange(layout.blocks_per_kv_block, dtype=torch.int32)
        self.offsets: Int32s = self._torch_offsets.numpy()
        self._row_offsets = np.tile(self.offsets, layout.width)
        # Where a group and a row begin, counted in manager blocks.
        self.group_starts = rows * layout.width * np.arange(len(groups))[:, None]
        self.row_starts = layout.width * np.arange(rows)[:, None] + self.group_starts.T
        self.slots: Ints | None = tables.slot_mappings.numpy()[self.groups] if layout.has_slots else None

    def copy(self, rows: Ints, positions: Ints, width: int) -> None:
        """Bring the first `width` blocks of rows to batch positions."""
        blocks = self.tables[:, rows, :width]
        begin, end = int(positions[0]), int(positions[-1]) + 1
        columns = width * len(self.offsets)
        if end - begin == len(positions):
            self._expand(blocks, self.inputs[:, begin:end, :columns])
        else:
            out = np.empty((*blocks.shape[:2], columns), dtype=np.int32)
            self._expand(blocks, out)
            self.inputs[:, positions, :columns] = out

    def _expand(self, blocks: Int32s, out: Int32s) -> None:
        """[groups, rows, columns] manager blocks to kernel blocks."""
        per_block = len(self.offsets)
        if per_block < _WIDE:
            first = (blocks * self.stride).repeat(per_block).reshape(out.shape)
            np.add(first, self._row_offsets[: out.shape[2]], out=out)
        else:
            several, parts = torch.from_numpy(blocks)[..., None], torch.from_numpy(out).unflatten(2, (-1, per_block))
            torch.add(self._torch_offsets, several, alpha=self.stride, out=parts)


class HostTables(Tables):
    """Block tables on the CPU; arguments as of `Tables`."""

    def __init__(
        self,
        layouts: Sequence[TableLayout],
        max_num_reqs: int,
        max_num_batched_tokens: int,
        cp_size: int = 1,
        cp_rank: int = 0,
        cp_interleave: int = 1,
    ) -> None:
        cpu = torch.device("cpu")
        super().__init__(layouts, max_num_reqs, max_num_batched_tokens, cpu, cp_size, cp_rank, cp_interleave)
        self._flat: Int32s = self.flat_tables.numpy()
        self._flat_view = memoryview(self._flat)
        self._num_blocks: Ints = self.num_blocks.numpy()
        self._slots: Ints = self.slot_mappings.numpy()
        self._widths = np.array([layout.width for layout in self.layouts])
        # [max_num_reqs, num_groups]: where each row begins, in a buffer with one entry for each manager block.
        self._row_starts = np.array(self.starts) + np.arange(max_num_reqs)[:, None] * self._widths
        self._positions = np.arange(max_num_reqs)
        self._row_at = np.full(max_num_reqs + 1, _NULL)  # by batch position
        self._row_at[max_num_reqs] = _NOBODY
        self._position_of = np.full(max_num_reqs, max_num_reqs)  # by row; the position behind the last is nobody's
        self._placed: tuple[bytes, int] | None = None  # the batch that the input tables are up to date for
        kinds = groupby(range(len(self.layouts)), lambda group: self.layouts[group])
        self._stacks = [Stack(self, layout, list(groups)) for layout, groups in kinds]

    def forget(self) -> None:
        """The input tables hold nothing: the next `place` writes all that its batch reads."""
        self._row_at[:] = _NOBODY
        self._placed = None

    def append(self, ids: Int32s, rows: Int32s, counts: Int32s, overwrite: npt.NDArray[np.bool_]) -> None:
        """Bring staged ids into the tables, shapes as in `StagedBlocks`.

        Raises:
            IndexError: a row would become longer than its group's width.
            ValueError: a row was staged twice, or ids do not match the counts. Nothing is written in either case.
        """
        known: Ints = rows.astype(np.int64)  # by which numpy indexes twice as fast
        first = self._num_blocks.take(known, axis=0)
        if has_new := _any(overwrite):
            first[overwrite] = 0
        ends = first + counts
        is_single = len(ids) == counts.size and _any(counts == 1) == counts.size
        self._check(len(ids), known, counts, ends, is_single)
        self._num_blocks[known] = ends
        cells = self._row_starts.take(known, axis=0) + first
        self._write(ids, cells.ravel(), counts.ravel(), is_single)
        if has_new:
            # What a new request has is copied whole: that costs less than an index for each block.
            self._position_of[known[overwrite]] = self.max_num_reqs
            self._placed = None
        positions = self._position_of.take(known)
        held = self._row_at.take(positions) == known
        num_held = _any(held)
        if num_held < len(known):
            if not num_held:
                return
            cells, first, counts, positions = cells[held], first[held], counts[held], positions[held]
        for stack in self._stacks:
            groups = stack.groups
            targets = stack.row_starts.take(positions, axis=0) + first[:, groups]
            self._extend(stack, cells[:, groups].ravel(), targets.ravel(), counts[:, groups].ravel(), is_single)

    def _check(self, num_ids: int, rows: Ints, counts: Int32s, ends: Ints, is_single: bool) -> None:
        if _any(ends > self._widths):
            i, group = np.argwhere(ends > self._widths)[0].tolist()
            raise IndexError(
                f"group {group} row {rows[i]}: {ends[i, group]} blocks exceed the width {self._widths[group]}"
            )
        if len(set(known := rows.tolist())) != len(known):
            raise ValueError(f"a row was staged twice in one step: {sorted(known)}")
        if not is_single and (total := int(np.add.reduce(counts, axis=None))) != num_ids:
            raise ValueError(f"{num_ids} block ids were staged for {total} columns")

    def _write(self, ids: Int32s, cells: Ints, counts: Int32s, is_single: bool) -> None:
        """Write `counts[i]` of the ids from each cell on; all 1 if `is_single`."""
        if is_single:
            self._flat[cells] = ids
        elif len(ids) >= _LONG * len(cells):
            table, source, begin = self._flat_view, memoryview(ids), 0
            for cell, count in zip(cells.tolist(), counts.tolist(), strict=True):
                end = begin + count
                table[cell : cell + count] = source[begin:end]
                begin = end
        elif len(ids):
            self._flat[_ragged(cells, counts)] = ids

    def _extend(self, stack: Stack, cells: Ints, targets: Ints, counts: Int32s, is_single: bool) -> None:
        """Bring `counts[i]` blocks from each cell on to the input table, from each target on; all 1 if `is_single`."""
        if not is_single:
            if not _any(counts):
                return
            cells, targets = _ragged(cells, counts), _ragged(targets, counts)
        blocks = self._flat.take(cells)
        blocks *= stack.stride
        stack.flat_inputs[targets] = blocks[:, None] + stack.offsets

    def place(self, rows: Ints, num_reqs_padded: int) -> bool:
        """Bring the rows of a batch into the input tables; positions behind them become rows of null blocks.

        Args:
            rows: [num_reqs], without repetition.

        Returns:
            Whether something may have changed.
        """
        placed = rows.tobytes(), num_reqs_padded
        if placed == self._placed:
            return False
        self._placed = placed
        num_reqs = len(rows)
        here = self._position_of.take(rows) == self._positions[:num_reqs]
        here &= self._row_at[:num_reqs] == rows
        if (num_here := _any(here)) < num_reqs:
            moved = np.flatnonzero(~here) if num_here else self._positions[:num_reqs]
            moving = rows[moved]
            self._row_at[moved], self._position_of[moving] = moving, moved
            lengths = self._num_blocks.take(moving, axis=0)
            for stack in self._stacks:
                for part, width in _like_lengths(lengths[:, stack.groups]):
                    stack.copy(moving[part], moved[part], width)
        if num_reqs < num_reqs_padded:
            padding = num_reqs + np.flatnonzero(self._row_at[num_reqs:num_reqs_padded] != _NULL)
            self._row_at[padding] = _NULL
            for stack in self._stacks:
                stack.inputs[:, padding] = 0
        return True

    def map_slots(self, rows: Ints, query_lens: Ints, positions: Ints, num_tokens_padded: int) -> None:
        """Slots of a step's tokens; what lies behind them becomes `PAD_SLOT`, in all groups.

        From the real count on: a longer earlier step must not leave valid slots under padding (vllm!36580).

        Args:
            rows, query_lens: [num_reqs] each.
            positions: [num_tokens] of each token in its request, consecutive within one.
        """
        num_tokens = len(positions)
        for stack in self._stacks:
            if stack.slots is not None:
                self._map_stack(stack, rows, query_lens, positions, stack.slots[:, :num_tokens])
        if num_tokens < num_tokens_padded:
            self._slots[:, num_tokens:num_tokens_padded] = PAD_SLOT

    def _map_stack(self, stack: Stack, rows: Ints, query_lens: Ints, positions: Ints, out: Ints) -> None:
        """A token at position p, in column c that holds block b, has slot `p + (b - c) * block_size`.

        So all tokens of a request in one block are shifted alike, and only blocks are looked up.
        """
        if self.cp[0] > 1:
            self._map_shared(stack, rows.repeat(query_lens), positions, out)
            return
        width, size = stack.width, stack.block_size
        row_starts = rows * width
        runs: _Runs | None = None
        if len(positions) == len(rows):
            columns = positions // size
        else:
            runs = _Runs(query_lens, positions, size)
            columns, row_starts = runs.columns, row_starts.repeat(runs.counts)
        if is_beyond := _any(columns >= width):
            row_starts += np.minimum(columns, width - 1)
        else:
            row_starts += columns
        shifts = stack.flat.take(row_starts + stack.group_starts) - columns
        shifts *= size
        if runs is None:
            np.add(shifts, positions, out=out)
        elif len(positions) == len(columns) * size:  # every block from end to end
            np.add(shifts[..., None], positions.reshape(-1, size), out=out.reshape(*shifts.shape, size))
        else:
            np.add(shifts.repeat(runs.lengths(), axis=1), positions, out=out)
        if is_beyond:
            out[:, positions >= width * size] = PAD_SLOT

    def _map_shared(self, stack: Stack, rows: Ints, positions: Ints, out: Ints) -> None:
        """Blocks shared with other ranks, see `kernels.slot_mapping`, token by token."""
        cp_size, cp_rank, interleave = self.cp
        columns, offsets = np.divmod(positions, stack.block_size * cp_size)
        cells = rows * stack.width + np.minimum(columns, stack.width - 1)
        blocks = stack.flat.take(cells + stack.group_starts).astype(np.int64)
        local = offsets // (interleave * cp_size) * interleave + offsets % interleave
        np.add(blocks * stack.block_size, local, out=out)
        out[:, (offsets // interleave % cp_size != cp_rank) | (columns >= stack.width)] = PAD_SLOT


class _Runs:
    """The blocks of `size` tokens that a batch's tokens lie in, request by request.

    Attributes:
        counts: of each request, how many.
        columns: of each block.
    """

    def __init__(self, query_lens: Ints, positions: Ints, size: int) -> None:
        ends = query_lens.cumsum()
        columns, self._offsets = np.divmod(positions.take(ends - query_lens), size)
        self._reach = self._offsets + query_lens  # from the beginning of the first block to the last token
        self._size = size
        self.counts = (self._reach + (size - 1)) // size
        self._ends = self.counts.cumsum()
        self._begins = self._ends - self.counts
        self.columns = (columns - self._begins).repeat(self.counts)
        self.columns += np.arange(len(self.columns))

    def lengths(self) -> Ints:
        """Of each block, how many of the batch's tokens lie in it."""
        lengths = np.full(len(self.columns), self._size)
        lengths[self._begins] -= self._offsets
        lengths[self._ends - 1] -= self.counts * self._size - self._reach
        return lengths
