"""What several commands take: names of choices, and checks of sizes and files."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

CacheMode = Literal["none", "align", "all"]
DraftMethod = Literal["ngram", "mtp"]
StateScheme = Literal["slots", "replay"]
SCHEME_HELP = "How drafts are undone: a state after each token (slots), or one state and a ring of inputs (replay)."


def require_at_least_one(**options: int | None) -> None:
    from hybrid_kv.config import ConfigError

    for name, value in options.items():
        if value is not None and value < 1:
            raise ConfigError(f"{name}={value!r} must be an integer >= 1")


def require_folder(file: Path) -> None:
    from hybrid_kv.config import ConfigError

    if not file.parent.is_dir():
        raise ConfigError(f"{file}: the folder {file.parent} does not exist; make it first")
    if file.is_dir():
        raise ConfigError(f"{file} is a folder; name a file in it")
