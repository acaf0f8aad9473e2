"""The host's tables: compiled and as Python runs them, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings

pytest.importorskip("numba")

from hybrid_kv.kernels.block_tables import HostTables, TableLayout, host
from tests.support.block_table_steps import Scenario, scenarios, tensors

LAYOUTS = [TableLayout(3, 4, 2, 2), TableLayout(5, 4, 1, 1)]


def as_python(*arguments: Any) -> HostTables:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "compiled", lambda loop, signature: loop)
        return HostTables(*arguments)


@settings(max_examples=60)
@given(scenarios())
def test_python_and_machine_code_write_the_same(scenario: Scenario) -> None:
    make = (scenario.layouts, scenario.max_num_reqs, scenario.max_num_tokens, *scenario.cp)
    both = HostTables(*make), as_python(*make)
    rng = np.random.default_rng(0)
    for step in scenario.steps:
        ids = [
            rng.integers(1, 1 << 20, sum(counts)).astype(np.int32) for _, _, counts in step.staged
        ]
        staged, batch = tensors(step, ids, len(scenario.layouts))
        rows, lens = batch.rows.numpy(), batch.query_start_loc.diff().numpy().astype(np.int64)
        is_changed = []
        for tables in both:
            tables.append(*(part.numpy() for part in vars(staged).values()))
            is_changed.append(tables.place(rows, batch.num_reqs_padded))
            tables.map_slots(rows, lens, batch.positions.numpy(), batch.num_tokens_padded)
        assert is_changed[0] == is_changed[1]
        for name in ("flat_tables", "flat_input_tables", "num_blocks", "slot_mappings"):
            assert torch.equal(getattr(both[0], name), getattr(both[1], name)), name


def test_a_request_that_comes_back_to_its_place_brings_only_its_new_blocks() -> None:
    tables = HostTables(LAYOUTS, 2, 8)
    for row in (0, 1):
        tables.append(*staged([row], [[1, 1]], [7 + row, 8]))
    assert tables.place(np.array([0, 1]), 2)
    assert tables.place(np.array([0]), 1)
    tables.append(*staged([1], [[1, 0]], [5], overwrite=False))
    tables.flat_input_tables.fill_(-7)
    assert tables.place(np.array([0, 1]), 2)
    assert tables.input_tables[0].tolist() == [[-7] * 6, [-7, -7, 10, 11, -7, -7]]
    assert (tables.input_tables[1] == -7).all()
    assert not tables.place(np.array([0, 1]), 2)
    assert (
        tables.place(np.array([0]), 1)
        and tables.place(np.array([0, 1]), 2)
        and tables.place(np.array([0]), 2)
    )


@pytest.mark.parametrize("owners", range(4))
def test_what_was_forgotten_is_brought_anew_whoever_owned_the_row(owners: int) -> None:
    tables = HostTables(LAYOUTS, 1, 8)
    for _ in range(owners):
        tables.append(*staged([0], [[1, 1]], [7, 8]))
    tables.place(np.array([0]), 1)
    tables.flat_input_tables.fill_(-7)
    tables.forget()
    assert tables.place(np.array([0]), 1)
    assert [table[0, 0] for table in tables.input_tables] == ([14, 8] if owners else [-7, -7])


def staged(
    rows: Sequence[int], counts: Sequence[Sequence[int]], ids: Sequence[int], overwrite: bool = True
) -> tuple[npt.NDArray[Any], ...]:
    shapes = np.array(counts, dtype=np.int32), np.full(len(rows), overwrite)
    return np.array(ids, dtype=np.int32), np.array(rows, dtype=np.int32), *shapes


@pytest.mark.parametrize("make", [HostTables, as_python])
@pytest.mark.parametrize(
    ("rows", "counts", "ids", "error", "message"),
    [
        ([2], [[1, 1]], [5, 6], IndexError, "row 2: the tables have rows 0 to 1"),
        ([3], [[1, 1]], [5, 6], IndexError, "row 3: the tables have rows 0 to 1"),
        ([-1], [[1, 1]], [5, 6], IndexError, "row -1: the tables have rows 0 to 1"),
        ([0, 0], [[1, 0], [0, 1]], [5, 6], ValueError, r"staged twice in one step: \[0, 0\]"),
        (
            [0, 1],
            [[3, 0], [0, 6]],
            [5] * 9,
            IndexError,
            "group 1 row 1: 6 blocks exceed the width 5",
        ),
        ([1], [[1, 1]], [5], ValueError, "1 block ids were staged for 2 columns"),
        ([1], [[1, 1]], [5] * 3, ValueError, "3 block ids were staged for 2 columns"),
    ],
)
def test_what_cannot_be_appended_is_refused_and_nothing_is_written(
    make: Callable[..., HostTables],
    rows: list[int],
    counts: list[list[int]],
    ids: list[int],
    error: type[Exception],
    message: str,
) -> None:
    tables = make(LAYOUTS, 2, 8)
    with pytest.raises(error, match=message):
        tables.append(*staged(rows, counts, ids))
    assert not tables.flat_tables.any() and not tables.num_blocks.any()


@pytest.mark.parametrize("make", [HostTables, as_python])
def test_a_batch_beyond_the_tables_is_refused(make: Callable[..., HostTables]) -> None:
    tables, one = make(LAYOUTS, 2, 8), np.ones(1, dtype=np.int64)
    for row in (-1, 2, 3):
        with pytest.raises(IndexError, match="a row of a batch that the tables do not have"):
            tables.place(np.array([row]), 1)
    with pytest.raises(IndexError, match="more rows in a batch than in the tables"):
        tables.place(np.array([0]), 3)
    for lens, tokens in ((1, 2), (2, 1), (9, 9)):
        with pytest.raises(ValueError, match="the lengths of a batch do not add up to its tokens"):
            tables.map_slots(one - 1, lens * one, np.arange(tokens), tokens)
