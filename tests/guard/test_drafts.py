"""The rules of drafts can be broken, and say so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hybrid_kv.engine import runner
from hybrid_kv.engine.runner import ModelRunner
from hybrid_kv.engine.scheduler import Scheduler
from hybrid_kv.guard.forced import FORCED
from hybrid_kv.guard.play import run_scenario
from hybrid_kv.guard.traffic import SCENARIOS_PER_RUN, draw_scenario

Break = Callable[[pytest.MonkeyPatch], None]


def first(names: str, run: int = 0) -> str:
    """What a forced scenario breaks; empty if nothing."""
    found = run_scenario(draw_scenario(run * SCENARIOS_PER_RUN + list(FORCED).index(names))).wrong
    return str(found[0]) if found else ""


def narrow(patch: pytest.MonkeyPatch) -> None:
    """Rows of `max_model_len` tokens."""
    start: Callable[..., None] = ModelRunner.__init__

    def init(self: ModelRunner, *given: Any) -> None:
        start(self, *given)
        rows, width = self.token_ids.shape
        self.token_ids.resize((rows, width - 1), refcheck=False)

    patch.setattr(ModelRunner, "__init__", init)


def roomy(by: int) -> Break:
    """The scheduler sees room for another number of tokens."""
    room = Scheduler._room
    return lambda patch: patch.setattr(Scheduler, "_room", lambda self, request: room(self, request) + by)


def starved(patch: pytest.MonkeyPatch) -> None:
    """The drafts of a request are a quarter of its share."""
    ask = Scheduler._next
    patch.setattr(Scheduler, "_next", lambda self, request, budget, share: ask(self, request, budget, share // 4))


def endless(patch: pytest.MonkeyPatch) -> None:
    """The last token is never in flight."""
    room = Scheduler._room
    patch.setattr(Scheduler, "_room", lambda self, request: max(2, room(self, request)))


def strange(patch: pytest.MonkeyPatch) -> None:
    """What is no token is verified, too."""
    patch.setattr(runner, "takewhile", lambda is_token, drafts: drafts)


LATE = "once_more_at_max_model_len"


@pytest.mark.parametrize(
    ("names", "broken", "said"),
    [
        (LATE, narrow, "known-tokens: a proposer is shown 64 tokens of request"),
        (LATE, roomy(1), "drafts-due: request"),
        ("one_step_late", endless, "runs-again: request"),
        (LATE, roomy(-1), "drafts-due: request"),
        ("all_accepted, max_model_len_with_drafts", roomy(1), "drafts-due: request"),
        ("all_accepted, max_model_len_with_drafts", roomy(-1), "drafts-due: request"),
        ("one_token_left, first_decode_beside_chunk", starved, "drafts-due: request 0 is to run"),
        ("strange_drafts", strange, "drafts-due: request"),
    ],
)
def test_a_rule_of_drafts(monkeypatch: pytest.MonkeyPatch, names: str, broken: Break, said: str) -> None:
    assert first(names) == ""
    broken(monkeypatch)
    assert said in first(names)
