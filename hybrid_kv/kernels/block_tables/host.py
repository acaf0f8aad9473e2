"""Block tables of all groups in host memory: a step costs what changed.

Contract. Three methods are the parts of a step. `append` brings staged manager block ids into the
tables. `place` brings the batch's rows into the input tables. `map_slots` gives each token its
slot. Together they do what `update_block_tables` does in one launch, and in the same way: an input
row remembers which request's blocks it holds and how many, so that a request which keeps its place,
or comes back to it, brings only its new blocks.

Each part is one loop, compiled by numba. Shapes considered, at 8 prefills of 64 blocks and 8,192
tokens, two groups, on a core that has done something else before, as in an engine: (a) numpy for
what changed, some 65 calls: 80 us on warm caches, 140 to 220 on cold ones, as each call runs code
that nothing else does. (b) One call for each part and no temporaries: 45 us. This is (b).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from hybrid_kv.kernels.block_tables.tables import TableLayout, Tables
from hybrid_kv.kernels.common.compiled import compiled
from hybrid_kv.kernels.slot_mapping import PAD_SLOT

Ints = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]
Bools = npt.NDArray[np.bool_]

# In the place of a request's key: null blocks, and what no reader may use.
_NULL = -1
_UNKNOWN = -2


def _append(  # noqa: C901 - a compiled loop calls no other function
    ids: Int32s,
    rows: Int32s,
    counts: Int32s,
    overwrite: Bools,
    geometry: Ints,
    tables: Int32s,
    num_blocks: Ints,
    row_keys: Ints,
    entry_of: Ints,
) -> bool:
    """Write staged ids into the tables; return False, with nothing written, where they do not fit.

    A row may be none of the table's, or staged twice, or become too long, or ids may be missing.

    Args:
        entry_of: [max_num_reqs], scratch.
    """
    num_ids = 0
    for entry in range(len(rows)):
        if not 0 <= rows[entry] < len(entry_of):
            return False
        entry_of[rows[entry]] = entry
    for entry in range(len(rows)):
        if entry_of[rows[entry]] != entry:
            return False
        for group in range(len(geometry)):
            first = 0 if overwrite[entry] else num_blocks[rows[entry], group]
            if first + counts[entry, group] > geometry[group, 2]:
                return False
            num_ids += counts[entry, group]
    if num_ids != len(ids):
        return False

    begin = 0
    for entry in range(len(rows)):
        row = rows[entry]
        if overwrite[entry]:
            row_keys[row] += len(row_keys)
        for group in range(len(geometry)):
            first = 0 if overwrite[entry] else num_blocks[row, group]
            count = counts[entry, group]
            cell = geometry[group, 0] + row * geometry[group, 2] + first
            tables[cell : cell + count] = ids[begin : begin + count]
            num_blocks[row, group] = first + count
            begin += count
    return True


def _place(  # noqa: C901 - a compiled loop calls no other function
    rows: Ints,
    num_reqs_padded: int,
    geometry: Ints,
    tables: Int32s,
    input_tables: Int32s,
    num_blocks: Ints,
    row_keys: Ints,
    held_keys: Ints,
    held_blocks: Ints,
) -> bool:
    """Bring a batch's rows into the input tables; return whether an input row changed."""
    if max(len(rows), num_reqs_padded) > len(held_keys):
        raise IndexError("more rows in a batch than in the tables")
    is_changed = False
    for position in range(len(rows)):
        row = rows[position]
        if not 0 <= row < len(row_keys):
            raise IndexError("a row of a batch that the tables do not have")
        if held_keys[position] != row_keys[row]:
            held_keys[position] = row_keys[row]
            held_blocks[position] = 0
            is_changed = True
        for group in range(len(geometry)):
            held = held_blocks[position, group]
            end = num_blocks[row, group]
            if held < end:
                table_start, input_start, width, per_block, stride, _ = geometry[group]
                start = table_start + row * width
                input_start += position * width * per_block
                blocks = tables[start + held : start + end]
                out = input_tables[input_start + held * per_block : input_start + end * per_block]
                kernel_blocks = out.reshape(len(blocks), per_block)
                for column in range(len(blocks)):
                    first = blocks[column] * np.int32(stride)
                    for i in range(per_block):
                        kernel_blocks[column, i] = first + np.int32(i)
                held_blocks[position, group] = end
                is_changed = True
    for position in range(len(rows), num_reqs_padded):
        if held_keys[position] != _NULL:
            held_keys[position] = _NULL
            for group in range(len(geometry)):
                size = geometry[group, 2] * geometry[group, 3]
                start = geometry[group, 1] + position * size
                input_tables[start : start + size] = 0
            is_changed = True
    return is_changed


def _map_slots(
    rows: Ints,
    query_lens: Ints,
    positions: Ints,
    num_tokens_padded: int,
    geometry: Ints,
    tables: Int32s,
    slots: Ints,
    cp_size: int,
    cp_rank: int,
    cp_interleave: int,
) -> None:
    """Give each token its slot.

    A request's tokens in one block follow each other: one look into the table for all of them.
    """
    num_tokens = len(positions)
    if query_lens.sum() != num_tokens or num_tokens > slots.shape[1]:
        raise ValueError("the lengths of a batch do not add up to its tokens, or those to too many")
    for group in range(len(geometry)):
        out = slots[group]
        start = geometry[group, 0]
        width = geometry[group, 2]
        size = geometry[group, 5]
        virtual = size * cp_size
        token = end = 0
        for position in range(len(rows) if size else 0):
            end += query_lens[position]
            row_start = start + rows[position] * width
            while token < end:
                column, offset = divmod(positions[token], virtual)
                count = min(end - token, virtual - offset)
                run = out[token : token + count]
                if column >= width:
                    run[:] = PAD_SLOT
                elif cp_size == 1:
                    first = tables[row_start + column] * size + offset
                    for i in range(len(run)):
                        run[i] = first + i
                else:
                    first = tables[row_start + column] * size
                    for i in range(len(run)):
                        turn, place = divmod(offset + i, cp_interleave)
                        is_here = turn % cp_size == cp_rank
                        run[i] = (
                            first + turn // cp_size * cp_interleave + place if is_here else PAD_SLOT
                        )
                token += count
        out[num_tokens:num_tokens_padded] = PAD_SLOT


