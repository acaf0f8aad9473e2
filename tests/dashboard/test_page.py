"""What the page says, and what it refuses; how it looks and behaves is `test_chromium.py`."""

from __future__ import annotations

import itertools
import json
import re
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from hybrid_kv.config import ConfigError, HybridKVError
from hybrid_kv.dashboard import draw
from hybrid_kv.dashboard.data import Results, load
from hybrid_kv.dashboard.page import build_page, write_page
from tests.dashboard.kinds import everything
from tests.dashboard.rows import RECEIPT, history, results, row

pytest.importorskip("plotly", reason="the report needs plotly: pip install -e '.[report]'")


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> str:
    return build_page(results(tmp_path_factory.mktemp("rows"), *everything()), "https://example.org/a/b/")


def section(html: str, anchor: str) -> str:
    found = re.search(rf'<section id="{anchor}">.*?</section>', html, re.DOTALL)
    assert found, anchor
    return found[0]


def titles(html: str) -> dict[str, str]:
    found = re.findall(r'<section id="([\w-]+)"><p class="kind">[^<]*</p><h2>(.*?)</h2>', html)
    return {anchor: unescape(title) for anchor, title in found}


def data(html: str) -> dict[str, Any]:
    found = re.search(r'id="history-data">(.*?)</script>', html, re.DOTALL)
    assert found
    return json.loads(found[1])  # type: ignore[no-any-return]


def figures(html: str) -> list[dict[str, Any]]:
    return [json.loads(text) for text in re.findall(r'<script type="application/json">(.*?)</script></figure>', html)]


def test_each_section_says_what_it_found(full: str) -> None:
    assert titles(full) == {
        "verdict": "✕ fail: 51 of 54 checks of the newest runs",
        "history": "1 of 116 series changed their level, once for the worse",
        "comparison": "1 of 4 benchmarks is slower than fffffff",
        "block-ids": "One append of block ids takes 2 to 4 times as long without staging",
        "slots-and-replay": "Replay moves 4 to 6.7 times fewer bytes than slots",
        "gpu": "Our kernels move their bytes at 22 to 75 % of the bandwidth of a copy",
        "accuracy": "Right answers: 98.0 % of 250 questions of gsm8k_synth",
        "hits-and-drafts": "Caching costs no accepted draft: hits and drafts by cache mode",
        "kernels": "None of 2 kernels spills a register on sm_90, gfx942",
        "operating-curve": "1 of 50 comparisons of equal code raised an alarm; a planted 5 % is found in 95 % of the "
        "trials or more; 1 quarantined",
    }


def test_what_failed_is_listed_with_its_limit(full: str) -> None:
    failed = re.findall(r"<tr [^>]*><th scope=row>(.*?)</tr>", section(full, "verdict"))
    assert len(failed) == 3
    assert any("compare: engine_step/decode" in line and "1.08×" in line for line in failed)
    assert any("guard: layout" in line and "3 requests" in line and "<td>0</td>" in line for line in failed)


def test_a_quarantined_benchmark_fails_nothing(tmp_path: Path) -> None:
    rows = [one for one in everything() if one["suite"] == "operating_curve"]
    page = build_page(results(tmp_path, *rows))
    assert titles(page)["verdict"] == "No check has said pass or fail yet"
    assert "wild/step [K=3] (quarantined)" in json.dumps(figures(page)).replace("<br>", " ")


def test_commits_are_linked_only_where_the_user_says(full: str, tmp_path: Path) -> None:
    assert f'<a href="https://example.org/a/b/commit/{"f" * 40}">fffffff</a>' in full
    assert data(full)["repository"] == "https://example.org/a/b"
    plain = build_page(results(tmp_path, *everything()))
    assert "/commit/" not in plain.split("<script>")[0]
    assert data(plain)["repository"] == ""


