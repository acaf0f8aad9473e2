"""The commits between two revisions, and a folder for each that is asked.

A commit is taken out of git by `git archive`, not as a git worktree: the checkout, its index and its list of worktrees
stay as they are, whatever happens. The package is Python, so that its folder is all that a wheel of it would have.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench.harness.versions import WORKING_TREE, Revision, extract, find_revision
from hybrid_kv.config import ConfigError

MOST_TREES = 6  # of 11 MB each; GOOD's is asked for again and again


def git(root: Path, *words: str) -> str:
    """What git prints, without the last line's end."""
    done = subprocess.run(("git", *words), cwd=root, capture_output=True, check=True)
    return done.stdout.decode(errors="backslashreplace").rstrip("\n")


@dataclass(frozen=True)
class History:
    """The commits after `good`, up to `bad`, that change `hybrid_kv/`, oldest first."""

    root: Path
    good: Revision
    bad: Revision
    commits: tuple[str, ...]

    def commit(self, position: int) -> str:
        return self.good.commit if position < 0 else self.commits[position]


def read_history(root: Path, good: str, bad: str) -> History:
    """
    A merge is one commit: what it brought is not looked into. A commit that leaves `hybrid_kv/` as it was cannot have
    changed an answer, and is left out.

    Raises:
        ConfigError: the working tree or an unknown revision; `good` is not an ancestor of `bad`; or nothing lies
            between them.
    """
    if WORKING_TREE in (good, bad):
        raise ConfigError("bisect asks commits, not the working tree; commit it and give HEAD")
    first, last = find_revision(root, good, by="bisect"), find_revision(root, bad, by="bisect")
    try:
        base = git(root, "merge-base", first.commit, last.commit)
    except subprocess.CalledProcessError:
        base = ""
    if base != first.commit:
        common = f"they part at {base[:9]}: try that one as GOOD" if base else "they have no commit in common"
        if base == last.commit:
            common = "it is the other way round; swap them"
        raise ConfigError(f"GOOD {first} is no ancestor of BAD {last}; {common}")
    listed = git(
        root, "rev-list", "--reverse", "--first-parent", f"{first.commit}..{last.commit}", "--", "hybrid_kv"
    ).split()  # fmt: skip
    if not listed:
        raise ConfigError(f"no commit after {first} and up to {last} changes hybrid_kv/; give others")
    return History(root, first, last, tuple(listed))


@dataclass(frozen=True)
class Culprit:
    """What git knows of a commit.

    Attributes:
        stat: of its changes, a line per file and one for all of them.
        packages: lines of constraints.txt that it removed or added, as `-torch==2.12.0`.
    """

    commit: str
    author: str
    date: str
    title: str
    stat: str
    packages: tuple[str, ...]

    @property
    def line(self) -> str:
        return f"{self.commit[:9]} {self.title}"


def fill_package(root: Path) -> Callable[[str, Path], None]:
    """For `Trees`: the commit's `hybrid_kv/`."""

    def fill(commit: str, folder: Path) -> None:
        if not extract(root, commit, "hybrid_kv", folder):
            raise ConfigError(f"{commit[:9]} has no folder hybrid_kv")

    return fill


def describe(root: Path, commit: str) -> Culprit:
    author, date, title = git(root, "log", "-1", "--format=%an <%ae>%n%as%n%s", commit).split("\n")
    stat = git(root, "show", "-m", "--first-parent", "--stat=100", "--format=", commit)
    changes = git(
        root, "show", "-m", "--first-parent", "--format=", "--unified=0", commit, "--", "constraints.txt"
    )  # fmt: skip
    packages = tuple(re.findall(r"^[-+]\w.*", changes, re.MULTILINE))
    return Culprit(commit, author, date, title, stat.strip("\n"), packages)


class Trees:
    """A folder for each commit that is asked, filled when it is first needed; the oldest go when there are many.

    Args:
        fill: puts a commit's files into an empty folder; raises ConfigError if it has none.
    """

    def __init__(self, folder: Path, fill: Callable[[str, Path], None]) -> None:
        self._folder = folder
        self._fill = fill
        self._held: list[Path] = []

    def of(self, commit: str) -> Path:
        """
        Raises:
            ConfigError: the commit has no such files.
        """
        tree = self._folder / commit
        if tree in self._held:
            self._held.remove(tree)
        else:
            tree.mkdir(parents=True)
            try:
                self._fill(commit, tree)
            except BaseException:
                shutil.rmtree(tree)
                raise
        self._held.append(tree)
        if len(self._held) > MOST_TREES:
            shutil.rmtree(self._held.pop(0))
        return tree
