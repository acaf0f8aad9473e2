from __future__ import annotations

from collections.abc import Iterator

import pytest

from mutants.runner.run import Forks


@pytest.fixture(scope="package")
def forked() -> Iterator[Forks]:
    """One for all tests: it imports for seconds."""
    one = Forks()
    yield one
    one.close()
