"""A border that has moved, to either side, is seen."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from typing import Any

import pytest

from hybrid_kv.attention import undo
from hybrid_kv.cache.manager import KVCacheManager
from hybrid_kv.cache.modes import MODES
from hybrid_kv.engine.scheduler import Scheduler
from hybrid_kv.guard.checks.refusals import check_refusals
from hybrid_kv.guard.registry import Run


@pytest.mark.parametrize("seed", range(3))
def test_what_is_allowed_runs_and_what_is_not_is_refused(seed: int) -> None:
    (result,) = check_refusals(Run(1, seed))
    assert result.passed, result.detail


@pytest.mark.parametrize(
    ("least", "said"),
    [(lambda T: T, "must be refused because 'is too short"), (lambda T: 99, "is refused: replay_ring_len=")],
)
def test_a_ring_limit_that_has_moved_is_seen(
    monkeypatch: pytest.MonkeyPatch, least: Callable[[int], int], said: str
) -> None:
    monkeypatch.setattr(undo, "shortest_ring_len", least)
    (result,) = check_refusals(Run(1))
    assert not result.passed and said in result.detail


@pytest.mark.parametrize(
    ("function", "old", "new", "said"),
    [
        (KVCacheManager.__init__, "continue", "break", "drafts of a block, mode align, layers *M"),
        (Scheduler.add, "if length >= limit:", "if length == limit:", "the prompt has 65 tokens"),
        (Scheduler.add, "if length == 0:", "if length == -1:", "the prompt is empty"),
    ],
)
def test_a_condition_that_lets_something_in_is_seen(
    monkeypatch: pytest.MonkeyPatch, function: Callable[..., Any], old: str, new: str, said: str
) -> None:
    source, planted = textwrap.dedent(inspect.getsource(function)), dict[str, Any]()
    assert source.count(old) == 1
    exec("from __future__ import annotations\n" + source.replace(old, new), {**function.__globals__}, planted)
    monkeypatch.setattr(function, "__code__", planted[function.__name__].__code__)
    (result,) = check_refusals(Run(1))
    assert not result.passed and said in result.detail


def test_a_request_that_is_refused_a_block_too_early_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    fits = KVCacheManager.can_ever_fit
    monkeypatch.setattr(KVCacheManager, "can_ever_fit", lambda self, num_tokens: fits(self, num_tokens + 8))
    (result,) = check_refusals(Run(1))
    assert not result.passed and "the last block of a request, mode none" in result.detail


@pytest.mark.parametrize(
    ("mode", "keeps", "said"),
    [
        ("align", True, "Mamba blocks of 16 tokens: {'mamba_cache_mode': 'align', 'mamba_block_size': 16} must be"),
        ("all", False, "Mamba blocks of 16 tokens: {'mamba_cache_mode': 'all', 'mamba_block_size': 16} is refused"),
    ],
)
def test_a_block_size_of_the_user_that_is_lost_or_refused_is_seen(
    monkeypatch: pytest.MonkeyPatch, mode: str, keeps: bool, said: str
) -> None:
    monkeypatch.setattr(type(MODES[mode]), "may_replace", lambda self, given, chosen: keeps, raising=False)
    (result,) = check_refusals(Run(1))
    assert not result.passed and said in result.detail


def test_states_that_are_run_again_without_their_inputs_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(undo.ReplaySpec, "needs_inputs", False)
    (result,) = check_refusals(Run(1))
    assert not result.passed and "is for Mamba-2 layers, not gdn_attention; use slots" in result.detail
