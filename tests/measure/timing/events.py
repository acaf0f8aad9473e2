"""CUDA's events and waits as entries of a log."""

from __future__ import annotations

import pytest
import torch


def log_events(monkeypatch: pytest.MonkeyPatch, log: list[str], milliseconds: float) -> None:
    """Have `log` get "event" and "wait"; any two events are this many milliseconds apart."""

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            log.append("event")

        def synchronize(self) -> None:
            log.append("wait")

        def elapsed_time(self, end: Event) -> float:
            assert log[-1] == "wait"  # an event that has not happened yet has no time
            return milliseconds

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: log.append("wait"))
