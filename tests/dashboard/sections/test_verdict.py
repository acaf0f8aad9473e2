"""A tile for each suite on each machine, with what it was measured on."""

from __future__ import annotations

import re

import pytest

from tests.dashboard.html import section

pytest.importorskip("plotly", reason="the report needs plotly: pip install -e '.[report]'")


def test_each_suite_and_machine_has_a_tile(full: str) -> None:
    tiles = re.findall(
        r'<li class="tile" data-machine="(.*?)"><b class="(.*?)">.*?class="name">(.*?)<', section(full, "verdict")
    )
    assert ("rack, H200", "fail", "guard") in tiles and ("box", "stale", "guard") in tiles
    assert ("", "stale", "static kernel metrics") in tiles
