"""Forced patterns of traffic, and an engine that copies no state."""

from __future__ import annotations

import pytest

from hybrid_kv.check.guard.forced import FORCED
from hybrid_kv.engine import runner


def forced(name: str) -> int:
    """The number of the scenario that a pattern is forced in."""
    return next(number for number, names in enumerate(FORCED) if name in names.split(", "))


def no_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "postprocess_mamba", lambda *_: None)
