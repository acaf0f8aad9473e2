"""A failing scenario becomes small, stays wrong in the same way, and the same each time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid_kv.cache.block_hash import BlockHashes
from hybrid_kv.cache.manager import KVCacheManager
from hybrid_kv.check.guard import shrink as module
from hybrid_kv.check.guard.play import ScenarioFailure, run_scenario
from hybrid_kv.check.guard.registry import CheckResult
from hybrid_kv.check.guard.replay import from_json
from hybrid_kv.check.guard.run import GuardRunOptions, run_guard
from hybrid_kv.check.guard.scenario import answer_book
from hybrid_kv.check.guard.shrink import shrink
from hybrid_kv.check.guard.traffic import draw_scenario
from hybrid_kv.sampling import SamplingParams
from hybrid_kv.spec_decode import verify
from tests.support.forced import forced, no_copies


def failure(number: int) -> ScenarioFailure:
    return run_scenario(draw_scenario(number)).wrong[0]


def num_prompt_tokens(found: ScenarioFailure) -> int:
    return sum(map(len, found.scenario.prompts))


def no_salt(monkeypatch: pytest.MonkeyPatch) -> None:
    init = BlockHashes.__init__
    monkeypatch.setattr(BlockHashes, "__init__", lambda self, salt="": init(self, ""))


def chunks_beside_boundaries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVCacheManager, "chunk_end", lambda manager, start, end, *_: end)


@pytest.mark.parametrize(
    ("inject", "pattern", "rule", "num_requests", "num_tokens"),
    [
        (no_copies, "rejected_at_boundary", "copy-bytes", 1, 4),
        (no_salt, "salts_apart", "hit-length", 2, 12),
        (chunks_beside_boundaries, "attention_deeper", "chunk-end", 1, 16),
    ],
)
def test_little_is_left_of_a_failing_scenario(
    monkeypatch: pytest.MonkeyPatch,
    inject: Any,
    pattern: str,
    rule: str,
    num_requests: int,
    num_tokens: int,
) -> None:
    with monkeypatch.context() as patch:
        inject(patch)
        found = shrink(failure(forced(pattern)))
        small = found.failure
        assert found.is_minimal and small.rule == rule
        assert (
            len(small.scenario.prompts) <= num_requests and num_prompt_tokens(small) <= num_tokens
        )
        assert len(small.scenario.options) <= 8
        assert [one.rule for one in run_scenario(small.scenario).wrong] == [rule]
        assert replace(shrink(failure(forced(pattern))), seconds=0.0) == replace(found, seconds=0.0)
    assert run_scenario(small.scenario).wrong == []


def test_drawn_tokens_keep_their_seed_where_the_failure_needs_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def next_to_it(logits: torch.Tensor, params: Sequence[SamplingParams], *_: object) -> list[int]:
        return [
            token + (not own.is_greedy)
            for token, own in zip(logits.argmax(-1).tolist(), params, strict=True)
        ]

    monkeypatch.setattr(verify, "sample", next_to_it)
    scenario = replace(
        draw_scenario(0), params=[SamplingParams(max_tokens=3, temperature=5.0, seed=1)] * 4
    )
    found = shrink(run_scenario(scenario).wrong[0]).failure
    (params,) = found.scenario.params
    assert params.temperature > 0 and params.seed == 1 and num_prompt_tokens(found) == 1


def test_when_the_time_is_up_the_best_so_far_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    no_copies(monkeypatch)
    before = failure(forced("rejected_at_boundary"))
    found = shrink(before, seconds=0)
    assert not found.is_minimal and found.failure.scenario.prompts == before.scenario.prompts
    assert run_scenario(found.failure.scenario).wrong


def test_a_second_turn_stays_one_while_the_first_becomes_shorter() -> None:
    scenario = draw_scenario(forced("second_turn_all"))
    text, again = module.prompts_of(scenario)
    assert again.parent == 0 and again.num_answer >= 12
    text.new[:4] = []
    made = module.with_prompts(scenario, [text, again])
    first, second = made.prompts
    answer = answer_book(scenario.layers).answer(first, scenario.params[0], 96)
    assert len(first) == 8 and second == [*first, *answer[: again.num_answer], *again.new]


def test_a_failing_section_names_its_reproducer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "repro"

    def unlike_the_oracle() -> CheckResult:
        return run_guard(
            {"exact model": 10}, GuardRunOptions(0, progress=False, repro=folder, jobs=1)
        )[0]

    assert unlike_the_oracle().passed and not folder.exists()
    no_copies(monkeypatch)
    unlike = unlike_the_oracle()
    (file,) = folder.glob("copy-bytes-*.json")
    assert not unlike.passed and f"hybrid-kv replay {file}" in unlike.detail
    assert run_scenario(from_json(file.read_text())).wrong[0].report in unlike.detail
