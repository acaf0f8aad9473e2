from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.dashboard import chromium
from tests.dashboard.html import page_of
from tests.dashboard.kinds import everything
from tests.dashboard.rows import results

Open = Callable[..., chromium.Page]


@pytest.fixture(scope="session")
def full(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A page with every section, of a repository."""
    pytest.importorskip("plotly", reason="the report needs plotly: pip install -e '.[report]'")
    return page_of(results(tmp_path_factory.mktemp("rows"), *everything()), "https://example.org/a/b/")


@pytest.fixture(scope="session")
def browser() -> Iterator[chromium.Browser]:
    """Headless; a test that asks for it is skipped where none is installed."""
    path = chromium.find()
    if path is None:
        pytest.skip(f"none of {', '.join(chromium.NAMES)} is on the PATH")
    running = chromium.Browser(path)
    yield running
    running.close()


@pytest.fixture
def opened(browser: chromium.Browser) -> Iterator[Open]:
    """Opens files in tabs that the end of the test closes."""
    pages: list[chromium.Page] = []

    def opening(file: Path, **how: object) -> chromium.Page:
        pages.append(browser.open(file, **how))  # type: ignore[arg-type]
        return pages[-1]

    yield opening
    for page in pages:
        page.close()
