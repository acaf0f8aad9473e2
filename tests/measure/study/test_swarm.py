"""A swarm finds a planted fault, keeps little of a million failures, and survives Ctrl-C."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from hybrid_kv.check.guard.play import Differences, ScenarioFailure
from hybrid_kv.check.guard.replay import from_json
from hybrid_kv.check.guard.scenario import Scenario, answer_book
from hybrid_kv.check.guard.shrink import Shrunk
from hybrid_kv.check.guard.traffic import draw_swarm_scenario
from hybrid_kv.engine import runner
from hybrid_kv.errors import HybridKVError
from hybrid_kv.measure.results.store import read_rows
from hybrid_kv.measure.study import swarm as module
from hybrid_kv.measure.study.swarm import Swarm, Tally, here, in_processes, play_batch
from hybrid_kv.measure.study.work import Give, Lost, Pool, Results, in_executor
from tests.cli.run import run

FIRST = 31  # the last of its batch, in which a boundary is passed with drafts
SEEDS = 6  # of a batch that is not played
Kept = list[tuple[int, bool]]


drawn = cache(draw_swarm_scenario)  # the same seeds in most tests


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Swarm]:
    """A swarm of so many batches, on a clock that advances one second at each look."""

    def made(batches: int, kept: Kept | None = None) -> Swarm:
        clock, notes = count(), [] if kept is None else kept

        def keep(tally: Tally, is_over: bool) -> None:
            notes.append((tally.seeds, is_over))

        # It looks before each batch, and behind it.
        return Swarm(
            0, 2 * batches - 1, tmp_path / "repro", lambda _: None, keep, lambda: float(next(clock))
        )

    return made


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace playing: each third scenario breaks a rule, `a`, `b`, `a`; nothing is shrunk."""

    def played(scenario: Scenario) -> Differences:
        wrong = (
            []
            if scenario.seed % 3
            else [ScenarioFailure(scenario, "b" if scenario.seed % 9 == 3 else "a", "so it is")] * 2
        )
        return Differences(wrong, num_requests=10, num_scenarios=1)

    monkeypatch.setattr(module, "SEEDS_PER_BATCH", SEEDS)
    monkeypatch.setattr(module, "draw_swarm_scenario", drawn)
    monkeypatch.setattr(module, "run_scenario", played)
    monkeypatch.setattr(module, "shrink", lambda failure: Shrunk(failure, 5, 0.1, is_minimal=True))
    monkeypatch.setattr("hybrid_kv.check.guard.cases.tell", lambda case: ("", "a story"))


def test_an_injected_fault_is_found_reduced_and_gone_without_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["guard", "--swarm", "0.0000001", "--jobs", "1", "--seed", str(FIRST)]
    with monkeypatch.context() as patch:
        patch.setattr(runner, "postprocess_mamba", lambda *_: None)
        code, out, err = run(capsys, *command)
        assert (
            code == 1
            and f"the same seeds again: hybrid-kv guard --swarm 1e-07 --seed {FIRST}\n" in err
        )
        assert (
            f"step-tokens: 1 scenarios, the first is {FIRST}\nshrunk to 1 requests with 1 "
            "prompt tokens"
        ) in out
        assert "1 scenarios failed, 1 rules broken: repro/swarm-seeds.txt" in out
        (file,) = Path("repro").glob("*.json")
        assert run(capsys, "guard", "--replay", str(file))[0] == 1
    assert Path("repro/swarm-seeds.txt").read_text() == f"{FIRST} step-tokens\n"
    assert run(capsys, "guard", "--replay", str(file))[0] == 0
    rows = read_rows(Path("out/swarm.csv")).set_index("metric")
    assert (
        rows.loc["failures", "verdict"] == "fail"
        and json.loads(rows.loc["failures", "params"])["rule"]
    )
    assert run(capsys, *command)[0] == 0
    rows = read_rows(Path("out/swarm.csv"))
    assert list(rows[rows["metric"] == "rules_broken"]["verdict"]) == ["fail", "pass"]


