"""`compare` as a whole, on toy packages in a git repository and a clock that counts work.

The toy's clock moves only by the work that it is given, so equal code takes exactly as long, and 5
% more is 5 %.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.harness import compare as driver
from bench.harness import operating_curve, verdicts
from bench.harness import pairs as processes
from bench.harness.cells import CellInfo
from bench.harness.compare import Comparison, Design, Measured, Selection, Times, compare
from bench.harness.verdicts import (
    acknowledging_rows,
    cells_of_table,
    count_outcomes,
    outcomes_of,
    read_acknowledged,
    read_quarantine,
    reason_for,
    timed_outcomes,
)
from bench.harness.versions import Revision, find_revision, place
from hybrid_kv.measure.results import Row, append_rows, check_file, read_rows
from hybrid_kv.measure.timing import fitness
from tests.bench.bisect.toy import commit
from tests.bench.harness.toy import TORCH, git, write_package, write_toy
from tests.cli.run import refused, run

Command = Callable[..., tuple[int, str, str]]

SMALL = Design(pairs=3, samples=2)
STEP, BIG, NEW, WRONG, HELD, RAISING, DYING, HANGING, LISTED = (
    f"toy/{name}[size=1]"
    for name in ("step", "big", "new", "wrong", "held", "raising", "dying", "hanging", "listed")
)
LATE = "late/newer[]"


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with a branch for each of `VERSIONS`, and one, `empty`, without the package."""
    return write_toy(tmp_path_factory.mktemp("toy"))


