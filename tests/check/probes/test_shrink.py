from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hybrid_kv.check.probes.reproducer import (
    ProbeCase,
    case_of,
    from_json,
    replay,
    to_json,
    write_files,
)
from hybrid_kv.check.probes.session import Failure, Session
from hybrid_kv.check.probes.shrink import distinct, shrink
from hybrid_kv.config import ConfigError
from tests.check.probes.toy import UNIT, ToyKind, run_probe, session


def started(bug: str) -> Session:
    return session(ToyKind(bug=bug))


def failure_of(bug: str, probe: str) -> Failure:
    (failure,) = run_probe(started(bug), probe).failures
    return failure


@pytest.mark.parametrize(
    "bug, probe, requests, tokens",
    [
        ("hit", "repeat", 2, 2 * (UNIT + 1)),
        ("ends with the hit", "ends at a cached entry", 2, 2 * (UNIT + 1)),
        ("salts", "salts isolate", 2, 2 * (UNIT + 1)),
        ("preempted", "preempted", 1, 1),
        ("n", "several answers", 1, 1),
        ("abort", "abort, then the same prompt", 2, 2),
        ("dies", "batch", 7, 7),
        ("dies of one token", "alone", 1, 1),
    ],
)
def test_nothing_that_can_be_missed_is_left(
    bug: str, probe: str, requests: int, tokens: int
) -> None:
    shrunk = shrink(failure_of(bug, probe), lambda: started(bug))
    assert shrunk.failure.num_requests == requests and shrunk.num_prompt_tokens <= tokens
    assert shrunk.is_minimal


def test_what_was_found_when_the_time_is_up_still_fails() -> None:
    failure = failure_of("hit", "repeat")
    shrunk = shrink(failure, lambda: started("hit"), seconds=0)
    assert not shrunk.is_minimal and shrunk.failure == failure


def case(bug: str = "hit", probe: str = "repeat") -> ProbeCase:
    failure = shrink(failure_of(bug, probe), lambda: started(bug)).failure
    return case_of(failure, "ours", "1.0", "qwen3_5_text", 1e-6)


@pytest.mark.parametrize(
    "bug, probe", [("hit", "repeat"), ("salts", "salts isolate"), ("preempted", "preempted")]
)
def test_a_file_is_played_again_and_tells_the_bug_from_its_mend(bug: str, probe: str) -> None:
    one = from_json(to_json(case(bug, probe)), "file")
    assert one == case(bug, probe)
    assert one.is_wrong(replay(one, started(bug).target))
    assert not one.is_wrong(replay(one, started("").target))


def test_a_case_is_played_on_an_empty_cache() -> None:
    one = case()
    alone = replace(one, rounds=one.rounds[-1:], index=0)
    target = started("").target
    assert [replay(alone, target).cached_tokens for _ in range(2)] == [0, 0]


def test_the_text_has_all_requests(tmp_path: Path) -> None:
    files = {file.suffix: file.read_text() for file in write_files(case(), tmp_path / "repro")}
    assert set(files) == {".json", ".md"} and files[".md"].count("1. `[") == 1


def test_deaths_of_one_kind_are_made_small_once() -> None:
    one, wrong = failure_of("dies", "batch"), failure_of("hit", "repeat")
    again = replace(one, judgement=replace(one.judgement, problem="toy died at index 7"))
    like = replace(one, judgement=replace(one.judgement, problem="toy died at index 31"))
    assert distinct([one, wrong, again, like, wrong]) == [one, wrong, again, wrong]


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"format": "other", "version": 1}', to_json(case()).replace("rounds", "x")],
)
def test_another_file_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(ConfigError, match=r"file can't be played: .*write it anew"):
        from_json(text, "file")


def test_what_only_fails_in_an_engine_with_a_past_is_reduced_in_new_ones() -> None:
    """The bug comes with the 21st request, whatever the cache holds."""
    shrunk = shrink(failure_of("churn", "again after many"), lambda: started("churn"), seconds=20)
    assert shrunk.failure.num_requests == 21
