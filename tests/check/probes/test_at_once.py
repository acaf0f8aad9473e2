"""Settings in processes of their own say what they say one after another."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hybrid_kv.check.guard.workers import CONTEXT
from hybrid_kv.check.probes import run as at_once
from hybrid_kv.check.probes.guarded import Guarded
from hybrid_kv.check.probes.run import ProbeRun, guard
from hybrid_kv.check.probes.session import Outcome
from hybrid_kv.check.targets import ours, remote
from hybrid_kv.check.targets.kinds import kind_of
from hybrid_kv.models.random_checkpoint import write_checkpoint
from tests.check.targets import hostile


def untimed(outcomes: list[Outcome]) -> list[Outcome]:
    # A server counts for all of its clients: what another run preempted moves this one's counters
    # too.
    return [replace(one, seconds=0.0, moved={}) for one in outcomes]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    made = tmp_path_factory.mktemp("lfm2")
    write_checkpoint("lfm2", made)
    return str(made)


def test_two_at_a_time_say_what_one_after_another_says(tmp_path: Path) -> None:
    """Of a server, which costs a process no engine of its own."""
    (tmp_path / "config.json").write_text('{"model_type": "toy", "vocab_size": 50}')
    toy, cells = kind_of(hostile.serve(hostile.Case({}))), [{}, {"dtype": "auto"}]
    reported = list[Outcome]()

    def guarded() -> Guarded:
        return Guarded(toy, str(tmp_path), against=toy)

    in_turn = ProbeRun(guarded(), cells, ["alone"])
    guard([in_turn])
    runs = [
        ProbeRun(guarded(), cells, ["alone"], reported.append),
        ProbeRun(guarded(), cells[:1], ["alone"]),
    ]
    guard(runs, jobs=2)
    assert (
        untimed(runs[0].found()) == untimed(in_turn.found())
        and len(reported) == len(runs[0].outcomes) == 2
    )
    assert [one.verdict for one in runs[1].outcomes] == ["right"]
    assert runs[0].guarded.version == "1"


def test_a_wave_begins_when_the_last_one_is_done() -> None:
    waves = at_once.Waves(iter([[{"n": "1"}, {"n": "2"}], [], [{"n": "3"}]]))
    assert [waves.next(is_busy) for is_busy in (False, True, True, False, True, False)] == [
        {"n": "1"},
        {"n": "2"},
        None,
        {"n": "3"},
        None,
        None,
    ]


def test_what_cannot_be_started_is_reported_too(folder: str) -> None:
    queue = CONTEXT.SimpleQueue()
    at_once.start_process([("ours", None, None, folder, 0, 1, True)], {}, queue)
    at_once.ask_in_process(0, {"spec": "mtp1"}, [], 1, [])
    i, version, outcome = queue.get()
    assert (i, version, outcome.probe, outcome.verdict) == (
        0,
        "?",
        "start",
        "not supported",
    ) and queue.empty()


def test_doubt_in_the_oracle_goes_along(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the plain engine was wrong in a dtype, answers are compared with that engine's own."""
    asked = list[Guarded]()
    monkeypatch.setattr(at_once, "ask", lambda guarded, *_: asked.append(guarded))
    at_once.start_process([("ours", None, None, folder, 3, 1, False)], {}, CONTEXT.SimpleQueue())
    at_once.ask_in_process(0, {}, [], 2, ["float32"])
    (guarded,) = asked
    assert not guarded.judge_of({}).trusted and guarded.judge_of({"dtype": "bfloat16"}).trusted
    assert guarded.kind is ours.KIND and (guarded.seed, guarded.shortest, guarded.thorough) == (
        3,
        2,
        False,
    )


def test_processes_start_targets_without_an_import_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remote, "_shared", {})
    at_once.start_process([], {("toy", "python", ""): Path("folder")}, CONTEXT.SimpleQueue())
    assert remote.load("toy", "python") == Path("folder")
