"""Generated mutants of which somebody has proven that nothing can tell them from the code: `mutants/equivalent.yaml`.

    - file: cache/block_pool.py
      change: "BlockPool.free: counts = ids[0] => counts = ids[-1]"
      proof: The list has one element.

`change` is what a row says: the function, and the lines without their indentation. No line's number, which would move.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

from hybrid_kv.config import ConfigError
from hybrid_kv.mutation.generated import ARROW, Source
from hybrid_kv.mutation.mutant import FOLDER

FILE = FOLDER / "equivalent.yaml"
_source = cache(Source)


def read_equivalent(file: Path = FILE) -> set[tuple[str, str]]:
    """File and change of each mutant that is none.

    Raises:
        ConfigError: it is no list of such entries, or one has no proof or is of code that is not there any more.
    """
    import yaml

    try:
        entries: Sequence[dict[str, str]] = yaml.safe_load(file.read_text(encoding="utf-8")) or []
        found = {(entry["file"], entry["change"]): entry["proof"] for entry in entries}
    except (OSError, yaml.YAMLError, KeyError, TypeError) as error:
        raise ConfigError(f"{file} is no list of equivalent mutants: {type(error).__name__}: {error}") from None
    for (path, change), proof in found.items():
        if not proof or not is_there(path, change):
            raise ConfigError(f"{file}: {path} has no more {change!r}, or it has no proof; take the entry out")
    return {*found}


def is_there(path: str, change: str) -> bool:
    """Whether a file of the package still has the lines that a mutant changes."""
    function, _, lines = change.partition(": ")
    old, arrow, _ = lines.partition(ARROW)
    return bool(arrow) and _has(path, function, old)


@cache
def _has(path: str, function: str, old: str) -> bool:
    try:
        return _source(path).has(function, old)
    except OSError:
        return False
