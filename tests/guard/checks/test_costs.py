"""A hit that drafts have cost, and a draft that caching has cost, are seen."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hybrid_kv.engine.llm import RequestOutput
from hybrid_kv.guard.checks import costs
from hybrid_kv.guard.checks.costs import check_costs
from hybrid_kv.guard.play import Differences
from hybrid_kv.guard.registry import Run
from hybrid_kv.guard.scenario import Scenario


@pytest.mark.parametrize("name", ["cached_tokens", "num_accepted_draft_tokens"])
def test_what_drafts_and_caching_cost_is_seen(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    assert check_costs(Run(3))[0].passed
    play = costs.play

    def dearer(scenario: Scenario) -> tuple[Differences, list[RequestOutput]]:
        result, outputs = play(scenario)
        if scenario.options["num_speculative_tokens"] and scenario.options["enable_prefix_caching"]:
            outputs[-1] = replace(outputs[-1], **{name: getattr(outputs[-1], name) - 1})
        return result, outputs

    monkeypatch.setattr(costs, "play", dearer)
    result = check_costs(Run(3))[0]
    assert not result.passed and result.value == 3


def test_costs_without_hits_are_void(monkeypatch: pytest.MonkeyPatch) -> None:
    play = costs.play
    monkeypatch.setattr(costs, "play", lambda s: (play(s)[0], [replace(o, cached_tokens=0) for o in play(s)[1]]))
    assert check_costs(Run(3))[0].detail.startswith("void")
