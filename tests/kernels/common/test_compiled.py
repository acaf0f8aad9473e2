"""A loop runs as machine code where numba is, and everywhere else as it is written."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from hybrid_kv.kernels.common.compiled import compiled

SIGNATURE = "void(int64[::1], int64)"


def add(values: Any, more: int) -> None:
    for i in range(len(values)):
        values[i] += more


def test_a_compiled_loop_does_what_it_says() -> None:
    pytest.importorskip("numba")
    loop, values = compiled(add, SIGNATURE), np.arange(3)
    loop(values, 5)
    assert values.tolist() == [5, 6, 7]
    assert loop is not add and compiled(add, SIGNATURE) is loop
    with pytest.raises(TypeError, match="No matching definition"):
        loop(values.astype(np.int32), 5)


def test_without_numba_python_runs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    assert compiled.__wrapped__(add, SIGNATURE) is add


@pytest.mark.parametrize(("reorder", "fastmath"), [((), False), ((True,), {"reassoc", "contract"})])
@pytest.mark.parametrize(
    "error", [RuntimeError("no locator available"), OSError(28, "No space left on device")]
)
def test_code_that_cannot_be_kept_is_compiled_all_the_same(
    monkeypatch: pytest.MonkeyPatch, error: Exception, reorder: tuple[bool, ...], fastmath: Any
) -> None:
    numba = pytest.importorskip("numba")
    kept = []

    def njit(signature: str, cache: bool = False, fastmath: Any = False) -> Any:
        kept.append((cache, fastmath))
        if cache:
            raise error
        return lambda loop: (signature, loop)

    monkeypatch.setattr(numba, "njit", njit)
    assert compiled.__wrapped__(add, SIGNATURE, *reorder) == (SIGNATURE, add)
    assert kept == [(True, fastmath), (False, fastmath)]
