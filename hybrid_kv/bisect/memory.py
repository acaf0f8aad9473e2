"""What was answered so far, in a file: a bisect that was interrupted goes on where it was."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hybrid_kv.bisect.search import Answer
from hybrid_kv.config import ConfigError
from hybrid_kv.files import write_whole

ENDS, CONFIRMED = "ends", "confirmed"


@dataclass(frozen=True)
class Outcome:
    """What a commit answered, a line for people, and the figures behind it, ready for JSON."""

    answer: Answer
    detail: str
    figures: Mapping[str, Any] = field(default_factory=dict)


class Memory:
    """Outcomes by commit, and those of the two ends and of the last check, `ENDS` and `CONFIRMED`."""

    def __init__(self, file: Path | None = None) -> None:
        self._file = file
        self.outcomes: dict[str, Outcome] = {}
        if file is not None and file.exists():
            try:
                found = json.loads(file.read_text(encoding="utf-8"))
                self.outcomes = {key: Outcome(**one) for key, one in found.items()}
            except (ValueError, TypeError, AttributeError):
                raise ConfigError(f"{file} is no state of a bisect; delete it to start anew") from None

    def recall(self, key: str, ask: Callable[[], Outcome]) -> Outcome:
        """The outcome that is known, or what `ask` says, which is known from then on."""
        if key not in self.outcomes:
            self.outcomes[key] = ask()
            if self._file is not None:
                write_whole(self._file, json.dumps({name: asdict(one) for name, one in self.outcomes.items()}))
        return self.outcomes[key]


@contextmanager
def workplace(cache: Path, question: Mapping[str, str]) -> Iterator[Path]:
    """A folder in `cache` for one question; `trees` in it goes when the context ends, the rest if it ends well.

    Raises:
        ConfigError: another process is at the same question.
    """
    key = hashlib.sha256(json.dumps(question, sort_keys=True).encode()).hexdigest()[:12]
    place = cache / key
    place.mkdir(parents=True, exist_ok=True)
    _remove_left(cache, place)
    with _locked(place) as is_mine:
        if not is_mine:
            raise ConfigError(f"another bisect asks the same in {place}; wait for it")
        try:
            shutil.rmtree(place / "trees", ignore_errors=True)
            yield place
            shutil.rmtree(place)
        finally:
            shutil.rmtree(place / "trees", ignore_errors=True)
            if place.exists() and not any(place.iterdir()):
                place.rmdir()


def _remove_left(cache: Path, mine: Path) -> None:
    """The trees of processes that were killed."""
    for place in cache.iterdir():
        if place != mine and (place / "trees").is_dir():
            with _locked(place) as is_free:
                if is_free:
                    shutil.rmtree(place / "trees", ignore_errors=True)


@contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        is_mine = True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            is_mine = False
        yield is_mine
    finally:
        os.close(descriptor)
