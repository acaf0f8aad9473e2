"""A tile for each suite on each machine, with what it was measured on."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.dashboard.html import page_of, section
from tests.dashboard.rows import results, row

pytest.importorskip("plotly", reason="the report needs plotly: pip install -e '.[report]'")


def test_each_suite_and_machine_has_a_tile(full: str) -> None:
    tiles = re.findall(
        r'<li class="tile" data-machine="(.*?)"><b class="(.*?)">.*?class="name">(.*?)<', section(full, "verdict")
    )
    assert ("rack, H200", "fail", "guard") in tiles and ("box", "stale", "guard") in tiles
    assert ("", "stale", "static kernel metrics") in tiles


def test_a_suite_that_was_timed_on_an_unfit_machine_says_so(tmp_path: Path) -> None:
    guard = {"suite": "guard", "benchmark": "block ids", "unit": "", "verdict": "pass"}
    rows = [row(1, {"unfit": "others took 33% <b>"}, **guard), row(1, machine="rack", **guard)]
    page = page_of(results(tmp_path, *rows))
    assert section(page, "verdict").count("not fit for times: others took 33% &lt;b&gt;</span></li>") == 1
