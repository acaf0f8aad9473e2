"""Histories with a known first bad commit: commits on top of this checkout's, in a clone.

Most commits add a comment line to some module. One applies the given edits. Some cannot be
imported, two or three in a row, as when a change is split badly.
"""

from __future__ import annotations

import random
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from bench.bisect.history import git
from hybrid_kv.config import ConfigError

Edit = Callable[[str], str]  # of a file's text
DOOR = "hybrid_kv/__init__.py"
BREAK = '\nraise ImportError("half a change")\n'
EPOCH = 1_700_000_000  # seconds; a commit a minute, so that a seed is a history


def generate(
    root: Path,
    good: str,
    folder: Path,
    edits: Mapping[str, Edit],
    *,
    num: int,
    first_bad: int,
    rng: random.Random,
) -> tuple[str, ...]:
    """Clone `root` into `folder` and add `num` commits to commit `good`.

    Number `first_bad` applies `edits`, by file.

    Returns:
        The commits.

    Raises:
        ConfigError: git refuses, or a file of the edits does not exist.
    """
    try:
        subprocess.run(
            ("git", "clone", "-q", "--shared", str(root), str(folder)),
            check=True,
            capture_output=True,
        )
    except subprocess.CalledProcessError as error:
        raise ConfigError(
            f"{root} cannot be cloned: {error.stderr.decode(errors='replace').strip()}"
        ) from None
    git(folder, "checkout", "-q", "--detach", good)
    names = [name for name in git(folder, "ls-files", "hybrid_kv/*.py").split("\n") if name != DOOR]
    texts = {name: (folder / name).read_text(encoding="utf-8") for name in (*names, DOOR)}
    stream = b"".join(_stream(good, texts, names, edits, num, first_bad, rng))
    subprocess.run(
        ("git", "fast-import", "--quiet", "--force"), cwd=folder, input=stream, check=True
    )
    git(folder, "checkout", "-q", "--detach", "generated")
    return tuple(git(folder, "rev-list", "--reverse", f"{good}..generated").split())


def _stream(
    good: str,
    texts: dict[str, str],
    names: list[str],
    edits: Mapping[str, Edit],
    num: int,
    first_bad: int,
    rng: random.Random,
) -> Iterator[bytes]:
    """Yield for git fast-import a commit after the other, each with the files that it changes."""
    intact, is_broken = texts[DOOR], broken(num, first_bad, rng)
    for number in range(num):
        if number == first_bad:
            changed, title = {name: edit(texts[name]) for name, edit in edits.items()}, "injected"
        else:
            name = rng.choice(names)
            changed, title = {name: f"{texts[name]}# {number}\n"}, f"comment {number}"
        door = intact + BREAK if is_broken[number] else intact
        if door != texts[DOOR]:
            changed[DOOR] = door
        texts.update(changed)
        stamp = f"generated <generated@example.org> {EPOCH + 60 * number} +0000"
        parent = f"from {good}\n" if number == 0 else ""
        origin = f"author {stamp}\ncommitter {stamp}"
        yield f"commit refs/heads/generated\n{origin}\n{_data(title)}{parent}".encode()
        for name, text in changed.items():
            yield f"M 100644 inline {name}\n{_data(text)}".encode()


def _data(text: str) -> str:
    return f"data {len(text.encode())}\n{text}\n"


def broken(num: int, first_bad: int, rng: random.Random) -> list[bool]:
    """Return which commits cannot run: one in twenty, two or three in a row.

    They are not the first bad one, its parent or the last.
    """
    found = [False] * num
    for start in range(num):
        if rng.random() < 0.02:
            for number in range(start, min(num, start + rng.choice((2, 3)))):
                found[number] = number not in (first_bad - 1, first_bad, num - 1)
    return found