@pytest.fixture(autouse=True)
def no_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers import a torch of three lines."""
    (tmp_path / "torch.py").write_text(TORCH)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


@pytest.fixture
def command(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Command:
    """Runs `hybrid-kv compare` in the toy: exit code, stdout, stderr."""
    monkeypatch.setattr(driver, "ROOT", toy)
    monkeypatch.setattr(fitness, "examine", lambda _: SimpleNamespace(unfit=""))

    return lambda *words: run(
        capsys, "compare", *words, "--results", tmp_path, "--seed", "3", "--pairs", "3"
    )


def verdicts_of(comparison: Comparison, folder: Path) -> dict[str, str]:
    return {one.name: one.verdict for one in outcomes_of(comparison, folder / "results")}


def test_equal_code_is_the_same_and_what_cannot_run_says_why(toy: Path) -> None:
    comparison = compare(
        "base", "comment", Selection(names=["toy", "late"]), root=toy, design=SMALL
    )
    assert {key: times.log_ratios for key, times in comparison.measured.first.items()} == {
        key: pytest.approx([0.0] * 3)
        for key in (STEP, BIG, NEW, WRONG, RAISING, DYING, HANGING, LATE)
    }
    assert comparison.measured.repeat == {}
    found = {one.name: one for one in outcomes_of(comparison, toy / "results")}
    assert [one.verdict for one in found.values()].count("same") == 10
    # Its module belongs to an editable install alone.
    assert found["toy/own[size=1]"].verdict == "not comparable"
    assert (
        found["toy/own[size=1]"].reason
        == "BASE: ModuleNotFoundError: No module named 'hybrid_kv.later'"
    )
    # An error of NaN proves nothing.
    assert found["toy/nan[size=1]"].verdict == "wrong result"
    assert found["toy/device[size=1]"].reason == "it needs a CUDA device"
    assert "must be int" in found["toy/float[size=1] counts"].reason
    # Neither rivals nor cells that are not quick.
    assert not {"toy/rival[size=1]", "toy/slow[size=1]"} & found.keys()


@pytest.mark.parametrize(
    ("head", "verdict", "ratio"), [("slow", "slower", 1.05), ("fast", "faster", 0.95)]
)
def test_a_change_is_repeated_and_found(toy: Path, head: str, verdict: str, ratio: float) -> None:
    comparison = compare(
        "base", head, Selection(names=["toy/step", "toy/big"]), root=toy, design=SMALL
    )
    assert list(comparison.measured.repeat) == [STEP]
    assert len(comparison.measured.repeat[STEP].log_ratios) == 6
    step, big = sorted(timed_outcomes(comparison.measured, SMALL), key=lambda one: one.name != STEP)
    assert (step.verdict, big.verdict) == (verdict, "same")
    assert step.estimate.ratio == pytest.approx(ratio)
    assert step.estimate.n == 6
    assert (step.base, step.head) == pytest.approx((1e-4, ratio * 1e-4))
    assert (step.suspect, big.suspect) == (True, False)
    assert step.max_error == 0.25
    assert step.alarm == (verdict == "slower")


@pytest.mark.parametrize(
    ("head", "verdict", "ratio"), [("slow", "slower", 1.05), ("comment", "same", 1.0)]
)
def test_a_launch_is_timed_by_the_device_and_what_became_slower_is_found(
    toy: Path,
    command: Command,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    head: str,
    verdict: str,
    ratio: float,
) -> None:
    monkeypatch.setenv("TOY_GPU", "1")
    document = tmp_path / "out.json"
    code, out, err = command("base", head, "--tier", "gpu", "-k", "toy/", "--out", str(document))
    assert (code, err) == (int(verdict == "slower"), "")
    assert f": 1 {verdict}" in out.splitlines()[-1]  # and nothing of another tier
    row, *more = read_rows(tmp_path / "compare.csv").itertuples()
    assert (row.benchmark, row.metric, row.verdict) == (
        "toy/device",
        "gpu_time_ratio",
        "fail" if code else "pass",
    )
    assert row.value == pytest.approx(ratio)
    assert [one.metric for one in more] == ["p_value"] * code + ["clock_base", "clock_head"]
    assert (more[-1].value, more[-1].unit) == (1980, "MHz")
    (outcome,) = json.loads(document.read_text())["outcomes"]
    assert outcome["base"] == pytest.approx(2e-4)  # without what passes through the cache


SIDES = [
    (
        "base",
        "wrong",
        {
            STEP: ("wrong result", "HEAD: WrongResultError: before it was timed: no 42"),
            WRONG: ("wrong result", "HEAD: WrongResultError: after it was timed: not any more"),
        },
    ),
    (
        "wrong",
        "base",
        {
            STEP: ("not comparable", "BASE: WrongResultError: before it was timed: no 42"),
            BIG: ("same", ""),
        },
    ),
    (
        "old",
        "base",
        {
            NEW: (
                "not comparable",
                "BASE: AttributeError: module 'hybrid_kv' has no attribute 'newer'",
            ),
            LATE: ("not comparable", "BASE: ImportError: cannot import name 'newer'"),
            BIG: ("same", ""),
        },
    ),
    (
        "base",
        "old",
        {
            NEW: ("broken at HEAD", "has no attribute 'newer'"),
            LATE: ("broken at HEAD", "cannot import name 'newer'"),
            BIG: ("same", ""),
        },
    ),
    (
        "base",
        "raising",
        {
            RAISING: ("broken at HEAD", "RuntimeError: no 9"),
            LISTED: ("not comparable", "BASE: it has no such benchmark"),
            BIG: ("same", ""),
        },
    ),
    (
        "raising",
        "base",
        {LISTED: ("broken at HEAD", "it has no such benchmark"), BIG: ("same", "")},
    ),
    ("raising", "raising", {RAISING: ("not comparable", "RuntimeError: no 9"), BIG: ("same", "")}),
    ("dying", "base", {DYING: ("not comparable", "the worker, in make, died"), BIG: ("same", "")}),
]


@pytest.mark.parametrize(("base", "head", "expected"), SIDES)
def test_what_one_side_cannot_run_is_an_alarm_if_that_is_head(
    toy: Path, base: str, head: str, expected: dict[str, tuple[str, str]]
) -> None:
    select = [key.partition("[")[0] for key in expected]
    comparison = compare(base, head, Selection(names=select), root=toy, design=SMALL)
    found = {one.name: one for one in outcomes_of(comparison, toy / "results")}
    assert {name: one.verdict for name, one in found.items()} == {
        name: word for name, (word, _) in expected.items()
    }
    assert all(
        found[name].alarm == (word in verdicts.ALARMS) for name, (word, _) in expected.items()
    )
    assert all(reason in found[name].reason for name, (_, reason) in expected.items())


OWN_LATE = """
from bench import work
from bench.cases import Case, Cell

