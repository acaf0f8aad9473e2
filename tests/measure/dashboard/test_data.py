"""What is read, which rows are the newest, which rows a page keeps."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

from hybrid_kv.measure.dashboard.data import (
    Chosen,
    choose_rows,
    fullest_run,
    last_rows,
    load,
    newest_run,
)
from hybrid_kv.measure.dashboard.series import histories
from hybrid_kv.measure.dashboard.verdicts import verdicts
from hybrid_kv.measure.results.store import NAMES, opened
from tests.measure.dashboard.rows import history, results, row, write

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


def test_a_machine_with_a_gpu_is_another_and_static_metrics_belong_to_none(tmp_path: Path) -> None:
    guard = [
        row(0, suite="guard", benchmark="layout", metric=name)
        for name in ("views", "views:at_most", "views:n")
    ]
    rows = [
        row(1, suite="kernels", device="H200"),
        row(2, device="H200"),
        row(3, machine="other", device=""),
    ]
    found = results(tmp_path, *guard, *rows)
    assert [*zip(found.rows["suite"], found.rows["machine"], strict=True)] == [
        ("guard", "box"),
        ("kernels", ""),
        ("state_update", "box, H200"),
        ("state_update", "other"),
    ]
    assert found.machines == ["other", "box, H200", "box"]  # the newest first


def test_how_a_number_came_about_is_not_what_it_is_of(tmp_path: Path) -> None:
    same = {"K": 3, "model": "nano"}
    found = results(
        tmp_path,
        row(0, {**same, "receipt": {"max_error": 0.1}, "seconds": 1}),
        row(1, {**same, "receipt": {"max_error": 0.2}, "candidate_commit": "a"}),
        row(2, {**same, "K": 5}),
    )
    assert list(found.rows["case"]) == ["K=3, model=nano"] * 2 + ["K=5, model=nano"]
    assert len(histories(found.rows)) == 2


def test_the_numbers_behind_a_check_are_read_with_it(tmp_path: Path) -> None:
    guard = {
        "suite": "guard",
        "benchmark": "answers",
        "unit": "answers",
        "verdict": "pass",
        "value": 0.0,
    }
    number = {**guard, "unit": "", "verdict": ""}
    found = results(
        tmp_path,
        row(1, {"mode": "all"}, metric="all/mtp_3", **guard),
        row(1, {"mode": "all"}, metric="all/mtp_3:at_least", **number | {"value": 0.5}),
        row(1, {"mode": "all"}, metric="all/mtp_3:hit_rate", **number | {"value": 0.8}),
        row(1, {"mode": "all"}, metric="all/mtp_3:accepted", **number | {"value": 4.0}),
        row(2, {"mode": "all"}, metric="all/mtp_3", **guard),
        row(2, metric="p: q"),
    )
    first, second, other = (one.parsed for one in found.rows.itertuples())
    assert first == {
        "mode": "all",
        "hit_rate": 0.8,
        "limit": ">= 0.5",
        "accepted": 4,
        "at_least": 0.5,
    }
    assert type(first["accepted"]) is int and second == {"mode": "all"} and other == {}
    assert list(found.rows["metric"]) == ["all/mtp_3", "all/mtp_3", "p: q"]


# ---- which rows ----


def test_newest_and_fullest_run(tmp_path: Path) -> None:
    full = [row(run, {"i": i}) for run in (1, 2) for i in range(3)]
    rows = results(tmp_path, *full, row(3, {"i": 0})).rows
    assert set(newest_run(rows)["run_id"]) == {"run00003"}
    assert set(fullest_run(rows)["run_id"]) == {"run00002"}
    assert len(fullest_run(rows)) == 3
    assert newest_run(rows[:0]).empty and fullest_run(rows[:0]).empty


def test_the_last_word_of_each_series(tmp_path: Path) -> None:
    rows = results(
        tmp_path,
        row(0, {"i": 1}, value=1.0),
        row(1, {"i": 2}, value=2.0),
        row(2, {"i": 1}, value=3.0),
    ).rows
    assert sorted(last_rows(rows)["value"]) == [2, 3]


def test_the_repositorys_own_rows_are_read() -> None:
    found = load(Path(__file__).resolve().parents[3] / "results")
    assert len(found.rows) > 1000
    for one in found.rows.itertuples():
        params = json.loads(one.params)
        assert {name: one.parsed[name] for name in params} == params
        # the guard's numbers are folded in
        assert one.suite == "guard" or len(one.parsed) == len(params)


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
    assert (
        older[0] < 40
        and len({after - before for before, after in itertools.pairwise(older[1:])}) == 1
    )
    assert found.total == 200 and "the newest 8 runs of each suite on each machine" in found.rule


def test_each_suite_and_machine_keeps_its_newest_and_its_fullest_run(tmp_path: Path) -> None:
    rows = (
        history(range(90))
        + [row(3, {"K": k}) for k in range(5)]
        + [row(0, machine="old"), row(1, suite="rare")]
    )
    runs, _ = chosen(tmp_path, rows, 20)
    assert {0, 1, 3, 89} <= set(runs)


def test_the_last_word_of_a_static_series_is_always_there(tmp_path: Path) -> None:
    rows = [row(i, {"shape": i % 7}, suite="kernels", value=i) for i in range(7)]
    rows += [row(20 + i, {"shape": 0}, suite="kernels", value=i) for i in range(60)]
    with opened([write(tmp_path, rows) / "made.csv"]) as store:
        found = store.frame(
            f"SELECT {NAMES} FROM {choose_rows(store, 16).source} ORDER BY place, line"
        )
    assert len(found) < 60 and set(found["params"]) == {f'{{"shape": {i}}}' for i in range(7)}
    assert found["value"].iloc[-1] == 59
