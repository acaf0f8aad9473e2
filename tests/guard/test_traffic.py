"""Scenarios are reproducible, and a pattern that happened is counted."""

from __future__ import annotations

from collections import Counter

import pytest

from hybrid_kv.engine.llm import LLM
from hybrid_kv.engine.sampling import SamplingParams
from hybrid_kv.guard.checks import run_scenario
from hybrid_kv.guard.traffic import REQUIRED, Observer, Scenario, draw_scenario
from hybrid_kv.models.exact import ExactModel


def test_a_seed_is_a_scenario() -> None:
    assert draw_scenario(5) == draw_scenario(5)
    assert draw_scenario(5) != draw_scenario(6)


def test_every_required_pattern_happens_within_thirty_scenarios() -> None:
    seen: Counter[str] = Counter()
    for seed in range(30):
        errors, patterns = run_scenario(draw_scenario(seed))
        assert not errors, errors[0]
        seen += patterns
    assert set(seen) == set(REQUIRED)


def test_quiet_traffic_is_void() -> None:
    options = {"num_blocks": 100, "max_num_seqs": 2, "max_model_len": 96, "device": "cpu", "captured_batch_sizes": ()}
    scenario = Scenario(0, "M*", options, [[1, 2, 3, 4, 5]], [SamplingParams(max_tokens=3)], 0)
    errors, seen = run_scenario(scenario)
    assert not errors
    assert {"preemption", "chunked_prefill", "padded_rows", "waiting", "row_reuse"}.isdisjoint(
        name for name in seen if seen[name]
    )


def test_accounting_sees_a_block_too_many() -> None:
    scenario = draw_scenario(1)
    llm = LLM(ExactModel(), num_blocks=50, max_num_seqs=2, max_model_len=96, device="cpu")
    observer = Observer(scenario)

    def hoard(engine: LLM) -> None:
        for request in engine.scheduler.running:
            engine.manager.allocate_slots(request.request_id, request.num_computed_tokens + 64)
        observer(engine)

    with pytest.raises(AssertionError, match="are due"):
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4), progress=False, on_step=hoard)


def test_a_livelock_is_an_error() -> None:
    # Twenty tokens need two steps of sixteen, and the request is preempted after each first one.
    scenario = Scenario(0, "M*", {}, [[1, 2]], [SamplingParams(max_tokens=2)], 0)
    llm = LLM(ExactModel(), num_blocks=50, max_num_seqs=2, max_num_batched_tokens=16, max_model_len=96, device="cpu")
    observer = Observer(scenario)

    def preempt_for_ever(engine: LLM) -> None:
        observer(engine)
        for request in list(engine.scheduler.running):
            engine.scheduler.preempt(request)

    with pytest.raises(AssertionError, match="livelock"):
        llm.generate([[1] * 20], SamplingParams(max_tokens=5), progress=False, on_step=preempt_for_ever)
