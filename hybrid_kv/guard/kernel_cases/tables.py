"""Block tables: ids of kernel blocks, slots of tokens, and a few steps of them on the host and in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import torch

from hybrid_kv.cache.block_table import BlockTables
from hybrid_kv.guard import definitions
from hybrid_kv.guard.kernel_cases.draw import Compared, Draw, longs, starts
from hybrid_kv.kernels.block_tables import (
    HostTables,
    StagedBlocks,
    StepBatch,
    TableLayout,
    Tables,
    update_block_tables_reference,
)
from hybrid_kv.kernels.kernel_blocks import expand_list, expand_numpy, expand_torch, gather_kernel_blocks
from hybrid_kv.kernels.slot_mapping import slot_mapping

MAX_REQS, MAX_TOKENS = 4, 48
CPU = torch.device("cpu")


def slots(draw: Draw) -> Iterator[Compared]:
    """Of one rank and of several, up to some tokens beyond a row's last block."""
    interleave, (cp_size, width) = draw.number(1, 3), draw.numbers(1, 3, 2)
    block_size, cp = interleave * draw.number(1, 3), (cp_size, draw.number(0, cp_size - 1), interleave)
    table = [draw.numbers(1, 99, width) for _ in range(2)]
    rows = draw.numbers(0, 1, 6)
    positions = [draw.number(0, width * block_size * cp_size + 3) for _ in rows]
    got = slot_mapping(torch.tensor(table, dtype=torch.int32), longs(rows), longs(positions), block_size, *cp)
    expected = [definitions.slot(table[row], n, block_size, *cp) for row, n in zip(rows, positions, strict=True)]
    yield "slot_mapping", got, np.array(expected)


def expansions(draw: Draw) -> Iterator[Compared]:
    """A stride that is left out is that of blocks without a gap."""
    per_block, width = draw.numbers(1, 4, 2)
    gap = draw.one_of(None, 0, 2)
    stride = () if gap is None else (per_block + gap,)
    ids, offsets = np.array(draw.numbers(1, 99, 5), dtype=np.int32), torch.arange(per_block, dtype=torch.int32)
    expected = np.array(definitions.kernel_blocks(ids.tolist(), per_block, per_block + (gap or 0)))
    yield "expand_list", longs(expand_list(ids.tolist(), per_block, *stride)), expected
    yield "expand_numpy", torch.from_numpy(expand_numpy(ids, per_block, *stride)), expected
    yield "expand_torch", expand_torch(torch.from_numpy(ids), offsets, *stride), expected

    table, rows, num_blocks = [draw.numbers(1, 99, width) for _ in range(3)], draw.some(range(3)), draw.number(0, width)
    out = torch.full((len(rows), width * per_block), -7, dtype=torch.int32)
    gather_kernel_blocks(torch.tensor(table, dtype=torch.int32), longs(rows), num_blocks, offsets, out)
    kept = [-7] * ((width - num_blocks) * per_block)
    lines = [definitions.kernel_blocks(table[row][:num_blocks], per_block, per_block) + kept for row in rows]
    yield "gather_kernel_blocks", out, np.array(lines).reshape(out.shape)


