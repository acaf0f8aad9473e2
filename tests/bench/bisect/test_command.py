"""`hybrid-kv bisect` on toy histories: which commit it names, what it prints, how it resumes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.bisect.history import Trees
from bench.harness import compare
from hybrid_kv.check.guard.replay import to_json
from hybrid_kv.check.guard.traffic import draw_scenario
from tests.bench.bisect.toy import checkout, commit
from tests.bench.harness.toy import git
from tests.cli.run import refused, run

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty checkout, the working folder beside it, and a scenario in that."""
    root, work = tmp_path / "root", tmp_path / "work"
    root.mkdir()
    work.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setattr(compare, "ROOT", root)
    Path("scenario.json").write_text(to_json(draw_scenario(0), "tokens"))
    return root


def test_the_commit_that_broke_a_rule_is_named_with_its_evidence(
    root: Path, capsys: Capture
) -> None:
    commits = checkout(root, ["", "", "raise", "", "tokens", "tokens", "raise", "tokens"])
    code, out, err = run(
        capsys, "bisect", commits[0], "--replay", "scenario.json", "--out", "found.json"
    )
    assert code == 0
    assert out.startswith(
        f"{commits[4][:9]} is the first bad commit (7 commits that change hybrid_kv/, "
    )
    for line in (
        "author    t <t@example.com>",
        "title     toy: number 4",
        "hybrid_kv/ANSWER",
        "step 0: request 0",
        "evidence  before: no rule is broken; with it: broken rule: tokens",
        "packages  -torch==3, +torch==4",
    ):
        assert line in out
    assert "ends: bad, broken rule: tokens" in err
    document = json.loads(Path("found.json").read_text())
    assert (document["verdict"], document["first_bad"]["commit"]) == ("found", commits[4])
    assert not list(Path("out/bisect").iterdir()) and git(root, "status", "--porcelain") == ""


def test_a_first_bad_commit_that_cannot_run_is_one_of_several(root: Path, capsys: Capture) -> None:
    commits = checkout(root, ["", "", "raise", "another rule", "tokens", "tokens"])
    code, out, err = run(capsys, "bisect", commits[0], "HEAD", "--replay", "scenario.json")
    assert code == 0
    assert out.startswith("the first bad commit is one of 3, of which the last is bad")
    assert "toy: number 2, which was skipped" in out and "toy: number 3, which was skipped" in out
    assert (
        "cannot run: ImportError: half a change" in err
        and "broken rule: another rule, not tokens" in err
    )


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        (["", "", ""], "nothing to bisect: scenario.json breaks no rule at BAD"),
        (["tokens", "", "tokens"], "nothing to bisect: scenario.json fails at GOOD as well"),
    ],
)
def test_ends_that_do_not_differ_end_the_search(
    root: Path, capsys: Capture, answers: list[str], said: str
) -> None:
    commits = checkout(root, answers)
    code, out, _ = run(capsys, "bisect", commits[0], "--replay", "scenario.json")
    assert code == 1 and out.startswith(said) and len(out.splitlines()) == 1


def test_a_commit_that_leaves_the_package_alone_is_not_tested(root: Path, capsys: Capture) -> None:
    good = checkout(root, [""])[0]
    for number in range(5):
        commit(root, {"README.md": str(number)}, "docs: more")
    broken = commit(root, {"hybrid_kv/ANSWER": "tokens"}, "cache: break it")
    commit(root, {"README.md": "last"}, "docs: last")
    code, out, _ = run(capsys, "bisect", good, "--replay", "scenario.json")
    assert code == 0 and out.startswith(
        f"{broken[:9]} is the first bad commit (1 commits that change"
    )


def test_a_merge_is_one_commit(root: Path, capsys: Capture) -> None:
    good = checkout(root, [""])[0]
    git(root, "checkout", "-q", "-b", "side")
    commit(root, {"hybrid_kv/ANSWER": "tokens"}, "side: break it")
    git(root, "checkout", "-q", "main")
    commit(root, {"hybrid_kv/OTHER": "1"}, "main: go on")
    git(root, "merge", "-q", "--no-ff", "-m", "merge: side", "side")
    code, out, _ = run(capsys, "bisect", good, "--replay", "scenario.json")
    assert code == 0 and "title     merge: side" in out and "hybrid_kv/ANSWER" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("v0 {bad} --replay scenario.json", "git knows no revision 'v0'"),
        (
            "{good} . --replay scenario.json",
            "bisect tests commits, not the working tree; commit it and give HEAD",
        ),
        ("{bad} {good} --replay scenario.json", "it is the other way round; swap them"),
        ("{raising} HEAD --replay scenario.json", "no commit after"),
        ("{good} {apart} --replay scenario.json", "they have no commit in common"),
        (
            "{good} --replay scenario.json",
            "BAD: scenario.json cannot run: ImportError: half a change",
        ),
        ("{good} {bad} --replay none.json", "none.json"),
        ("{good} {bad} --replay broken.json", "broken.json is no scenario of this version"),
        (
            "{good} HEAD HEAD --replay scenario.json",
            "'HEAD' is a third revision; options after -- are for",
        ),
        ("{good}", "name what failed with one of: --replay FILE, --benchmark NAME, --accuracy"),
        ("{good} --replay scenario.json --accuracy", "name what failed with one of"),
        ("{good} HEAD --accuracy -- --seed 3", "--seed after --: bisect sets it itself"),
        ("{good} --benchmark no-such", "no benchmark's name contains 'no-such'"),
        ("{good} --self-test --repetitions 0", "repetitions=0 must be an integer >= 1"),
    ],
)
def test_what_cannot_run_is_one_line_and_leaves_nothing(
    root: Path, capsys: Capture, words: str, said: str
) -> None:
    commits = dict(
        zip(("good", "bad", "raising"), checkout(root, ["", "tokens", "raise"]), strict=True)
    )
    commits["apart"] = git(root, "commit-tree", "HEAD^{tree}", "-m", "other")
    Path("broken.json").write_text("{}")
    assert said in refused(capsys, "bisect", *words.format(**commits).split())
    assert not Path("out").exists()


def test_without_git_it_is_one_line(root: Path, capsys: Capture) -> None:
    assert "bisect needs a git checkout of hybrid-kv" in refused(
        capsys, "bisect", "v0", "--replay", "scenario.json"
    )


def test_it_resumes_after_an_interruption(
    root: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    commits = checkout(root, ["", *[""] * 9, *["tokens"] * 9])
    tested: list[str] = []
    usual = Trees.of

    def counted(trees: Trees, name: str) -> Path:
        tested.append(name)
        if len(tested) == 5:
            raise KeyboardInterrupt
        return usual(trees, name)

    monkeypatch.setattr(Trees, "of", counted)
    code, out, err = run(capsys, "bisect", commits[0], "--replay", "scenario.json")
    assert (code, out) == (130, "") and err.endswith("interrupted\n")
    assert len([*Path("out/bisect").glob("*.json")]) == 1
    tested.clear()
    code, out, err = run(capsys, "bisect", commits[0], "--replay", "scenario.json")
    assert code == 0 and out.startswith(commits[10][:9])
    assert err.startswith("resuming: 2 commits are known")
    assert not list(Path("out/bisect").iterdir())
