"""What did not pass is listed with what it should have been."""

from __future__ import annotations

import re

import pytest

from tests.dashboard.html import section

pytest.importorskip("plotly", reason="the report needs plotly: pip install -e '.[report]'")


def test_what_failed_is_listed_with_its_limit(full: str) -> None:
    failed = re.findall(r"<tr [^>]*><th scope=row>(.*?)</tr>", section(full, "verdict"))
    assert len(failed) == 3
    assert any("compare: engine_step/decode" in line and "1.08×" in line for line in failed)
    assert any("guard: layout" in line and "3 requests" in line and "<td>0</td>" in line for line in failed)
