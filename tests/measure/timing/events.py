"""CUDA's events and waits as entries of a log."""

import torch


def log_events(monkeypatch, log, milliseconds):
    """Have `log` get "event" and "wait"; any two events are this many milliseconds apart."""

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            log.append("event")

        def synchronize(self):
            log.append("wait")

        def elapsed_time(self, end):
            assert log[-1] == "wait"  # an event that has not happened yet has no time
            return milliseconds

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: log.append("wait"))
