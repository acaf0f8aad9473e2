from __future__ import annotations

import pytest

from tests.dashboard.html import page_of
from tests.dashboard.kinds import everything, swarms
from tests.dashboard.rows import results


@pytest.fixture(scope="session")
def full(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A page with every section, of a repository."""
    return page_of(results(tmp_path_factory.mktemp("rows"), *everything(), *swarms()), "https://example.org/a/b/")
