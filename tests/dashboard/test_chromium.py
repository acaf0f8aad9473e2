"""The page in a browser: it draws without a complaint, filters, fits a phone, can be dark, holds 100,000 rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from hybrid_kv.dashboard.commit import write_commits
from hybrid_kv.dashboard.data import MAX_POINTS, Results, load
from hybrid_kv.dashboard.page import build_page
from hybrid_kv.dashboard.report import Report
from hybrid_kv.results import COLUMNS
from tests.dashboard import chromium
from tests.dashboard.conftest import Open
from tests.dashboard.html import page_of, written
from tests.dashboard.kinds import everything, swarms
from tests.dashboard.rows import DEFAULTS, results

pytest.importorskip("plotly", reason="the report needs plotly: pip install -e '.[report]'")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    report = Report(results(folder / "rows", *everything(), *swarms()), repository="https://example.org/a/b")
    write_commits(report, folder / "commits")
    return written(build_page(report), folder)


TRACES = "document.getElementById('history-chart').data"
SHOWN = "[...document.querySelectorAll('{}')].filter((e) => e.offsetParent).length"


def is_drawn(page: chromium.Page) -> bool:
    """Every figure has its traces, and the script came to its end."""
    ready = page.js("document.documentElement.dataset.ready") == "true"
    return ready and page.js("[...document.querySelectorAll('.canvas')].every((c) => c.querySelector('.main-svg'))")


def test_everything_is_drawn_without_a_complaint(opened: Open, site: Path) -> None:
    page = opened(site)
    assert is_drawn(page)
    assert page.problems == []
    assert page.js("document.querySelectorAll('figure .canvas .scatterlayer .trace').length") > 20


def test_the_checks_of_this_file_can_fail(opened: Open, site: Path, tmp_path: Path) -> None:
    text = site.read_text()
    broken = text.replace("Plotly.newPlot(", "Plotly.noPlot(")
    page = opened(written(broken, tmp_path / "broken"))
    assert not is_drawn(page)
    assert any("noPlot" in problem for problem in page.problems)
    fetching = text.replace("</head>", '<script src="https://example.org/plotly.js"></script></head>')
    assert opened(written(fetching, tmp_path / "fetching")).problems


def test_the_machine_filter_changes_traces_verdict_and_blocks(opened: Open, site: Path) -> None:
    page = opened(site)
    page.choose("#benchmark", "state_update: slots, CPU time")
    assert page.js(f"{TRACES}.map((t) => t.name).sort()") == ["box", "rack, H200"]
    assert page.js("document.querySelector('#verdict h2').textContent").startswith("✕ fail: 53 of 59")
    tiles = page.js(SHOWN.format(".tile"))

    page.choose("#machine", "rack, H200")
    assert page.js(f"{TRACES}.map((t) => t.name)") == ["rack, H200"]
    headline = page.js("document.querySelector('#verdict h2').textContent")
    assert headline == "✕ fail: 28 of 32 checks of the newest runs"
    assert page.js(SHOWN.format(".tile")) == 3 < tiles
    assert page.js(SHOWN.format("#accuracy table, #block-ids figure")) == 0
    assert page.js("document.querySelectorAll('#history tbody tr')[0].hidden") is False

    page.choose("#machine", "box")
    assert page.js(f"{TRACES}.map((t) => t.name)") == ["box"]
    assert page.js(SHOWN.format("#accuracy table, #block-ids figure")) == 3
    assert page.js("document.querySelectorAll('#history tbody tr')[0].hidden") is True
    assert page.problems == []


def test_a_figure_that_was_hidden_has_its_width_when_it_is_shown(opened: Open, site: Path) -> None:
    page = opened(site)
    width = "document.querySelector('#block-ids .canvas').getBoundingClientRect().width"
    drawn = "document.querySelector('#block-ids .canvas .main-svg').getBoundingClientRect().width"
    page.choose("#machine", "rack, H200")
    page.resize(900, 900)
    page.choose("#machine", "")
    page.wait(f"Math.abs({drawn} - {width}) < 1 && {width} > 300")


def test_a_step_is_chosen_with_a_click(opened: Open, site: Path) -> None:
    page = opened(site)
    page.choose("#benchmark", "guard: layout, views")
    assert page.js("document.getElementById('history-chart').layout.annotations.length") == 0
    page.click("button[data-series]")
    assert page.js("document.getElementById('benchmark').value") == "state_update: slots, CPU time"
    assert page.js("document.getElementById('history-chart').layout.annotations.map((a) => a.text)") == [
        "+19.8 % worse"
    ]
    assert page.js("document.getElementById('history-chart').layout.shapes.length") == 3  # two levels, one step
    symbols = page.js(f"{TRACES}.find((t) => t.name !== 'box').marker.symbol")
    assert [i for i, symbol in enumerate(symbols) if symbol.endswith("-open")] == [5]
    assert page.js("document.querySelectorAll('#history-runs tr').length") == 10
    assert page.js("document.querySelector('#history-runs a').href").endswith("/commits/000390003900.html")
    assert page.problems == []


def test_a_case_is_chosen_among_those_of_its_benchmark(opened: Open, site: Path) -> None:
    page = opened(site)
    page.choose("#benchmark", "kernels: state_update.slots, registers")
    cases = page.js("[...document.getElementById('case').options].map((o) => o.value)")
    assert len(cases) == 2 and all("target=" in case for case in cases)
    before = page.js(f"{TRACES}[0].y")
    page.choose("#case", cases[0] if page.js("document.getElementById('case').value") == cases[1] else cases[1])
    assert page.js(f"{TRACES}[0].y") != before


def test_a_target_is_chosen_with_a_click(opened: Open, site: Path) -> None:
    page = opened(site)
    rows = "[...document.querySelectorAll('tr[data-target]')].filter((r) => r.checkVisibility())"
    visible = f"{rows}.map((r) => r.dataset.target)"
    assert page.js(visible) == []  # folded
    page.click("#kernels summary")
    assert set(page.js(visible)) == {"sm_90"}
    page.click("button[data-target=gfx942]")
    assert set(page.js(visible)) == {"gfx942"}
    assert page.js("[...document.querySelectorAll('button[data-target]')].map((b) => b.ariaPressed)") == [
        "false",
        "true",
    ]


def test_times_have_units_in_the_chart_and_in_the_list(opened: Open, site: Path) -> None:
    page = opened(site)
    page.choose("#benchmark", "state_update: slots, CPU time")
    assert page.js(f"{TRACES}[0].y[0]") == pytest.approx(100e-9)
    assert page.js("document.getElementById('history-chart').layout.yaxis.title.text") == "time, s"
    cells = page.js("[...document.querySelector('#history-runs tr').cells].map((c) => c.textContent)")
    assert cells[2:5] == ["100 ns", "90 ns to 140 ns", "25"]


def test_dark_mode_is_dark_and_its_text_light(opened: Open, site: Path) -> None:
    def tone(page: chromium.Page, selector: str, part: str) -> float:
        colour = page.js(f"getComputedStyle(document.querySelector({selector!r})).{part}")
        return sum(float(c) for c in colour.strip("rgb()").split(",")) / 3

    for dark in (False, True):
        page = opened(site, dark=dark)
        for selector, part in (("section", "color"), (".xtick text", "fill"), ("table", "color")):
            assert (tone(page, selector, part) > tone(page, "section", "backgroundColor")) == dark, (selector, dark)
        style = "getComputedStyle(document.querySelector({!r}))"
        assert page.js(f"{style.format('.xtick text')}.fill === {style.format('.kind')}.color")
        assert page.problems == []


@pytest.mark.parametrize("width", [320, 390])
@pytest.mark.parametrize("name", ["index", "commits/000420004200", "commits/000200002000"])
def test_on_a_phone_nothing_is_cut(opened: Open, site: Path, name: str, width: int) -> None:
    page = opened(site.parent / f"{name}.html", width=width, height=844)
    page.js("document.querySelectorAll('details').forEach((one) => { one.open = true })")
    assert page.js("document.documentElement.scrollWidth") == width
    if width == 390:  # on a narrower one an axis may have a longer name than its figure
        assert page.js(chromium.CUT) == []
    wide = "[...document.querySelectorAll('section, figure, .canvas, .main-svg, h1, h2, p, select, .scroll')]"
    assert page.js(f"{wide}.filter((e) => e.getBoundingClientRect().right > innerWidth + 0.5).length") == 0
    scrolling = "[...document.querySelectorAll('.scroll')].filter((e) => e.scrollWidth > e.clientWidth)"
    assert page.js(f"{scrolling}.length") > 0
    assert page.js(f"{scrolling}.every((e) => getComputedStyle(e).overflowX === 'auto')")
    assert page.problems == []
    if name == "index":
        assert is_drawn(page)
        # Touch scrolls the page, also where a finger starts on a figure.
        assert page.js("document.getElementById('history-chart').layout.dragmode") is False


def test_the_check_of_what_is_cut_can_fail(opened: Open, site: Path, tmp_path: Path) -> None:
    title = '"title":{"text":"share of the questions"'
    html = site.read_text()
    assert title in html
    page = opened(written(html.replace(title, title[:-1] + " and more" * 4 + '"'), tmp_path), width=390, height=844)
    assert len(page.js(chromium.CUT)) == 1
    long = html.replace("<h2", f"<p style='overflow: hidden; white-space: nowrap'>{'long ' * 40}</p><h2", 1)
    assert opened(written(long, tmp_path / "long"), width=390, height=844).js(chromium.CUT)


def test_a_commits_page_is_a_click_away_and_leads_back(opened: Open, site: Path) -> None:
    page = opened(site)
    page.follow("#commits a[href$='000420004200.html']")
    assert page.js("location.pathname").endswith("/commits/000420004200.html")
    assert page.js("[...document.querySelectorAll('section')].map((s) => s.id)") == ["verdict", "comparison", "figures"]
    assert page.js("document.querySelector('#verdict h2').textContent") == "✕ fail: 4 of 6 checks"
    assert page.problems == []
    page.follow("header a[href$='index.html']")
    assert is_drawn(page)


def test_no_rows_at_all(opened: Open, tmp_path: Path) -> None:
    page = opened(written(page_of(results(tmp_path / "rows")), tmp_path))
    assert page.js("document.documentElement.dataset.ready") == "true"
    assert page.problems == []
    assert "has said pass or fail yet" in page.js("document.body.innerText")


def hundred_thousand(folder: Path) -> Results:
    """1,000 runs of 100 benchmarks; every tenth became slower."""
    runs, benchmarks = 1000, 100
    rng = np.random.default_rng(0)
    values = 1000 * np.exp(0.02 * rng.standard_normal((benchmarks, runs)))
    values[::10, 700:] *= 1.2
    names = np.repeat([f"step{i}" for i in range(benchmarks)], runs)
    run = np.tile(np.arange(runs), benchmarks)
    frame = pd.DataFrame({**DEFAULTS, "benchmark": names, "value": values.ravel()})
    frame["run_id"] = [f"run{i}" for i in run]
    frame["time_utc"] = (pd.Timestamp("2020-01-01") + pd.to_timedelta(run, "h")).strftime("%Y-%m-%dT%H:%M:%SZ")
    frame["commit"] = [f"{i:05}" * 8 for i in run]
    frame["params"] = "{}"
    frame["ci_low"], frame["ci_high"] = frame["value"] * 0.98, frame["value"] * 1.02
    folder.mkdir()
    frame.reindex(columns=list(COLUMNS)).to_csv(folder / "big.csv", index=False)
    return load(folder)


def test_a_hundred_thousand_rows(opened: Open, tmp_path: Path) -> None:
    found = hundred_thousand(tmp_path / "rows")
    assert len(found.rows) == 100_000
    html = page_of(found)
    assert len(html) < 9_000_000  # 4.8 of them are plotly
    page = opened(written(html, tmp_path))
    assert page.js("document.documentElement.dataset.ready") == "true"
    assert page.problems == []
    assert page.js("document.querySelector('#history h2').textContent").startswith("10 of 100 series changed")
    page.choose("#benchmark", "state_update: step0, CPU time")
    kept = page.js(f"{TRACES}[0].y.length")
    assert 390 <= kept <= 400 and 100 * kept <= MAX_POINTS
    assert page.js("document.getElementById('history-chart').layout.annotations.length") == 1
    assert "A series with more than 400 runs keeps" in html
