"""Floors: how they follow from runs, what a file may hold, what the command does with them."""

from __future__ import annotations

import dataclasses
import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml
from scipy.stats import betabinom

from hybrid_kv.config import ConfigError, HybridKVError
from hybrid_kv.measure import results
from hybrid_kv.measure.accuracy import run, threshold
from hybrid_kv.measure.accuracy.threshold import Floor, floor_of
from tests.cli.run import refused
from tests.measure.dashboard.rows import row, write
from tests.support.answers import call, result_of

COMMIT, OLDER = "c" * 40, "b" * 40
PLAIN = {
    "model": "guard_model",
    "task": "gsm8k_synth",
    "limit": 250,
    "num_fewshot": 5,
    "lm_eval": "0.4.13",
}


def rows(scores: list[float], seeds: list[int] | None = None, **changes: Any) -> pd.DataFrame:
    """Return rows of both filters with these strict scores; flexible ones are a little higher."""
    params = changes.pop("params", PLAIN)
    made = []
    same = {
        "commit": COMMIT,
        "suite": "accuracy",
        "benchmark": "gsm8k_synth",
        "unit": "",
        "n": 250,
    } | changes
    for i, score in enumerate(scores):
        own = params | {"seed": i if seeds is None else seeds[i]}
        for metric, value in (
            ("exact_match_strict", score),
            ("exact_match_flexible", min(1.0, score + 0.004)),
        ):
            made.append(
                row(i, own, metric=metric, value=value, run_id=f"{same['commit'][:1]}{i}", **same)
            )
    return pd.DataFrame(made)


def strict(frame: pd.DataFrame, task: str = "gsm8k_synth") -> Floor:
    return threshold.floor_from_rows(frame, "guard_model", task, run.STRICT, 250)


def test_a_floor_from_ten_runs() -> None:
    scores = [0.84, 0.92, 0.88, 0.91, 0.93, 0.90, 0.86, 0.92, 0.90, 0.98]
    floor = strict(rows(scores))
    assert (floor.runs, floor.distinct, floor.questions, floor.commit) == (10, 2500, 250, COMMIT)
    assert floor.mean == pytest.approx(statistics.mean(scores)) and floor.sd == pytest.approx(
        statistics.stdev(scores)
    )
    assert (
        floor.floor
        == floor_of(floor.mean, floor.sd, 250, 2500)
        == pytest.approx(floor.mean - 4 * floor.sd)
    )
    assert floor.date == "2026-01-10"
    flexible = threshold.floor_from_rows(
        rows(scores), "guard_model", "gsm8k_synth", run.FLEXIBLE, 250
    )
    assert flexible.mean == pytest.approx(floor.mean + 0.004)


def test_without_spread_the_floor_uses_binomial_uncertainty() -> None:
    # Different questions, no mistake in any: the first mistakes are no alarm.
    floor = strict(rows([1.0] * 12))
    assert floor.sd == 0 and floor.floor == pytest.approx(0.988)
    # A floor is missed by the next run with the chance of four standard deviations.
    for distinct, mean in ((3000, 1.0), (2500, 0.6), (250, 0.9)):
        misses = round(floor_of(mean, 0.0, 250, distinct) * 250)
        next_run = betabinom(250, mean * distinct + 0.5, (1 - mean) * distinct + 0.5)
        assert next_run.cdf(misses - 1) < 3.2e-5 <= next_run.cdf(misses) + 1e-6
    # The same questions twelve times, always the same answers: they count once.
    again = strict(rows([1.0] * 12, seeds=[0] * 12))
    assert again.distinct == 250 and again.floor == pytest.approx(0.952)
    # The same questions with other answers: now sd tells, but never less than a question.
    assert floor_of(0.62, 0.007, 1319, 1319) == pytest.approx(0.62 - 0.028)
    assert floor_of(0.62, 0.0001, 1319, 1319) == pytest.approx(0.62 - 4 / 1319)
    assert floor_of(0.01, 0.1, 250, 250) == 0
    # Other questions every time: sd may be small by luck.
    assert floor_of(0.9, 0.0001, 250, 2500) < 0.85


def test_seeds_of_gsm8k_choose_shots_not_questions() -> None:
    frame = rows([0.62, 0.63] * 5, benchmark="gsm8k")
    assert strict(frame, "gsm8k").distinct == 250


