"""The comment for a pull request: short, found again by its first line, safe to paste."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from hybrid_kv.measure.dashboard.markdown import MARKER
from tests.measure.dashboard import hostile
from tests.measure.dashboard.html import comment_of
from tests.measure.dashboard.kinds import everything
from tests.measure.dashboard.rows import history, results, row


def test_it_is_short_and_starts_with_its_marker(tmp_path: Path) -> None:
    text = comment_of(results(tmp_path, *everything()))
    lines = text.splitlines()
    assert lines[0] == MARKER == "<!-- hybrid-kv report -->"
    assert lines[1] == "### hybrid-kv: ✕ HEAD is wrong"
    assert lines[3] == (
        "Right? ✕ no: 1 check failed. Slower? ✕ yes: compare engine_step/decode ✕ fail, and 2 more."
    )
    assert lines[5] == 'Next: `hybrid-kv guard -k "layout"`'
    assert len(lines) < 40
    assert "| `guard` | ✕ fail | 0 of 1 | `0004100` | `rack, H200` |" in lines
    assert (
        "| `guard: layout, views` | `3 requests` | `0` | `0004100` 2026-02-11 | – | never |"
        in lines
    )
    level = "`state_update: slots, CPU time (K=3, model=nano)` | `+19.8 %, 101 ns → 121 ns`"
    assert f"| {level} | – | `0002000` 2026-01-21 | – | `0001900` 2026-01-20 |" in lines


def test_one_machine_leaves_the_others_out(tmp_path: Path) -> None:
    found = results(tmp_path, *everything())
    assert "rack" not in comment_of(found, "box")
    rack = comment_of(found, "rack, H200")
    assert "box" not in rack
    assert "static kernel metrics" in rack
    assert "state_update: slots" in rack and "state_update: slots" not in comment_of(found, "box")


def test_when_all_is_well_only_verdicts_are_listed(tmp_path: Path) -> None:
    text = comment_of(results(tmp_path, row(0, verdict="pass")))
    assert "| △ stale | 1 of 1 |" in text
    assert text.count("\n|---") == 1
    assert "failing" not in text and "worse" not in text


def test_steps_for_the_better_are_not_listed(tmp_path: Path) -> None:
    rows = history([2.0, 1.0], unit="B", verdict="pass") + history(
        [1.0, 2.0], unit="B", better="equal", metric="m"
    )
    assert "worse" not in comment_of(results(tmp_path, *rows))


def test_long_lists_are_cut_and_say_so(tmp_path: Path) -> None:
    rows = [row(0, {"i": i}, verdict="fail", unit="B") for i in range(25)]
    text = comment_of(results(tmp_path, *rows))
    assert text.count("| `state_update: slots") == 10
    assert "and 15 more" in text


def rendered(text: str) -> tuple[set[str], list[int], str]:
    """Return tokens that are not a table's, each line's number of cells, and the text.

    Code spans are left out.
    """
    kinds, cells, said = set(), [0], ""
    for token in MarkdownIt("commonmark").enable("table").parse(text):
        for child in token.children or []:
            kinds |= {child.type} - {"text", "code_inline"}
            said += f" {child.content}" * (child.type == "text")
        kinds |= {token.type} if "html" in token.type or "fence" in token.type else set()
        cells[-1] += token.type in ("th_open", "td_open")
        if token.type == "tr_close":
            cells.append(0)
    return kinds, cells[:-1], said


@pytest.mark.parametrize("columns", hostile.GROUPS, ids="+".join)
def test_whatever_a_row_holds_stays_in_its_code_span(columns: list[str]) -> None:
    made = [
        row(1, verdict="fail", unit="B"),
        *history([1.0, 2.0], unit="B", verdict="pass", metric="m"),
    ]
    for start in range(0, len(hostile.PAYLOADS), 5):  # as many as a comment lists
        rows = []
        for payload in hostile.PAYLOADS[start : start + 5]:
            texts = {
                name: hostile.with_payload("{}", payload) if name == "params" else payload
                for name in columns
            }
            rows += [
                {**one, "python": payload, "benchmark": str(len(rows)), **texts} for one in made
            ]
        comment = comment_of(hostile.results_of(rows))
        kinds, cells, text = rendered(comment.removeprefix(MARKER))
        assert kinds <= {"softbreak"}, comment
        assert set(cells) == {5, 6} and len(cells) == sum(
            line.startswith("| ") for line in comment.splitlines()
        )
        assert not re.search(r"evil|pwned|@|#\d|GH-|<|&|`", text), text
