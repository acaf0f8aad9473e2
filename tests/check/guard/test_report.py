"""The command: what it prints, writes and returns."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import hybrid_kv.measure.guard_checks  # noqa: F401  (registers them)
from hybrid_kv.check.guard.registry import CHECKS, CheckResult, Run, load_checks
from hybrid_kv.measure.results import metric_key, read_rows
from tests.cli.run import printed, raising


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A guard of a section of toys, and one that a test replaces."""

    def ratio(run: Run) -> list[CheckResult]:
        return [
            CheckResult("list over the engine", 2.0, "time ratio", ">= 1", 1, section="block ids")
        ]

    load_checks()
    for section in CHECKS:
        change(monkeypatch, section, quick=int(section in ("block ids", "guard model")))
    change(monkeypatch, "block ids", function=ratio)


def change(monkeypatch: pytest.MonkeyPatch, section: str, **changes: Any) -> None:
    monkeypatch.setitem(CHECKS, section, replace(CHECKS[section], **changes))


QUICK = ("guard", "--quick", "--jobs", "1")


def test_a_clean_run_exits_0_and_writes_a_row_per_check(
    small: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clean = {
        "exact model": CheckResult("wrong tokens, exact model", 0, "requests", "0", 20),
        "guard model": CheckResult(
            "largest logit difference", 1e-13, "logit", "1e-09", 9, metrics={"cached_tokens": 3}
        ),
        "accuracy": CheckResult(
            "share of right answers", 0.9, "share", ">= 0.8", 9, interval=(0.8, 1.0)
        ),
    }
    for section, result in clean.items():
        found = replace(result, section=section, seconds=0.5)
        change(monkeypatch, section, quick=1, function=lambda run, found=found: [found])
    out = tmp_path / "out.json"
    table = printed(capsys, *QUICK, "--results", tmp_path / "results", "--out", out)
    document = json.loads(out.read_text())
    rows = read_rows(tmp_path / "results" / "guard.csv")
    assert document["passed"]
    numbers = rows[rows["metric"].str.contains(":")]
    (whole,) = rows[rows["benchmark"] == "whole"].itertuples()
    assert (whole.params, whole.metric, whole.n, whole.verdict) == (
        '{"size":"quick"}',
        "seconds",
        len(document["checks"]),
        "",
    )
    assert whole.value >= 1.5  # three checks of half a second each
    rows = rows[~rows["metric"].str.contains(":") & (rows["benchmark"] != "whole")]
    assert [metric_key(check["name"]) for check in document["checks"]] == rows["metric"].tolist()
    assert [check["value"] for check in document["checks"]] == pytest.approx(rows["value"].tolist())
    assert {"wrong_tokens/exact_model:limit", "wrong_tokens/exact_model:seconds"} <= set(
        numbers["metric"]
    )
    assert (numbers["verdict"] == "").all()
    assert {check["section"] for check in document["checks"]} == {
        "exact model",
        "guard model",
        "accuracy",
        "block ids",
    }
    assert (rows["verdict"] == "pass").all()
    assert f"{len(rows)} of {len(rows)} checks passed" in table


def test_a_check_that_crashes_has_failed(
    small: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    change(monkeypatch, "guard model", function=raising(IndexError("block 99 of 10")))
    assert "IndexError: block 99 of 10" in printed(capsys, *QUICK, "--results", tmp_path, code=1)
