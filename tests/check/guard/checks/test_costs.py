"""A hit that drafts have cost, and a draft that caching has cost, are seen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from hybrid_kv.check.guard.checks import costs
from hybrid_kv.check.guard.checks.costs import check_costs
from hybrid_kv.check.guard.play import Differences
from hybrid_kv.check.guard.registry import CheckResult, Run
from hybrid_kv.check.guard.scenario import Scenario
from hybrid_kv.check.guard.traffic import draw_trio
from hybrid_kv.engine.llm import RequestOutput

Played = tuple[Differences, list[RequestOutput]]


@pytest.fixture(scope="module")
def played() -> dict[str, Played]:
    """By scenario, played once for all tests."""
    return {str(one): costs.play(one) for trial in range(3) for one in draw_trio(trial)}


Change = Callable[[RequestOutput], RequestOutput]


def cost(
    monkeypatch: pytest.MonkeyPatch,
    played: dict[str, Played],
    one: Change,
    every: Change = lambda output: output,
) -> CheckResult:
    """Return the check's line with every output changed, and the last line of the full engines."""

    def play(scenario: Scenario) -> Played:
        result, outputs = played[str(scenario)]
        outputs = list(map(every, outputs))
        if scenario.options["num_speculative_tokens"] and scenario.options["enable_prefix_caching"]:
            outputs[-1] = one(outputs[-1])
        return result, outputs

    monkeypatch.setattr(costs, "play", play)
    return check_costs(Run(3))[0]


def same(output: RequestOutput) -> RequestOutput:
    return output


@pytest.mark.parametrize("name", ["cached_tokens", "num_accepted_draft_tokens"])
def test_what_drafts_and_caching_cost_is_seen(
    monkeypatch: pytest.MonkeyPatch, played: dict[str, Played], name: str
) -> None:
    assert cost(monkeypatch, played, same).passed
    result = cost(
        monkeypatch, played, lambda output: replace(output, **{name: getattr(output, name) - 1})
    )
    assert not result.passed and result.value == 3


def test_costs_without_hits_are_void(
    monkeypatch: pytest.MonkeyPatch, played: dict[str, Played]
) -> None:
    void = cost(monkeypatch, played, same, lambda output: replace(output, cached_tokens=0))
    assert void.detail.startswith("void")