def test_fuzz_is_guard_with_a_swarm(
    broken: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Both end, print and keep the same, but for the command that plays the same seeds again."""
    monkeypatch.chdir(tmp_path)
    seen = []
    for words in (["fuzz", "--hours"], ["guard", "--swarm"]):
        place = "-".join(words)
        options = [
            "1e-9",
            "--seed",
            "0",
            "--jobs",
            "1",
            "--results",
            place,
            "--repro",
            f"{place}/repro",
        ]
        code, out, err = run(capsys, *words, *options, "--json")
        assert err.startswith(f"the same seeds again: hybrid-kv {' '.join(words)} 1e-09 --seed 0\n")
        rows = read_rows(tmp_path / place / "swarm.csv").drop(columns=["run_id", "time_utc"])
        rows = rows[rows["metric"] != "requests_per_cpu_second"].fillna("")
        document = json.loads(out.replace(place, "")) | {"requests_per_cpu_second": 0}
        seen.append((code, document, rows.to_dict("records")))
    assert seen[0] == seen[1] and seen[0][0] == 1 and seen[0][2]


def test_of_each_rule_the_first_failure_is_kept_and_the_seeds_of_all(
    broken: None, make: Callable[..., Swarm], tmp_path: Path
) -> None:
    tally = make(2).run(here)
    assert (tally.seeds, tally.requests) == (2 * SEEDS, 20 * SEEDS)
    failed = range(0, 2 * SEEDS, 3)
    lines = [f"{seed} {'b' if seed % 9 == 3 else 'a'}" for seed in failed]
    assert (tmp_path / "repro/swarm-seeds.txt").read_text().splitlines() == lines
    found = {one.rule: (one.first_seed, one.seeds) for one in tally.findings.values()}
    assert found == {
        "a": (0, sum(line.endswith("a") for line in lines)),
        "b": (3, sum("b" in line for line in lines)),
    }
    files = sorted((tmp_path / "repro").glob("*.json"))
    assert [one.file for one in sorted(tally.findings.values(), key=lambda one: one.rule)] == files
    assert [from_json(file.read_text()) for file in files] == [
        draw_swarm_scenario(0),
        draw_swarm_scenario(3),
    ]


def test_the_same_first_seed_gives_the_same_swarm_in_any_pool(
    broken: None, make: Callable[..., Swarm]
) -> None:
    with ThreadPoolExecutor(2) as threads:
        one, two = (
            make(2).run(pool) for pool in (here, lambda give: in_executor(threads, 2, give))
        )
    counts = [
        {found.rule: found.seeds for found in tally.findings.values()} for tally in (one, two)
    ]
    assert counts[0] == counts[1] == {"a": 3, "b": 1}
    # Which of them is shrunk depends on the first to end.
    assert replace(one, cpu_seconds=0.0, findings={}) == replace(two, cpu_seconds=0.0, findings={})


def test_an_interrupt_costs_no_finding_and_no_summary(
    broken: None, make: Callable[..., Swarm], tmp_path: Path
) -> None:
    def interrupted(give: Give) -> Results:
        task = give()
        assert task is not None
        yield task, task.call(*task.args)
        give()
        raise KeyboardInterrupt

    kept: Kept = []
    tally = make(9, kept).run(interrupted)
    assert kept == [(SEEDS, True)] and set(tally.findings) == {"a", "b"}
    assert all(one.file is not None and "0 plays" in one.story for one in tally.findings.values())


def test_what_was_seen_is_kept_every_now_and_then(
    broken: None, make: Callable[..., Swarm], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "KEEP_EVERY", 6.0)
    kept: Kept = []
    make(9, kept).run(here)
    seeds = [seeds // SEEDS for seeds, _ in kept]
    assert 2 < len(seeds) < 9 and seeds == sorted(seeds)
    assert [over for _, over in kept] == [False] * (len(kept) - 1) + [True]


def losing(*lost: int) -> Pool:
    """Runs tasks here, but for those of these numbers."""

    def pool(give: Give) -> Results:
        for number, (task, result) in enumerate(here(give)):
            yield task, Lost("the node died") if number in lost else result

    return pool


def test_a_lost_batch_is_counted_and_a_lost_search_costs_no_finding(
    broken: None, make: Callable[..., Swarm]
) -> None:
    tally = make(3).run(losing(1, 3))  # the search for a small case of `a`, and the second batch
    assert (tally.lost, tally.seeds) == (2, 2 * SEEDS)
    assert "0 plays" in tally.findings["a"].story and "5 plays" in tally.findings["b"].story


def test_a_swarm_that_cannot_play_ends_with_one_line(
    broken: None, make: Callable[..., Swarm], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(HybridKVError, match="the first batch could not be played: the node died"):
        make(3).run(losing(0))

    class Dead(Executor):
        def submit(self, *_: Any) -> Any:  # type: ignore[override]
            raise BrokenProcessPool

    @contextmanager
    def dead(_: int) -> Any:
        yield Dead()

    monkeypatch.setattr(module, "processes", dead)
    with pytest.raises(
        HybridKVError, match="a worker was killed, or ran out of memory; use fewer --jobs"
    ):
        make(3).run(in_processes(2))


def test_a_worker_forgets_what_it_played() -> None:
    batch = play_batch(FIRST, FIRST + 1)
    assert batch.total.num_scenarios == 1 and batch.total.num_requests and not batch.total.wrong
    assert answer_book.cache_info().currsize == 0


def test_a_swarm_that_played_nothing_is_void() -> None:
    rows = {row.metric: row for row in Tally().rows(is_over=True)}
    assert rows["requests_per_cpu_second"].value == 0 and rows["rules_broken"].verdict == "void"
