"""Each forced pattern happens, and is seen; traffic without it is not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hybrid_kv.check.guard.forced import FORCED
from hybrid_kv.check.guard.patterns import REQUIRED
from hybrid_kv.check.guard.play import run_scenario
from hybrid_kv.check.guard.traffic import draw_scenario
from hybrid_kv.sampling import SamplingParams
from tests.support.scenarios import scenario


@pytest.mark.parametrize("names", FORCED)
def test_a_forced_pattern_happens(names: str) -> None:
    result = run_scenario(draw_scenario(list(FORCED).index(names)))
    assert result.wrong == []
    assert [name for name in names.split(", ") if not result.seen[name]] == []


def test_quiet_traffic_has_none_of_them() -> None:
    alone = scenario(
        "none", max_num_seqs=2, captured_batch_sizes=(), attention_backend="TORCH", block_size=16
    )
    prompts, params = [[1, 2, 3, 4, 5]], [SamplingParams(max_tokens=3)]
    result = run_scenario(replace(alone, layers="M*", prompts=prompts, params=params, waves=()))
    assert result.wrong == []
    assert {name for name in REQUIRED if result.seen[name]} == {"blocks_first"}
