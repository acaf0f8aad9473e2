"""Shared by the tests of the accuracy runs."""

from collections.abc import Iterator

import pytest

from hybrid_kv.threads import one_thread


@pytest.fixture(scope="module")
def single_thread() -> Iterator[None]:
    """The models are tiny, the machine shared: a second thread only waits."""
    with one_thread():
        yield
