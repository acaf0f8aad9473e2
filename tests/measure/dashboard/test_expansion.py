"""Block ids to kernel blocks: where numpy overtakes a list; nothing unmeasured looks measured."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench import figures, kernel_blocks
from hybrid_kv.measure.dashboard.sections import expansion
from hybrid_kv.measure.dashboard.sections.expansion import NOT_MEASURED, Crossover, crossover
from tests.measure.dashboard.html import cells, page_of, section, titles
from tests.measure.dashboard.kinds import EXPANSIONS, everything, expansions, static_metrics
from tests.measure.dashboard.rows import results, row

SIZES = (1, 4, 16, 128)


def times(once: float, each_id: float, spread: float = 0.0) -> dict[int, Any]:
    """By number of ids; the interval ends that share below and above."""
    found = {}
    for num_ids in SIZES:
        value = once + each_id * num_ids
        ends = {"ci_low": (1 - spread) * value, "ci_high": (1 + spread) * value}
        found[num_ids] = SimpleNamespace(value=value, **ends)
    return found


@pytest.mark.parametrize("ids", [1.5, 4, 9.25, 100])
def test_the_crossover_of_straight_lines_is_exact(ids: float) -> None:
    """500 + 100 n and 500 + 80 ids + 20 n meet at n = ids, which need not be a measured number."""
    found = crossover(times(500, 100), times(500 + 80 * ids, 20))
    assert found.ids == found.low == found.high == pytest.approx(ids)


def test_a_crossover_lies_between_those_of_the_ends_of_both_intervals() -> None:
    found = crossover(times(0, 100, 0.1), times(800, 20, 0.1))
    assert found.ids == pytest.approx(10)
    assert found.low == pytest.approx(720 / (110 - 18)) and found.high == pytest.approx(
        880 / (90 - 22)
    )
    assert found.text == "10 (8 to 13)"
    assert crossover(times(0, 100, 0.001), times(745, 20, 0.001)).text == "10"


def test_a_list_that_is_never_or_always_slower_has_no_crossover_between() -> None:
    assert crossover(times(0, 10), times(10, 20)).text == "∞"
    assert crossover(times(20, 20), times(10, 10)).text == "1"
    assert crossover({}, times(10, 10)).text == "∞"
    half_known = crossover(times(0, 21, 0.1), times(100, 20, 0.1))
    assert half_known.low < half_known.ids < half_known.high == math.inf


def test_one_faster_time_below_the_crossover_does_not_move_it() -> None:
    """The list is slower by chance at 1 id and faster at 4."""
    listed = times(0, 100)
    listed[1] = SimpleNamespace(value=9000, ci_low=9000, ci_high=9000)
    assert crossover(listed, times(800, 20)).ids == pytest.approx(10)


def test_the_section_says_where_and_what_is_not_measured(tmp_path: Path) -> None:
    page = page_of(results(tmp_path, *expansions()))
    assert (
        titles(page)["kernel-blocks"]
        == "numpy is faster than a list from 6 ids on; on a GPU nothing is measured"
    )
    lines = {line[0]: line[1:] for line in cells(section(page, "kernel-blocks"))}
    for subject, (once, each_id) in EXPANSIONS.items():
        own = lines[f"8, {expansion.SUBJECTS[subject]}"]
        assert float(own[1]) == pytest.approx((once + 32 * each_id) / 1000, rel=5e-3)
        assert own[-3:] == [NOT_MEASURED] * 3
    assert lines["8, list"][4:6] == ["32,768", "0"] and lines["8, Triton"][4:6] == ["4,096", "1"]
    assert "predicted µs" not in section(page, "kernel-blocks")


def test_a_time_of_a_gpu_takes_the_place_of_its_mark(tmp_path: Path) -> None:
    params = {"num_ids": 1024, "blocks_per_kv_block": 8, "subject": "triton", "launch": "eager"}
    timed = {"suite": "gpu", "benchmark": "kernel_blocks", "device": "H200"}
    made = [row(50, params, metric="gpu_time", value=2400.0, **timed)]
    made.append(row(50, params, metric="end_to_end_time", value=31e3, **timed))
    made.append(
        row(50, {**params, "num_ids": 1, "subject": "list"}, metric="gpu_time", value=1.0, **timed)
    )
    found = results(tmp_path, *expansions(), *made)
    by_subject = {way.subject: expansion.cells(way)[-3:] for way in expansion.ways(found)}
    assert by_subject.pop("triton") == [NOT_MEASURED, "2.4", "31"]
    (raced,) = [line for line in cells(section(page_of(found), "gpu")) if "num_ids=1024" in line[0]]
    assert raced[1].startswith("31 µs")  # what the ratios beside it are of
    assert set(map(tuple, by_subject.values())) == {(NOT_MEASURED,) * 3}


def test_what_was_not_counted_says_so(tmp_path: Path) -> None:
    found = results(tmp_path, *(one for one in expansions() if one["benchmark"] == "expand"))
    assert {tuple(expansion.cells(way)[4:6]) for way in expansion.ways(found)} == {
        (NOT_MEASURED,) * 2
    }


def test_predictions_have_a_table_of_their_own(tmp_path: Path) -> None:
    shape = {"dtype": "int32", "shape": "8 per block", "target": "sm_90"}
    compiled = {"suite": "kernels", "benchmark": "kernel_blocks.expand", "unit": "1/B"}
    made = [row(50, shape, metric="sass_instructions_per_byte", value=2.0, **compiled)]
    found = results(tmp_path, *expansions(), *static_metrics(), *made)
    (line,) = expansion.predicted(found)
    assert line[:5] == ["8", "–", "9", "–", "–"]  # 2 for each of 4.5 bytes
    assert line[5].startswith("1.7") and " to " in line[5]
    text = figures.expansion_table(found) or ""
    measured, _, known = text.partition("Nothing here is measured:")
    assert "predicted µs" in known and "predicted µs" not in measured
    assert measured.count(f"*{NOT_MEASURED}*") == 15
    assert "| 8, list | 0.9 | 13.3 | 410 | 26,215 | 32,768 | 0 | *not measured* |" in measured
    short = figures.expansion_short_table(found) or ""
    assert "| Triton | 0.212 | 0.584 | 12.5 | 787 | 4,096 | 1 | *not measured* |\n" in short
    assert "per block: 6 (5 to 7) with 8. In the review of vllm!38831 it was 32." in short


def test_sizes_that_are_shown_are_measured_and_counted() -> None:
    assert {*expansion.SHOWN_IDS} <= {
        *kernel_blocks.NUM_IDS
    } and expansion.GPU_IDS in kernel_blocks.COUNTED_IDS
    assert expansion.PROGRAM == kernel_blocks.BLOCK and [*expansion.SUBJECTS] == [
        *kernel_blocks.WAYS
    ]
    assert figures.SHORT_BLOCKS_PER_KV_BLOCK in kernel_blocks.BLOCKS_PER_KV_BLOCK


def test_a_crossover_of_a_run_that_lacks_a_way_is_not_drawn(tmp_path: Path) -> None:
    assert expansion.ways(results(tmp_path, *everything()[:1])) == []
    assert Crossover(5.2, 4.9, 7.0).text == "6 (5 to 7)"