def cells():
    names = ("newer", "dropped")
    return [Cell(name, {}, "cpu", lambda: Case(work.step, lambda: 0.5)) for name in names]
"""
OWN_CASES = """
from collections import namedtuple

Case = namedtuple("Case", "run check reset max_repeats", defaults=(lambda: None, 1000))

class Cell(namedtuple("Cell", "benchmark params tier make")):
    key = property(lambda self: f"late/{self.benchmark}[]")
"""


def test_an_older_version_runs_the_benchmark_that_it_came_with(toy: Path, tmp_path: Path) -> None:
    """An older version runs its own `late`, in the layout of its day.

    Today's `late` and `new` need `newer`.
    """
    own = {"bench/__init__.py": "", "bench/late.py": OWN_LATE, "bench/cases.py": OWN_CASES}
    own["bench/work.py"] = "import hybrid_kv\n\ndef step():\n    return hybrid_kv.step()\n"
    own[".gitignore"] = ""
    git(toy, "worktree", "add", "-q", "--detach", tmp_path / "old", "old")
    old = commit(tmp_path / "old", own)
    comparison = compare(
        old, "slow", Selection(names=["toy/new", "late", "toy/big"]), root=toy, design=SMALL
    )
    assert verdicts_of(comparison, toy) == {BIG: "same", NEW: "not comparable", LATE: "slower"}
    (late,) = (one for one in outcomes_of(comparison, toy / "results") if one.name == LATE)
    assert late.estimate.ratio == pytest.approx(1.05)
    assert late.max_error == 0.5
    assert late.own["BASE"].startswith("ImportError: cannot import name 'newer'")
    assert cells_of_table(late)[-1] == "slower (BASE by its own benchmark)"
    turned = compare("slow", old, Selection(names=["late"]), root=toy, design=SMALL)
    assert verdicts_of(turned, toy) == {LATE: "faster"}


@pytest.mark.parametrize("seed", [6, 7])  # of orders: the one that dies comes early
def test_a_worker_that_dies_costs_one_benchmark_and_no_other(toy: Path, seed: int) -> None:
    others = ["toy/dying", "toy/big", "toy/step", "toy/new"]
    comparison = compare(
        "base", "dying", Selection(names=others), root=toy, design=SMALL, seed=seed
    )
    assert {key: len(times.log_ratios) for key, times in comparison.measured.first.items()} == {
        BIG: 3,
        NEW: 3,
    }
    found = verdicts_of(comparison, toy)
    assert found == {DYING: "broken at HEAD", STEP: "wrong result", BIG: "same", NEW: "same"}
    assert comparison.measured.failures[DYING].reason.startswith("the worker, in make, died")


def test_a_count_that_kills_its_worker_costs_no_other_count(toy: Path) -> None:
    comparison = compare(
        "base", "dying", Selection(names=["toy/fatal", "toy/held"]), root=toy, design=SMALL
    )
    assert verdicts_of(comparison, toy) == {
        "toy/fatal[size=1] counts": "broken at HEAD",
        f"{HELD} blocks": "same",
    }


def states(groups: set[int]) -> set[str]:
    """States of all processes of these process groups."""
    found = set()
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it ended meanwhile
            state, _, group, *_ = file.read_text().rpartition(")")[2].split()
            if int(group) in groups:
                found.add(state)
    return found


def test_a_worker_that_hangs_is_an_alarm_and_is_ended(
    toy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []
    popen = processes.subprocess.Popen

    def kept(*arguments: Any, **options: Any) -> subprocess.Popen[str]:
        process = popen(*arguments, **options)
        if "pass_fds" in options:
            started.append(process)
        return process

    monkeypatch.setattr(processes.subprocess, "Popen", kept)
    monkeypatch.setattr(processes, "ANSWER_SECONDS", 3.0)
    monkeypatch.setattr(processes, "END_SECONDS", 0.1)
    comparison = compare(
        "base", "hanging", Selection(names=["toy/hanging"]), root=toy, design=SMALL
    )
    assert verdicts_of(comparison, toy) == {HANGING: "broken at HEAD"}
    assert comparison.measured.failures[HANGING].reason.endswith("did not answer within 3 s")
    assert states({process.pid for process in started}) <= {"Z"}


def test_the_working_tree_is_copied_with_its_edits(toy: Path) -> None:
    write_package(toy, ticks=110_000)
    try:
        comparison = compare("base", ".", Selection(names=["toy/step"]), root=toy, design=SMALL)
        assert comparison.head == Revision(".", git(toy, "rev-parse", "base"), dirty=True)
        assert str(comparison.head).endswith(", dirty)")
        assert not find_revision(toy, "base").dirty  # the commit is what it was
    finally:
        write_package(toy)
    assert verdicts_of(comparison, toy) == {STEP: "slower"}
    assert not find_revision(toy, ".").dirty


def test_a_seed_decides_everything_random(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    popen = processes.subprocess.Popen

    def drawn(seed: int) -> list[tuple[list[int], str]]:
        """Compare for real, and return the seeds of the sides and of hashes of each worker."""
        seeds = []

        def started(command: list[str], **options: Any) -> subprocess.Popen[str]:
            if "pass_fds" in options:
                sides = json.loads(command[2])["sides"]
                seeds.append(([side["seed"] for side in sides], options["env"]["PYTHONHASHSEED"]))
            return popen(command, **options)

        with monkeypatch.context() as patch:
            patch.setattr(processes.subprocess, "Popen", started)
            chosen = Selection(names=["toy/step"])
            compare("base", "base", chosen, root=toy, design=SMALL, seed=seed)
        return seeds

    first, again, other = drawn(5), drawn(5), drawn(6)
    assert first == again and len(first) == len(other)
    for (sides, hashes), (other_sides, other_hashes) in zip(first, other, strict=True):
        assert len({*sides}) == len(sides) > 1
        assert not {*sides} & {*other_sides} and hashes != other_hashes


def test_order_is_random_and_even() -> None:
    class Answering(processes.Pair):
        def __init__(self) -> None:
            super().__init__((), random.Random(4))
            self.requests = []

        def ask(self, side: int, do: str, **arguments: object) -> dict[str, int]:
            self.requests.append((side, arguments))
            return {"side": side}

    pair = Answering()
    for _ in range(400):
        assert pair.ask_both("sample", repeats=2) == ({"side": 0}, {"side": 1})
    firsts = Counter(side for side, _ in pair.requests[::2])
    assert all(150 < firsts[side] < 250 for side in (0, 1))
    pair.requests.clear()
    pair.ask_both("make", only_head={"inject": 0.1}, key="k")
    assert dict(pair.requests) == {0: {"key": "k"}, 1: {"key": "k", "inject": 0.1}}


# ---- workers ----


def test_both_workers_of_a_pair_share_core_and_hash_seed(toy: Path, tmp_path: Path) -> None:
    code = (
        "import os; from hybrid_kv import *; ANSWER = (hash('a'), "
        "sorted(os.sched_getaffinity(0)), os.getppid())"
    )
    folders = [tmp_path / "0", tmp_path / "1"]
    for folder in folders:
        folder.mkdir()
        place(toy, find_revision(toy, "base"), folder)
        cases = folder / "bench" / "harness" / "registry.py"
        cases.write_text(
            cases.read_text() + f"\n{code}\ndef unavailable(): return {{'seen': ANSWER}}\n"
        )
    seen = []
    with driver.start(folders, 2, random.Random(1)) as pairs:
        for pair in pairs:
            seen += [answer["unavailable"]["seen"] for answer in pair.ask_both("cells", quick=True)]
    assert len({json.dumps(one) for one in seen}) == 1
    assert len(seen[0][1]) == 1


# ---- counts ----


def test_a_changed_count_is_an_alarm_until_it_is_acknowledged(toy: Path, command: Command) -> None:
    code, out, err = command("base", "blocks", "-k", "held", "-k", "toy/big")
    assert (code, err) == (1, "")
    assert out.splitlines()[1].endswith("changed")  # alarms come first
    assert "1 alarm: 1 changed, 1 same" in out
    code, out, _ = command("base", "blocks", "-k", "held", "--acknowledge", "two  blocks\nmore")
    assert code == 0
    assert "acknowledged (two blocks more)" in out
    try:
        assert command("base", "blocks", "-k", "held")[0] == 0
        assert command("blocks", "base", "-k", "held")[0] == 1  # the way back is another change
        (row,) = read_rows(toy / "results" / "acknowledged.csv").itertuples()
        assert (row.suite, row.benchmark, row.metric, row.value) == ("toy", "held", "blocks", 12)
        assert json.loads(row.params) == {"reason": "two blocks more", "size": 1, "was": 10}
    finally:
        (toy / "results" / "acknowledged.csv").unlink()


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (9, 1, ""),
        (1, 2, "a"),
        (1, 3, "a; b"),
        (2, 1, "b; c; d"),
        (3, 1, "c; d"),
        (1, 9, ""),
        (5, 5, "loop"),
    ],
)
def test_acknowledged_steps_chain(old: int, new: int, expected: str) -> None:
    assert (
        reason_for(old, new, {1: {2: "a"}, 2: {3: "b"}, 3: {4: "c"}, 4: {1: "d"}, 5: {5: "loop"}})
        == expected
    )


def test_a_count_that_only_one_side_has(tmp_path: Path) -> None:
    """A new count has no baseline; one that is gone is an alarm until a person accepts it."""
    cell = CellInfo("s", "b", {"size": 1}, "count")
    counts = ({"counts": {"x": [3, "B", "lower"]}}, {"counts": {"y": [1, "B", "lower"]}})
    measured = Measured([cell], counts={cell.key: counts})
    gone, new = count_outcomes(measured, {})
    assert (gone.metric, gone.verdict, gone.alarm, gone.base, gone.head) == (
        "x",
        "changed",
        True,
        3,
        None,
    )
    assert cells_of_table(gone)[1:] == ("3 B", "", "", "", "changed (HEAD: it has no such count)")
    assert (new.metric, new.verdict, new.alarm) == ("y", "not comparable", False)
    assert new.reason.startswith("BASE")

    file = tmp_path / "acknowledged.csv"
    append_rows(file, acknowledging_rows([gone, new], "x was no use", "0" * 40))
    assert check_file(file) == []
    known = read_acknowledged(file)
    gone, new = count_outcomes(measured, known)
    assert (gone.verdict, gone.alarm) == ("acknowledged", False)
    assert "no such count" in gone.reason and gone.reason.endswith("x was no use")
    # To have it go at 3 is not to have it stay at 3, become another number or go at 4.
    (steps,) = known.values()
    assert steps == {3: {None: "x was no use"}}
    assert reason_for(4, None, steps) == reason_for(3, 5, steps) == ""
    assert reason_for(4, None, {4: {3: "less"}, **steps}) == "less; x was no use"


# ---- quarantine ----


def rate_row(key: str, verdict: str, metric: str = "false_alarm_rate") -> Row:
    return Row("operating_curve", key, metric, 0.1, verdict=verdict)


def test_quarantine_is_the_newest_word_on_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "operating_curve.csv"
    assert read_quarantine(file) == set()
    append_rows(
        file,
        [rate_row("a", "fail"), rate_row("b", "pass"), rate_row("c", "fail", "detection_rate")],
    )
    append_rows(file, [rate_row("d", "fail"), rate_row("d", "pass"), rate_row("b", "fail")])
    assert read_quarantine(file) == {"a", "b"}
    monkeypatch.setattr(verdicts, "provenance", lambda: SimpleNamespace(machine="another"))
    assert read_quarantine(file) == set()


def test_a_quarantined_benchmark_is_shown_but_raises_no_alarm(toy: Path, command: Command) -> None:
    append_rows(toy / "results" / "operating_curve.csv", [rate_row(STEP, "fail")])
    try:
        code, out, _ = command("base", "slow", "-k", "toy/step")
    finally:
        (toy / "results" / "operating_curve.csv").unlink()
    assert code == 0
    assert "slower, quarantined" in out
    assert "no regression found: 1 quarantined" in out
    assert command("base", "slow", "-k", "toy/step")[0] == 1


# ---- the command ----


def test_the_command_prints_and_writes_everything(
    toy: Path, command: Command, tmp_path: Path
) -> None:
    json_file, comment = tmp_path / "out.json", tmp_path / "comment.md"
    extra = ["-k", "step", "-k", "held", "--out", str(json_file), "--markdown", str(comment)]
    code, out, err = command("base", "slow", *extra)
    assert (code, err) == (1, "")
    assert out.splitlines()[0].split()[:3] == ["benchmark", "BASE", "HEAD"]
    assert "1.050" in out.splitlines()[1] and "slower" in out.splitlines()[1]
    assert out.splitlines()[-1].startswith("1 alarm: 1 slower, 1 same; slow (")
    frame = read_rows(tmp_path / "compare.csv")
    assert set(frame["suite"]) == {"compare"}
    assert set(frame["baseline_commit"]) == {git(toy, "rev-parse", "base")}
    step, p_value, held, at_base = frame.itertuples()
    assert (step.benchmark, step.metric, step.unit) == ("toy/step", "cpu_time_ratio", "time ratio")
    assert (step.verdict, step.n) == ("fail", 6)
    assert step.value == pytest.approx(1.05)
    assert set(frame["commit"]) == {git(toy, "rev-parse", "slow")}
    params = json.loads(step.params)
    assert params["receipt"] == {"checked_before": True, "checked_after": True, "max_error": 0.25}
    assert (params["size"], params["outcome"]) == (1, "slower")
    assert (p_value.metric, p_value.verdict, json.loads(p_value.params)) == (
        "p_value",
        "",
        {"size": 1},
    )
    assert 0 <= p_value.value < 0.01
    assert (held.metric, held.value, held.verdict) == ("blocks", 10, "pass")
    assert (at_base.metric, at_base.value, at_base.verdict) == ("blocks_at_base", 10, "")
    assert json.loads(held.params) == {"size": 1, "outcome": "same"}
    document = json.loads(json_file.read_text())
    assert [one["alarm"] for one in document["outcomes"]] == [True, False]
    assert document["outcomes"][0]["log_ratios"]["first"] == pytest.approx([0.04879] * 3, abs=1e-4)
    text = comment.read_text()
    assert (
        text.startswith("**1 alarm: 1 slower, 1 same")
        and "**; `slow (" in text
        and "\n| `toy/step" in text
    )
    assert text.index("slower |") < text.index("<details>") < text.index("held")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nonsense",), "git knows no revision 'nonsense'"),
        (("base", "--", "--output=x"), "git knows no revision '--output=x'"),
        (("empty", "base"), "has no folder hybrid_kv"),
        (("base", "base", "-k", "nothing"), "no benchmark's name contains 'nothing'"),
        (("old", "base", "-k", "late"), "nothing can be compared with old"),
        (("base", "blocks", "--acknowledge", " "), "--acknowledge needs a reason"),
        (("base", "--pairs", "2"), "fewer than 3 worker pairs"),
        (("base", "--threshold", "0.001"), "--threshold"),
        (("base", "--out", "/dev/null/out.json"), "/dev/null cannot be written"),
        (("base", "base", "--tier", "gpu", "-k", "toy/"), "it needs a CUDA device"),
    ],
)
def test_what_cannot_run_is_one_line_and_exit_2(
    toy: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.setattr(driver, "ROOT", toy)
    monkeypatch.chdir(tmp_path)
    assert message in refused(capsys, "compare", "--results", ".", *arguments)
    assert not (tmp_path / "compare.csv").exists()


# ---- the operating curve ----


def trial(
    percent: int = 0,
    number: int = 0,
    slower: tuple[str, ...] = (),
    faster: tuple[str, ...] = (),
    suspects: tuple[str, ...] = (),
) -> operating_curve.Trial:
    return operating_curve.Trial(percent, number, slower, faster, suspects)


def test_two_false_alarms_in_fifty_are_too_many() -> None:
    assert [operating_curve.keeps_its_rate(hits, 50) for hits in range(4)] == [
        True,
        True,
        False,
        False,
    ]
    assert not operating_curve.keeps_its_rate(1, 3)


def test_rates_count_what_happened() -> None:
    injected = operating_curve.INJECTED
    trials = [trial(number=i) for i in range(8)]
    trials += [
        trial(number=8, slower=("a",), suspects=("a", "b")),
        trial(number=9, faster=("a",), suspects=("a",)),
    ]
    trials += [trial(5, i, slower=injected if i else injected[1:]) for i in range(4)]
    found = {
        (row.benchmark, row.metric, row.params["inject_percent"]): row
        for row in operating_curve.rates(trials, ["a", "b"], "e")
    }
    assert {
        key: row.value for key, row in found.items() if key[0] in ("a", "b", operating_curve.WHOLE)
    } == {
        (operating_curve.WHOLE, "false_alarm_rate", 0): 0.2,
        ("a", "false_alarm_rate", 0): 0.2,
        ("a", "suspect_rate", 0): 0.2,
        ("b", "false_alarm_rate", 0): 0.0,
        ("b", "suspect_rate", 0): 0.1,
    }
    assert (
        found["a", "false_alarm_rate", 0].verdict,
        found["b", "false_alarm_rate", 0].verdict,
    ) == ("fail", "pass")
    assert found[injected[0], "detection_rate", 5].value == 0.75
    assert found[injected[1], "detection_rate", 5].value == 1.0
    assert found[injected[0], "detection_rate", 5].n == 4
    assert found[injected[0], "detection_rate", 5].ci_low == pytest.approx(0.1941, abs=1e-4)
    assert not any(metric == "detection_rate" and percent == 10 for _, metric, percent in found)


def test_the_self_test_stops_and_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class StoppedError(Exception):
        pass

    file, ran = tmp_path / "curve.csv", []
    monkeypatch.setattr(operating_curve, "timed_keys", lambda: ["a", "b"])
    commit = "ab" * 20
    monkeypatch.setattr(operating_curve, "find_revision", lambda root, name: Revision(name, commit))

    def run(
        revision: str, percent: int, number: int, design: Design, root: Path
    ) -> operating_curve.Trial:
        if len(ran) == 3:
            raise StoppedError
        ran.append((percent, number))
        return trial(percent, number, slower=("a",) if percent else ())

    monkeypatch.setattr(operating_curve, "run_trial", run)
    with pytest.raises(StoppedError):
        operating_curve.self_test("HEAD", file, root=tmp_path, repetitions=2, injects=1)
    assert ran == [(0, 0), (5, 0), (0, 1)]
    assert read_quarantine(file) == set()  # the rates so far were written
    ran[:] = []
    summary = operating_curve.self_test("HEAD", file, root=tmp_path, repetitions=2, injects=1)
    assert ran == [(2, 0), (10, 0)]
    assert set(read_rows(file)["commit"]) == {commit}
    assert {row.n for row in summary if row.metric == "false_alarm_rate"} == {2}
    size = file.stat().st_size
    again = operating_curve.self_test("HEAD", file, root=tmp_path, repetitions=2, injects=1)
    assert (again, ran, file.stat().st_size) == (summary, [(2, 0), (10, 0)], size)
    operating_curve.print_rates(summary)
    assert "0/2 (0%–84%)" in capsys.readouterr().out


def test_trials_of_another_design_or_other_benchmarks_do_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "curve.csv"
    ids = {
        operating_curve.experiment_id(*one)
        for one in ((["a", "b"], SMALL), (["a"], SMALL), (["a"], Design()))
    }
    assert len(ids) == 3
    assert operating_curve.experiment_id(["b", "a"], SMALL) in ids
    append_rows(file, [operating_curve.trial_row(trial(5, 3, ("x",), (), ("x", "y")), "one")])
    assert operating_curve.read_trials(file, "one") == [trial(5, 3, ("x",), (), ("x", "y"))]
    assert operating_curve.read_trials(file, "two") == []
    monkeypatch.setattr(verdicts, "provenance", lambda: type("P", (), {"machine": "another"}))
    assert operating_curve.read_trials(file, "one") == []


def test_a_trial_on_the_toy(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operating_curve, "INJECTED", (STEP,))
    found = operating_curve.run_trial("base", 10, 0, SMALL, toy)
    assert (found.slower, found.faster, found.suspects) == ((STEP,), (), (STEP,))
    assert operating_curve.run_trial("base", 0, 0, SMALL, toy).suspects == ()


def test_injected_benchmarks_exist_and_are_measured_by_a_trial() -> None:
    assert set(operating_curve.INJECTED) <= set(operating_curve.timed_keys())


# ---- shown ----


def test_a_verdict_from_an_unfit_machine_carries_the_mark() -> None:
    timed, counted = (
        CellInfo("s", name, {}, tier) for name, tier in (("t", "cpu"), ("c", "count"))
    )
    answers = ({"counts": {"blocks": (3, "blocks")}}, {"counts": {"blocks": (3, "blocks")}})
    first = {timed.key: Times([0.0] * 3, [(1.0, 1.0)] * 3)}
    measured = Measured([timed, counted], first, counts={counted.key: answers})
    outcomes = [*timed_outcomes(measured, SMALL), *verdicts.count_outcomes(measured, {})]
    comparison = Comparison(
        Revision("a", "1"), Revision("b", "2"), 0, SMALL, measured, "others took 33% of a core"
    )
    marks = {row.metric: row.params.get("unfit") for row in verdicts.rows(comparison, outcomes)}
    assert marks == {
        "cpu_time_ratio": "others took 33% of a core",
        "blocks": None,
        "blocks_at_base": None,
    }
    assert "; unfit machine: others took 33% of a core" in verdicts.verdict_line(
        comparison, outcomes
    )
    assert "; unfit machine: others took 33% of a core" in verdicts.markdown(comparison, outcomes)
    assert verdicts.document(comparison, outcomes)["unfit"] == "others took 33% of a core"


def test_a_placed_version_has_all_that_its_benchmarks_read(tmp_path: Path) -> None:
    """Today's suites are listed in a copy of this checkout's own files, away from the checkout."""
    if not (driver.ROOT / ".git").exists():
        pytest.skip("this is no git checkout")
    folder = tmp_path / "placed"
    folder.mkdir()
    place(driver.ROOT, find_revision(driver.ROOT, "."), folder)
    code = "from bench.harness import registry; print(registry.unavailable())"
    command = [sys.executable, "-c", code]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "{}\n"), done.stderr