def test_false_alarms_of_a_floor_are_rare() -> None:
    rng = np.random.default_rng(3)
    alarms = 0
    for _ in range(300):
        before = rng.binomial(250, 0.97, size=10) / 250
        floor = floor_of(before.mean(), before.std(ddof=1), 250, 2500)
        alarms += int((rng.binomial(250, 0.97, size=200) / 250 < floor).sum())
        assert (
            rng.binomial(250, 0.80, size=20) / 250 < floor
        ).mean() > 0.9  # 17 points down is seen
    assert alarms <= 12  # of 60,000; 3.2e-5 would be 2


@pytest.mark.parametrize(
    "frame",
    [
        rows([0.9] * 9),
        rows([0.9] * 12, dirty=True),
        rows([0.9] * 12, commit=""),
        rows([0.9] * 12, n=249),
        rows([0.9] * 12, suite="guard"),
        rows([0.9] * 12, benchmark="gsm8k"),
        rows([0.9] * 12, params=PLAIN | {"model": "other"}),
        rows([0.9] * 12, params=PLAIN | {"mamba_cache_mode": "all"}),
        pd.concat([rows([0.9] * 9), rows([0.9] * 9, commit=OLDER)]),  # of two commits
        pd.concat([rows([0.9] * 9)] * 2),  # the same runs, doubled
    ],
)
def test_fewer_than_ten_clean_plain_runs_are_refused(frame: pd.DataFrame) -> None:
    with pytest.raises(
        HybridKVError, match=r"\d clean runs of guard_model on 250 .*a floor takes 10"
    ):
        strict(frame.reset_index(drop=True))


def test_the_newest_commit_with_ten_runs_counts() -> None:
    frame = pd.concat(
        [rows([0.8] * 10, commit=OLDER), rows([0.9] * 10), rows([0.1] * 2, commit="d" * 40)]
    )
    assert strict(frame.reset_index(drop=True)).mean == pytest.approx(0.9)


def test_a_floor_that_cannot_alarm_is_refused() -> None:
    with pytest.raises(HybridKVError, match="would be 0"):
        strict(rows([0.0, 0.02] * 5))


FLOOR = strict(rows([0.9, 0.92] * 6))


def test_a_file_of_floors_keeps_the_others(tmp_path: Path) -> None:
    file = tmp_path / "t.yaml"
    other = dataclasses.replace(FLOOR, model="another")
    assert threshold.write_floor(FLOOR, file) is None
    assert threshold.write_floor(other, file) is None
    newer = strict(rows([0.93, 0.95] * 6))
    assert threshold.write_floor(newer, file) == FLOOR
    assert threshold.read_floors(file) == sorted([newer, other], key=lambda floor: floor.key)
    assert threshold.find_floor("guard_model", "gsm8k_synth", run.STRICT, 250, file) == newer
    assert [path.name for path in tmp_path.iterdir()] == ["t.yaml"]
    for key, message in (
        (
            ("guard_model", "gsm8k_synth", run.STRICT, 50),
            r"no floor for .*50 questions; there is one for --limit 250",
        ),
        (("guard_model", "gsm8k", run.STRICT, 250), "no floor for guard_model, gsm8k"),
        (("guard_model", "gsm8k_synth", run.FLEXIBLE, 250), "no floor"),
    ):
        with pytest.raises(ConfigError, match=message):
            threshold.find_floor(*key, file)


ENTRY = dataclasses.asdict(FLOOR)


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ("floors: [", "cannot be read"),
        ("[" * 100_000, "cannot be read: maximum recursion depth"),
        ("", "must hold a list 'floors' and nothing else"),
        ({"floors": {}}, "must hold a list"),
        ({"floors": [], "tolerance": 0.08}, "must hold a list 'floors' and nothing else"),
        ({"floors": [1]}, "entry 1: .* must be a mapping, not int"),
        ({"floors": [ENTRY | {"rtol": 0.08}]}, "entry 1: .* unexpected keyword argument 'rtol'"),
        (
            {"floors": [{k: v for k, v in ENTRY.items() if k != "sd"}]},
            "entry 1: .* missing 1 .*: 'sd'",
        ),
        (
            {"floors": [ENTRY | {"floor": FLOOR.floor - 0.01}]},
            "does not follow from the runs.*was it edited",
        ),
        ({"floors": [ENTRY | {"runs": 9}]}, "9 are too few for a floor; it takes 10"),
        ({"floors": [ENTRY | {"runs": "12"}]}, "runs: '12' is not of type int"),
        ({"floors": [ENTRY | {"questions": 0}]}, "questions: 0 must be 1 to 1,000,000"),
        ({"floors": [ENTRY | {"distinct": 10**18}]}, f"distinct: {10**18} must be 1 to 1,000,000"),
        ({"floors": [ENTRY, ENTRY]}, "entry 2: .* is there twice"),
    ],
)
def test_a_file_that_no_tool_wrote_is_refused(
    tmp_path: Path, document: object, message: str
) -> None:
    file = tmp_path / "t.yaml"
    file.write_text(document if isinstance(document, str) else yaml.safe_dump(document))
    with pytest.raises(ConfigError, match=message):
        threshold.read_floors(file)


