"""The fused kernel, interpreted, against the host's tables, which tests/cache verifies."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings

pytest.importorskip("triton")

from bench.static.compile import compile_case
from bench.static.launches import aot_cases
from hybrid_kv.kernels.block_tables import (
    DeviceTables,
    HostTables,
    StepBatch,
    TableLayout,
    launch,
    update_block_tables,
)
from hybrid_kv.kernels.slot_mapping import PAD_SLOT
from tests.kernels.definitions import kernel_blocks
from tests.kernels.interpreter import interpreted, share_memory_with_the_interpreter
from tests.support.block_table_steps import CPU, Scenario, Step, scenarios, tensors


def first_difference(scenario: Scenario, device: torch.device = CPU) -> str:
    """Run kernel and `HostTables` side by side; what differs first, or nothing."""
    layouts = scenario.layouts
    fused = DeviceTables(
        layouts, scenario.max_num_reqs, scenario.max_num_tokens, device, *scenario.cp
    )
    host = HostTables(layouts, scenario.max_num_reqs, scenario.max_num_tokens, *scenario.cp)
    rng = np.random.default_rng(0)
    highest = (2**31 - 1) // max(layout.kernel_block_stride for layout in layouts)
    for number, step in enumerate(scenario.steps):
        ids = [
            rng.integers(1, highest, sum(counts)).astype(np.int32) for _, _, counts in step.staged
        ]
        staged, batch = tensors(step, ids, len(layouts), device)
        if step.forgets:
            for tables in (fused, host):
                tables.forget()
                tables.flat_input_tables.fill_(-7)
        below = [out[batch.num_reqs_padded :].clone() for out in fused.input_tables]
        update_block_tables(fused, staged, batch)
        if step.staged:
            parts = (staged.ids, staged.rows, staged.counts, staged.overwrite)
            host.append(*(part.cpu().numpy() for part in parts))
        rows, lens = (
            batch.rows.cpu().numpy(),
            batch.query_start_loc.diff().cpu().numpy().astype(np.int64),
        )
        host.place(rows, batch.num_reqs_padded)
        host.map_slots(rows, lens, batch.positions.cpu().numpy(), batch.num_tokens_padded)
        for name in ("flat_tables", "num_blocks", "slot_mappings"):
            if not torch.equal(getattr(fused, name).cpu(), getattr(host, name)):
                return f"step {number}: {name}"
        for group in range(len(layouts)):
            difference = input_difference(group, fused, host, batch)
            if difference:
                return f"step {number}: group {group}{difference}"
            if not torch.equal(fused.input_tables[group][batch.num_reqs_padded :], below[group]):
                return f"step {number}: group {group}: a row below the batch was written"
    return ""


def input_difference(group: int, fused: DeviceTables, host: HostTables, batch: StepBatch) -> str:
    """Return where an input table of a group differs from the group's block table."""
    layout = host.layouts[group]
    both = fused.input_tables[group], host.input_tables[group]
    for position, row in enumerate(batch.rows.tolist()):
        blocks = host.tables[group][row, : host.num_blocks[row, group]].tolist()
        due = kernel_blocks(blocks, layout.blocks_per_kv_block, layout.kernel_block_stride)
        if any(part[position, : len(due)].tolist() != due for part in both):
            return f" position {position}"
    padding = slice(len(batch.rows), batch.num_reqs_padded)
    if any(part[padding].any() for part in both):
        return ": a padding row is not null"
    return ""


@settings(max_examples=20)  # The interpreter is slow.
@given(scenarios())
def test_random_steps_match_the_host(scenario: Scenario) -> None:
    assert interpreted(first_difference, scenario) == ""


ATTENTION = TableLayout(
    width=20, block_size=34 * 16, blocks_per_kv_block=34, kernel_block_stride=34
)
MAMBA = TableLayout(
    width=5, block_size=34 * 16, blocks_per_kv_block=1, kernel_block_stride=1, has_slots=False
)


@pytest.mark.parametrize(
    ("layouts", "steps"),
    [
        pytest.param(
            [ATTENTION, MAMBA],
            [
                Step(
                    [(row, True, [3, 2]) for row in (0, 1, 2)], [(row, 900, 4) for row in (2, 1, 0)]
                ),
                # Row 0 ends, which was last in the batch. Another request takes it over and is
                # alone in the batch.
                Step([(0, True, [2, 1])], [(0, 0, 1)]),
                # It comes to the place of the one before it, whose three blocks still lie there.
                Step([], [(1, 904, 1), (2, 904, 1), (0, 1, 1)]),
            ],
            id="another request in the same row",
        ),
        pytest.param(
            [ATTENTION, MAMBA],
            [
                Step([(0, True, [2, 1]), (3, True, [4, 4])], [(0, 0, 700)]),
                Step([(3, False, [1, 1])], [(0, 700, 1)]),
                Step([], [(3, 2000, 3), (0, 701, 1)]),
            ],
            id="staged without being in the batch",
        ),
        pytest.param(
            [ATTENTION, replace(MAMBA, block_size=1, has_slots=True)],
            [Step([(0, True, [2, 1])], [(0, 0, 700)]), Step([], [(0, 700, 1)], padding_tokens=2)],
            id="slots behind the padding stay",
        ),
        pytest.param(
            [ATTENTION, MAMBA],
            [
                Step([(0, True, [2, 1])], [(0, 0, 700)]),
                Step([], [], 1),
                Step([(0, False, [2, 1])], [(0, 1080, 600)]),
            ],
            id="tokens in the first and the second new block",
        ),
    ],
)
def test_steps_match(layouts: list[TableLayout], steps: list[Step]) -> None:
    num_rows = 1 + max(row for row, *_ in steps[0].staged)
    assert interpreted(first_difference, Scenario(layouts, num_rows, steps)) == ""