def test_the_history_has_levels_steps_and_both_commits(full: str) -> None:
    document = data(full)
    (series,) = [s for s in document["series"] if s["steps"]]
    assert series["machine"] == "rack, H200"
    assert [level["value"] for level in series["levels"]] == [101, 121]
    assert [(step["word"], step["time"]) for step in series["steps"]] == [("worse", series["time"][20])]
    assert document["series"][document["start"]] == series
    assert sum(series["dirty"]) == 1
    assert [document["commits"][c][:5] for c in series["commit"]][:3] == ["00000", "00001", "00002"]
    listed = section(full, "history")
    assert "0001900…" in re.sub(r"<[^>]*>|\s", "", listed)
    assert "101 ns → 121 ns" in listed and "+19.8 %" in listed
    assert "95 % interval" in listed


def test_series_without_a_level_are_not_in_the_history(full: str) -> None:
    assert {s["suite"] for s in data(full)["series"]} == {
        "guard",
        "state_update",
        "kernel_blocks",
        "kernels",
        "gpu",
        "accuracy",
    }


def test_every_interval_is_drawn_where_the_rows_have_one(full: str, tmp_path: Path) -> None:
    axes = [trace.get("error_y") or trace.get("error_x") for figure in figures(full) for trace in figure["data"]]
    assert axes and all(axes)
    (engine,) = [t for f in figures(section(full, "block-ids")) for t in f["data"] if t["name"] == "engine"]
    assert engine["y"] == [401, 416, 656]
    assert engine["error_y"]["array"] == pytest.approx([40.1, 41.6, 65.6])
    assert engine["error_y"]["arrayminus"] == pytest.approx([40.1, 41.6, 65.6])


def test_rounding_makes_no_negative_interval(tmp_path: Path) -> None:
    same = {"suite": "accuracy", "benchmark": "t", "metric": "exact_match_strict", "unit": "", "n": 250}
    page = build_page(results(tmp_path, row(0, value=1.0, ci_low=0.98, ci_high=0.9999999999999999, **same)))
    bars = [trace["error_x"] for figure in figures(page) for trace in figure["data"] if trace["x"]]
    assert bars[0]["array"] == [0]
    assert bars[0]["arrayminus"] == pytest.approx([2])


def test_the_limit_is_drawn_with_the_schemes(full: str) -> None:
    figure, *timed = figures(section(full, "slots-and-replay"))
    assert {trace["name"]: trace["y"] for trace in figure["data"]} == {
        "replay": [1536, 1536],
        "slots": [2048 * 3, 2048 * 5],
        "limit": [1024, 1024],
    }
    of_box, on_device, of_rack = timed
    assert len(of_box["data"]) == len(of_rack["data"]) == 1  # slots, timed on the host
    assert {trace["name"]: trace["y"] for trace in on_device["data"]} == {"replay": [15, 15], "slots": [20, 40]}


def test_a_gpus_tables_name_every_subject_of_every_case(full: str) -> None:
    text = section(full, "gpu")
    assert re.findall(r"<summary>(.*?)</summary>", text) == ["state_update", "conv_update", "expansion"]
    lines = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", line) for line in re.findall(r"<tr >(.*?)</tr>", text)]
    assert len(lines) == 2 * 4 + 2
    case = "<br><small>K=1, model=nano, num_reqs=16</small>"
    assert lines[0] == [f"slots{case}", "20 µs <small>(18 µs to 22 µs)</small>", "1,500 GB/s", "45 %", ""]
    assert lines[3][0] == f"torch (eager){case}" and lines[3][-1] == "4.5×"
    assert lines[9] == ["triton<br><small>num_rows=256</small>", "9 µs", "", "", ""]


