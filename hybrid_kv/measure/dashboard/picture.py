"""`python -m hybrid_kv.measure.dashboard.picture [--results FOLDER] [--out FILE]`: a screenshot.

It is taken of a real page by a real browser: Chromium or Chrome, as the system has it.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from hybrid_kv.errors import HybridKVError, require, run_command
from hybrid_kv.files import check_outputs, write_whole
from hybrid_kv.measure.dashboard.data import load
from hybrid_kv.measure.dashboard.page import build_page
from hybrid_kv.measure.dashboard.report import Report
from hybrid_kv.measure.results import head

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
WIDTH = 1280
HEIGHT = 720
MAX_BYTES = 200_000


@contextmanager
def browser() -> Iterator[Browser]:
    """Start Chromium, without a window.

    Raises:
        HybridKVError: there is none.
    """
    require("playwright")
    from playwright.sync_api import sync_playwright

    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        raise HybridKVError(
            f"none of {', '.join(BROWSERS)} is installed; on Debian, apt-get install chromium"
        )
    with sync_playwright() as playwright:
        # Its sandbox needs rights that root in a container lacks; the only page is the project's
        # own.
        started = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        try:
            yield started
        finally:
            started.close()


def open_page(started: Browser, file: Path, width: int, height: int, dark: bool = False) -> Page:
    """Open a page from a disk, and return it when its script has run.

    Nothing else can be reached.

    Args:
        width, height: of the window, in CSS pixels.
    """
    context = started.new_context(color_scheme="dark" if dark else "light", offline=True)
    page = context.new_page()
    page.set_viewport_size({"width": width, "height": height})
    page.goto(file.resolve().as_uri())
    page.wait_for_selector("html[data-ready]", state="attached")
    return page


def take_picture(html: str) -> bytes:
    """Take the first screen of a page as PNG.

    Raises:
        HybridKVError: there is no browser, or the picture is larger than `MAX_BYTES`.
    """
    with TemporaryDirectory() as folder, browser() as started:
        file = Path(folder) / "index.html"
        write_whole(file, html)
        picture = open_page(started, file, WIDTH, HEIGHT).screenshot()
    if len(picture) > MAX_BYTES:
        raise HybridKVError(
            f"the picture has {len(picture):,} bytes, more than {MAX_BYTES:,}; draw fewer charts"
        )
    return picture


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the picture; return 0.

    Raises:
        HybridKVError: no results, no browser, or a file that cannot be written.
    """
    parser = argparse.ArgumentParser(
        prog="python -m hybrid_kv.measure.dashboard.picture", description=take_picture.__doc__
    )
    parser.add_argument(
        "--results", type=Path, default=Path("results"), help="folder with CSVs or data sets"
    )
    parser.add_argument("--out", type=Path, default=Path("docs/report.png"), help="the picture")
    options = parser.parse_args(arguments)
    check_outputs(options.out)
    checkout = head()
    picture = take_picture(build_page(Report(load(options.results, checkout), checkout)))
    write_whole(options.out, picture)
    print(f"{options.out}: {len(picture):,} bytes")
    return 0


if __name__ == "__main__":
    run_command(main)
