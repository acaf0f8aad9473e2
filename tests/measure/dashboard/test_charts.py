"""The charts of the first screen: which series they show, and what is drawn of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hybrid_kv.measure.dashboard.charts import CHARTS, Line
from hybrid_kv.measure.dashboard.series import histories
from hybrid_kv.measure.dashboard.svg import HEIGHT, WIDTH, scale_of, spark
from hybrid_kv.measure.results import Head
from tests.measure.dashboard.html import charts, page_of, views
from tests.measure.dashboard.kinds import charted
from tests.measure.dashboard.rows import RECEIPT, history, results, row

REPOSITORY = "https://example.org/a/b"


def test_each_chart_has_a_point_for_each_run_and_links_to_its_commits(tmp_path: Path) -> None:
    found = charts(page_of(results(tmp_path, *charted()), REPOSITORY))
    assert list(found) == [chart.title for chart in CHARTS] and len(found) >= 8
    for card in found.values():
        points = re.findall(r'<a href="commits/(\d{12})\.html" tabindex="-1"><circle', card)
        assert points == [f"{run:05}" * 2 + f"{run:05}"[:2] for run in range(30)]


def test_a_step_is_marked_where_it_is_and_leads_to_its_commit(tmp_path: Path) -> None:
    found = charts(page_of(results(tmp_path, *charted()), REPOSITORY))
    card = found["Scheduler, decode"]
    assert (
        'class="card worse"' in card
        and '<b class="worse">▲ +20 %</b> <a href="commits/000200002000.html">' in card
    )
    (step,) = re.findall(
        r'<g class="step worse"><a href="(.*?)" aria-label="(.*?)">.*?<path d="M([\d.]+) ', card
    )
    assert step[:2] == (
        "commits/000200002000.html",
        "+19.8 % worse, 101 ns → 121 ns, between 0001900 and 0002000",
    )
    circles = re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)"', card)
    assert circles[20][0] == step[2]
    assert all(0 < float(x) < WIDTH and 0 < float(y) < HEIGHT for x, y in circles)
    assert min(float(y) for _, y in circles[:20]) > max(float(y) for _, y in circles[20:])
    assert card.count('class="level"') == 2
    assert "no step" in found["Memory of a request"]


def test_a_comparison_side_by_side_is_marked_where_runs_of_days_show_no_step(
    tmp_path: Path,
) -> None:
    compared = {
        "suite": "compare",
        "benchmark": "end_to_end/nemotron",
        "metric": "cpu_time_ratio",
        "unit": "time ratio",
        "baseline_commit": "00009" * 8,
        "value": 1.033,
    }
    same_case = {"mode": "all"}
    rows = [
        row(10, same_case, **compared, ci_low=1.016, ci_high=1.051),
        row(11, same_case, **compared, ci_low=0.99, ci_high=1.051),  # may be equal
        row(12, {"mode": "none"}, **compared, ci_low=1.016, ci_high=1.051),  # of another case
        row(13, same_case, **compared, ci_low=1.016, ci_high=1.051, machine="another"),
    ]
    runs = history(
        [100 + run % 2 for run in range(30)],
        suite="end_to_end",
        benchmark="nemotron",
        params={"mode": "all", "subject": "engine"},
    )
    card = charts(page_of(results(tmp_path, *runs, *rows), REPOSITORY))["End to end"]
    marks = re.findall(r'<g class="step (\w+)"><a href="(.*?)" aria-label="(.*?)">', card)
    assert marks == [
        (
            "worse",
            "commits/000100001000.html",
            "+3.3 % (+1.6 to +5.1) worse, side by side with 0000900",
        )
    ]


def test_charts_share_their_commits_in_the_order_of_git(tmp_path: Path) -> None:
    """Measured in another order than made, and one chart on every second commit alone."""

    class Backwards(Head):
        def times(self) -> dict[str, int]:
            return {row(run)["commit"]: 10**9 - run for run in range(30)}

    rows = [one for one in charted() if one["suite"] != "memory" or int(one["commit"][:5]) % 2]
    found = charts(page_of(results(tmp_path, *rows, head=Backwards("a" * 40))))
    places = {title: re.findall(r'cx="([\d.]+)"', card) for title, card in found.items()}
    everywhere = places["Scheduler, decode"]
    assert everywhere == sorted(everywhere, key=float) and len(set(everywhere)) == 30
    assert places["Memory of a request"] == everywhere[::2]
    labels = re.findall(r"<title>(\d{5})\d\d, ", found["Scheduler, decode"])
    assert labels == [f"{run:05}" for run in range(29, -1, -1)]


def test_a_machine_has_its_own_charts(tmp_path: Path) -> None:
    rows = charted() + [
        one | {"machine": "rack"} for one in charted(12) if one["benchmark"] == "decode"
    ]
    page = page_of(results(tmp_path, *rows))
    assert charts(page)["Scheduler, decode"].count("<circle") == 30  # the longest of all
    assert list(charts(page, "rack")) == ["Scheduler, decode"]
    assert charts(page, "rack")["Scheduler, decode"].count("<circle") == 12
    assert set(views(page)) == {"", "box", "rack"}


def test_a_rival_stands_beside_ours_in_the_same_case(tmp_path: Path) -> None:
    def total(run: int, scenario: str, subject: str, **own: object) -> dict[str, object]:
        params = {"receipt": RECEIPT, "scenario": scenario, "subject": subject}
        return row(run, params | ({"by": "asv"} if subject == "engine" else {}), **{**TOTAL, **own})

    ratio = {"metric": "ratio_to_engine", "unit": "time ratio"}
    rows = [total(run, "a", "engine") for run in range(3)]
    rows += [
        total(1, "a", "vllm 0.22.0 V1", value=9.0, **ratio),
        total(1, "a", "vllm 0.32.0 V1", value=4.0, **ratio),
    ]
    rows.append(total(2, "b", "vllm 9", value=1.0, **ratio))
    card = charts(page_of(results(tmp_path, *rows)))["Block tables, a step"]
    assert "<p>vllm 0.32.0 V1: 4× our time</p>" in card
    assert card.count("<circle") == 3


TOTAL = {"suite": "block_tables", "benchmark": "total"}


def test_asvs_pages_are_linked_where_they_are(tmp_path: Path) -> None:
    from hybrid_kv.measure.dashboard.page import build_page
    from hybrid_kv.measure.dashboard.report import Report

    report = Report(results(tmp_path, *charted()))
    assert "asv/" not in build_page(report)
    assert build_page(report, asv=True).count('<a href="asv/index.html') >= len(CHARTS)


@pytest.mark.parametrize("case", [("K=3",), ("K=3", "mode=all")])
def test_the_case_that_fits_best_is_chosen_before_a_longer_series(
    tmp_path: Path, case: tuple[str, ...]
) -> None:
    longer = history([1.0, 2.0, 3.0], params={"K": 0, "mode": "all"}, unit="B")
    other = [
        row(0, {"K": 3, "mode": "all"}, unit="B"),
        row(0, {"K": 3, "subject": "vllm", "mode": "all"}, unit="B"),
    ]
    series = histories(results(tmp_path, *longer, *other).rows)
    chosen = Line("state_update", "slots", case=case).choose(series)
    assert chosen is not None and chosen.key[3] == "K=3, mode=all"
    assert Line("state_update", "rows").choose(series) is None


def test_noise_does_not_fill_a_chart_and_an_outlier_does_not_flatten_it() -> None:
    quiet = scale_of([100.0, 101.0, 99.0], 0, 100)
    assert abs(quiet.y(101.0) - quiet.y(99.0)) < 10
    values = [100.0, 110.0] * 50 + [1e6]
    scale = scale_of(values, 0, 100)
    assert scale.y(100.0) - scale.y(110.0) > 10
    assert (scale.y(1e6), scale.y(-1e6)) == (0, 100)
    assert scale_of([0.0, 0.0], 0, 100).y(0.0) == 50


def test_a_spark_has_a_tick_for_each_step() -> None:
    drawn = spark([1.0, 1.0, 2.0, 2.0], [2])
    assert drawn.count('class="tick"') == 1 and len(re.findall(r"\d+,\d+", drawn)) == 4


def test_charts_name_asvs_benchmarks_as_its_suite_does() -> None:
    suite = Path(__file__).resolve().parents[3] / "bench" / "asv_suite"
    for module, class_name, method in (chart.asv.split(".") for chart in CHARTS if chart.asv):
        text = (suite / f"{module}.py").read_text()
        assert re.search(rf"^class {class_name}\b", text, re.MULTILINE) and f"def {method}(" in text
