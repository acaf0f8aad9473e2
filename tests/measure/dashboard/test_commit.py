"""The page of a commit: what it says, what it links to, and that nothing in it can run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from hybrid_kv.config import HybridKVError
from hybrid_kv.measure.dashboard.commit import build_commits, write_commits
from hybrid_kv.measure.dashboard.report import Report
from hybrid_kv.measure.results import NO_HEAD, Head
from tests.measure.dashboard import hostile
from tests.measure.dashboard.html import Checkout, section, titles
from tests.measure.dashboard.kinds import everything
from tests.measure.dashboard.rows import history, results, row

REPOSITORY = "https://example.org/a/b"


def pages(
    folder: Path, *rows: dict[str, Any], head: Head = NO_HEAD, repository: str = REPOSITORY
) -> dict[str, str]:
    """By the first five letters of the commit."""
    made = build_commits(Report(results(folder, *rows), head, repository))
    return {name[:5]: html for name, html in made}


def test_each_part_says_what_the_commit_changed(tmp_path: Path) -> None:
    made = pages(tmp_path, *everything())
    assert titles(made["00020"]) == {
        "verdict": "No check ran on it",
        "steps": "1 level changed with it or since the run before it, 1 for the worse",
        # their intervals overlap
        "metrics": "None of 2 metrics, beside the commit measured before",
    }
    assert titles(made["00042"]) == {
        "verdict": "✕ fail: 3 of 5 checks",
        "comparison": "1 of 5 benchmarks is slower",
        "metrics": "No commit before it was measured in the same series",
    }
    compared = section(made["00042"], "comparison")
    assert "+8 % (+7 to +9)" in compared and "14 blocks" in compared


def test_what_grew_worse_stands_first_and_the_engine_before_its_rivals(tmp_path: Path) -> None:
    before, after = {"a": 10, "b": 10, "c": 10, "d": 10}, {"a": 9, "b": 11, "c": 20, "d": 40}
    rows = [
        row(
            run,
            {"subject": "list"} if name == "d" else {},
            benchmark=name,
            value=float(value),
            unit="B",
        )
        for run, values in enumerate((before, after))
        for name, value in values.items()
    ]
    own = section(pages(tmp_path, *rows)["00001"], "metrics")
    lines = re.findall(
        r"<tr ><th scope=row>.*?: (\w),.*?<td>(.*?)</td><td><b class=\"(\w+)\">", own
    )
    assert lines == [
        ("c", "+100 %", "worse"),
        ("b", "+10 %", "worse"),
        ("a", "-10 %", "better"),
        ("d", "+300 %", "worse"),
    ]
    assert "3 worse, 1 better of 4 metrics" in own


def test_a_page_leads_to_the_repository_the_report_and_its_neighbours(tmp_path: Path) -> None:
    made = pages(tmp_path, *history([1.0, 2.0, 3.0], unit="B"))
    commit = "00001" * 8
    assert f'<a href="{REPOSITORY}/commit/{commit}"><code>{commit}</code></a>' in made["00001"]
    assert '<a href="../index.html">' in made["00001"]
    for name, neighbours in (
        ("00000", ["00001"]),
        ("00001", ["00000", "00002"]),
        ("00002", ["00001"]),
    ):
        linked = re.findall(r': <a href="(\d{5})\d{7}\.html">', made[name])
        assert linked == neighbours
    assert "/commit/" not in pages(tmp_path / "alone", row(0), repository="")["00000"]


def test_author_day_and_message_come_from_git(tmp_path: Path) -> None:
    page = pages(tmp_path, row(0), head=Checkout("a" * 40))["00000"]
    assert (
        "<h1>cache: &lt;i&gt;tidy&lt;/i&gt;</h1>" in page
        and "A &lt;b&gt;\x1b[31m U, 2026-01-01" in page
    )
    assert "<h1>Commit 0000000</h1>" in pages(tmp_path, row(0))["00000"]


def test_long_tables_are_cut_and_say_so(tmp_path: Path) -> None:
    rows = [
        row(run, {"i": i}, value=float(run), unit="B", verdict="fail" * run)
        for run in (0, 1)
        for i in range(60)
    ]
    page = pages(tmp_path, *rows)["00001"]
    for name in ("verdict", "steps", "metrics"):
        assert section(page, name).count("<tr >") - (name == "verdict") == 50
        assert "and 10 more" in section(page, name)


@pytest.mark.parametrize("columns", hostile.GROUPS, ids="+".join)
def test_hostile_texts_stay_text(columns: list[str]) -> None:
    rows = hostile.hostile_rows(*[name for name in columns if name != "commit"])
    for _, page in build_commits(Report(hostile.results_of(rows), repository=REPOSITORY)):
        body = page.split("<body>")[1]
        tags = set(re.findall(r"<(/?[a-zA-Z!?][\w-]*)", body))
        assert tags <= {f"{end}{tag}" for end in ("", "/") for tag in TAGS}
        assert all(re.fullmatch(LINK, link) for link in re.findall(r'href="(.*?)"', body))


TAGS = {
    "a",
    "b",
    "body",
    "br",
    "code",
    "div",
    "h1",
    "h2",
    "h3",
    "header",
    "html",
    "main",
    "p",
    "section",
    "small",
}
TAGS |= {"span", "table", "tbody", "td", "th", "thead", "tr"}
LINK = r"\.\./index\.html|[0-9a-f]{12}\.html|https://example\.org/a/b/commit/[0-9a-f]{40}"


def test_pages_of_an_earlier_report_go_and_other_files_stay(tmp_path: Path) -> None:
    folder = tmp_path / "commits"
    write_commits(Report(results(tmp_path / "a", *history([1.0, 2.0]))), folder)
    (folder / "mine.html").touch()
    write_commits(Report(results(tmp_path / "b", row(1), row(2))), folder)
    assert sorted(file.stem for file in folder.iterdir()) == [
        "000010000100",
        "000020000200",
        "mine",
    ]
    (tmp_path / "file").touch()
    with pytest.raises(HybridKVError, match="cannot be written"):
        write_commits(Report(results(tmp_path / "b")), tmp_path / "file")
        write_commits(Report(results(tmp_path / "b", row(1))), tmp_path / "file")
