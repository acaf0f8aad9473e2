"""`hybrid-kv predict`: JSON, the table, and what it refuses in one line."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.cli.run import printed, refused

NANO = "examples/nemotron-3-nano/config.json"


def document(capsys: pytest.CaptureFixture[str], *args: object) -> dict[str, Any]:
    return json.loads(printed(capsys, "predict", NANO, "--json", *args))  # type: ignore[no-any-return]


def test_json_has_each_kernel_and_calls_itself_predicted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = document(capsys, "--gpu", "H100", "--batch", 8, "--batch", 64, "--weights", "6GB")
    assert (found["kind"], found["gpu"], found["weight_bytes"]) == ("predicted", "h100", 6 * 10**9)
    assert [step["batch"] for step in found["steps"]] == [8, 64]
    for step in found["steps"]:
        assert [kernel["name"] for kernel in step["kernels"]] == [
            "conv",
            "update",
            "attention",
            "tables",
            "weights",
        ]
        assert step["low"] < step["us"] < step["high"]
        assert step["us"] == pytest.approx(sum(kernel["us"] for kernel in step["kernels"]) + 5.8)


def test_a_scheme_has_its_price(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--gpu", "h200", "--batch", 128, "--num-speculative-tokens", 3)
    slots, recompute = (
        document(capsys, *flags, "--state-scheme", name) for name in ("slots", "recompute")
    )
    before, after = (found["steps"][0]["kernels"][1] for found in (slots, recompute))
    assert before["name"] == "update"
    assert before["num_bytes"] > 5 * after["num_bytes"] and before["us"] > 4 * after["us"]


def test_the_table_says_that_it_is_predicted(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, "predict", NANO, "--gpu", "b200", "--batch", 4, "--eager")
    assert "predicted µs of the cache's kernels" in out and out.rstrip().endswith("host")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--gpu", "h900"), "--gpu h900: no constants for it; use one of a100, h100"),
        (("--gpu", "h100", "--acceptance", "1.5"), "'--acceptance'…1.5"),
        (("--gpu", "h100", "--waits", "-1"), "'--waits'…-1"),
        (("--gpu", "h100", "--batch", "0"), "'--batch'…0"),
    ],
)
def test_what_cannot_be_predicted_is_one_line(
    capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], message: str
) -> None:
    said = refused(capsys, "predict", NANO, *flags)
    assert all(part in said for part in message.split("…"))
