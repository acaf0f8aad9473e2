"""The page as a whole: what is missing, what it links and fetches, what it rejects."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hybrid_kv.config import ConfigError
from tests.dashboard import hostile
from tests.dashboard.html import cells, data, page_of, section, titles
from tests.dashboard.kinds import everything
from tests.dashboard.rows import results

pytest.importorskip("plotly", reason="the report needs plotly: pip install -e '.[report]'")


def test_commits_are_linked_only_where_the_user_says(full: str, tmp_path: Path) -> None:
    assert f'<a href="https://example.org/a/b/commit/{"f" * 40}">fffffff</a>' in full
    assert data(full)["repository"] == "https://example.org/a/b"
    plain = page_of(results(tmp_path, *everything()))
    assert "/commit/" not in plain.split("<script>")[0]


def test_what_is_missing_names_its_command(full: str, tmp_path: Path) -> None:
    page = page_of(results(tmp_path))
    missing = dict(cells(section(page, "missing")))
    assert missing["verdict"] == "<code>hybrid-kv guard --record</code>"
    assert missing["other engines"] == "<code>make bench</code>"
    assert set(titles(page)) == {"history", "missing"} and "no rows yet" in page
    assert "missing" not in titles(full)


@pytest.mark.parametrize(
    "columns", [("machine", "device", "commit", "baseline_commit", "params"), ("unit", "metric", "benchmark")]
)
def test_hostile_texts_stay_text(columns: tuple[str, ...]) -> None:
    page = page_of(hostile.results_of(hostile.hostile_rows(*columns)), "https://example.org/a")
    own = page.split("<main>")[1].split("</main>")[0]
    assert not re.findall(r"<(?:img|iframe|base|meta|object|form|style|textarea|svg)\b", own)
    assert set(re.findall(r"<script[^>]*>", own)) == {
        '<script type="application/json" id="headlines">',
        '<script type="application/json" id="history-data">',
    }
    assert not re.findall(r"<[^>]* on\w+=", re.sub(r'"[^"]*"', '""', own))


@pytest.mark.parametrize("url", ["javascript:alert(1)", "example.org/a", 'https://x/"onclick="', "https://x/ y"])
def test_a_repository_is_a_web_address(tmp_path: Path, url: str) -> None:
    with pytest.raises(ConfigError, match="is not the URL of a repository"):
        page_of(results(tmp_path), url)


def test_nothing_is_fetched(full: str) -> None:
    outside = full.split("<script>")[0]
    assert "default-src 'none'" in outside
    assert not re.findall(r"<(?:script|link|img|iframe)[^>]*(?:src|href)=", outside)
