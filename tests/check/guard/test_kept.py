"""A block that is lost, loaded, stored or counted contrary to the requests' tokens is seen."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from hybrid_kv.cache import offload
from hybrid_kv.cache.manager import HitLostError
from hybrid_kv.cache.offload import KVOffload
from hybrid_kv.check.guard.play import run_scenario
from hybrid_kv.check.guard.scenario import Scenario
from hybrid_kv.check.guard.traffic import draw_scenario
from hybrid_kv.engine.scheduler import Scheduler
from hybrid_kv.request import Request
from tests.support.forced import forced


def rule(scenario: Scenario) -> str:
    (failure,) = run_scenario(scenario).wrong
    return failure.rule


class LastInFirstOut(OrderedDict[Any, Any]):
    def popitem(self, last: bool = True) -> Any:
        return super().popitem(not last)


def first_group_alone(tier: KVOffload, items: Any) -> None:
    STORE(tier, [item for item in items if item[0][0] == 0])


STORE = KVOffload.store


@pytest.mark.parametrize(
    ("place", "name", "broken", "seen"),
    [
        (offload, "OrderedDict", LastInFirstOut, "hit-length"),
        (KVOffload, "store", first_group_alone, "tier"),
    ],
)
def test_a_host_tier_that_keeps_other_blocks(
    monkeypatch: pytest.MonkeyPatch, place: Any, name: str, broken: Any, seen: str
) -> None:
    scenario = draw_scenario(forced("offload_hit"))
    tight = replace(scenario, options={**scenario.options, "kv_offload_bytes": 2000})
    assert not run_scenario(tight).wrong
    monkeypatch.setattr(place, name, broken)
    assert rule(tight) == seen


@pytest.mark.parametrize(
    "metric", ["loaded_blocks", "loaded_bytes", "stored_bytes", "host_hits", "misses"]
)
def test_a_metric_of_the_tier_that_did_not_happen(
    monkeypatch: pytest.MonkeyPatch, metric: str
) -> None:
    load: Callable[..., Any] = KVOffload.load

    def lie(self: KVOffload, pages: Any, ids: Any) -> None:
        load(self, pages, ids)
        setattr(self.stats, metric, getattr(self.stats, metric) + 1)

    monkeypatch.setattr(KVOffload, "load", lie)
    assert rule(draw_scenario(forced("offload_hit"))) == "tier"


def test_a_request_that_goes_on_without_what_the_tier_has_lost_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scenario = draw_scenario(forced("lost_hit"))
    result = run_scenario(scenario)
    assert not result.wrong and result.seen["lost_hit"] and not result.seen["offload_hit"]

    def admit(self: Scheduler, request: Request, budget: int, scheduled: Any) -> Any:
        """Without a second look, which would find what the device has."""
        try:
            return self._try_to_admit(request, budget, scheduled)
        except HitLostError:
            return None

    monkeypatch.setattr(Scheduler, "_admit", admit)
    assert rule(scenario) in ("left-waiting", "RuntimeError in step")
