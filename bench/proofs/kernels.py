"""The kernels that index states and tables, with all that the cache manager promises them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import z3

from bench.proofs.prove import Case
from bench.proofs.symbolic import Access, Array, Formula, Int, Run, table
from hybrid_kv.kernels.block_tables.launch import _COUNTS, BLOCK, _block_tables
from hybrid_kv.kernels.causal_conv1d.update import _conv_update
from hybrid_kv.kernels.gated_delta.slots import _constexprs as _delta_constexprs
from hybrid_kv.kernels.gated_delta.slots import _delta_update
from hybrid_kv.kernels.ssd.slots import _constexprs, _state_update

MEMORY = 2**40  # bytes of the largest array
MAX_ROWS = 65535  # a grid's second axis has no more
LONG_STRIDE = 2**24  # elements from a token to the next, at most: the width of a projection
ITEMSIZE = 4
Kernel = Callable[..., None]

tile, row = z3.Int("program0"), z3.Int("program1")
rows, tokens, blocks = z3.Ints("num_rows num_tokens num_blocks")
slot_stride, columns_stride = z3.Ints("slot_stride columns_stride")


def _stride(name: str, bits: int = 32) -> tuple[Int, list[Formula]]:
    value = z3.Int(name)
    low = 2**31 if bits == 64 else 0
    return Int(value, bits), [value >= low, value < (MEMORY if bits == 64 else 2**31)]


def _states(name: str, size: int, bits: int) -> tuple[Array, Int, list[Formula]]:
    """Return a pool of states of `size` elements, and its stride, which has `bits`.

    The stride is `slot_stride` from one block to the next.
    """
    stride, facts = _stride("slot_stride", bits)
    elements = (blocks - 1) * slot_stride + size
    facts += [blocks >= 1, slot_stride >= size, elements * ITEMSIZE <= MEMORY]
    return Array(name, elements), stride, facts


def _tables(columns: int) -> tuple[dict[str, Array], list[Formula]]:
    """Return the tables of a step, and what is known of them.

    They are where a row's tokens begin, the block it starts from, and the blocks it writes.
    """
    in_pool = lambda _, block: z3.And(block >= 0, block < blocks)  # noqa: E731
    starts = Array(
        "cu_seqlens", rows + 1, 32, lambda place, token: z3.And(token >= 0, token <= tokens)
    )
    length = starts(row + 1) - starts(row)
    facts = [
        rows >= 1,
        rows <= MAX_ROWS,
        row >= 0,
        row < rows,
        tokens >= 0,
        tokens < 2**31,
        length >= 0,
        length <= columns,
        columns_stride >= columns,
        columns_stride < 2**14,
    ]
    written = Array("state_indices", (rows - 1) * columns_stride + columns, 32, in_pool)
    return {
        "cu_seqlens": starts,
        "state_indices": written,
        "source": Array("source", rows, 32, in_pool),
    }, facts


def _between(columns: int) -> Callable[[Callable[[Formula], Formula]], list[Formula]]:
    """Return what is known of two rows.

    A block that a row writes is in no other row, but the null block; and tokens belong to one row.
    """
    starts, source, written = map(table, ("cu_seqlens", "source", "state_indices"))

    def between(renamed: Callable[[Formula], Formula]) -> list[Formula]:
        other, found = renamed(row), []
        for one, two in ((row, other), (other, row)):
            found.append(z3.Implies(one < two, starts(one + 1) <= starts(two)))
            for i in range(columns):
                mine = written(one * columns_stride + i)
                theirs = [source(two), *(written(two * columns_stride + j) for j in range(columns))]
                found += [
                    z3.Implies(z3.And(one != two, mine != 0), mine != block) for block in theirs
                ]
        mine = [written(row * columns_stride + i) for i in range(columns)]
        found += [z3.Or(a == 0, a != b) for i, a in enumerate(mine) for b in mine[:i]]
        return found

    return between


def _own(columns: int, size: int) -> Callable[[Access], Formula]:
    """Return the test that an access is of a block that the row's tables name.

    The null block is none.
    """
    source, written = table("source"), table("state_indices")

    def own(access: Access) -> Formula:
        mine = (
            [written(row * columns_stride + i) for i in range(columns)]
            if access.is_store
            else [source(row)]
        )
        begins = [(block, block * slot_stride) for block in mine]
        return z3.Or(
            *(
                z3.And(block != 0, access.offset >= at, access.offset < at + size)
                for block, at in begins
            )
        )

    return own


def _inputs(widths: dict[str, int]) -> tuple[dict[str, Any], list[Formula]]:
    """Return tensors of as many elements a token, and their strides, as arguments."""
    arguments: dict[str, Any] = {}
    facts: list[Formula] = []
    for name, width in widths.items():
        stride, own = _stride(f"{name}_stride")
        arguments |= {
            name: Array(name, (tokens - 1) * stride.value + width),
            f"{name}_stride": stride,
        }
        facts += [
            *own,
            stride.value >= width,
            stride.value < LONG_STRIDE,
            tokens * stride.value * ITEMSIZE <= MEMORY,
        ]
    return arguments, facts


def conv_update(kernel: Kernel = _conv_update, columns: int = 4, bits: int = 32) -> Case:
    """Return the convolution of a verify step, of Nemotron-3-Nano's channels."""
    channels, taps, block = 6144, 4, 128
    size = (taps - 2 + columns) * channels
    pool, stride, facts = _states("conv_state", size, bits)
    tables, more = _tables(columns)
    x_stride, of_x = _stride("x_stride")
    skips = Array("window_rows", rows, 32, lambda _, value: z3.And(value >= 0, value < columns))
    arguments: dict[str, Any] = {
        "conv_state": pool,
        "x": Array("x", (tokens - 1) * x_stride.value + channels),
        "weight": Array("weight", channels * taps),
        "bias": Array("bias", channels),
        "y": Array("y", tokens * channels),
        "cu_seqlens": tables["cu_seqlens"],
        "window_indices": tables["source"],
        "window_rows": skips,
        "state_indices": tables["state_indices"],
        "state_stride": stride,
        "x_stride": x_stride,
        "channel_stride": 1,
        "tap_stride": channels,
        "indices_stride": Int(columns_stride, 32),
        "CHANNELS": channels,
        "KERNEL": taps,
        "COLUMNS": columns,
        "HAS_BIAS": True,
        "BLOCK": block,
    }
    tiles = -(-channels // block)
    facts += [
        *more,
        *of_x,
        tile >= 0,
        tile < tiles,
        x_stride.value >= channels,
        x_stride.value < LONG_STRIDE,
    ]
    facts += [tokens * x_stride.value * ITEMSIZE <= MEMORY]
    name = f"convolution, {columns} columns, stride of {bits} bits"
    return Case(
        name, kernel, arguments, facts, _between(columns), ("conv_state",), _own(columns, size)
    )


def state_update(
    kernel: Kernel = _state_update,
    heads: int = 64,
    head_dim: int = 64,
    state: int = 128,
    columns: int = 4,
    bits: int = 32,
) -> Case:
    """Return the verify step of a Mamba-2 layer in `slots`.

    The default is the state of Nemotron-3-Nano, and three drafts.
    """
    groups = 8
    size = heads * head_dim * state
    constants = _constexprs(heads, head_dim, state, groups, ITEMSIZE, 32)
    pool, stride, facts = _states("state", size, bits)
    tables, more = _tables(columns)
    inputs, of_inputs = _inputs(
        {"x": heads * head_dim, "dt": heads, "B": groups * state, "C": groups * state}
    )
    arguments: dict[str, Any] = {
        "state": pool,
        **inputs,
        **{name: Array(name, heads) for name in ("dt_bias", "A_log", "D")},
        "y": Array("y", tokens * heads * head_dim),
        "cu_seqlens": tables["cu_seqlens"],
        "source_indices": tables["source"],
        "state_indices": tables["state_indices"],
        "state_stride": stride,
        "indices_stride": Int(columns_stride, 32),
        **constants,
    }
    facts += [*more, *of_inputs, tile >= 0, tile < heads * -(-head_dim // constants["BLOCK_P"])]
    name = f"state update, {columns} columns, stride of {bits} bits"
    return Case(name, kernel, arguments, facts, _between(columns), ("state",), _own(columns, size))


def delta_update(
    kernel: Kernel = _delta_update, columns: int = 4, bits: int = 32, per_channel: bool = False
) -> Case:
    """Return the verify step of a layer with a delta rule in `slots`.

    The sizes are those of Qwen3-Next or Kimi-Linear.
    """
    key_heads, heads, key, value = (32 if per_channel else 16), 32, 128, 128
    size, gates = heads * value * key, heads * (key if per_channel else 1)
    constants = _delta_constexprs(key_heads, heads, key, value, ITEMSIZE, 32)
    pool, stride, facts = _states("state", size, bits)
    tables, more = _tables(columns)
    widths = {
        "q": key_heads * key,
        "k": key_heads * key,
        "v": heads * value,
        "dt": gates,
        "beta": heads,
    }
    inputs, of_inputs = _inputs(widths)
    arguments: dict[str, Any] = {
        "state": pool,
        **inputs,
        "dt_bias": Array("dt_bias", gates),
        "A_log": Array("A_log", heads),
        "y": Array("y", tokens * heads * value),
        "cu_seqlens": tables["cu_seqlens"],
        "source_indices": tables["source"],
        "state_indices": tables["state_indices"],
        "state_stride": stride,
        "indices_stride": Int(columns_stride, 32),
        **constants,
        "PER_CHANNEL": per_channel,
        "BETA_SCALE": 1.0,
        "EPS": 1e-6,
    }
    facts += [*more, *of_inputs, tile >= 0, tile < heads * -(-value // constants["BLOCK_V"])]
    kind = "per channel" if per_channel else "per head"
    name = f"delta rule {kind}, {columns} columns, stride of {bits} bits"
    return Case(name, kernel, arguments, facts, _between(columns), ("state",), _own(columns, size))


def block_tables(kernel: Kernel = _block_tables, bpk: int = 4) -> Case:
    """Return the block tables and slots of all groups, `bpk` kernel blocks to a block."""
    groups, lanes, unit = 3, 256, 16
    group, index = tile, row  # the axes of the grid
    staged, num_reqs, padded, num_tokens, padded_tokens = (z3.Int(name) for name in _COUNTS)
    most, ids, held, inputs, stride = z3.Ints("max_num_reqs num_ids table_size input_size slot_row")
    geometry = Array("geometry", 6 * groups, 64, known=lambda place: (place % 6 == 3, bpk))
    is_row = lambda _, one: z3.And(one >= 0, one < most)  # noqa: E731
    rows_of = Array("rows", num_reqs, 64, is_row)
    staged_rows = Array("staged_rows", staged, 32, is_row)
    overwrite = Array("staged_overwrite", staged, 32)
    num_blocks = Array(
        "num_blocks",
        most * groups,
        64,
        lambda at, n: z3.And(n >= 0, n <= geometry(at % groups * 6 + 2)),
    )

    def fits(at: Formula, count: Formula) -> Formula:
        entry, own = at / groups, at % groups
        before = z3.If(overwrite(entry) != 0, 0, num_blocks(staged_rows(entry) * groups + own))
        return z3.And(count >= 0, count <= ids, before + count <= geometry(own * 6 + 2))

    counts = Array("staged_counts", staged * groups, 32, fits)
    starts = Array(
        "query_start_loc",
        num_reqs + 1,
        32,
        lambda _, token: z3.And(token >= 0, token <= num_tokens),
    )
    cells = {name: Array(name, groups * most, 64) for name in ("row_keys", "held_keys")}
    arguments: dict[str, Any] = {
        "geometry": geometry,
        "tables": Array("tables", held, 32),
        "input_tables": Array("input_tables", inputs, 32),
        "num_blocks": num_blocks,
        **cells,
        "held_blocks": Array(
            "held_blocks", groups * most, 32, lambda _, n: z3.And(n >= 0, n < 2**31 // bpk)
        ),
        "slot_mappings": Array("slot_mappings", groups * stride, 64),
        "slot_stride": Int(stride, 32),
        "staged_ids": Array("staged_ids", ids, 32),
        "staged_rows": staged_rows,
        "staged_counts": counts,
        "staged_overwrite": overwrite,
        "rows": rows_of,
        "query_start_loc": starts,
        "positions": Array("positions", num_tokens, 64, lambda _, at: z3.And(at >= 0, at < 2**31)),
        **{name: Int(z3.Int(name), 32) for name in (*_COUNTS, "max_num_reqs")},
        "NUM_GROUPS": groups,
        "ROWS": lanes,
        "BLOCKS_PER_KV_BLOCK": bpk,
        "BLOCK_SIZE": unit,
        "CP_SIZE": 1,
        "CP_RANK": 0,
        "CP_INTERLEAVE": 1,
        "PAD": -1,
        "BLOCK": BLOCK,
    }
    begins, input_begins, width = (
        geometry(group * 6),
        geometry(group * 6 + 1),
        geometry(group * 6 + 2),
    )
    size = most * width
    facts = [
        group >= 0,
        group < groups,
        index >= 0,
        index <= padded + staged,
        most >= 1,
        most <= lanes,
        num_reqs >= 0,
        num_reqs <= padded,
        padded <= most,
        staged >= 0,
        staged <= most,
        num_tokens >= 0,
        num_tokens <= padded_tokens,
        padded_tokens <= stride,
        stride < 2**30,
        ids >= 0,
        ids < 2**31,
        begins >= 0,
        input_begins >= 0,
        width >= 1,
        width < 2**31 // bpk - BLOCK,
        begins + size <= held,
        input_begins + size * bpk <= inputs,
        held * 4 <= MEMORY,
        inputs * 4 <= MEMORY,
        geometry(group * 6 + 4) >= bpk,
        geometry(group * 6 + 4) < 2**31,
        geometry(group * 6 + 5) >= 0,
        geometry(group * 6 + 5) <= unit,
    ]

    def between(renamed: Callable[[Formula], Formula]) -> list[Formula]:
        other, found = renamed(index), []
        for one, two in ((index, other), (other, index)):
            found.append(
                z3.Implies(z3.And(one < two, two < num_reqs), starts(one + 1) <= starts(two))
            )
        for ids_of, first in ((rows_of, 0), (staged_rows, padded)):
            found.append(z3.Implies(index != other, ids_of(index - first) != ids_of(other - first)))
        for begin, per in ((begins, 1), (input_begins, bpk)):
            apart = z3.Or(
                begin + size * per <= renamed(begin), renamed(begin + size * per) <= begin
            )
            found.append(z3.Implies(group != renamed(group), apart))
        return found

    def sums(run: Run, total: Formula) -> Formula:
        """Return the bounds of a sum over the entries before this one.

        There are as many ids as all counts say.
        """
        *_, entry = run.reductions[-1]
        return z3.And(
            total >= 0,
            z3.Implies(entry >= 0, total + counts(entry * groups + group) <= ids),
            total <= ids,
        )

    name = f"block tables and slots, {bpk} kernel blocks to a block"
    return Case(name, kernel, arguments, facts, between, sums=sums, others=(index, index - padded))


def cases() -> Iterator[Case]:
    """Yield all cases."""
    for bits in (32, 64):
        for columns in (1, 4):
            yield conv_update(columns=columns, bits=bits)
            yield state_update(columns=columns, bits=bits)
            yield delta_update(columns=columns, bits=bits)
            yield delta_update(columns=columns, bits=bits, per_channel=True)
    for bpk in (1, 4):
        yield block_tables(bpk=bpk)
