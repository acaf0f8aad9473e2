"""The git checkout that this package lies in, if it is not installed."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


def git(*arguments: str) -> str | None:
    """Return what git prints in the checkout; None if it fails."""
    try:
        done = subprocess.run(("git", *arguments), cwd=REPOSITORY, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    # Git keeps whatever bytes a name was given in.
    return done.stdout.decode(errors="replace").strip()


def commit() -> str:
    """Return HEAD of the checkout of this package; empty for an installed one.

    It is empty also inside another checkout.
    """
    top = git("rev-parse", "--show-toplevel")
    return (git("rev-parse", "HEAD") or "") if top and Path(top).resolve() == REPOSITORY else ""


@cache
def changed_modules() -> frozenset[str]:
    """Return modules of this package's checkout that differ from the last commit.

    If none does, those that it changed; none for an installed package.
    """
    if not commit():
        return frozenset()
    status = git("status", "--porcelain", "--", "*.py")
    status = status or git("diff", "--name-only", "HEAD~1", "HEAD", "--", "*.py")
    files = (line.split()[-1] for line in (status or "").splitlines())
    return frozenset(file.removesuffix(".py").replace("/", ".") for file in files)