def test_the_repositorys_floors_follow_from_its_own_rows() -> None:
    frame = results.read_rows(threshold.FILE.parents[3] / "results" / "accuracy.csv")
    floors = threshold.read_floors()
    assert {(floor.model, floor.task, floor.filter) for floor in floors} >= {
        ("guard_model", "gsm8k_synth", name) for name in threshold.METRICS
    }
    for floor in floors:
        # Later commits may have runs of their own: those of the entry's commit are what it was made
        # from.
        own = frame[frame["commit"] == floor.commit].reset_index(drop=True)
        assert threshold.floor_from_rows(own, *floor.key) == floor


@pytest.mark.parametrize(("right", "passed"), [(206, True), (205, False)])
@pytest.mark.parametrize("answer_filter", [run.STRICT, run.FLEXIBLE])
def test_check_floor_on_the_command_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    right: int,
    passed: bool,
    answer_filter: str,
) -> None:
    file, out = tmp_path / "t.yaml", tmp_path / "accuracy.csv"
    floor = dataclasses.replace(FLOOR, filter=answer_filter)
    assert 205 / 250 < floor.floor == 206 / 250
    threshold.write_floor(floor, file)
    monkeypatch.setattr(threshold.find_floor, "__defaults__", (file,))
    word = {run.STRICT: "right", run.FLEXIBLE: "flexible"}[answer_filter]
    made = result_of([word] * right + ["wrong"] * (250 - right))
    monkeypatch.setattr(run, "evaluate", lambda *_, **__: made)
    code, printed, _ = call(
        capsys, "--check-floor", "--filter", answer_filter, "--results", tmp_path
    )
    assert code == (0 if passed else 1)
    assert f"{answer_filter} {right / 250:.2%} {'>=' if passed else '<'} floor" in printed
    verdicts = results.read_rows(out).set_index("metric")["verdict"].to_dict()
    assert verdicts.pop(threshold.METRICS[answer_filter]) == ("pass" if passed else "fail")
    assert set(verdicts.values()) == {""}
    # Found before anything is sent; a run that had fewer questions than it should is not judged.
    monkeypatch.setattr(run, "evaluate", lambda *_, **__: pytest.fail("sent"))
    given = ["--check-floor", "--filter", answer_filter, "--limit", "50", "--results", tmp_path]
    assert "there is one for --limit 250" in refused(capsys, "accuracy", *given)
    with pytest.raises(ConfigError, match="for 250 questions, the run had 249"):
        threshold.check(result_of(["right"] * 249), floor)


def test_the_tool_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, csv = tmp_path / "t.yaml", write(tmp_path, rows([0.9, 0.92] * 6)) / "made.csv"
    code, printed, _ = call(capsys, "threshold", "--rows", csv, "--file", file)
    assert code == 0 and printed.count("12 runs") == 2 and "was" not in printed
    assert {floor.filter for floor in threshold.read_floors(file)} == {run.STRICT, run.FLEXIBLE}
    before = file.read_bytes()
    code, printed, _ = call(capsys, "threshold", "--rows", csv, "--file", file)
    assert code == 0 and f"(was {FLOOR.floor:.2%})" in printed and file.read_bytes() == before
    code, printed, _ = call(
        capsys, "threshold", "--rows", csv, "--file", file, "--json", "--out", tmp_path / "t.json"
    )
    floors = json.loads(printed)["floors"]
    assert {one["filter"] for one in floors} == {run.STRICT, run.FLEXIBLE} and {
        one["runs"] for one in floors
    } == {12}
    assert json.loads((tmp_path / "t.json").read_text())["floors"] == floors
    assert "0 clean runs" in refused(
        capsys, "accuracy", "threshold", "--rows", csv, "--file", file, "--limit", "100"
    )
    refused(capsys, "accuracy", "threshold", "--rows", tmp_path / "nowhere.csv")
    assert "Invalid value for '--limit'" in refused(capsys, "accuracy", "threshold", "--limit", "0")
