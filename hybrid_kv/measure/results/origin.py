"""The origin of a run's numbers: commit, machine, device and versions."""

from __future__ import annotations

import os
import platform
import re
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

from hybrid_kv import environment
from hybrid_kv.check import checkout
from hybrid_kv.measure.results.measured import CODE, IMPORTS, measured_paths


@dataclass(frozen=True)
class Provenance:
    """The origin of a run's numbers; the same for all rows of a run."""

    run_id: str
    commit: str
    dirty: bool
    device: str
    machine: str
    python: str
    torch: str
    triton: str


def machine_name() -> str:
    """Return CPU model and cores, never the host's name; `HYBRID_KV_MACHINE` replaces it."""
    name = environment.machine()
    if name:
        return "".join(letter for letter in " ".join(name.split()) if letter.isprintable())
    model = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    model = next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), model
    )
    return f"{model} x{os.cpu_count()}"


@cache
def provenance() -> Provenance:
    """Gather the provenance once per process, so that a run has one `run_id`."""
    import torch  # Seconds and 100 MiB, which a reader of rows does not need.

    commit = checkout.commit()
    try:
        triton = metadata.version("triton")
    except metadata.PackageNotFoundError:
        triton = ""
    return Provenance(
        run_id=uuid.uuid4().hex[:12],
        commit=commit,
        dirty=bool(commit and checkout.git("status", "--porcelain", "--", ".", ":!results")),
        device=torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        machine=machine_name(),
        python=platform.python_version(),
        torch=str(torch.__version__),
        triton=triton,
    )


@dataclass(frozen=True)
class CommitInfo:
    """A commit's author, the day it was made, the first line of its message."""

    author: str
    day: str
    subject: str


@dataclass(frozen=True)
class Head:
    """The commit that is checked out; empty for an installed package."""

    commit: str

    def commits_since(self, commit: str, suite: str) -> int | None:
        """Count commits, on either side, that changed what a suite measures since a commit.

        0: its files are the same, also where a change was taken back. None: the checkout lacks the
          commit.
        """
        if not self.commit or not re.fullmatch(r"[0-9a-f]{40}", commit):
            return None
        return _commits_between(commit, self.commit, suite)

    def times(self) -> dict[str, int]:
        """Return when each commit of this one's history was made, the oldest first.

        Times are in seconds since 1970. Each is later than the one before it, whatever the clocks
        of their authors said.
        """
        log = (
            checkout.git("log", "--reverse", "--topo-order", "--format=%H %ct", self.commit)
            if self.commit
            else None
        )
        times: dict[str, int] = {}
        newest = 0
        for line in (log or "").splitlines():
            commit, time = line.split()
            newest = max(newest + 1, int(time))
            times[commit] = newest
        return times

    def describe(self, commits: Iterable[str]) -> dict[str, CommitInfo]:
        """Return author, day and subject of those of the commits that the checkout has."""
        hashes = [
            commit for commit in dict.fromkeys(commits) if re.fullmatch(r"[0-9a-f]{40}", commit)
        ]
        if not self.commit or not hashes:
            return {}
        log = (
            checkout.git(
                "log", "--no-walk", "--ignore-missing", "--format=%H%x00%an%x00%cs%x00%s", *hashes
            )
            or ""
        )
        lines = [line.split("\0") for line in log.split("\n") if line.count("\0") == 3]
        return {commit: CommitInfo(*info) for commit, *info in lines if commit in hashes}


NO_HEAD = Head("")


@cache
def _commits_between(commit: str, head: str, suite: str) -> int | None:
    paths = measured_paths(suite, *_tree(head))
    count = checkout.git("rev-list", "--count", f"{commit}...{head}", "--", *paths)
    if count is None:
        return None
    return (
        0 if checkout.git("diff", "--quiet", commit, head, "--", *paths) is not None else int(count)
    )


@cache
def _tree(commit: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Files with code at a commit, and their import statements for `measured_paths`."""
    files = checkout.git("ls-tree", "-r", "--name-only", commit, "--", *CODE) or ""
    imports = checkout.git("grep", "-E", IMPORTS, commit, "--", "*.py") or ""
    return tuple(files.splitlines()), tuple(line.partition(":")[2] for line in imports.splitlines())


def head() -> Head:
    """Return HEAD of the checkout that this package lies in."""
    return Head(checkout.commit())
