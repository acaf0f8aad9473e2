"""The comment for a pull request: short, found again by its first line, safe to paste."""

from __future__ import annotations

from pathlib import Path

from hybrid_kv.dashboard.markdown import MARKER, summary
from tests.dashboard.kinds import everything
from tests.dashboard.rows import history, results, row


def test_it_is_short_and_starts_with_its_marker(tmp_path: Path) -> None:
    text = summary(results(tmp_path, *everything()))
    lines = text.splitlines()
    assert lines[0] == MARKER == "<!-- hybrid-kv report -->"
    assert lines[1] == "### hybrid-kv: ✕ fail: 51 of 54 checks of the newest runs"
    assert len(lines) < 40
    assert "| guard | ✕ fail | 0 of 1 | `0004100` | rack, H200 |" in lines
    assert "| guard | ✓ pass | 10 of 10 | `0004000` | box |" in lines
    assert "| guard: layout, views | 3 requests | 0 | 100 |" in lines
    assert "| state\\_update: slots, cpu\\_time (K=3, model=nano) | `0002000` 2026-01-21 | +19.8 % |" in lines


def test_one_machine_leaves_the_others_out(tmp_path: Path) -> None:
    found = results(tmp_path, *everything())
    assert "rack" not in summary(found, "box")
    rack = summary(found, "rack, H200")
    assert "box" not in rack
    assert "static kernel metrics" in rack
    assert "state\\_update: slots" in rack and "state\\_update: slots" not in summary(found, "box")


def test_no_rows_no_verdict(tmp_path: Path) -> None:
    text = summary(results(tmp_path))
    assert text.startswith(f"{MARKER}\n### hybrid-kv: no verdict\n")
    assert "hybrid-kv guard" in text


def test_when_all_is_well_only_verdicts_are_listed(tmp_path: Path) -> None:
    text = summary(results(tmp_path, row(0, verdict="pass")))
    assert "✓ pass: 1 of 1" in text
    assert text.count("\n|---") == 1
    assert "not passed" not in text and "worse" not in text


def test_steps_for_the_better_are_not_listed(tmp_path: Path) -> None:
    rows = history([2.0, 1.0], unit="B", verdict="pass") + history([1.0, 2.0], unit="B", better="equal", metric="m")
    assert "worse" not in summary(results(tmp_path, *rows))


def test_long_lists_are_cut_and_say_so(tmp_path: Path) -> None:
    rows = [row(0, {"i": i}, verdict="fail", unit="B") for i in range(25)]
    text = summary(results(tmp_path, *rows))
    assert text.count("| state\\_update: slots") == 10
    assert "and 15 more" in text


def test_names_cannot_leave_their_cells(tmp_path: Path) -> None:
    evil = "a|b # c @everyone <script> [x](y) *z*"
    text = summary(results(tmp_path, row(0, benchmark=evil, unit="B", machine=evil, verdict="fail")))
    for line in text.splitlines()[2:]:
        assert not line or line.startswith("|")
    assert "@everyone" not in text and "<script" not in text.replace("\\<", "") and "](y" not in text.replace("\\]", "")
