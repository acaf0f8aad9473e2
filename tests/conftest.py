"""Shared settings: one hypothesis profile, and the marker for tests that need a GPU."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, settings

# Derandomised, so that a change and its parent see the same examples; no deadline, because CI machines are shared.
settings.register_profile(
    "hybrid-kv", deadline=None, derandomize=True, max_examples=60, suppress_health_check=[HealthCheck.too_slow]
)
# `make fuzz`: other examples every time, as many as ten minutes take.
settings.register_profile("nightly", parent=settings.get_profile("hybrid-kv"), derandomize=False, max_examples=2400)
settings.load_profile("hybrid-kv")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
