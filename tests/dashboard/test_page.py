"""What the page says, and what it refuses; how it looks and behaves is `test_chromium.py`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hybrid_kv.config import ConfigError, HybridKVError
from hybrid_kv.dashboard.data import Results, load
from tests.dashboard import hostile
from tests.dashboard.html import data, page_of, section, titles, written
from tests.dashboard.kinds import everything
from tests.dashboard.rows import results, row

pytest.importorskip("plotly", reason="the report needs plotly: pip install -e '.[report]'")


def test_each_section_says_what_it_found(full: str) -> None:
    assert titles(full) == {
        "red-now": "3 checks failed, 1 level is worse",
        "verdict": "✕ fail: 52 of 55 checks of the newest runs",
        "history": "1 of 118 series changed their level, once for the worse",
        "commits": "0 of the 44 newest commits changed a figure",
        "comparison": "1 of 5 benchmarks is slower than fffffff",
        "block-ids": "One append of block ids takes 2 to 4 times as long without staging",
        "slots-and-replay": "Replay moves 4 to 6.7 times fewer bytes than slots",
        "gpu": "Our kernels move their bytes at 22 to 75 % of the bandwidth of a copy",
        "accuracy": "Right answers: 98.0 % of 250 questions of gsm8k_synth",
        "hits-and-drafts": "Caching costs no accepted draft: hits and drafts by cache mode",
        "kernels": "None of 2 kernels spills a register on sm_90, gfx942",
        "operating-curve": "1 of 50 comparisons of equal code raised an alarm; a planted 5 % is found in 95 % of the "
        "trials or more; 1 quarantined",
    }


def test_commits_are_linked_only_where_the_user_says(full: str, tmp_path: Path) -> None:
    assert f'<a href="https://example.org/a/b/commit/{"f" * 40}">fffffff</a>' in full
    assert data(full)["repository"] == "https://example.org/a/b"
    plain = page_of(results(tmp_path, *everything()))
    assert "/commit/" not in plain.split("<script>")[0]
    assert data(plain)["repository"] == ""


def test_what_is_missing_names_its_command(full: str, tmp_path: Path) -> None:
    page = page_of(results(tmp_path))
    commands = re.findall(r"<td><code>(.*?)</code>", section(page, "missing"))
    assert {
        "hybrid-kv guard --record",
        "make bench",
        "hybrid-kv accuracy --record",
        "hybrid-kv compare --self-test --record",
    } <= set(commands)
    assert set(titles(page)) == {"verdict", "history", "missing"}
    assert "no rows yet" in page
    assert "missing" not in titles(full)
    without = page_of(results(tmp_path / "cpu", *[one for one in everything() if one["suite"] != "gpu"]))
    assert "gpu" not in titles(without)
    assert "expansion by a Triton kernel" in section(without, "missing")
    assert "accuracy compare" not in section(without, "missing")


def test_hostile_texts_stay_text() -> None:
    """Without a browser; `test_hostile_rows.py` is with one."""
    for columns in (("machine", "device", "commit", "baseline_commit", "params"), ("unit", "metric", "benchmark")):
        page = page_of(hostile.results_of(hostile.hostile_rows(*columns)), "https://example.org/a")
        own = page.split("<main>")[1].split("</main>")[0]
        assert not re.findall(r"<(?:img|iframe|base|meta|object|form|style|textarea)\b", own), columns
        assert set(re.findall(r"<script[^>]*>", own)) <= {
            '<script type="application/json">',
            '<script type="application/json" id="headlines">',
            '<script type="application/json" id="history-data">',
        }


@pytest.mark.parametrize("url", ["javascript:alert(1)", "example.org/a", 'https://x/"onclick="', "https://x/ y"])
def test_a_repository_is_a_web_address(tmp_path: Path, url: str) -> None:
    with pytest.raises(ConfigError, match="is no URL of a repository"):
        page_of(results(tmp_path), url)


def test_an_unknown_machine_names_those_there_are(tmp_path: Path) -> None:
    found = results(tmp_path, *everything())
    with pytest.raises(ConfigError, match=r"no row is from machine 'mars'; there are box, rack, H200"):
        page_of(found, machine="mars")
    assert "<option selected>rack, H200</option>" in page_of(found, machine="rack, H200")


def test_nothing_is_fetched(full: str) -> None:
    outside = full.split("<script>")[0]
    assert "default-src 'none'" in outside
    assert not re.findall(r"<(?:script|link|img|iframe)[^>]*(?:src|href)=", outside)


def test_the_page_depends_on_the_rows_alone(tmp_path: Path) -> None:
    found = results(tmp_path, *everything())
    assert page_of(found) == page_of(load(tmp_path))


def test_a_page_is_replaced_whole(tmp_path: Path) -> None:
    assert written("one", tmp_path / "a" / "site").read_text() == "one"
    page = written("two", tmp_path / "a" / "site")
    assert page.read_text() == "two"
    assert [file.name for file in page.parent.iterdir()] == ["index.html"]
    with pytest.raises(HybridKVError, match="cannot be written"):
        written("three", page)


def test_results_know_their_files(tmp_path: Path) -> None:
    (tmp_path / "acknowledged.csv").write_text("a,b\n")
    found: Results = results(tmp_path, row())
    page = page_of(found)
    assert "Drawn from made.csv. Of another kind, not read: acknowledged.csv." in page
