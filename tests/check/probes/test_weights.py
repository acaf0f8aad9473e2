"""A checkpoint that is exact by its weights, in an engine: every wrong token is wrong."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hybrid_kv.check.probes.guarded import Guarded
from hybrid_kv.check.probes.judge import WeightsJudge
from hybrid_kv.check.probes.run import ProbeRun, guard
from hybrid_kv.check.targets.kinds import kind_of, model_folder
from hybrid_kv.check.targets.target import Answer, Ask


@pytest.fixture(scope="module")
def folder() -> Iterator[str]:
    with model_folder("lfm2:exact") as made:
        yield made


def test_a_wrong_token_and_a_log_probability_that_is_off_by_the_least_are_wrong(
    folder: str,
) -> None:
    judge = WeightsJudge(folder)
    ask = Ask((5, 6, 7), max_tokens=1)
    (right,) = [int(judge.oracle.logprobs(ask.prompt)[-1].argmax())]
    wrong = 1 + right % 100
    assert judge.judge(ask, Answer((right,), logprobs=({right: 0.0},)), None).verdict == "right"
    assert judge.judge(ask, Answer((wrong,)), None).expected == (right,)
    assert judge.judge(ask, Answer((right,), logprobs=({right: -1e-7},)), None).logprob == 0.0
    assert (
        judge.judge(
            Ask((5, 6, 7), max_tokens=1, temperature=1.0, seed=3), Answer((wrong,)), None
        ).verdict
        == "wrong"
    )


@pytest.mark.parametrize("settings", [{"dtype": "bfloat16"}, {"prefix": "align", "spec": "ngram3"}])
def test_this_engine_is_right_in_every_dtype(folder: str, settings: dict[str, str]) -> None:
    run = ProbeRun(Guarded(kind_of("ours"), folder), [settings], ["drafts", "repeat"])
    guard([run])
    verdicts = {outcome.probe: outcome.verdict for outcome in run.found()}
    assert len(verdicts) >= 2 and {*verdicts.values()} == {"right"}
