"""CUDA's events and waits as entries of a log."""

import torch


def log_events(monkeypatch, log, milliseconds):
    """From now on `log` gets "event" and "wait"; between any two events lie so many milliseconds."""

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
