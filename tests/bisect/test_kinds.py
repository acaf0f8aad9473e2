"""Counts, answers and replays: what makes a commit bad, what it cannot say, and the last check."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from hybrid_kv.bisect import answers as module
from hybrid_kv.bisect.answers import Answered, Answers, answers_of
from hybrid_kv.bisect.counts import Counts
from hybrid_kv.bisect.history import Trees
from hybrid_kv.bisect.memory import ENDS, Memory, Outcome
from hybrid_kv.bisect.own_code import NotMeasurableError
from hybrid_kv.bisect.replay import Replay
from hybrid_kv.bisect.run import Finding, find
from hybrid_kv.config import HybridKVError


def counted(*counts: Mapping[str, int] | None) -> Finding:
    """A bisect of commits that count so; None: it cannot run."""

    def count(commit: str) -> Mapping[str, int]:
        if (own := counts[int(commit)]) is None:
            raise NotMeasurableError("cannot run: ImportError")
        return own

    commits = tuple(map(str, range(1, len(counts))))
    return find("0", commits, Counts(count), Memory(), lambda *_: None)


def test_the_commit_that_changed_a_count_is_found() -> None:
    finding = counted(*[{"blocks": 3, "bytes": 8}] * 4, *[{"blocks": 5, "bytes": 8}] * 5)
    assert (finding.verdict, finding.culprit) == ("found", "4")
    assert finding.evidence.detail == "before: blocks 3; with it: blocks 5"


def test_a_count_is_bad_from_half_way_to_the_bad_end() -> None:
    values = (10, 8, 8, 11, 11, 12, 12)  # the gain of the second commit is no loss
    assert counted(*({"blocks": value} for value in values)).culprit == "3"


def test_counts_that_a_commit_lacks_or_cannot_make_are_skipped() -> None:
    finding = counted({"blocks": 3}, {"blocks": 3}, None, {"bytes": 1}, {"blocks": 5}, {"blocks": 5})
    assert (finding.culprit, finding.between) == ("4", ("2", "3"))


def test_equal_counts_blame_nobody() -> None:
    finding = counted({"blocks": 3}, {"blocks": 4}, {"blocks": 3})
    assert (finding.verdict, finding.evidence.detail) == ("nothing", "GOOD and BAD count the same: blocks 3")


RIGHT = "1" * 60
LOSS = "0" * 12 + "1" * 48


def answered(*right: str, others: tuple[str, ...] = ()) -> Finding:
    """A bisect of commits with these answers; `others`: to the questions of the next seed, if not the same."""

    def ask(commit: str, seed: int) -> Answered:
        own = (others if seed == 8 and others else right)[int(commit)]
        return Answered(own, f"questions {seed}, {len(own)}")

    commits = tuple(map(str, range(1, len(right))))
    return find("0", commits, Answers(ask, 7), Memory(), lambda *_: None)


def test_the_commit_that_lost_answers_is_found() -> None:
    finding = answered(*[RIGHT] * 5, *[LOSS] * 6)
    assert (finding.verdict, finding.culprit) == ("found", "5")
    assert finding.evidence.detail.startswith("of other questions: 12 answers of 60 lost, 0 gained, p 0.00024, ")


def test_a_commit_between_the_ends_or_with_other_questions_is_skipped() -> None:
    half = "0" * 6 + "1" * 54
    assert answered(RIGHT, RIGHT, half, LOSS, LOSS).between == ("2",)
    assert answered(RIGHT, RIGHT, RIGHT[1:], LOSS, LOSS).between == ("2",)


def test_a_loss_that_other_questions_do_not_show_blames_nobody() -> None:
    right = (RIGHT, RIGHT, LOSS, LOSS)
    finding = answered(*right, others=(RIGHT,) * 4)
    assert (finding.verdict, finding.culprit) == ("undecided", "2")


def test_a_few_lost_answers_are_no_loss() -> None:
    finding = answered(RIGHT, RIGHT, "0" * 5 + "1" * 55)
    assert finding.verdict == "nothing" and finding.evidence.detail.startswith("no loss shown: 5 answers of 60 lost")


def test_ends_with_other_questions_are_an_error() -> None:
    with pytest.raises(HybridKVError, match="GOOD and BAD ask other questions"):
        answered(RIGHT, RIGHT[1:])


def test_answers_are_those_of_the_commits_own_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def run_own(trees: Trees, commit: str, *words: str) -> None:
        asked.append((commit, *words))
        lines = [
            {"doc_id": number, "doc_hash": "d", "prompt_hash": "p", "target_hash": "t", "correct": number != 1,
             "correct_flexible": True, "invalid": False, "output_sha": "o"}
            for number in range(3)
        ]  # fmt: skip
        Path(words[words.index("--samples") + 1]).write_text("".join(json.dumps(line) + "\n" for line in lines))

    monkeypatch.setattr(module, "run_own", run_own)
    found = answers_of(Trees(tmp_path, lambda *_: None), ["--limit", "3"])("abc", 5)
    assert found.right == "101"
    assert asked[0][:4] == ("abc", "accuracy", "--seed", "5") and asked[0][-2:] == ("--limit", "3")


def test_a_scenario_that_stops_failing_by_itself_blames_nobody() -> None:
    plays = {"0": "good", "1": "good", "2": "bad", "3": "bad"}
    seen: list[str] = []

    def play(commit: str) -> Outcome:
        seen.append(commit)
        answer = "good" if seen.count("2") > 1 else plays[commit]  # the second time, 2 is well
        return Outcome(answer, "", {"rule": "tokens"})  # type: ignore[arg-type]

    finding = find("0", ("1", "2", "3"), Replay(play, "scenario"), Memory(), lambda *_: None)
    assert (finding.verdict, finding.culprit) == ("undecided", "2")


def test_what_was_answered_is_not_asked_again(tmp_path: Path) -> None:
    memory = Memory(tmp_path / "state.json")
    memory.recall("a", lambda: Outcome("bad", "broken", {"rule": "tokens"}))
    again = Memory(tmp_path / "state.json")
    assert again.recall("a", lambda: Outcome("good", "")) == Outcome("bad", "broken", {"rule": "tokens"})
    assert ENDS not in again.outcomes
    (tmp_path / "state.json").write_text("[1]")
    with pytest.raises(HybridKVError, match="is no state of a bisect; delete it"):
        Memory(tmp_path / "state.json")
