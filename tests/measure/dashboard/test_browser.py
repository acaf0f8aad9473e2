"""The page in a real browser, from a disk: first screen, phones, dark mode, keyboard, picture."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hybrid_kv.errors import HybridKVError
from hybrid_kv.measure.dashboard import picture
from hybrid_kv.measure.dashboard.charts import CHARTS
from hybrid_kv.measure.dashboard.commit import write_commits
from hybrid_kv.measure.dashboard.page import build_page
from hybrid_kv.measure.dashboard.report import Report
from tests.measure.dashboard import hostile
from tests.measure.dashboard.kinds import charted, everything
from tests.measure.dashboard.rows import results, write

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytest.importorskip("playwright", reason="needs playwright: pip install -e '.[report]'")


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    try:
        with picture.browser() as started:
            yield started
    except HybridKVError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page with a history and every section, and the pages of its commits."""
    folder = tmp_path_factory.mktemp("site")
    report = Report(
        results(folder / "rows", *charted(), *everything()), repository="https://example.org/a/b"
    )
    write_commits(report, folder / "commits")
    (folder / "index.html").write_text(build_page(report), encoding="utf-8")
    return folder / "index.html"


def opened(
    chromium: Browser, site: Path, width: int = 1280, height: int = 800, dark: bool = False
) -> Page:
    return picture.open_page(chromium, site, width, height, dark)


def test_the_first_screen_has_the_verdict_and_the_charts(chromium: Browser, site: Path) -> None:
    page = opened(chromium, site)
    assert page.locator("h2:visible").first.inner_text() == "✕ HEAD is wrong"
    questions = page.locator("dt:visible").all_inner_texts()
    assert questions == [
        "Is HEAD right?",
        "Is it slower?",
        "Since which commit?",
        "What to run next?",
    ]
    assert page.locator("dd:visible code").inner_text() == 'hybrid-kv guard -k "layout"'
    cards = page.locator(".card:visible")
    boxes = [card.bounding_box() for card in cards.all()]
    assert len(boxes) == len(CHARTS)
    assert all(box is not None and box["y"] + box["height"] <= 800 for box in boxes)
    assert all(card.locator("circle").count() == 30 for card in cards.all())
    assert page.locator(".card:visible .step").count() == 1
    assert page.locator("details[open]").count() == 0  # tables are behind
    failing = page.locator("#failing-now").bounding_box()
    assert failing is not None and failing["y"] < 1000


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize(("width", "height"), [(1280, 800), (390, 844)])
def test_nothing_is_cut_off_on_a_phone_and_every_text_can_be_read(
    chromium: Browser, site: Path, width: int, height: int, dark: bool
) -> None:
    page = opened(chromium, site, width, height, dark)
    page.evaluate("for (const one of document.querySelectorAll('details')) one.open = true")
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert page.evaluate(CONTRAST) >= 4.5


# The least contrast of a text that is seen, against the first background behind it (WCAG 2.2,
# 1.4.3).
CONTRAST = """() => {
  const parts = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const light = (colour) => {
    const [r, g, b] = parts(colour).map((part) => part / 255)
      .map((part) => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (one) => {
    for (; one; one = one.parentElement) {
      const colour = getComputedStyle(one).backgroundColor;
      if ((parts(colour)[3] ?? 1) === 1) return colour;
    }
    return "rgb(255, 255, 255)";
  };
  const text = "h1, h2, h3, p, b, a, small, dt, dd, td, th, code, summary, span, text";
  const seen = [...document.querySelectorAll(text)]
    .filter((one) => one.checkVisibility() && one.textContent.trim())
    .filter((one) => !one.querySelector("h1, h2, p, b, small, a"));
  return Math.min(...seen.map((one) => {
    const style = getComputedStyle(one);
    const [a, b] = [light(one.localName === "text" ? style.fill : style.color), light(behind(one))];
    return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  }));
}"""


def test_a_step_is_reached_by_keyboard_and_leads_to_its_commits_page(
    chromium: Browser, site: Path
) -> None:
    page = opened(chromium, site)
    for _ in range(30):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.closest('.step') !== null"):
            break
    label = page.evaluate("document.activeElement.getAttribute('aria-label')")
    assert label.startswith("+19.8 % worse, 101 ns → 121 ns")
    page.keyboard.press("Enter")
    page.wait_for_url("**/commits/000200002000.html")
    assert page.locator("h1").inner_text() == "Commit 0002000"


def test_a_point_is_clicked(chromium: Browser, site: Path) -> None:
    page = opened(chromium, site)
    page.locator(".card:visible circle").nth(5).click()
    page.wait_for_url("**/commits/000050000500.html")


def test_sections_are_opened_by_keyboard_and_by_link(chromium: Browser, site: Path) -> None:
    page = opened(chromium, site)
    page.locator("#history summary").focus()
    page.keyboard.press("Enter")
    assert page.locator("#series > tr:visible").count() > 100
    page.evaluate("location.hash = 'kernels'")
    page.wait_for_selector("#kernels > details[open]")


def test_the_filter_keeps_series_with_all_its_words(chromium: Browser, site: Path) -> None:
    page = opened(chromium, site)
    page.locator("#history summary").click()
    page.locator("#filter").fill("scheduler decode")
    (name,) = page.locator("#series > tr:visible > th").all_inner_texts()
    assert name.startswith("scheduler: decode")
    page.locator("#filter").fill("nothing like it")
    assert page.locator("#series > tr:visible").count() == 0


def test_the_machine_changes_verdict_charts_and_tables(chromium: Browser, site: Path) -> None:
    page = opened(chromium, site)
    page.locator("#machine").select_option("rack, H200")
    assert page.locator(".card:visible").count() == 0
    assert page.locator("#failing-now [data-machine=box]:visible").count() == 0
    page.locator("#machine").select_option("box")
    assert page.locator("h2:visible").first.inner_text() == "✕ HEAD is worse than it was"
    assert page.locator(".card:visible").count() == len(CHARTS)


def test_no_text_of_a_row_runs_and_nothing_is_fetched(chromium: Browser, tmp_path: Path) -> None:
    rows = hostile.hostile_rows("machine", "metric", "params")
    (tmp_path / "index.html").write_text(
        build_page(Report(hostile.results_of(rows))), encoding="utf-8"
    )
    context = chromium.new_context()
    page = context.new_page()
    wanted: list[str] = []
    errors: list[str] = []
    page.on("request", lambda request: wanted.append(request.url))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto((tmp_path / "index.html").as_uri())
    page.wait_for_selector("html[data-ready]", state="attached")
    assert wanted == [(tmp_path / "index.html").as_uri()] and not errors
    assert page.evaluate("typeof pwned") == "undefined"


def test_the_picture_is_taken_by_a_command_and_is_small(chromium: Browser, tmp_path: Path) -> None:
    del chromium  # there is one
    rows, out = write(tmp_path / "rows", charted()), tmp_path / "report.png"
    command = [
        sys.executable,
        "-m",
        "hybrid_kv.measure.dashboard.picture",
        "--results",
        str(rows),
        "--out",
        str(out),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    taken = out.read_bytes()
    assert taken.startswith(b"\x89PNG") and 10_000 < len(taken) <= picture.MAX_BYTES
    assert done.stdout == f"{out}: {len(taken):,} bytes\n"


def test_a_system_without_a_browser_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    rows = write(tmp_path / "rows", charted(3))
    with pytest.raises(HybridKVError, match="apt-get install chromium"):
        picture.main(["--results", str(rows), "--out", str(tmp_path / "report.png")])
    assert not (tmp_path / "report.png").exists()
