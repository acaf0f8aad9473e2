"""The commits between two revisions, a folder for each tested one, and runs of its own code.

A commit is taken out of git by `git archive`, not as a git worktree: the checkout, its index and
its list of worktrees stay as they are, whatever happens. The package is Python, so that its folder
is all that a wheel of it would have.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench.bisect.question import NotMeasurableError
from bench.harness.versions import WORKING_TREE, Revision, extract, find_revision
from hybrid_kv.config import ConfigError

# seconds; a reduced scenario takes ten with its imports, 250 questions of a guard model a minute
LIMIT = 1800.0


def git(root: Path, *words: str) -> str:
    """Return what git prints, without the last line's end."""
    done = subprocess.run(("git", *words), cwd=root, capture_output=True, check=True)
    return done.stdout.decode(errors="backslashreplace").rstrip("\n")


@dataclass(frozen=True)
class History:
    """The commits after `good`, up to `bad`, that change `hybrid_kv/`, oldest first."""

    root: Path
    good: Revision
    bad: Revision
    commits: tuple[str, ...]


def read_history(root: Path, good: str, bad: str) -> History:
    """Return the commits between two revisions that may have changed an answer.

    A merge is one commit: its branch is not searched. A commit that leaves `hybrid_kv/` as it was
    cannot have changed an answer, and is left out.

    Raises:
        ConfigError: the working tree or an unknown revision; `good` is not an ancestor of `bad`; or
            nothing lies between them.
    """
    if WORKING_TREE in (good, bad):
        raise ConfigError("bisect tests commits, not the working tree; commit it and give HEAD")
    first, last = find_revision(root, good, by="bisect"), find_revision(root, bad, by="bisect")
    try:
        base = git(root, "merge-base", first.commit, last.commit)
    except subprocess.CalledProcessError:
        base = ""
    if base != first.commit:
        common = (
            f"they part at {base[:9]}: try that one as GOOD"
            if base
            else "they have no commit in common"
        )
        if base == last.commit:
            common = "it is the other way round; swap them"
        raise ConfigError(f"GOOD {first} is not an ancestor of BAD {last}; {common}")
    commits = f"{first.commit}..{last.commit}"
    listed = git(
        root, "rev-list", "--reverse", "--first-parent", commits, "--", "hybrid_kv"
    ).split()
    if not listed:
        raise ConfigError(
            f"no commit after {first} and up to {last} changes hybrid_kv/; give others"
        )
    return History(root, first, last, tuple(listed))


@dataclass(frozen=True)
class Commit:
    """A commit, as git knows it.

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


def describe(root: Path, commit: str) -> Commit:
    author, date, title = git(root, "log", "-1", "--format=%an <%ae>%n%as%n%s", commit).split("\n")
    stat = git(root, "show", "-m", "--first-parent", "--stat=100", "--format=", commit)
    options = ("-m", "--first-parent", "--format=", "--unified=0")
    changes = git(root, "show", *options, commit, "--", "constraints.txt")
    packages = tuple(re.findall(r"^[-+]\w.*", changes, re.MULTILINE))
    return Commit(commit, author, date, title, stat.strip("\n"), packages)


def fill_package(root: Path) -> Callable[[str, Path], None]:
    """Return a function that fills `Trees` with the commit's `hybrid_kv/`."""

    def fill(commit: str, folder: Path) -> None:
        if not extract(root, commit, "hybrid_kv", folder):
            raise ConfigError(f"{commit[:9]} has no folder hybrid_kv")

    return fill


@dataclass(frozen=True)
class Trees:
    """A folder for each commit that is tested, filled when it is first needed.

    Attributes:
        fill: puts a commit's files into an empty folder; raises ConfigError if it has none.
    """

    folder: Path
    fill: Callable[[str, Path], None]

    def of(self, commit: str) -> Path:
        """Return the folder with a commit's files.

        Raises:
            NotMeasurableError: the commit has no such files.
        """
        tree = self.folder / commit
        if not tree.exists():
            tree.mkdir(parents=True)
            try:
                self.fill(commit, tree)
            except ConfigError as error:
                shutil.rmtree(tree)
                raise NotMeasurableError(str(error)) from None
        return tree

    def run(self, commit: str, *words: str) -> subprocess.CompletedProcess[str]:
        """Run `hybrid-kv WORDS` by the commit's own code.

        Raises:
            NotMeasurableError: it has no package, or did not end within `LIMIT` seconds.
        """
        tree = self.of(commit)
        environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
        command = (sys.executable, "-m", "hybrid_kv.cli", *words)
        try:
            return subprocess.run(
                command,
                cwd=tree,
                env=environment,
                timeout=LIMIT,
                capture_output=True,
                text=True,
                errors="backslashreplace",
            )
        except subprocess.TimeoutExpired:
            raise NotMeasurableError(f"still running after {LIMIT:.0f} s") from None


def cannot_run(ran: subprocess.CompletedProcess[str]) -> str:
    """Return why, in a line."""
    reason = last_line(ran.stderr) or last_line(ran.stdout) or f"exit code {ran.returncode}"
    return f"cannot run: {reason}"


def last_line(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip()), "")