class Requests:
    """What block tables should hold: of each row and group a list of blocks, and the slots of the last steps.

    Args:
        gaps: kernel blocks between two manager blocks, any of them.
    """

    def __init__(self, draw: Draw, gaps: Sequence[int] = (0, 2)) -> None:
        interleave, cp_size = draw.number(1, 2), draw.number(1, 3)
        self.cp = cp_size, draw.number(0, cp_size - 1), interleave
        self.layouts = [self._layout(draw, interleave, gaps) for _ in range(draw.number(1, 3))]
        self.blocks = [[list[int]() for _ in self.layouts] for _ in range(MAX_REQS)]
        self.slots = np.full((len(self.layouts), MAX_TOKENS), definitions.NO_SLOT)

    @staticmethod
    def _layout(draw: Draw, interleave: int, gaps: Sequence[int]) -> TableLayout:
        per_block = draw.number(1, 3)
        size = interleave * draw.number(1, 2) * per_block
        return TableLayout(draw.number(1, 4), size, per_block, per_block + draw.one_of(*gaps), draw.number(0, 3) > 0)

    def stage(self, draw: Draw, fills: bool = False) -> StagedBlocks:
        """New blocks for some rows, up to their width; a row begins anew or goes on. `fills`: all rows, as they can."""
        rows = [*range(MAX_REQS)] if fills else draw.some(range(MAX_REQS))
        new, overwrite = list[list[list[int]]](), list[bool]()
        for row in rows:
            overwrite.append(fills or draw.chance())
            held = [0 if overwrite[-1] else len(blocks) for blocks in self.blocks[row]]
            most = [layout.width - n for layout, n in zip(self.layouts, held, strict=True)]
            counts = most if fills else [draw.number(0, count) for count in most]
            new.append([draw.numbers(1, 999, count) for count in counts])
            for blocks, n, more in zip(self.blocks[row], held, new[-1], strict=True):
                blocks[n:] = more
        return _staged(rows, new, overwrite, len(self.layouts))

    def one_too_many(self, draw: Draw) -> StagedBlocks:
        row, group = draw.number(0, MAX_REQS - 1), draw.number(0, len(self.layouts) - 1)
        new = [list[int]() for _ in self.layouts]
        new[group] = [1] * (self.layouts[group].width - len(self.blocks[row][group]) + 1)
        return _staged([row], [new], [False], len(self.layouts))

    def batch(self, draw: Draw, rows: Sequence[int] | None = None) -> StepBatch:
        """Some rows, and of each consecutive tokens that its blocks hold; where they fill their row, two more."""
        rows = draw.some(range(MAX_REQS)) if rows is None else rows
        lengths, positions = list[int](), list[int]()
        for row in rows:
            ends = [
                len(blocks) * layout.block_size * self.cp[0] + 2 * (len(blocks) == layout.width)
                for blocks, layout in zip(self.blocks[row], self.layouts, strict=True)
                if layout.has_slots
            ]
            end = min(ends, default=5)
            first = draw.number(0, end)
            lengths.append(draw.number(0, min(end - first, 9)))
            positions += range(first, first + lengths[-1])
        padded_rows, padded_tokens = draw.number(len(rows), MAX_REQS), len(positions) + draw.number(0, 5)
        self._map(rows, lengths, positions, padded_tokens)
        bounds = torch.tensor(starts(lengths), dtype=torch.int32)
        return StepBatch(longs(rows), bounds, longs(positions), padded_rows, padded_tokens)

    def _map(self, rows: Sequence[int], lengths: list[int], positions: list[int], padded_tokens: int) -> None:
        token_rows = [row for row, length in zip(rows, lengths, strict=True) for _ in range(length)]
        self.slots[:, len(positions) : padded_tokens] = definitions.NO_SLOT
        for group, layout in enumerate(self.layouts):
            for token, (row, position) in enumerate(zip(token_rows, positions, strict=True)):
                if layout.has_slots:
                    blocks = self.blocks[row][group]
                    self.slots[group, token] = definitions.slot(blocks, position, layout.block_size, *self.cp)

    def compare(self, name: str, tables: Tables | BlockTables, batch: StepBatch) -> Iterator[Compared]:
        """The tables, what a step's readers get, and null rows behind them."""
        counts = [[len(blocks) for blocks in row] for row in self.blocks]
        yield f"{name}, num_blocks", tables.num_blocks, np.array(counts)
        yield f"{name}, slot_mappings", tables.slot_mappings, self.slots
        for group, layout in enumerate(self.layouts):
            for row, blocks in enumerate(self.blocks):
                held = blocks[group]
                yield f"{name}, tables", tables.tables[group][row, : len(held)], np.array(held)
            for place, row in enumerate(batch.rows.tolist()):
                held = self.blocks[row][group]
                expected = definitions.kernel_blocks(held, layout.blocks_per_kv_block, layout.kernel_block_stride)
                got = tables.input_tables[group][place, : len(expected)]
                yield f"{name}, input_tables", got, np.array(expected)
            padding = tables.input_tables[group][len(batch.rows) : batch.num_reqs_padded]
            yield f"{name}, padding rows", padding, np.zeros(padding.shape)


def block_tables(draw: Draw) -> Iterator[Compared]:
    """Steps of a few requests; what would make a row longer than its table is refused."""
    requests = Requests(draw)
    host = HostTables(requests.layouts, MAX_REQS, MAX_TOKENS, *requests.cp)
    plain = Tables(requests.layouts, MAX_REQS, MAX_TOKENS, CPU, *requests.cp)
    for _ in range(3):
        staged, batch = requests.stage(draw), requests.batch(draw)
        below = [out[batch.num_reqs_padded :].clone() for out in plain.input_tables]
        update_block_tables_reference(plain, staged, batch)
        yield from requests.compare("update_block_tables", plain, batch)
        for out, old in zip(plain.input_tables, below, strict=True):
            yield "update_block_tables, rows below the batch", out[batch.num_reqs_padded :], old.numpy()
        _append(host, staged)
        host.place(batch.rows.numpy(), batch.num_reqs_padded)
        lengths = batch.query_start_loc.diff().long().numpy()
        host.map_slots(batch.rows.numpy(), lengths, batch.positions.numpy(), batch.num_tokens_padded)
        yield from requests.compare("HostTables", host, batch)
        if draw.chance():
            host.forget()
            host.flat_input_tables.fill_(-7)
    staged = requests.one_too_many(draw)
    update_block_tables = partial(update_block_tables_reference, plain, staged, batch)
    yield "update_block_tables, a block too many", _is_refused(update_block_tables), np.array(True)
    yield "HostTables, a block too many", _is_refused(partial(_append, host, staged)), np.array(True)


def _is_refused(update: Callable[[], None]) -> torch.Tensor:
    try:
        update()
    except IndexError:
        return torch.tensor(True)
    return torch.tensor(False)


def _append(host: HostTables, staged: StagedBlocks) -> None:
    host.append(staged.ids.numpy(), staged.rows.numpy(), staged.counts.numpy(), staged.overwrite.numpy())


def _staged(rows: list[int], new: list[list[list[int]]], overwrite: list[bool], num_groups: int) -> StagedBlocks:
    ids = [block for groups in new for blocks in groups for block in blocks]
    counts = [[len(blocks) for blocks in groups] for groups in new]
    return StagedBlocks(
        torch.tensor(ids, dtype=torch.int32),
        torch.tensor(rows, dtype=torch.int32),
        torch.tensor(counts, dtype=torch.int32).view(-1, num_groups),
        torch.tensor(overwrite, dtype=torch.bool),
    )


CASES = (slots, expansions, block_tables)
