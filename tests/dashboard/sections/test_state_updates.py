"""Bytes and times of both schemes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dashboard.html import figures, page_of, section, titles
from tests.dashboard.kinds import everything
from tests.dashboard.rows import RECEIPT, results, row

pytest.importorskip("plotly", reason="the report needs plotly: pip install -e '.[report]'")


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
    found = figures(section(page_of(results(tmp_path, *rows)), "slots-and-replay"))
    assert len(found) == 2
    first = {trace["name"]: trace["y"] for trace in found[0]["data"]}
    assert first == {"slots": [9, 27], "replay": [3.016, 3.016]}
    assert found[0]["layout"]["yaxis"]["title"]["text"] == "µs"


def test_a_step_that_flushes_is_on_the_axis_of_both_schemes(tmp_path: Path) -> None:
    rows = [
        row(0, {"receipt": RECEIPT, "model": "nano", "K": k} | flush, benchmark=scheme, value=value + k, unit="us")
        for k in (1, 3)
        for scheme, flush, value in (
            ("slots", {}, 9.0),
            ("replay", {"flush": False}, 3.0),
            ("replay", {"flush": True}, 4.0),
        )
    ]
    (figure,) = figures(section(page_of(results(tmp_path, *rows)), "slots-and-replay"))
    assert {trace["name"]: trace["y"] for trace in figure["data"]} == {
        "replay": [4, 6],
        "replay, a step that flushes": [5, 7],
        "slots": [10, 12],
    }


def test_more_bytes_for_replay_are_said_so(tmp_path: Path) -> None:
    rows = [one | {"value": 9e9} if "replay" in one["params"] else one for one in everything()]
    assert titles(page_of(results(tmp_path, *rows)))["slots-and-replay"] == (
        "Replay moves more bytes than slots in 2 of 2 cases"
    )
