"""Settings in processes of their own say what they say one after another."""

from __future__ import annotations

from dataclasses import replace

import pytest

import hybrid_kv
from hybrid_kv.guard.workers import CONTEXT
from hybrid_kv.models.random_checkpoint import write_checkpoint
from hybrid_kv.probes import at_once
from hybrid_kv.probes.guarded import Guarded
from hybrid_kv.probes.run import guard, matrix_of
from hybrid_kv.probes.session import Outcome
from hybrid_kv.targets import ours

MATRIX = ("prefix=align", "prefix=all chunk=17")


def untimed(outcomes: list[Outcome]) -> list[Outcome]:
    return [replace(one, seconds=0.0) for one in outcomes]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    made = tmp_path_factory.mktemp("lfm2")
    write_checkpoint("lfm2", made)
    return str(made)


def test_two_at_a_time_say_what_one_after_another_says(folder: str) -> None:
    cells, found = matrix_of(ours, MATRIX), list[Outcome]()
    in_turn = guard(Guarded(ours, folder), cells, ["alone"])
    guarded = Guarded(ours, folder)
    beside = guard(guarded, cells, ["alone"], found.append, jobs=2)
    assert untimed(beside) == untimed(in_turn) and len(found) == len(beside) == 3
    assert guarded.version == hybrid_kv.__version__


def test_what_cannot_be_started_is_reported_too(folder: str) -> None:
    queue = CONTEXT.SimpleQueue()
    at_once._start("ours", None, None, folder, 0, 1, True, 1, "1.0", [], queue)
    at_once._ask({"spec": "mtp1"}, [])
    version, outcome = queue.get()
    assert (version, outcome.probe, outcome.verdict) == ("1.0", "start", "not supported") and queue.empty()


def test_doubt_in_the_oracle_goes_along(folder: str) -> None:
    """Of a dtype in which the plain engine was wrong the answers are held against that engine's own."""
    at_once._start("ours", None, None, folder, 3, 1, False, 2, "?", ["float32"], CONTEXT.SimpleQueue())
    guarded, _ = at_once._worker
    assert not guarded.judge_of({}).trusted and guarded.judge_of({"dtype": "bfloat16"}).trusted
    assert guarded.kind is ours and (guarded.seed, guarded.shortest, guarded.thorough) == (3, 2, False)
