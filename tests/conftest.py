"""Shared settings: one torch thread, a hypothesis profile, the `gpu` marker, and Ctrl-C."""

from __future__ import annotations

import gc
import os
import signal

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings

# A failed assertion of theirs says the values, as one of a test module does.
pytest.register_assert_rewrite("tests.support")

# Nothing that a module makes while it is imported is garbage; see `pytest_collection_finish`.
gc.disable()
# Tensors this small are slower on several threads, five times so where the workers of a run share
# the cores.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the processes that tests start
# Nor should each of them compile the package again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# what commands print is the same where CI runs the tests
for name in ("GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY"):
    os.environ.pop(name, None)

# Derandomised, so that a change and its parent see the same examples; no deadline, because CI
# machines are shared.
settings.register_profile(
    "hybrid-kv",
    deadline=None,
    derandomize=True,
    max_examples=40,
    suppress_health_check=[HealthCheck.too_slow],
)
# `make fuzz`: other examples every time, as many as ten minutes take.
settings.register_profile(
    "nightly", parent=settings.get_profile("hybrid-kv"), derandomize=False, max_examples=3000
)
# `make rehearse`
settings.register_profile("rehearsal", parent=settings.get_profile("nightly"), max_examples=2)
# `hybrid-kv mutants --by triton`, which wants to know that a test fails and not the smallest
# example.
settings.register_profile(
    "mutants", parent=settings.get_profile("hybrid-kv"), phases=[Phase.explicit, Phase.generate]
)
settings.load_profile("hybrid-kv")

# A shell's job in the background ignores Ctrl-C, and so would each process that a test starts and
# interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    if config.option.markexpr == "gpu":  # or a runner that has lost its GPU would pass
        raise pytest.UsageError("-m gpu: torch sees no GPU here")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def pytest_collection_finish() -> None:
    # What the tests import is a million objects, which every full collection of garbage would walk
    # again.
    gc.freeze()
    gc.set_threshold(20_000, 20)  # And what a test makes is rarely garbage in a circle.
    gc.enable()
