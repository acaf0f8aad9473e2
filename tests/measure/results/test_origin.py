"""Where numbers come from, without the host's name."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from hybrid_kv.check import checkout as checkout_of_package
from hybrid_kv.measure.results import origin
from tests.bench.bisect.toy import commit, git


def test_provenance_does_not_name_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HYBRID_KV_MACHINE", raising=False)
    assert os.uname().nodename not in origin.machine_name()
    monkeypatch.setenv("HYBRID_KV_MACHINE", "h200-a\n b ")
    assert origin.machine_name() == "h200-a b"


def test_no_git_gives_an_empty_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert checkout_of_package.commit() == ""


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a repository with a suite of `bench`, the guard, their subjects, and unrelated code."""
    git(tmp_path, "init", "-q")
    monkeypatch.setattr(checkout_of_package, "REPOSITORY", tmp_path.resolve())
    files = {
        "hybrid_kv/__init__.py": "",
        "hybrid_kv/cache/__init__.py": "from hybrid_kv.errors import A\n",
        "hybrid_kv/cache/table.json": "1",
        "hybrid_kv/errors.py": "A = 1\n",
        "hybrid_kv/check/guard/__init__.py": (
            "def run():\n    from hybrid_kv.cache import (\n        x)\n"
        ),
        "hybrid_kv/cli.py": "from hybrid_kv.check import guard\n",
        "bench/__init__.py": "",
        "bench/ssd.py": "from hybrid_kv import cache\n",
    }
    commit(tmp_path, files, "start")
    return tmp_path


def test_a_run_counts_until_a_file_that_it_measures_has_changed(checkout: Path) -> None:
    changes = [
        {"hybrid_kv/cli.py": "1"},
        {"hybrid_kv/check/guard/__init__.py": "from hybrid_kv import cache"},
        {"bench/ssd.py": "from hybrid_kv import cache  # faster"},
        {"hybrid_kv/errors.py": "A = 2"},
        {"hybrid_kv/cache/table.json": "2"},
        {
            "README.md": "1",
            "docs/page.md": "1",
            "results/guard.csv": "1",
            "hybrid_kv/cache/README.md": "1",
        },
    ]
    made = [commit(checkout, files, "a change") for files in changes]
    head = origin.head()
    assert head.commit == made[-1]
    assert [head.commits_since(one, "guard") for one in made] == [3, 2, 2, 1, 0, 0]
    assert [head.commits_since(one, "ssd") for one in made] == [3, 3, 2, 1, 0, 0]
    assert [head.commits_since(one, "no suite") for one in made] == [4, 3, 2, 1, 0, 0]  # all code
    # HEAD is behind what was measured
    assert origin.Head(made[0]).commits_since(made[-1], "guard") == 3


def test_a_change_that_was_taken_back_is_none(checkout: Path) -> None:
    start = origin.head().commit
    commit(checkout, {"hybrid_kv/errors.py": "A = 2\n"}, "worse")
    assert origin.head().commits_since(start, "ssd") == 1
    commit(checkout, {"hybrid_kv/errors.py": "A = 1\n"}, "mended")
    assert origin.head().commits_since(start, "ssd") == 0


def test_a_commit_that_the_checkout_lacks_has_no_distance(checkout: Path) -> None:
    head = origin.head()
    for unknown in ("a" * 40, "", "HEAD", "--all", head.commit + "-dirty"):
        assert head.commits_since(unknown, "guard") is None
    assert origin.NO_HEAD.commits_since(head.commit, "guard") is None


def test_commits_are_in_order_whatever_their_clocks_say(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [origin.head().commit]
    for day in (20, 10, 30):
        monkeypatch.setenv("GIT_COMMITTER_DATE", f"2099-01-{day}T00:00:00Z")
        made.append(commit(checkout, {"day": str(day)}, "a day"))
    times = origin.head().times()
    assert list(times) == made
    assert sorted(set(times.values())) == list(times.values())
    assert origin.Head(made[1]).times().keys() == set(made[:2])
    assert origin.NO_HEAD.times() == origin.Head("a" * 40).times() == {}


def test_authors_come_from_git(checkout: Path) -> None:
    made = [commit(checkout, {name: "1"}, name) for name in ("a", "b", "c", "README.md")]
    head = origin.head()
    infos = head.describe([made[3], "a" * 40, made[0], "HEAD", "--all", made[3]])
    assert set(infos) == {made[0], made[3]}
    assert (infos[made[3]].author, infos[made[3]].subject) == ("t", "README.md")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", infos[made[3]].day)
    assert head.describe(["a" * 40]) == head.describe([]) == origin.NO_HEAD.describe(made) == {}
