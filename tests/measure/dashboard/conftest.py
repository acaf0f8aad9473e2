from __future__ import annotations

import pytest

from tests.measure.dashboard.html import page_of
from tests.measure.dashboard.kinds import everything, swarms
from tests.measure.dashboard.rows import results


@pytest.fixture(scope="session")
def full(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A page with every section, of a repository."""
    return page_of(
        results(tmp_path_factory.mktemp("rows"), *everything(), *swarms()),
        "https://example.org/a/b/",
    )