class HostTables(Tables):
    """Block tables on the CPU; arguments as of `Tables`."""

    def __init__(
        self,
        layouts: Sequence[TableLayout],
        max_num_reqs: int,
        max_num_batched_tokens: int,
        *context_parallelism: int,
    ) -> None:
        super().__init__(
            layouts, max_num_reqs, max_num_batched_tokens, torch.device("cpu"), *context_parallelism
        )
        self._geometry: Ints = self.geometry.numpy()
        self._flat: Int32s = self.flat_tables.numpy()
        self._flat_inputs: Int32s = self.flat_input_tables.numpy()
        self._num_blocks: Ints = self.num_blocks.numpy()
        self._slots: Ints = self.slot_mappings.numpy()
        # Of each row a key that changes when another request moves in; of each batch position whom
        # it holds, and how many blocks of each group.
        self._row_keys = np.arange(max_num_reqs)
        self._held_keys = np.full(max_num_reqs, _NULL)
        self._held_blocks = np.zeros_like(self._num_blocks)
        self._entry_of = np.zeros(max_num_reqs, dtype=np.int64)
        self._num_reqs_padded = 0  # of the last `place`
        ids = "int32[::1]"
        more = "int64[::1]"
        table = "int64[:, ::1]"
        staged = f"{ids}, {ids}, int32[:, ::1], boolean[::1]"
        self._append = compiled(
            _append, f"boolean({staged}, {table}, {ids}, {table}, {more}, {more})"
        )
        self._place = compiled(
            _place,
            f"boolean({more}, int64, {table}, {ids}, {ids}, {table}, {more}, {more}, {table})",
        )
        self._map_slots = compiled(
            _map_slots,
            f"void({more}, {more}, {more}, int64, {table}, {ids}, {table}, int64, int64, int64)",
        )

    def forget(self) -> None:
        """Forget what the input tables hold: the next `place` writes all that its batch reads."""
        self._held_keys[:] = _UNKNOWN

    def append(self, ids: Int32s, rows: Int32s, counts: Int32s, overwrite: Bools) -> None:
        """Bring staged ids into the tables, shapes as in `StagedBlocks`.

        Raises:
            IndexError: a row would become longer than its group's width, or is none.
            ValueError: a row was staged twice, or ids do not match the counts. Nothing is written
                in either case.
        """
        tables = self._geometry, self._flat, self._num_blocks, self._row_keys, self._entry_of
        if not self._append(ids, rows, counts, overwrite, *tables):
            self._reject(len(ids), rows, counts, overwrite)

    def _reject(self, num_ids: int, rows: Int32s, counts: Int32s, overwrite: Bools) -> None:
        known = rows.tolist()
        if len(set(known)) != len(known):
            raise ValueError(f"a row was staged twice in one step: {sorted(known)}")
        strange = [row for row in known if not 0 <= row < self.max_num_reqs]
        if strange:
            raise IndexError(f"row {strange[0]}: the tables have rows 0 to {self.max_num_reqs - 1}")
        ends = np.where(overwrite[:, None], 0, self._num_blocks[rows]) + counts
        widths = self._geometry[:, 2]
        for entry, group in np.argwhere(ends > widths).tolist():
            raise IndexError(
                f"group {group} row {known[entry]}: {ends[entry, group]} blocks exceed the width "
                f"{widths[group]}"
            )
        raise ValueError(f"{num_ids} block ids were staged for {counts.sum()} columns")

    def place(self, rows: Ints, num_reqs_padded: int) -> bool:
        """Bring the rows of a batch into the input tables; positions after them become null blocks.

        Args:
            rows: [num_reqs], without repetition.

        Returns:
            Whether a reader of `num_reqs_padded` rows may see something else than before.

        Raises:
            IndexError: the tables have no such row, or fewer than `num_reqs_padded`.
        """
        is_other = num_reqs_padded != self._num_reqs_padded
        self._num_reqs_padded = num_reqs_padded
        tables = self._geometry, self._flat, self._flat_inputs, self._num_blocks
        held = self._row_keys, self._held_keys, self._held_blocks
        return self._place(np.ascontiguousarray(rows), num_reqs_padded, *tables, *held) or is_other

    def map_slots(
        self, rows: Ints, query_lens: Ints, positions: Ints, num_tokens_padded: int
    ) -> None:
        """Map a step's tokens to slots; what comes after them becomes `PAD_SLOT`, in all groups.

        From the real count on: a longer earlier step must not leave valid slots under padding
        (vllm!36580).

        Args:
            rows, query_lens: [num_reqs] each.
            positions: [num_tokens] of each token in its request, consecutive within one.

        Raises:
            ValueError: the lengths do not add up to the tokens, or there are more than the slot
                mappings hold.
        """
        batch = map(np.ascontiguousarray, (rows, query_lens, positions))
        self._map_slots(
            *batch, num_tokens_padded, self._geometry, self._flat, self._slots, *self.cp
        )
