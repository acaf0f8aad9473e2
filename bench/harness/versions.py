"""Versions for `hybrid-kv compare`: looked up in git, put into folders of their own."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import zipfile
from dataclasses import dataclass
from pathlib import Path

from bench.harness import worker
from hybrid_kv.config import ConfigError

WORKING_TREE = "."
BENCHMARKS = ("bench", "examples")  # the suites, and the configs that they read


@dataclass(frozen=True)
class Revision:
    """A version of `hybrid_kv`, by the user's name for it.

    `commit` is the commit that it is, or that it was edited from.
    """

    name: str
    commit: str
    dirty: bool = False

    def __str__(self) -> str:
        if self.name != WORKING_TREE:
            return (
                self.name
                if self.commit.startswith(self.name)
                else f"{self.name} ({self.commit[:9]})"
            )
        return f"working tree ({self.commit[:9]}{', dirty' if self.dirty else ''})"


def _git(root: Path, *arguments: str) -> bytes | None:
    try:
        done = subprocess.run(("git", *arguments), cwd=root, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout


def find_revision(root: Path, name: str, by: str = "compare") -> Revision:
    """Look a revision up.

    Args:
        by: the command, for the error.

    Raises:
        ConfigError: git does not know it, or `root` is no checkout.
    """
    top = _git(root, "rev-parse", "--show-toplevel")
    if top is None or Path(os.fsdecode(top.strip())).resolve() != root.resolve():
        raise ConfigError(
            f"{by} needs a git checkout of hybrid-kv; clone it and run pip install -e . there"
        )
    wanted = "HEAD" if name == WORKING_TREE else name
    commit = _git(
        root, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{wanted}^{{commit}}"
    )
    if commit is None:
        raise ConfigError(
            f"git knows no revision {name!r}; give a commit, tag or branch, "
            "or . for the working tree"
        )
    dirty = name == WORKING_TREE and bool(_git(root, "status", "--porcelain", "--", "hybrid_kv"))
    return Revision(name, commit.decode().strip(), dirty)


def place(root: Path, revision: Revision, folder: Path) -> None:
    """Put the revision's `hybrid_kv/` into `folder`, with the working tree's `bench/`.

    The revision's own `bench/` goes into `own`.

    What measures, `hybrid_kv/measure/timing`, is the working tree's as well: one clock for both
    sides. Copies, so that an edit during the run cannot mix two versions.

    Raises:
        ConfigError: the revision has no folder `hybrid_kv`.
    """
    copied = [*BENCHMARKS, "hybrid_kv/measure/timing"]
    if revision.name == WORKING_TREE:
        copied = [*BENCHMARKS, "hybrid_kv"]
    else:
        if not extract(root, revision.commit, "hybrid_kv", folder):
            raise ConfigError(f"revision {revision} has no folder hybrid_kv; give a later one")
        for name in BENCHMARKS:
            extract(root, revision.commit, name, folder / worker.OWN)
    for name in copied:
        if (root / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(root / name, folder / name, ignore=ignored, dirs_exist_ok=True)
    if (measure := folder / "hybrid_kv/measure").is_dir():
        (measure / "__init__.py").touch()  # an older revision has no such package


def extract(root: Path, commit: str, name: str, folder: Path) -> bool:
    """Put a folder of the commit into `folder`; False if it has none of that name."""
    archive = _git(root, "archive", "--format=zip", commit, name)
    if archive is None:
        return False
    with zipfile.ZipFile(io.BytesIO(archive)) as files:
        files.extractall(folder)
    return True
