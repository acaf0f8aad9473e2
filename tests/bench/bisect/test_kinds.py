"""Counts, answers and replays: what makes a commit bad, what it cannot say, and the last check."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from bench.bisect.answers import Answered, Answers, answers_of
from bench.bisect.counts import Counts
from bench.bisect.find import Finding, Memory, find
from bench.bisect.history import Trees
from bench.bisect.question import NotMeasurableError, Outcome
from bench.bisect.tokens import Tokens
from hybrid_kv.config import HybridKVError


def counted(*counts: Mapping[str, int] | None) -> Finding:
    """A bisect of commits that count so; None: it cannot run."""

    def count(commit: str) -> Mapping[str, int]:
        if (own := counts[int(commit)]) is None:
            raise NotMeasurableError("cannot run: ImportError")
        return own

    commits = tuple(map(str, range(1, len(counts))))
    return find("0", commits, Counts(count))


def test_the_commit_that_changed_a_count_is_found() -> None:
    finding = counted(*[{"blocks": 3, "bytes": 8}] * 4, *[{"blocks": 5, "bytes": 8}] * 5)
    assert (finding.verdict, finding.first_bad) == ("found", "4")
    assert finding.evidence.detail == "before: blocks 3; with it: blocks 5"


def test_a_count_is_bad_from_half_way_to_the_bad_end() -> None:
    values = (10, 8, 8, 11, 11, 12, 12)  # the gain of the second commit is no loss
    assert counted(*({"blocks": value} for value in values)).first_bad == "3"


def test_counts_that_a_commit_lacks_or_cannot_make_are_skipped() -> None:
    finding = counted(
        {"blocks": 3}, {"blocks": 3}, None, {"bytes": 1}, {"blocks": 5}, {"blocks": 5}
    )
    assert (finding.first_bad, finding.between) == ("4", ("2", "3"))


RIGHT = "1" * 60
LOSS = "0" * 12 + "1" * 48


def answered(*right: str, others: tuple[str, ...] = ()) -> Finding:
    """Return a bisect of commits with these answers.

    Args:
        others: answers to the questions of the next seed, if they differ.
    """

    def answer(commit: str, seed: int) -> Answered:
        own = (others if seed == 8 and others else right)[int(commit)]
        return Answered(own, f"questions {seed}, {len(own)}")

    commits = tuple(map(str, range(1, len(right))))
    return find("0", commits, Answers(answer, 7))


def test_the_commit_that_lost_answers_is_found() -> None:
    finding = answered(*[RIGHT] * 5, *[LOSS] * 6)
    assert (finding.verdict, finding.first_bad) == ("found", "5")
    assert finding.evidence.detail.startswith(
        "of other questions: 12 answers of 60 lost, 0 gained, p 0.00024, "
    )


def test_a_commit_between_the_ends_or_with_other_questions_is_skipped() -> None:
    half = "0" * 6 + "1" * 54
    assert answered(RIGHT, RIGHT, half, LOSS, LOSS).between == ("2",)
    assert answered(RIGHT, RIGHT, RIGHT[1:], LOSS, LOSS).between == ("2",)


def test_a_loss_that_other_questions_do_not_show_is_undecided() -> None:
    right = (RIGHT, RIGHT, LOSS, LOSS)
    finding = answered(*right, others=(RIGHT,) * 4)
    assert (finding.verdict, finding.first_bad) == ("undecided", "2")


def test_ends_with_other_questions_are_an_error() -> None:
    with pytest.raises(HybridKVError, match="GOOD and BAD have different questions"):
        answered(RIGHT, RIGHT[1:])


def test_answers_are_those_of_the_commits_own_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = []

    def run(trees: Trees, commit: str, *words: str) -> None:
        ran.append((commit, *words))
        lines = [
            {
                "doc_id": number,
                "doc_hash": "d",
                "prompt_hash": "p",
                "target_hash": "t",
                "correct": number != 1,
                "correct_flexible": True,
                "invalid": False,
                "output_sha": "o",
            }
            for number in range(3)
        ]
        Path(words[words.index("--samples") + 1]).write_text(
            "".join(json.dumps(line) + "\n" for line in lines)
        )

    monkeypatch.setattr(Trees, "run", run)
    found = answers_of(Trees(tmp_path, lambda *_: None), ["--limit", "3"])("abc", 5)
    assert found.right == "101"
    assert ran[0][:4] == ("abc", "accuracy", "--seed", "5") and ran[0][-2:] == ("--limit", "3")


def test_a_scenario_that_stops_failing_by_itself_is_undecided() -> None:
    plays = {"0": "good", "1": "good", "2": "bad", "3": "bad"}
    seen: list[str] = []

    def play(commit: str) -> Outcome:
        seen.append(commit)
        answer = "good" if seen.count("2") > 1 else plays[commit]  # the second time, 2 is good
        return Outcome(answer, "", {"rule": "tokens"})  # type: ignore[arg-type]

    finding = find("0", ("1", "2", "3"), Tokens(play, "scenario"))
    assert (finding.verdict, finding.first_bad) == ("undecided", "2")


def test_a_known_outcome_is_kept_and_not_tested_again(tmp_path: Path) -> None:
    reported: list[str] = []
    known = Outcome("bad", "broken", {"rule": "tokens"})
    for _ in range(2):
        memory = Memory(tmp_path / "state.json")
        assert memory.recall("a", lambda: known, lambda key, *_: reported.append(key)) == known
    assert reported == ["a"] and memory.outcomes == {"a": known}
    (tmp_path / "state.json").write_text("[1]")
    with pytest.raises(HybridKVError, match="is not the state of a bisect; delete it"):
        Memory(tmp_path / "state.json")
