"""What is red stands at the top, with the first red commit, its author and the last green one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hybrid_kv.results import Head, Told
from tests.dashboard.html import page_of, section, titles
from tests.dashboard.rows import results, row

pytest.importorskip("plotly", reason="the report needs plotly: pip install -e '.[report]'")


class Checkout(Head):
    """Git knows every commit, all of them by one author."""

    def tell(self, commits: object) -> dict[str, Told]:
        return {str(commit): Told("A <b> U", "2026-01-01", "change") for commit in list(commits)}  # type: ignore[call-overload]


def lines(page: str) -> list[list[str]]:
    found = re.findall(r"<tr [^>]*>(.*?)</tr>", section(page, "red-now"))
    return [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", line) for line in found]


def test_it_is_the_first_section_and_lists_checks_and_levels(full: str) -> None:
    assert next(iter(titles(full))) == "red-now"
    failed = lines(full)
    assert len(failed) == 4
    assert any("compare: engine_step/decode" in name and "1.08×" in cells for name, *cells in failed)
    layout = next(cells for name, *cells in failed if name == "guard: layout, views")
    assert layout[0] == '<b class="fail">✕ fail</b>' and layout[2:] == [
        "never",
        "3 requests",
        '<span class="name-of">0</span>',
        "100",
    ]
    _, word, since, green, figure, *_ = failed[-1]
    assert (word, figure) == ('<b class="worse">+19.8 % worse</b>', "101 ns → 121 ns")
    assert ">0002000</a>, <time>2026-01-21</time>" in since and ">0001900</a>" in green


def test_the_author_of_the_first_red_commit_is_named(tmp_path: Path) -> None:
    rows = [row(run, verdict="pass" if run < 3 else "fail", unit="B") for run in range(6)]
    ((_, _, since, green, *_),) = lines(page_of(results(tmp_path, *rows), head=Checkout("a" * 40)))
    assert ">0000300</a>" in since and since.endswith("<br><small>A &lt;b&gt; U</small>")
    assert ">0000200</a>" in green


def test_nothing_is_red_is_said_and_no_check_at_all_is_not(tmp_path: Path) -> None:
    assert titles(page_of(results(tmp_path / "a", row(0, verdict="pass"))))["red-now"] == "Nothing is red"
    assert "red-now" not in titles(page_of(results(tmp_path / "b", row(0))))
