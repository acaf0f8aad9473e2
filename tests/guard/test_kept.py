"""A block that is lost, loaded, stored or counted otherwise than the tokens of all requests say is seen."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from hybrid_kv.cache import offload
from hybrid_kv.cache.offload import KVOffload
from hybrid_kv.guard.forced import FORCED
from hybrid_kv.guard.kept import Device, Host
from hybrid_kv.guard.play import run_scenario
from hybrid_kv.guard.scenario import Scenario
from hybrid_kv.guard.traffic import SCENARIOS_PER_RUN, draw_scenario

A, B, C = ((0, ("", bytes([number]))) for number in range(3))


def forced(pattern: str, run: int = 0) -> Scenario:
    number = next(i for i, names in enumerate(FORCED) if pattern in names.split(", "))
    return draw_scenario(run * SCENARIOS_PER_RUN + number)


def rule(scenario: Scenario) -> str:
    (failure,) = run_scenario(scenario).wrong
    return failure.rule


def test_of_equal_blocks_the_first_is_found_and_another_takes_its_place() -> None:
    device = Device()
    assert device.publish(A, 1) and not device.publish(A, 2) and not device.publish(A, 3)
    device.give_back([2])  # it cannot be found
    device.take([2])
    assert (device.num_lost, A in device) == (0, True)
    device.give_back([1])
    device.take([1])
    assert (device.num_lost, A in device) == (1, True)
    device.take([3])
    assert (device.num_lost, len(device)) == (2, 0)


def test_the_host_keeps_what_was_used_last_up_to_its_last_byte() -> None:
    host = Host(20, [10])
    host.store([A, B])
    host.load([A])
    assert (host.used, host.num_left) == (20, 0)
    host.store([C])
    assert [name in host for name in (A, B, C)] == [True, False, True]
    host.store([B, A])  # together: A was there when they came
    assert (host.num_left, host.stored, host.loaded) == (2, [4], [1])
    assert A not in (small := Host(9, [10])) and not small.used


@pytest.mark.parametrize("run", range(3))
def test_hits_are_held_to_all_that_was_published_in_a_pool_that_loses_blocks(run: int) -> None:
    result = run_scenario(forced("exact_hit_of_host", run))
    assert not result.wrong and result.seen["exact_hit_of_host"]


class LastInFirstOut(OrderedDict[Any, Any]):
    def popitem(self, last: bool = True) -> Any:
        return super().popitem(not last)


def first_group_alone(tier: KVOffload, items: Any) -> None:
    STORE(tier, [item for item in items if item[0][0] == 0])


STORE = KVOffload.store


@pytest.mark.parametrize(
    ("place", "name", "broken", "seen"),
    [(offload, "OrderedDict", LastInFirstOut, "hit-length"), (KVOffload, "store", first_group_alone, "tier")],
)
def test_a_host_tier_that_keeps_other_blocks(
    monkeypatch: pytest.MonkeyPatch, place: Any, name: str, broken: Any, seen: str
) -> None:
    scenario = forced("offload_hit")
    tight = replace(scenario, options={**scenario.options, "kv_offload_bytes": 2000})
    assert not run_scenario(tight).wrong
    monkeypatch.setattr(place, name, broken)
    assert rule(tight) == seen


@pytest.mark.parametrize("metric", ["loaded_blocks", "loaded_bytes", "stored_bytes", "host_hits", "misses"])
def test_a_metric_of_the_tier_that_did_not_happen(monkeypatch: pytest.MonkeyPatch, metric: str) -> None:
    load: Callable[..., Any] = KVOffload.load

    def lie(self: KVOffload, pages: Any, ids: Any) -> None:
        load(self, pages, ids)
        setattr(self.stats, metric, getattr(self.stats, metric) + 1)

    monkeypatch.setattr(KVOffload, "load", lie)
    assert rule(forced("offload_hit")) == "tier"
