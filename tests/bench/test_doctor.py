"""`python -m bench.doctor`: trials on a loaded and on a quiet machine, and how many were told right."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace

import pytest

from bench import doctor
from tests.timing.test_fitness import QUIET


@pytest.mark.parametrize(("shares", "code", "last"), [((0.0, 0.4), 0, "20 of 20"), ((0.0, 0.0), 1, "10 of 20")])
def test_half_of_the_trials_are_loaded_and_the_right_ones_are_counted(monkeypatch, capsys, shares, code, last):
    loaded = []

    @contextmanager
    def load(busy):
        loaded.append(busy)
        yield

    monkeypatch.setattr(doctor, "load", load)
    monkeypatch.setattr(doctor, "examine", lambda seconds: replace(QUIET, waited=shares[loaded[-1]]))
    assert doctor.main([]) == code
    assert sum(loaded) == 10 and loaded != sorted(loaded)
    assert capsys.readouterr().out.endswith(f"{last} told right\n")


def test_no_busy_process_outlives_a_trial():
    others = set(doctor.multiprocessing.active_children())
    with doctor.load(True):
        running = set(doctor.multiprocessing.active_children()) - others
        assert len(running) == doctor.PER_CORE * (doctor.os.cpu_count() or 1)
    assert not any(process.is_alive() for process in running)
