"""What is read, what a series is, whose word is the last, what a page keeps."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from hybrid_kv.config import HybridKVError
from hybrid_kv.dashboard.data import (
    MAX_POINTS,
    Chosen,
    choose_rows,
    fullest_run,
    histories,
    last_words,
    load,
    newest_run,
    newest_series,
    points_per_series,
    thin,
)
from hybrid_kv.dashboard.verdicts import verdicts
from hybrid_kv.dashboard.words import about, duration, number
from hybrid_kv.results.dataset import export_rows
from hybrid_kv.results.store import NAMES, opened
from tests.dashboard.rows import history, results, row, write

# ---- reading ----


def test_every_file_of_the_schema_is_read_in_order_of_time(tmp_path: Path) -> None:
    write(tmp_path, [row(5, value=3.0)], "a.csv")
    write(tmp_path, [row(1, value=1.0), row(9, value=4.0), row(3, value=2.0)], "b.csv")
    found = load(tmp_path)
    assert list(found.rows["value"]) == [1, 2, 3, 4]
    assert found.files == ["a.csv", "b.csv"]


def test_empty_and_foreign_files_and_files_without_rows(tmp_path: Path) -> None:
    (tmp_path / "empty.csv").touch()
    (tmp_path / "cut.csv").write_text("schema,run")
    (tmp_path / "acknowledged.csv").write_text("benchmark,reason\nx,y\n")
    write(tmp_path, [], "header.csv")
    found = load(tmp_path)
    assert found.rows.empty
    assert found.machines == []
    assert found.files == ["cut.csv", "empty.csv", "header.csv"]
    assert found.foreign == ["acknowledged.csv"]
    assert histories(found.rows) == []
    assert verdicts(found.rows) == []


def test_a_missing_folder_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(HybridKVError, match="is no folder with results"):
        load(tmp_path / "none")


def test_params_that_are_no_object_are_one_line(tmp_path: Path) -> None:
    write(tmp_path, [row() | {"params": "[1]"}])
    with pytest.raises(HybridKVError, match=r"made.csv line 2: column 'params' holds '\[1\]'"):
        load(tmp_path)


def test_a_machine_with_a_gpu_is_another_machine(tmp_path: Path) -> None:
    found = results(tmp_path, row(0), row(1, device="H200"), row(2, device=""))
    assert list(found.rows["machine"]) == ["box", "box, H200", "box"]
    assert found.machines == ["box", "box, H200"]


def test_static_metrics_belong_to_no_machine(tmp_path: Path) -> None:
    found = results(tmp_path, row(0, suite="kernels", device="H200"), row(1, machine="other"))
    assert list(found.rows["machine"]) == ["", "other"]
    assert found.machines == ["other"]


def test_the_numbers_behind_a_check_move_no_machine_to_another_row(tmp_path: Path) -> None:
    guard = [row(0, suite="guard", benchmark="layout", metric=name) for name in ("views", "views:at_most", "views:n")]
    found = results(tmp_path, *guard, row(1, suite="kernels"), row(2, machine="other"))
    assert list(zip(found.rows["suite"], found.rows["machine"], strict=True)) == [
        ("guard", "box"),
        ("kernels", ""),
        ("state_update", "other"),
    ]


def test_how_a_number_came_about_is_not_what_it_is_of(tmp_path: Path) -> None:
    same = {"K": 3, "model": "nano"}
    found = results(
        tmp_path,
        row(0, {**same, "receipt": {"max_error": 0.1}, "seconds": 1}),
        row(1, {**same, "receipt": {"max_error": 0.2}, "mix": {"float": 1}, "candidate_commit": "a"}),
        row(2, {**same, "K": 5}),
    )
    assert list(found.rows["case"]) == ["K=3, model=nano"] * 2 + ["K=5, model=nano"]
    assert len(histories(found.rows)) == 2


def test_a_check_of_the_guard_keeps_its_name_when_its_figures_change(tmp_path: Path) -> None:
    guard = {"suite": "guard", "benchmark": "answers", "unit": "answers", "verdict": "pass", "value": 0.0}
    found = results(
        tmp_path,
        row(0, {"hit_rate": 0.7}, metric="all, mtp 3: hits 70%, accepted 91%", **guard),
        row(1, {"hit_rate": 0.8}, metric="all, mtp 3: hits 80%, accepted 92%", **guard),
        row(1, {"hit_rate": 0.1}, metric="none, mtp 3: accepted 92%", **guard),
    )
    assert [(s.key[2], len(s.rows)) for s in histories(found.rows)] == [("all/mtp_3", 2), ("none/mtp_3", 1)]
    assert found.rows["check"].iloc[0] == "all, mtp 3: hits 70%, accepted 91%"
    other = results(tmp_path, row(0, metric="p: q"))
    assert list(other.rows["metric"]) == ["p: q"]


def test_the_numbers_behind_a_check_are_read_with_it(tmp_path: Path) -> None:
    """Written as rows of their own since November 2026, in params before: both are one series."""
    guard = {"suite": "guard", "benchmark": "answers", "unit": "answers", "verdict": "pass", "value": 0.0}
    number = {**guard, "unit": "", "verdict": ""}
    found = results(
        tmp_path,
        row(
            0,
            {"mode": "all", "hit_rate": 0.7, "limit": ">= 0.5", "accepted": 3},
            metric="all, mtp 3: hits 70%",
            **guard,
        ),
        row(1, {"mode": "all"}, metric="all/mtp_3", **guard),
        row(1, {"mode": "all"}, metric="all/mtp_3:at_least", **number | {"value": 0.5}),
        row(1, {"mode": "all"}, metric="all/mtp_3:hit_rate", **number | {"value": 0.8}),
        row(1, {"mode": "all"}, metric="all/mtp_3:accepted", **number | {"value": 4.0}),
    )
    assert [(s.key[2], len(s.rows)) for s in histories(found.rows)] == [("all/mtp_3", 2)]
    old, new = (one.parsed for one in found.rows.itertuples())
    assert old == {"mode": "all", "hit_rate": 0.7, "limit": ">= 0.5", "accepted": 3}
    assert new == {"mode": "all", "hit_rate": 0.8, "limit": ">= 0.5", "accepted": 4, "at_least": 0.5}
    assert type(new["accepted"]) is int


# ---- which rows ----


def test_newest_and_fullest_run(tmp_path: Path) -> None:
    full = [row(run, {"i": i}) for run in (1, 2) for i in range(3)]
    rows = results(tmp_path, *full, row(3, {"i": 0})).rows
    assert set(newest_run(rows)["run_id"]) == {"run00003"}
    assert set(fullest_run(rows)["run_id"]) == {"run00002"}
    assert len(fullest_run(rows)) == 3
    assert newest_run(rows[:0]).empty and fullest_run(rows[:0]).empty


def test_the_last_word_of_each_series(tmp_path: Path) -> None:
    rows = results(tmp_path, row(0, {"i": 1}, value=1.0), row(1, {"i": 2}, value=2.0), row(2, {"i": 1}, value=3.0)).rows
    assert sorted(last_words(rows)["value"]) == [2, 3]


# ---- history ----


def test_a_run_counts_once(tmp_path: Path) -> None:
    (series,) = histories(results(tmp_path, row(0, value=1.0), row(0, value=2.0), row(1, value=3.0)).rows)
    assert list(series.rows["value"]) == [2, 3]


def test_machines_are_never_mixed(tmp_path: Path) -> None:
    slow = [row(run + 20, value=200.0 + run % 3, machine="slow") for run in range(20)]
    found = histories(results(tmp_path, *history([100.0 + i % 3 for i in range(20)]), *slow).rows)
    assert [s.key[4] for s in found] == ["box", "slow"]
    assert not any(s.steps for s in found)


def test_steps_of_changed_trees_and_void_runs_are_not_looked_for(tmp_path: Path) -> None:
    rows = history([100.0 + i % 3 for i in range(20)])
    dirty = [row(30 + i, value=200.0 + i % 3, dirty=True) for i in range(10)]
    void = [row(50 + i, value=200.0 + i % 3, verdict="void") for i in range(10)]
    (series,) = histories(results(tmp_path, *rows, *dirty, *void).rows)
    assert len(series.rows) == 40
    assert list(series.clean) == list(range(20))
    assert not series.steps
    (again,) = histories(results(tmp_path, *rows, *[one | {"dirty": False} for one in dirty]).rows)
    assert len(again.steps) == 1


def test_a_step_names_both_commits(tmp_path: Path) -> None:
    values = [100.0 + i % 3 for i in range(8)] + [150.0 + i % 3 for i in range(8)]
    rows = history(values)
    rows[7]["dirty"] = True  # The last before the step: it belongs to no commit.
    (series,) = histories(results(tmp_path, *rows).rows)
    (step,) = series.steps
    assert series.step_row(step).commit == "00008" * 8
    assert series.row_before(step).commit == "00006" * 8


@pytest.mark.parametrize(
    ("better", "up", "word"),
    [
        ("lower", True, "worse"),
        ("lower", False, "better"),
        ("higher", True, "better"),
        ("higher", False, "worse"),
        ("equal", True, "changed"),
        ("equal", False, "changed"),
    ],
)
def test_worse_is_what_the_rows_call_worse(tmp_path: Path, better: str, up: bool, word: str) -> None:
    values = [100.0, 120.0] if up else [120.0, 100.0]
    (series,) = histories(results(tmp_path, *history(values, unit="B", metric="bytes", better=better)).rows)
    assert series.judge(series.steps[0]) == word


@pytest.mark.parametrize(
    ("same", "values", "exact"),
    [
        ({"unit": "B"}, [1.0, 2.0], True),
        ({"unit": "ns"}, [1.0, 2.0], False),
        ({"unit": "time ratio"}, [1.0, 2.0], False),
        ({"unit": "share", "ci_low": 0.0, "ci_high": 1.0}, [1.0, 0.0], False),
        ({"unit": "logit"}, [1.0, 1.5], False),
        ({"unit": "1/B", "suite": "kernels"}, [1.1, 1.5], True),
    ],
)
def test_counts_are_exact_and_times_are_not(tmp_path: Path, same: dict, values: list[float], exact: bool) -> None:
    (series,) = histories(results(tmp_path, *history(values, **same)).rows)
    assert len(series.steps) == exact


# ---- what a page keeps ----


def test_thinning_keeps_the_ends_and_every_extreme() -> None:
    values = np.random.default_rng(0).random(10_000)
    values[[1234, 8765]] = [99, -99]
    kept = thin(values, 100)
    assert len(kept) <= 100
    assert {0, 1234, 8765, 9999} <= set(kept)
    assert list(kept) == sorted(set(kept))
    assert list(thin(values[:100], 100)) == list(range(100))
    assert len(thin(values[:101], 100)) <= 100


def test_thinning_spreads_over_the_whole_series() -> None:
    gaps = np.diff(thin(np.random.default_rng(0).random(10_000), 100))
    assert gaps.max() < 3 * 10_000 / 49


def test_long_series_are_thinned_only_when_there_are_too_many_points(tmp_path: Path) -> None:
    (one,) = histories(results(tmp_path, *history(np.arange(500.0))).rows)
    assert points_per_series([one]) == 400
    assert points_per_series([one] * 100) == 400
    assert points_per_series([one] * 101) == 200
    assert MAX_POINTS >= 200 * 101
    assert points_per_series([one] * 100_000) == 12


def test_too_many_series_keep_those_that_matter(tmp_path: Path) -> None:
    stepped = history([1.0, 2.0], unit="B", params={"i": 0})
    long = history([1.0, 1.0, 1.0], unit="B", params={"i": 1})
    short = [row(run, {"i": 2 + run}, unit="B", value=1.0) for run in range(3)]
    series = histories(results(tmp_path, *stepped, *long, *short).rows)
    assert [s.key[3] for s in newest_series(series, 3)] == ["i=0", "i=1", "i=4"]
    assert newest_series(series, 5) == series


# ---- figures ----


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (15122.4, "15,122"),
        (6.789, "6.79"),
        (0.0, "0"),
        (1.08e-13, "1.08e-13"),
        (0.00123, "0.00123"),
        (100.0, "100"),
        (99.96, "100"),
        (-2.5, "-2.5"),
        (float("nan"), "–"),
        (1e15, "1e+15"),
    ],
)
def test_number(value: float, text: str) -> None:
    assert number(value) == text


def test_durations_and_round_figures() -> None:
    assert [duration(ns) for ns in (410.0, 6790.0, 15.1e6, 2e9, 0.5)] == [
        "410 ns",
        "6.79 µs",
        "15.1 ms",
        "2 s",
        "0.5 ns",
    ]
    assert (about(6253.0), about(1.8417)) == ("6,300", "1.8")


def test_the_repositorys_own_rows_are_read() -> None:
    found = load(Path(__file__).resolve().parents[2] / "results")
    assert len(found.rows) > 1000
    for one in found.rows.itertuples():
        params = json.loads(one.params)
        assert {name: one.parsed[name] for name in params} == params
        assert one.suite == "guard" or len(one.parsed) == len(params)  # the guard's numbers are folded in


# ---- more rows than a page is made of ----


def chosen(folder: Path, rows: list[dict[str, object]], limit: int) -> tuple[list[int], Chosen]:
    """The runs whose rows are chosen, by number, and the choice."""
    with opened([write(folder, rows) / "made.csv"]) as store:
        found = choose_rows(store, limit)
        runs = store.run(f"SELECT DISTINCT run_id FROM {found.source} ORDER BY ALL")
    return [int(run.removeprefix("run")) for (run,) in runs], found


def test_what_fits_is_all_there(tmp_path: Path) -> None:
    assert chosen(tmp_path, history(range(50)), 50) == (list(range(50)), Chosen(50))


def test_of_more_rows_the_newest_runs_and_some_of_the_others_are_chosen(tmp_path: Path) -> None:
    runs, found = chosen(tmp_path, history(range(200)), 20)
    assert runs[-8:] == list(range(192, 200)) and 10 < len(runs) <= 20
    older = runs[:-8]
    assert older[0] < 40 and len({after - before for before, after in itertools.pairwise(older[1:])}) == 1
    assert found.total == 200 and "the newest 8 runs of each suite on each machine" in found.rule


def test_each_suite_and_machine_keeps_its_newest_and_its_fullest_run(tmp_path: Path) -> None:
    rows = history(range(90)) + [row(3, {"K": k}) for k in range(5)] + [row(0, machine="old"), row(1, suite="rare")]
    runs, _ = chosen(tmp_path, rows, 20)
    assert {0, 1, 3, 89} <= set(runs)


def test_the_last_word_of_a_static_series_is_always_there(tmp_path: Path) -> None:
    rows = [row(i, {"shape": i % 7}, suite="kernels", value=i) for i in range(7)]
    rows += [row(20 + i, {"shape": 0}, suite="kernels", value=i) for i in range(60)]
    with opened([write(tmp_path, rows) / "made.csv"]) as store:
        found = store.frame(f"SELECT {NAMES} FROM {choose_rows(store, 16).source} ORDER BY place, line")
    assert len(found) < 60 and set(found["params"]) == {f'{{"shape": {i}}}' for i in range(7)}
    assert found["value"].iloc[-1] == 59


def test_parquet_and_csv_make_one_frame(tmp_path: Path) -> None:
    export_rows([write(tmp_path / "csv", history(range(9))) / "made.csv"], tmp_path / "set" / "all.parquet")
    from_csv, from_parquet = load(tmp_path / "csv"), load(tmp_path / "set")
    assert from_csv.rows.equals(from_parquet.rows)
    assert from_parquet.files == ["all.parquet"]