@pytest.mark.parametrize("rank", range(3))
def test_each_context_parallel_rank_has_its_own_tokens(rank: int) -> None:
    steps = [Step([(0, True, [2, 1]), (1, True, [1, 1])], [(0, 0, 700), (1, 5, 3)])]
    assert (
        interpreted(first_difference, Scenario([ATTENTION, MAMBA], 4, steps, (3, rank, 2), 703))
        == ""
    )


def first_difference_of_short_vectors(scenario: Scenario) -> str:
    with patch.object(launch, "BLOCK", 32):
        return first_difference(scenario)


def test_more_than_a_vector_of_everything() -> None:
    """More than a vector: 4 x 10 staged cells, 100 tokens, 40 blocks and 1,360 kernel blocks."""
    layouts = [replace(ATTENTION, width=40, kernel_block_stride=37)] + [replace(MAMBA, width=1)] * 9
    one = Step([(row, True, [40] + [1] * 9) for row in (2, 0, 3, 1)], [(3, 0, 100), (1, 9000, 1)])
    assert (
        interpreted(
            first_difference_of_short_vectors, Scenario(layouts, 4, [one, Step([], [(3, 0, 1)], 1)])
        )
        == ""
    )


def beyond_int32() -> list[list[int]]:
    """A step whose tables begin 2**31 elements into reserved buffers that are never written."""
    share_memory_with_the_interpreter()
    far = 2**31
    tables = DeviceTables(
        [replace(ATTENTION, width=2, blocks_per_kv_block=2, kernel_block_stride=2)], 2, 8, CPU
    )
    for name in ("flat_tables", "flat_input_tables"):
        size = len(getattr(tables, name))
        buffer = torch.empty(far + size, dtype=torch.int32)
        buffer[far:] = 0
        setattr(tables, name, buffer)
    tables.geometry[:, :2] += far
    ids = [np.array([2**30 - 1, 5], np.int32)]
    update_block_tables(tables, *tensors(Step([(1, True, [2])], [(1, 543, 2)]), ids, 1))
    return [
        tables.flat_tables[far:].tolist(),
        tables.flat_input_tables[far:].tolist(),
        tables.slot_mappings[0].tolist(),
    ]


def test_offsets_and_slots_beyond_int32() -> None:
    block = 2**30 - 1
    table, inputs, slots = interpreted(beyond_int32)
    assert table == [0, 0, block, 5]
    assert inputs == [2 * block, 2 * block + 1, 10, 11, 0, 0, 0, 0]
    assert slots == [block * 544 + 543, 5 * 544] + [PAD_SLOT] * 6


@pytest.mark.gpu
@settings(max_examples=40)
@given(scenarios())
def test_random_steps_match_on_a_gpu(scenario: Scenario) -> None:
    assert first_difference(scenario, torch.device("cuda")) == ""


STEP = tensors(Step([(0, True, [1, 1])], [(0, 0, 3)]), [np.array([4, 5], np.int32)], 2)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("ids", torch.zeros(2, dtype=torch.int64), "staged.ids is torch.int64"),
        ("ids", torch.zeros(4, dtype=torch.int32)[::2], "staged.ids has strides"),
        ("rows", torch.zeros(3, dtype=torch.int32), r"staged.rows has shape \(3,\)"),
        ("counts", torch.zeros(1, 3, dtype=torch.int32), r"staged.counts .* must be \(1, 2\)"),
        ("overwrite", torch.zeros(2, dtype=torch.bool), r"staged.overwrite .* must be \(1,\)"),
        ("rows", torch.zeros(1, dtype=torch.int32), "batch.rows is torch.int32"),
        (
            "query_start_loc",
            torch.zeros(1, dtype=torch.int32),
            r"batch.query_start_loc .* must be \(2,\)",
        ),
        ("positions", torch.zeros(3), "batch.positions is torch.float32"),
        ("num_reqs_padded", 3, "3 rows and 3 tokens exceed the tables' 2 and 4"),
        ("num_reqs_padded", 0, r"batch.rows .* must be \(0,\)"),
        ("num_tokens_padded", 5, "1 rows and 5 tokens exceed"),
        ("num_tokens_padded", 2, r"batch.positions .* must be \(2,\)"),
    ],
)
def test_wrong_tensors_are_refused(field: str, value: Any, message: str) -> None:
    staged, batch = STEP
    if "batch" in message or "exceed" in message:
        batch = replace(batch, **{field: value})
    else:
        staged = replace(staged, **{field: value})
    with pytest.raises(ValueError, match=message):
        update_block_tables(DeviceTables([ATTENTION, MAMBA], 2, 4, CPU), staged, batch)


def test_impossible_layouts_are_refused() -> None:
    with pytest.raises(ValueError, match="manager blocks overlap"):
        TableLayout(width=1, block_size=16, blocks_per_kv_block=4, kernel_block_stride=3)
    with pytest.raises(ValueError, match="at least 1"):
        TableLayout(width=0, block_size=16, blocks_per_kv_block=1, kernel_block_stride=1)


def test_all_warps_read_a_counter_before_one_writes_it() -> None:
    """All warps read a counter before a warp writes it, which no interpreter would show."""
    ttir = compile_case(aot_cases()[0], "sm_90").asm["ttir"]
    loaded: set[str] = set()
    checked = []
    for line in ttir.splitlines():
        if "ttg.barrier" in line:
            loaded.clear()
        elif access := re.search(r"tt\.(load|store) (%\w+).* : !tt\.ptr<", line):
            if access[1] == "load":
                loaded.add(access[2])
            else:
                checked.append(access[2])
                assert access[2] not in loaded, line
    assert len(checked) == 5
