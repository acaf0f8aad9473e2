"""Generated mutants that are proven to behave as the code does: `mutants/equivalent.yaml`.

    - file: cache/block_pool.py
      change: "BlockPool.free: counts = ids[0] => counts = ids[-1]"
      proof: The list has one element.

`change` is what a mutation run prints: the function, and the lines without their indentation. It
has no line number, which would move.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from hybrid_kv.config import ConfigError
from hybrid_kv.files import write_whole
from mutants.runner.generated import ARROW, Source
from mutants.runner.mutant import FOLDER

FILE = FOLDER / "equivalent.yaml"
cached_source = cache(Source)


def read_equivalent(file: Path = FILE) -> set[tuple[str, str]]:
    """Return file and change of each mutant that is proven equivalent.

    Raises:
        ConfigError: the file is not a list of such entries, or one has no proof or changes code
            that has gone.
    """
    entries = _read(file, file.read_text(encoding="utf-8")) if file.exists() else []
    for entry in entries:
        if not entry["proof"] or not is_there(entry["file"], entry["change"]):
            raise ConfigError(
                f"{file}: {entry['file']} has no more {entry['change']!r}, or the entry has no "
                "proof; hybrid-kv mutants --prune-equivalent takes out what has gone"
            )
    return {(entry["file"], entry["change"]) for entry in entries}


def prune(file: Path = FILE) -> list[str]:
    """Take out the entries whose code has gone, and return their changes.

    Raises:
        ConfigError: the file is not a list of entries.
        HybridKVError: it cannot be written.
    """
    head, *parts = re.split(r"(?m)^(?=- )", file.read_text(encoding="utf-8"))
    kept, gone = [head], []
    for part in parts:
        (entry,) = _read(file, part)
        if is_there(entry["file"], entry["change"]):
            kept.append(part)
        else:
            gone.append(f"{entry['file']}: {entry['change']}")
    write_whole(file, "".join(kept))
    return gone


def _read(file: Path, text: str) -> list[dict[str, str]]:
    import yaml

    try:
        return [
            {name: entry[name] for name in ("file", "change", "proof")}
            for entry in yaml.safe_load(text) or []
        ]
    except (yaml.YAMLError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{file} is not a list of equivalent mutants: {type(error).__name__}: {error}"
        ) from None


def is_there(path: str, change: str) -> bool:
    """Return whether a file of the package still has the lines that a mutant changes."""
    function, _, lines = change.partition(": ")
    old, arrow, _ = lines.partition(ARROW)
    try:
        return bool(arrow) and cached_source(path).has(function, old)
    except OSError:
        return False
