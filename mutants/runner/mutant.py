"""A known bug of another engine as a change of this one's code.

A file of the folder `mutants/` is one bug. Its name is the bug's id. It is YAML:

    references: [vllm!33997]
    mechanism: What went wrong, in a sentence or two.
    settings: prefix=align spec=ngram3   # in which the bug acts, to reproduce it
    changes:
      - file: cache/manager.py
        old: the text to replace, which occurs exactly once
        new: what replaces it

Further lines of `old` and `new` are indented as in the code, relative to the line in which `old`
begins.
"""

from __future__ import annotations

import os
import re
import shutil
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybrid_kv.config import ConfigError
from hybrid_kv.files import read_text
from mutants.runner.units import BY_TESTS, is_unit, tests_of_all

FOLDER = Path(__file__).parents[1]
PACKAGE = FOLDER.parent / "hybrid_kv"
ID = re.compile(r"[A-M]\d{2,3}")
UNCHANGED = "none"  # the id of a copy without a bug, in which nothing may be found
Changed = dict[str, str]  # text by path in the package
# What judges the engine: a bug there would be one of the judge.
JUDGES = ("check/guard/", "check/probes/", "check/targets/", "cli/", "measure/", "sanitizer/")


@dataclass(frozen=True)
class Change:
    """Replace `old` by `new` in a file of the package."""

    file: str
    old: str
    new: str

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not isinstance(value, str):
                raise TypeError(f"{name} of a change is {value!r}, not a text")

    def apply(self, text: str, name: str) -> str:
        """Return the changed text.

        Raises:
            ConfigError: `old` does not occur exactly once.
        """
        first, *_ = self.old.split("\n")
        found = []
        for match in re.finditer(re.escape(first), text):
            begin = text.rfind("\n", 0, match.start()) + 1
            line = text[begin:]
            indent = "\n" + line[: len(line) - len(line.lstrip(" "))]
            if text.startswith(old := self.old.replace("\n", indent), match.start()):
                found.append((match.start(), old, self.new.replace("\n", indent)))
        if len(found) != 1:
            raise ConfigError(
                f"{name}: {first!r} occurs {len(found)} times in {self.file}, not once: the code "
                "has moved; write the mutant anew"
            )
        ((start, old, new),) = found
        return text[:start] + new + text[start + len(old) :]


@dataclass(frozen=True)
class Mutant(ABC):
    """A change of the engine's code. A row names it by `id`."""

    id: str

    @abstractmethod
    def changed(self) -> Changed:
        """Return the changed files.

        Raises:
            ConfigError: the code has moved, or a file is not one of the engine's.
        """

    @abstractmethod
    def ways(self, by: str) -> tuple[str, ...]:
        """Return what is to catch it, in this order, if `by` was chosen.

        They are ways of `guard.steps_of`, `http` or `tests`.
        """

    def labels(self) -> dict[str, str]:
        """Return what its row says with what became of it."""
        return {}


@dataclass(frozen=True)
class KnownBug(Mutant):
    """A bug of another engine.

    `settings` are the model and levels of the factors of `targets.ours` in which it acts; no run
    uses them.
    """

    references: tuple[str, ...]
    mechanism: str
    settings: dict[str, str]
    changes: tuple[Change, ...]

    def ways(self, by: str) -> tuple[str, ...]:
        files = [change.file for change in self.changes]
        if by != "quick" or not tests_of_all(files):
            return (by,)
        return (BY_TESTS, by) if all(map(is_unit, files)) else (by, BY_TESTS)

    def changed(self) -> Changed:
        found: Changed = {}
        for change in self.changes:
            path = PACKAGE / change.file
            # Another spelling would name a file that is not the one that is imported, or one of the
            # judges.
            is_spelled = os.path.normpath(change.file) == change.file
            if (
                not is_spelled
                or change.file.startswith((*JUDGES, "/", "../"))
                or not path.is_file()
            ):
                raise ConfigError(
                    f"{self.id}: {change.file} is not a file of the engine; "
                    "write it as in cache/manager.py"
                )
            text = found.get(change.file) or path.read_text(encoding="utf-8")
            found[change.file] = change.apply(text, self.id)
        return found


def inject(root: Path, texts: Mapping[str, str], package: Path = PACKAGE) -> None:
    """Link the files of a package into `root`, but for some with their own text.

    The package is this one unless another is given.

    What Python and numba have compiled is linked, too: they know a file by its time and size.
    """
    copy = root / package.name
    shutil.copytree(package, copy, copy_function=os.symlink)
    for file, text in texts.items():
        changed = copy / file
        for compiled in changed.parent.glob(f"__pycache__/{changed.stem}.*"):
            compiled.unlink()
        changed.unlink()
        changed.write_text(text, encoding="utf-8")


def read_mutants(folder: Path = FOLDER, ids: Sequence[str] = ()) -> list[KnownBug]:
    """Return the mutants of a folder in the order of their ids, or those of `ids`.

    `UNCHANGED` is one only if it is named.

    Raises:
        ConfigError: there is no such folder or id, or a file does not hold a mutant.
    """
    # M99 is before M100.
    names = sorted(folder.glob("*.yaml"), key=lambda file: (len(file.stem), file.stem))
    files = {file.stem: file for file in names if file.stem != "equivalent"}
    if not files:
        raise ConfigError(f"{folder}: there are no mutants; run this in a checkout")
    if unknown := [name for name in ids if name not in files and name != UNCHANGED]:
        raise ConfigError(
            f"--id {unknown[0]}: there is no such mutant; {folder} has {', '.join(files)}"
        )
    return [
        _read(files[name]) if name in files else KnownBug(name, (), "", {}, ())
        for name in (ids or files)
    ]


def _read(file: Path) -> KnownBug:
    import yaml

    try:
        parts: dict[str, Any] = yaml.safe_load(read_text(file))
        settings = dict(part.split("=") for part in parts.pop("settings").split())
        changes = tuple(Change(**change) for change in parts.pop("changes"))
        mutant = KnownBug(
            file.stem, tuple(parts.pop("references")), parts.pop("mechanism"), settings, changes
        )
    except (yaml.YAMLError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{file} is not a mutant: {type(error).__name__}: {error}") from None
    if not ID.fullmatch(mutant.id) or not changes or parts:
        raise ConfigError(
            f"{file} is not a mutant: its id is invalid, it changes nothing, "
            f"or {list(parts)} is unknown"
        )
    return mutant
