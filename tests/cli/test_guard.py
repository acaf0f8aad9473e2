"""`hybrid-kv guard`: where its rows go, and what it prints as JSON.

What it runs is tested in tests/check/guard.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from hybrid_kv.check.guard import run as guard_run
from hybrid_kv.check.guard.registry import CheckResult
from hybrid_kv.check.guard.run import GuardRunOptions
from hybrid_kv.measure.results import read_rows
from tests.cli.run import raising, refused, run


@pytest.fixture(autouse=True)
def ran(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[dict[str, Any]]:
    """In an empty folder, a guard that notes its arguments."""
    calls: list[dict[str, Any]] = []

    def note(
        amount: dict[str, int],
        options: GuardRunOptions,
        report: Callable[[list[CheckResult]], object],
    ) -> list[CheckResult]:
        calls.append(vars(options))
        found = [CheckResult("views", 0, "views", "0", 1, section="layout", seconds=0.1)]
        report(found)
        return found

    monkeypatch.setattr(guard_run, "run_guard", note)
    monkeypatch.chdir(tmp_path)
    return calls


@pytest.mark.parametrize(
    ("options", "place"),
    [([], "out"), (["--record"], "results"), (["--results", "nightly"], "nightly")],
)
def test_rows_are_ignored_by_git_unless_they_are_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], place: str
) -> None:
    assert run(capsys, "guard", "--quick", *options)[0] == 0
    assert [str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*.csv")] == [
        f"{place}/guard.csv"
    ]
    if place == "out":
        ignored = (Path(__file__).resolve().parents[2] / ".gitignore").read_text().splitlines()
        assert "/out/" in ignored


def test_json_is_all_that_is_printed_and_the_same_as_in_the_file(
    capsys: pytest.CaptureFixture[str], ran: list[dict[str, Any]]
) -> None:
    code, out, err = run(
        capsys, "guard", "--long", "--seed", "7", "--json", "--out", "deep/guard.json"
    )
    assert (code, err) == (0, "the same run again: hybrid-kv guard --long --seed 7\n")
    document = json.loads(out)
    assert (
        document["passed"]
        and document["seed"] == 7
        and document["checks"][0]["section"] == "layout"
    )
    assert json.loads(Path("deep/guard.json").read_text()) == document
    assert run(capsys, "guard", "--long")[2].endswith(f"--long --seed {ran[-1]['seed']}\n")
    code, out, _ = run(capsys, "guard", "--out", "guard.json")
    assert "1 of 1 checks passed" in out and json.loads(Path("guard.json").read_text())["passed"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ["--record", "--results", "x"],
            "--record and --results x exclude each other; give one of them",
        ),
        (
            ["--record", "-k", "layout"],
            "--record keeps the verdict of the whole guard; leave -k and --only out",
        ),
        (
            ["--record", "--only", "K=3"],
            "--record keeps the verdict of the whole guard; leave -k and --only out",
        ),
        (["--swarm", "0"], "--swarm 0 must be more than 0 hours, and 8,784 at most"),
        (["--swarm", "nan"], "--swarm nan must be more than 0 hours, and 8,784 at most"),
        (
            ["--swarm", "0.5", "--against", "vllm"],
            "--swarm does not go with --against; leave one of them out",
        ),
        (["--ray", "auto"], "--ray is an option of hybrid-kv fuzz"),
        (["--model", "lfm2"], "--model is about another engine: hybrid-kv check ENGINE"),
        (
            ["--results", "x.parquet"],
            "--results x.parquet: a CSV would spoil this data set; name another folder, then",
        ),
        (["--seed", str(2**63)], "Invalid value for '--seed': "),
        (["--quick", "--long"], "--quick and --long exclude each other"),
        (["--replay", "x.json", "--quick"], "--replay does not go with --quick; leave"),
        (["--results", "/dev/null/x"], "results cannot be written to /dev/null/x"),
        (
            ["--out", "/dev/null/x"],
            "/dev/null/x: /dev/null cannot be written: Not a directory; choose another folder",
        ),
    ],
)
def test_what_cannot_be_kept_is_refused_before_the_run(
    capsys: pytest.CaptureFixture[str], ran: list[dict[str, Any]], options: list[str], said: str
) -> None:
    assert refused(capsys, "guard", *options).startswith(f"error: {said}")
    assert not ran


@pytest.mark.parametrize("hours", ["0", "nan", "8785"])
def test_hours_that_cannot_be_played_are_refused(
    capsys: pytest.CaptureFixture[str], hours: str
) -> None:
    said = f"error: --hours {hours} must be more than 0 hours, and 8,784 at most\n"
    assert refused(capsys, "fuzz", "--hours", hours).replace("8,785", "8785") == said


@pytest.mark.parametrize(
    ("details", "code"), [(["void: no hit"], 3), (["void: no hit", "token 3 is 4"], 1), ([], 0)]
)
def test_a_void_check_has_an_exit_code_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    details: list[str],
    code: int,
) -> None:
    checks = [
        CheckResult(f"check {i}", 1, "", "0", 1, text, section="costs")
        for i, text in enumerate(details)
    ]
    monkeypatch.setattr(guard_run, "run_guard", lambda *_, **__: checks)
    found, out, _ = run(capsys, "guard")
    assert found == code and f"0 of {len(checks)} checks passed{', 1 failed' * (code == 1)}" in out
    assert (", 1 void" in out) == (code > 0)


def test_sections_are_chosen_by_a_part_of_their_name(
    capsys: pytest.CaptureFixture[str], ran: list[dict[str, Any]]
) -> None:
    assert (
        run(capsys, "guard", "--only", "lay", "-k", "cost", "--only", "mamba_cache_mode=align")[0]
        == 0
    )
    rest = {"repro": Path("repro"), "fail_fast": False, "jobs": None}
    assert ran == [
        {
            "seed": 0,
            "progress": True,
            "device": "cpu",
            "select": ["cost", "lay"],
            "only": {"mode": "align"},
            **rest,
        }
    ]


def test_what_has_ended_is_on_disk_if_the_next_section_is_interrupted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: Any, report: Any, **options: Any) -> None:
        report(
            [
                CheckResult(
                    "views",
                    3,
                    "views",
                    "0",
                    1,
                    "page 1 is elsewhere",
                    section="layout",
                    seconds=0.1,
                )
            ]
        )
        raise KeyboardInterrupt

    monkeypatch.setattr(guard_run, "run_guard", interrupted)
    code, out, _ = run(capsys, "guard", "--out", "out.json", "--junit-xml", "out.xml")
    assert code == 130 and out.splitlines()[0] == "layout            0.1 s  1 FAILED of 1 checks"
    document = json.loads(Path("out.json").read_text())
    assert not document["passed"] and not document["complete"] and len(document["checks"]) == 1
    assert read_rows("out/guard.csv")["verdict"].tolist()[0] == "fail"
    failures = [one.get("message") for one in ElementTree.parse("out.xml").iter("failure")]
    assert failures == ["page 1 is elsewhere", "ended early: KeyboardInterrupt"]


def test_rows_that_cannot_be_kept_do_not_cost_the_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "hybrid_kv.measure.results.append_rows", raising(OSError(28, "No space left on device"))
    )
    code, out, err = run(capsys, "guard")
    assert (code, err) == (2, "error: No space left on device\n")
    assert out == "layout            0.1 s  1 check ok\n"
