"""Where numbers come from, without the host's name."""

import os
import re
import subprocess

from hybrid_kv.results import origin


def test_provenance_does_not_name_the_host(monkeypatch):
    monkeypatch.delenv("HYBRID_KV_MACHINE", raising=False)
    assert os.uname().nodename not in origin._machine()
    monkeypatch.setenv("HYBRID_KV_MACHINE", "h200-a\n b ")
    assert origin._machine() == "h200-a b"


def test_no_git_gives_an_empty_commit(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert origin._commit() == ""


def test_git_tells_the_distance_from_head_in_commits_that_change_code_and_who_made_them(tmp_path, monkeypatch):
    def git(*arguments):
        identity = ["-c", "user.name=n", "-c", "user.email=e", "-c", "commit.gpgsign=false"]
        done = subprocess.run(["git", *identity, *arguments], cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    def commit(file):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(file + str(len(made)))
        git("add", "-A")
        git("commit", "-q", "-m", file)
        made.append(git("rev-parse", "HEAD"))

    made = []
    git("init", "-q")
    for file in ("code.py", "results/guard.csv", "code.py", "README.md", "docs/page.md", "docs/dashboard.png"):
        commit(file)
    monkeypatch.setattr(origin, "_REPOSITORY", tmp_path.resolve())
    head = origin.head()
    assert head.commit == made[-1]
    assert [head.distance(one) for one in made] == [1, 1, 0, 0, 0, 0]
    assert origin.Head(made[0]).distance(made[-1]) == 1  # HEAD is behind what was measured
    for unknown in ("a" * 40, "", "HEAD", "--all", made[0] + "-dirty"):
        assert head.distance(unknown) is None
    assert origin.NO_HEAD.distance(made[0]) is None

    told = head.tell([made[3], "a" * 40, made[0], "HEAD", "--all", made[3]])
    assert set(told) == {made[0], made[3]}
    assert (told[made[3]].author, told[made[3]].subject) == ("n", "README.md")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", told[made[3]].day)
    assert head.tell(["a" * 40]) == head.tell([]) == origin.NO_HEAD.tell(made) == {}