def test_times_of_both_schemes_are_drawn_in_one_unit(tmp_path: Path) -> None:
    rows = [
        row(
            0,
            {"receipt": RECEIPT, "model": "nano", "K": k, "num_reqs": n},
            benchmark=f"{scheme}_kernel",
            value=value,
            unit="us",
        )
        for k in (1, 3)
        for n in (16, 128)
        for scheme, value in (("slots", 9.0 * k), ("replay", 3.0 + n / 1000))
    ]
    found = figures(section(build_page(results(tmp_path, *rows)), "slots-and-replay"))
    assert len(found) == 2
    first = {trace["name"]: trace["y"] for trace in found[0]["data"]}
    assert first == {"slots": [9, 27], "replay": [3.016, 3.016]}
    assert found[0]["layout"]["yaxis"]["title"]["text"] == "µs"


def test_more_bytes_for_replay_are_said_so(tmp_path: Path) -> None:
    rows = [one | {"value": 9e9} if "replay" in one["params"] else one for one in everything()]
    assert titles(build_page(results(tmp_path, *rows)))["slots-and-replay"] == (
        "Replay moves more bytes than slots in 2 of 2 cases"
    )


def test_a_beaten_engine_is_said_so(tmp_path: Path) -> None:
    rows = [
        one | {"value": 0.5} if one["metric"] == "ratio_to_engine" and '"list"' in one["params"] else one
        for one in everything()
    ]
    title = titles(build_page(results(tmp_path, *rows)))["block-ids"]
    assert title == "The engine is beaten in 3 of 9 comparisons of one append"


def test_a_spill_is_said_so(tmp_path: Path) -> None:
    rows = [one | {"value": 8} if one["metric"] == "spill_bytes" else one for one in everything()]
    assert titles(build_page(results(tmp_path, *rows)))["kernels"] == "4 of 4 compiled cases spill registers"


def test_drafts_that_caching_costs_are_said_so(tmp_path: Path) -> None:
    rows = [one | {"params": one["params"].replace('"accepted": 92', '"accepted": 91')} for one in everything()[:9]]
    assert titles(build_page(results(tmp_path, *rows, *everything()[9:])))["hits-and-drafts"].startswith(
        "Caching changes"
    )


def test_paired_tests_have_their_figures(full: str) -> None:
    text = re.sub(r"<[^>]*>", " ", section(full, "accuracy"))
    for figure in (
        "-5.2 points",
        "(-8.4 to -2.0)",
        " 15 ",
        " 2 ",
        "0.0004",
        "3.8 points",
        " 250 ",
        "bbbbbbb to ccccccc",
    ):
        assert figure in text


def test_a_comparison_lists_changed_counts_and_marks_the_quarantined(full: str) -> None:
    own = section(full, "comparison")
    assert "memory/held, mamba" in own and "<td>12</td>" in own and "14 blocks" in own
    (figure,) = figures(own)
    symbols = [symbol for trace in figure["data"] for symbol in trace["marker"]["symbol"]]
    assert sum(symbol.endswith("-open") for symbol in symbols) == 1
    shown = {trace["hovertemplate"].split(":")[0]: trace["x"] for trace in figure["data"]}
    assert shown == {"slower": pytest.approx([8]), "faster": pytest.approx([-10]), "same": pytest.approx([1, 0])}


def test_only_the_newest_comparison_counts(tmp_path: Path) -> None:
    old = [one | {"run_id": "old", "time_utc": "2025-01-01T00:00:00Z", "value": 3.0} for one in everything()]
    page = build_page(results(tmp_path, *[one for one in old if one["suite"] == "compare"], *everything()))
    assert titles(page)["comparison"] == "1 of 4 benchmarks is slower than fffffff"


