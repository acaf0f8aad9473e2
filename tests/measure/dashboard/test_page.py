"""The page as a whole: what is missing, what it links and fetches, what it rejects."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hybrid_kv.config import ConfigError
from tests.measure.dashboard import hostile
from tests.measure.dashboard.html import cells, page_of, section, titles, views
from tests.measure.dashboard.kinds import everything
from tests.measure.dashboard.rows import results


def test_commits_are_linked_only_where_the_user_says(full: str, tmp_path: Path) -> None:
    assert f'<a href="https://example.org/a/b/commit/{"f" * 40}">fffffff</a>' in full
    plain = page_of(results(tmp_path, *everything()))
    assert "/commit/" not in plain.split("<script>")[0]


def test_what_is_missing_names_its_command(full: str, tmp_path: Path) -> None:
    page = page_of(results(tmp_path))
    missing = dict(cells(section(page, "missing")))
    assert missing["suites"] == "<code>hybrid-kv guard --record</code>"
    assert missing["other engines"] == "<code>make bench</code>"
    assert set(titles(page)) == {"missing"} and "no rows yet" in page
    assert "missing" not in titles(full)


@pytest.mark.parametrize(
    "columns",
    [("machine", "device", "commit", "baseline_commit", "params"), ("unit", "metric", "benchmark")],
)
def test_hostile_texts_stay_text(columns: tuple[str, ...]) -> None:
    page = page_of(hostile.results_of(hostile.hostile_rows(*columns)), "https://example.org/a")
    own = page.split("<main>")[1].split("</main>")[0]
    assert not re.findall(r"<(?:img|iframe|base|meta|object|form|style|textarea|script)\b", own)
    assert not re.findall(r"<[^>]* on\w+=", re.sub(r'"[^"]*"', '""', own))


@pytest.mark.parametrize(
    "url", ["javascript:alert(1)", "example.org/a", 'https://x/"onclick="', "https://x/ y"]
)
def test_a_repository_is_a_web_address(tmp_path: Path, url: str) -> None:
    with pytest.raises(ConfigError, match="is not the URL of a repository"):
        page_of(results(tmp_path), url)


def test_each_machine_has_a_view_and_one_is_seen(full: str, tmp_path: Path) -> None:
    assert set(views(full)) == {"", "box", "rack, H200"}
    assert "✕ HEAD is wrong" in views(full)[""][0]
    assert "✕ HEAD is worse than it was" in views(full)["box"][0]
    chosen = page_of(results(tmp_path, *everything()), machine="box")
    for page, name in ((full, ""), (chosen, "box")):
        assert re.findall(r'<div data-view="([^"]*)">', page) == [name, name]


def test_nothing_is_fetched(full: str) -> None:
    outside = full.split("<script>")[0]
    assert "default-src 'none'" in outside
    assert not re.findall(r"<(?:script|link|img|iframe)[^>]*(?:src|href)=", outside)
