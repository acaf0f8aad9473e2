"""Whatever a row holds, the page shows it as text: nothing runs, nothing is fetched, no link leads elsewhere."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from hybrid_kv.dashboard.commit import build_commits
from hybrid_kv.dashboard.page import build_page
from hybrid_kv.dashboard.report import Report
from hybrid_kv.results import Head, Told
from tests.dashboard import chromium, hostile
from tests.dashboard.conftest import Open
from tests.dashboard.html import page_of, written
from tests.dashboard.rows import history

pytest.importorskip("plotly", reason="the report needs plotly: pip install -e '.[report]'")

REPOSITORY = "https://example.org/a/b"
# What text could have become. The page itself has links and one style sheet, plotly one more.
FOREIGN = """
[...document.querySelectorAll("iframe, object, embed, base, form, img, textarea, link, meta[http-equiv=refresh], " +
  "svg script, [onerror], [onload], [onclick], [onfocus], [onmouseover], [ontoggle], section style")]
  .map((e) => e.outerHTML)
"""
OWN = "#[a-z-]+|[.]{2}[/]index[.]html|(commits[/])?[0-9a-f]{12}[.]html"
OWN += "|https:[/][/]example.org[/]a[/]b[/]commit[/][0-9a-f]{7,40}"
LINKS = f"""
[...document.querySelectorAll("a")].map((a) => [a.getAttribute("href"), a.getAttribute("xlink:href"), a.target])
  .flat()
  .filter((to) => to && !/^({OWN})$/.test(to))
"""
# Each series drawn, each trace of each figure hovered over; links are collected on the way.
TOUR = f"""
(() => {{
  const found = new Set(), look = () => {{ ({LINKS.strip()}).forEach((link) => found.add(link)); }};
  const hover = (chart) => chart.data.forEach((trace, i) => {{
    if (trace.x.length) Plotly.Fx.hover(chart, [{{ curveNumber: i, pointNumber: 0 }}]);
    look();
  }});
  const select = (id) => document.getElementById(id);
  const change = (one, value) => {{ one.value = value; one.dispatchEvent(new Event("change")); }};
  look();
  document.querySelectorAll(".plot .canvas").forEach((chart) => {{ if (chart.offsetParent) hover(chart); }});
  let drawn = 0;
  for (const benchmark of [...select("benchmark").options].map((o) => o.value)) {{
    change(select("benchmark"), benchmark);
    for (const name of [...select("case").options].map((o) => o.value)) {{
      change(select("case"), name);
      hover(document.getElementById("history-chart"));
      drawn += 1;
    }}
  }}
  for (const machine of [...select("machine").options].map((o) => o.value)) {{
    change(select("machine"), machine);
    look();
  }}
  return [drawn, [...found]];
}})()
"""


def test_there_are_payloads_enough() -> None:
    assert len(set(hostile.PAYLOADS)) >= 27
    assert sorted(name for group in hostile.GROUPS for name in group) == sorted(hostile.FREE)


@pytest.mark.parametrize("columns", hostile.GROUPS, ids="+".join)
def test_a_hostile_cell_stays_text(opened: Open, tmp_path: Path, columns: list[str]) -> None:
    found = Report(hostile.results_of(hostile.hostile_rows(*columns)), repository=REPOSITORY)
    page = opened(written(build_page(found), tmp_path))
    drawn, links = page.js(TOUR)
    assert links == []
    assert drawn >= len(hostile.PAYLOADS)
    assert page.js(FOREIGN) == []
    assert page.js("typeof pwned") == "undefined"
    assert page.js("location.href").startswith("file:") and page.js("document.title") == "hybrid-kv report"
    assert page.js("document.documentElement.dataset.ready") == "true"
    page.resize(390, 844)
    page.wait("document.documentElement.scrollWidth === 390")  # figures follow when they are drawn again
    assert page.problems == []


@pytest.mark.parametrize("columns", hostile.GROUPS, ids="+".join)
def test_a_hostile_cell_stays_text_on_the_page_of_a_commit(opened: Open, tmp_path: Path, columns: list[str]) -> None:
    """On the largest, at a phone's width: no text makes it wider."""
    rows = hostile.hostile_rows(*[name for name in columns if name != "commit"])
    made = build_commits(Report(hostile.results_of(rows), AUTHOR, REPOSITORY))
    page = opened(written(max((html for _, html in made), key=len), tmp_path), width=390, height=844)
    assert page.js(FOREIGN) == [] and page.js(LINKS) == []
    assert page.js("typeof pwned") == "undefined" and page.js("document.scripts.length") == 0
    assert page.js("document.title").startswith("hybrid-kv 0")
    assert page.js("document.querySelector('h1').textContent") == hostile.PAYLOADS[0]
    assert page.js("document.documentElement.scrollWidth") == 390 and page.js(chromium.CUT) == []
    assert page.problems == []


class _Author(Head):
    """Git says nothing but payloads."""

    def tell(self, commits: Iterable[str]) -> dict[str, Told]:
        return dict.fromkeys(commits, Told(hostile.PAYLOADS[1], "2026-01-01", hostile.PAYLOADS[0]))


AUTHOR = _Author("a" * 40)


def test_a_payload_is_shown_as_it_is(opened: Open, tmp_path: Path) -> None:
    link = f'<a href="{hostile.EVIL}">x</a>'
    rows = [{**one, "machine": link} for one in history([1.0, 2.0], unit=link)]
    page = opened(written(page_of(hostile.results_of(rows), REPOSITORY), tmp_path))
    assert page.js("document.querySelector('#history-chart .ytitle').textContent") == link
    assert page.js("document.querySelector('#machine').options[1].textContent") == link
    assert link in page.js("document.querySelector('#history-runs').textContent")


def test_the_checks_of_this_file_can_fail(opened: Open, tmp_path: Path) -> None:
    html = page_of(hostile.results_of(hostile.hostile_rows("unit")), REPOSITORY)
    leaking = html.replace("const plain = (text) => ", "const plain = (text) => text || ")
    assert leaking != html
    assert hostile.EVIL in opened(written(leaking, tmp_path / "links")).js(TOUR)[1]
    running = html.replace("<footer>", f"<img src=x onerror=pwned=1><a href={hostile.EVIL}>x</a><footer>")
    page = opened(written(running, tmp_path / "running"))
    page.wait("typeof pwned === 'number'")
    assert page.js(FOREIGN) and page.js(LINKS) == [hostile.EVIL]
