"""`hybrid-kv red`: what it prints, when it ends with 1, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli import run as cli
from tests.measure.dashboard.html import Checkout
from tests.measure.dashboard.rows import history, row, write

GUARD = {"suite": "guard", "benchmark": "layout", "metric": "views", "unit": "views"}


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    return cli.run(capsys, "red", *arguments)


def rows(*verdicts: str) -> list[dict[str, object]]:
    return [row(number, verdict=verdict, **GUARD) for number, verdict in enumerate(verdicts)]


def test_it_prints_what_fails_since_which_commit_and_author(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hybrid_kv.measure.results.head", lambda: Checkout("a" * 40))
    level = history([10.0, 12.0, 12.0], unit="blocks", metric="held")
    write(tmp_path / "rows", [*rows("pass", "fail", "fail"), *level])
    code, out, err = run(capsys, "--results", tmp_path / "rows", "--markdown", tmp_path / "red.md")
    assert (code, err) == (1, "")
    assert out.splitlines() == [
        "✕ fail  guard: layout, views: 100 views",
        "    since 0000100001, 2026-01-02, A <b>\ufffd[31m U; last passed: 0000000000, 2026-01-01",
        "+20 % worse  state_update: slots, held: 10 blocks → 12 blocks",
        "    since 0000100001, 2026-01-02, A <b>\ufffd[31m U; last passed: 0000000000, 2026-01-01",
        "1 check failed, 1 level is worse",
    ]
    assert (tmp_path / "red.md").read_text().count("\n| `") == 2


def test_with_the_rows_of_before_only_new_failures_count(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, now, table = tmp_path / "before", tmp_path / "now", tmp_path / "red.md"
    write(before, rows("pass", "fail"))
    write(now, rows("pass", "fail", "fail"))
    assert run(capsys, "--results", now, "--before", before, "--markdown", table) == (
        0,
        "Nothing is failing\n",
        "",
    )
    assert not table.exists()
    level = history([10.0, 10.0, 12.0], unit="blocks", metric="held")
    write(now, [*rows("pass", "fail", "fail"), *level])
    code, out, _ = run(capsys, "--results", now, "--before", before, "--markdown", table)
    assert code == 1 and out.splitlines()[-1] == "1 level is worse, and was not before"
    assert "guard" not in out + table.read_text() and "held" in table.read_text()


def test_json_has_the_commits_and_levels(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, history([10.0, 12.0], unit="blocks"))
    code, out, _ = run(capsys, "--results", tmp_path, "--json")
    (one,) = json.loads(out)
    assert (code, one["word"], one["was"], one["is"]) == (1, "worse", 10.0, 12.0)
    assert (one["since"]["commit"][:5], one["last_passed"]["commit"][:5]) == ("00001", "00000")
    write(tmp_path, rows("fail"))
    assert json.loads(run(capsys, "--results", tmp_path, "--json")[1])[0]["last_passed"] is None
