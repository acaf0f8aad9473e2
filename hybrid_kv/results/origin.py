"""Where a run's numbers come from: commit, machine, device and versions."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

from hybrid_kv import environment

_REPOSITORY = Path(__file__).resolve().parents[2]
_NO_CODE = (":!results", ":!docs", ":!*.md")  # A commit that appends rows and redraws them changes nothing measured.


@dataclass(frozen=True)
class Provenance:
    """Where a run's numbers come from; the same for all rows of a run."""

    run_id: str
    commit: str
    dirty: bool
    device: str
    machine: str
    python: str
    torch: str
    triton: str


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(("git", *arguments), cwd=_REPOSITORY, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.decode(errors="replace").strip()  # Git keeps whatever bytes a name was given in.


def _commit() -> str:
    """HEAD of the checkout this package lies in; empty for an installed package, also inside another checkout."""
    top = _git("rev-parse", "--show-toplevel")
    return (_git("rev-parse", "HEAD") or "") if top and Path(top).resolve() == _REPOSITORY else ""


@cache
def changed_modules() -> frozenset[str]:
    """Modules of the checkout this package lies in that differ from the last commit, or if none does, that it changed.

    None for an installed package.
    """
    if not _commit():
        return frozenset()
    text = _git("status", "--porcelain", "--", "*.py") or _git("diff", "--name-only", "HEAD~1", "HEAD", "--", "*.py")
    files = (line.split()[-1] for line in (text or "").splitlines())
    return frozenset(file.removesuffix(".py").replace("/", ".") for file in files)


def _machine() -> str:
    """CPU model and cores, never the host's name; `HYBRID_KV_MACHINE` replaces it."""
    if name := environment.machine():
        return "".join(letter for letter in " ".join(name.split()) if letter.isprintable())
    model = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), model)
    return f"{model} x{os.cpu_count()}"


@cache
def provenance() -> Provenance:
    """Gathered once per process, so that a run has one `run_id`."""
    import torch  # Seconds and 100 MiB, which a reader of rows does not need.

    commit = _commit()
    try:
        triton = metadata.version("triton")
    except metadata.PackageNotFoundError:
        triton = ""
    return Provenance(
        run_id=uuid.uuid4().hex[:12],
        commit=commit,
        dirty=bool(commit and _git("status", "--porcelain", "--", ".", ":!results")),
        device=torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        machine=_machine(),
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

    def distance(self, commit: str) -> int | None:
        """Commits that changed code between a commit and this one, on either side; None: the checkout lacks it."""
        if not self.commit or not re.fullmatch(r"[0-9a-f]{40}", commit):
            return None
        count = _git("rev-list", "--count", f"{commit}...{self.commit}", "--", ".", *_NO_CODE)
        return None if count is None else int(count)

    def describe(self, commits: Iterable[str]) -> dict[str, CommitInfo]:
        """Those of the commits that the checkout has."""
        wanted = [commit for commit in dict.fromkeys(commits) if re.fullmatch(r"[0-9a-f]{40}", commit)]
        if not self.commit or not wanted:
            return {}
        text = _git("log", "--no-walk", "--ignore-missing", "--format=%H%x00%an%x00%cs%x00%s", *wanted) or ""
        lines = [line.split("\0") for line in text.split("\n") if line.count("\0") == 3]
        return {commit: CommitInfo(*info) for commit, *info in lines if commit in wanted}


NO_HEAD = Head("")


def head() -> Head:
    """HEAD of the checkout that this package lies in."""
    return Head(_commit())
