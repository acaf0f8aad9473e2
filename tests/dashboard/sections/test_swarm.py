"""Seeds per day, what was covered, and the rules that were broken."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hybrid_kv.dashboard.data import SWARM, histories
from hybrid_kv.dashboard.sections.swarm import played_by_day
from tests.dashboard.html import figures, page_of, titles
from tests.dashboard.kinds import swarm, swarms
from tests.dashboard.rows import results

pytest.importorskip("plotly", reason="the report needs plotly: pip install -e '.[report]'")


def test_a_run_that_is_kept_twice_counts_once(tmp_path: Path) -> None:
    found = results(tmp_path, *swarms())
    rows = found.of(SWARM)
    own = rows[rows["machine"] == "box"]
    assert played_by_day(own, "seeds").to_dict() == {"2026-02-01": 1000, "2026-02-02": 4000}
    assert titles(page_of(found))["swarms"] == "Swarms played 95,400 exact requests; the newest broke 2 rules"


def test_rules_that_were_broken_are_listed_as_text(tmp_path: Path) -> None:
    page = page_of(results(tmp_path, *swarms()))
    assert "<th scope=row>copy-bytes</th><td>7</td>" in page and "<th scope=row>&lt;b&gt;tokens</th>" in page
    drawn = json.dumps(figures(page))
    assert "86 of 87" in drawn and "1,700 of 1,814" in drawn


def test_counts_that_grow_have_no_steps(tmp_path: Path) -> None:
    assert not histories(results(tmp_path, *swarms()).rows)


def test_a_swarm_without_a_request_is_no_error(tmp_path: Path) -> None:
    page = page_of(results(tmp_path, *swarm(1, 0, 0, 0, "pass")))
    assert titles(page)["swarms"] == "Swarms played 0 exact requests; the newest broke no rule"
