"""A step's block ids, by the engine and by models of vLLM, and what the guard requires of them."""

from __future__ import annotations

import pytest

from hybrid_kv.measure.timing import block_ids
from hybrid_kv.measure.timing.case import WrongResultError

DECODE = "decode, 16 of 256 append 1"


@pytest.mark.parametrize("scenario", block_ids.SCENARIOS)
@pytest.mark.parametrize("subject", block_ids.STAGINGS)
def test_every_subject_brings_the_same_ids(scenario: str, subject: str) -> None:
    case = block_ids.step(0, scenario, 8, subject)
    assert case.check() == 0
    case.reset()
    case.run()
    assert case.check() == 0


def test_the_guard_gets_every_rival_of_its_scenarios(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_ids, "REQUIRED", {DECODE: block_ids.REQUIRED[DECODE]})
    found = block_ids.guarded_ratios()
    assert [*found] == [(DECODE, "vllm 0.22 V2"), (DECODE, "vllm 0.32 V2")]
    assert all(0 < one.low <= one.value <= one.high for one in found.values())
    assert [block_ids.required_ratio(*key) for key in found] == [4.0, 2.5]
    assert block_ids.required_ratio("8 prefills x 64", "vllm 0.32 V2") == 1.0


def test_a_wrong_rival_stops_the_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_ids, "REQUIRED", {DECODE: {}})
    right = block_ids.ListStaging.finish

    def finish(self: block_ids.ListStaging) -> None:
        right(self)
        self.contents[1] += 1

    monkeypatch.setattr(block_ids.ListStaging, "finish", finish)
    with pytest.raises(WrongResultError, match=r"vllm 0.22 V2: the kernel blocks"):
        block_ids.guarded_ratios()
