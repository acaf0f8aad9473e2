"""Where numbers come from, without the host's name."""

import os
import re

from hybrid_kv.results import origin
from tests.bench.bisect.toy import commit, git


def test_provenance_does_not_name_the_host(monkeypatch):
    monkeypatch.delenv("HYBRID_KV_MACHINE", raising=False)
    assert os.uname().nodename not in origin._machine()
    monkeypatch.setenv("HYBRID_KV_MACHINE", "h200-a\n b ")
    assert origin._machine() == "h200-a b"


def test_no_git_gives_an_empty_commit(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert origin._commit() == ""


def test_distance_and_authors_come_from_git(tmp_path, monkeypatch):
    files = ("code.py", "results/guard.csv", "code.py", "README.md", "docs/page.md", "docs/picture.svg")
    git(tmp_path, "init", "-q")
    made = [commit(tmp_path, {file: str(number)}, file) for number, file in enumerate(files)]
    monkeypatch.setattr(origin, "_REPOSITORY", tmp_path.resolve())
    head = origin.head()
    assert head.commit == made[-1]
    assert [head.distance(one) for one in made] == [1, 1, 0, 0, 0, 0]
    assert origin.Head(made[0]).distance(made[-1]) == 1  # HEAD is behind what was measured
    for unknown in ("a" * 40, "", "HEAD", "--all", made[0] + "-dirty"):
        assert head.distance(unknown) is None
    assert origin.NO_HEAD.distance(made[0]) is None

    infos = head.describe([made[3], "a" * 40, made[0], "HEAD", "--all", made[3]])
    assert set(infos) == {made[0], made[3]}
    assert (infos[made[3]].author, infos[made[3]].subject) == ("t", "README.md")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", infos[made[3]].day)
    assert head.describe(["a" * 40]) == head.describe([]) == origin.NO_HEAD.describe(made) == {}
