from __future__ import annotations

import pytest

from hybrid_kv.dashboard.page import build_page
from tests.dashboard.kinds import everything
from tests.dashboard.rows import results


@pytest.fixture(scope="session")
def full(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A page with every section, of a repository."""
    pytest.importorskip("plotly", reason="the report needs plotly: pip install -e '.[report]'")
    return build_page(results(tmp_path_factory.mktemp("rows"), *everything()), "https://example.org/a/b/")
