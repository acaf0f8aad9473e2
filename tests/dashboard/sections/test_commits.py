"""Each commit that was measured is listed, newest first, with a link to its page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.dashboard.html import page_of, section, titles
from tests.dashboard.rows import history, results, row

pytest.importorskip("plotly", reason="the report needs plotly: pip install -e '.[report]'")


def test_the_newest_come_first_and_older_ones_are_folded(tmp_path: Path) -> None:
    rows = [*history([float(run // 5) for run in range(12)], unit="B"), row(12, dirty=True)]
    page = page_of(results(tmp_path, *rows))
    assert titles(page)["commits"] == "2 of the 12 newest commits changed a figure"
    links = re.findall(r'<a href="(commits/.*?)">(.*?)</a>', section(page, "commits"))
    assert links == [(f"commits/{f'{run:05}' * 8:.12}.html", f"{run:05}00") for run in reversed(range(12))]
    before, _, folded = section(page, "commits").partition("<details>")
    assert before.count('href="commits/') == 8 and folded.count('href="commits/') == 4


def test_without_a_whole_hash_there_is_no_page(tmp_path: Path) -> None:
    assert "commits" not in titles(page_of(results(tmp_path, row(0, commit=""), row(1, commit="abcdef0"))))