def test_what_is_missing_names_its_command(full: str, tmp_path: Path) -> None:
    page = build_page(results(tmp_path))
    commands = re.findall(r"<td><code>(.*?)</code>", section(page, "missing"))
    assert {"hybrid-kv guard", "make bench", "hybrid-kv accuracy", "hybrid-kv compare --self-test"} <= set(commands)
    assert set(titles(page)) == {"verdict", "history", "missing"}
    assert "no rows yet" in page
    assert "missing" not in titles(full)
    without = build_page(results(tmp_path / "cpu", *[one for one in everything() if one["suite"] != "gpu"]))
    assert "gpu" not in titles(without)
    assert "expansion by a Triton kernel" in section(without, "missing")
    assert "accuracy compare" not in section(without, "missing")


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    evil = '</script><img src=x onerror="alert(1)">'
    rows = everything()
    for one in rows:
        for name in ("benchmark", "machine", "commit"):
            one[name] = one[name] + evil if name != "benchmark" or one["suite"] == "state_update" else one[name]
    rows += history([1.0, 2.0], suite=evil, benchmark=evil, metric=evil, unit=evil, verdict="fail")
    page = build_page(results(tmp_path, *rows), "https://example.org/a")
    assert "<img src=x" not in page
    assert evil in json.dumps(data(page), ensure_ascii=False).replace('\\"', '"')


@pytest.mark.parametrize("url", ["javascript:alert(1)", "example.org/a", 'https://x/"onclick="', "https://x/ y"])
def test_a_repository_is_a_web_address(tmp_path: Path, url: str) -> None:
    with pytest.raises(ConfigError, match="is no URL of a repository"):
        build_page(results(tmp_path), url)


def test_an_unknown_machine_names_those_there_are(tmp_path: Path) -> None:
    found = results(tmp_path, *everything())
    with pytest.raises(ConfigError, match=r"no row is from machine 'mars'; there are box, rack, H200"):
        build_page(found, machine="mars")
    assert "<option selected>rack, H200</option>" in build_page(found, machine="rack, H200")


def test_nothing_is_fetched(full: str) -> None:
    outside = full.split("<script>")[0]
    assert "default-src 'none'" in outside
    assert not re.findall(r"<(?:script|link|img|iframe)[^>]*(?:src|href)=", outside)


def test_the_page_depends_on_the_rows_alone(tmp_path: Path) -> None:
    found = results(tmp_path, *everything())
    assert build_page(found) == build_page(load(tmp_path))


def test_a_page_is_replaced_whole(tmp_path: Path) -> None:
    assert write_page("one", tmp_path / "a" / "site").read_text() == "one"
    page = write_page("two", tmp_path / "a" / "site")
    assert page.read_text() == "two"
    assert [file.name for file in page.parent.iterdir()] == ["index.html"]
    with pytest.raises(HybridKVError, match="cannot be written"):
        write_page("three", page)


# ---- colours ----


def light(colour: str) -> list[float]:
    """Linear red, green and blue (sRGB, IEC 61966-2-1)."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]


def contrast(one: str, other: str) -> float:
    """WCAG 2.2, from 1 to 21."""
    low, high = sorted(
        sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), light(x), strict=True)) for x in (one, other)
    )
    return (high + 0.05) / (low + 0.05)


def test_marks_are_seen_on_both_pages() -> None:
    for mark, page in itertools.product(draw.MARKS, (draw.LIGHT_PAGE, draw.DARK_PAGE)):
        assert contrast(mark.colour, page) >= 3, (mark, page)


def test_no_two_marks_differ_by_colour_alone() -> None:
    assert len({mark.symbol for mark in draw.MARKS}) == len({mark.dash for mark in draw.MARKS}) == len(draw.MARKS)


def test_text_can_be_read_on_both_pages() -> None:
    styles = (Path(draw.__file__).parent / "page.css").read_text()
    blocks = re.findall(r":root \{(.*?)\}", styles, re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        colours = dict(re.findall(r"--(\w+): (#\w{6})", block))
        assert colours["card"] in (draw.LIGHT_PAGE, draw.DARK_PAGE)
        for name in ("ink", "soft", "link", "pass", "fail", "void"):
            assert min(contrast(colours[name], colours[page]) for page in ("card", "page", "quiet")) >= 4.5, name


def test_results_know_their_files(tmp_path: Path) -> None:
    (tmp_path / "acknowledged.csv").write_text("a,b\n")
    found: Results = results(tmp_path, row())
    page = build_page(found)
    assert "Drawn from made.csv. Of another kind, not read: acknowledged.csv." in page
