"""A known bug of another engine as a change of this one's code.

A file of the folder `mutants/` is one bug. Its name is the bug's id. It is YAML:

    references: [vllm!33997]
    mechanism: What went wrong, in a sentence or two.
    settings: prefix=align spec=ngram3   # in which the bug acts, for who wants to see it
    changes:
      - file: cache/manager.py
        old: the text to replace, which occurs exactly once
        new: what replaces it

Further lines of `old` and `new` are indented as in the code, relative to the line in which `old` begins.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybrid_kv.config import ConfigError

PACKAGE = Path(__file__).parents[1]
FOLDER = PACKAGE.parent / "mutants"
ID = re.compile(r"[A-L]\d\d")
UNCHANGED = "none"  # the id of a copy without a bug, in which nothing may be found
Changed = dict[str, tuple[str, list[int]]]  # text and numbers of the changed lines, by path in the package
# What judges the engine: a bug there would be one of the judge.
JUDGES = ("accuracy", "cli", "guard", "mutation", "probes", "sanitizer", "targets")


@dataclass(frozen=True)
class Change:
    """Replace `old` by `new` in a file of the package."""

    file: str
    old: str
    new: str

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not isinstance(value, str):
                raise TypeError(f"{name} of a change is {value!r}, no text")

    def apply(self, text: str, name: str) -> tuple[str, range]:
        """The changed text, and the numbers of its changed lines.

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
                f"{name}: {first!r} occurs {len(found)} times in {self.file}, not once: the code has moved; write the "
                "mutant anew"
            )
        ((start, old, new),) = found
        number = text.count("\n", 0, start) + 1
        return text[:start] + new + text[start + len(old) :], range(number, number + new.count("\n") + 1)


@dataclass(frozen=True)
class Mutant(ABC):
    """A change of the engine's code. A row names it by `id`."""

    id: str

    @abstractmethod
    def changed(self) -> Changed:
        """The changed files.

        Raises:
            ConfigError: the code has moved, or a file is none of the engine's.
        """

    def told(self) -> dict[str, Any]:
        """What its row says beside what became of it."""
        return {}

    def plant(self, root: Path) -> dict[str, list[int]]:
        """Make a package in `root` that is this one but for the change.

        Returns:
            The changed lines of each changed file, by its whole path.

        Raises:
            ConfigError: as `changed`; nothing is made.
        """
        found = self.changed()
        copy = plant(root, {file: text for file, (text, _) in found.items()})
        return {str(copy / file): lines for file, (_, lines) in found.items()}


@dataclass(frozen=True)
class KnownBug(Mutant):
    """One bug. `settings`: the model and levels of the factors of `targets.ours` in which it acts; no hunt is told."""

    references: tuple[str, ...]
    mechanism: str
    settings: dict[str, str]
    changes: tuple[Change, ...]

    def changed(self) -> Changed:
        found: Changed = {}
        for change in self.changes:
            path = PACKAGE / change.file
            if change.file.split("/")[0] in JUDGES or not path.is_file():
                raise ConfigError(f"{self.id}: {change.file} is no file of the engine")
            text, lines = found.get(change.file) or (path.read_text(encoding="utf-8"), [])
            text, more = change.apply(text, self.id)
            found[change.file] = text, [*lines, *more]
        return found


def plant(root: Path, texts: Mapping[str, str]) -> Path:
    """A package in `root` whose files are this one's but for some, and its folder."""
    copy = root / PACKAGE.name
    _link(PACKAGE, copy, texts)
    return copy


def _link(source: Path, copy: Path, texts: Mapping[str, str]) -> None:
    """A folder with links to what is in another one, but for some files."""
    copy.mkdir()
    stems = {Path(file).stem for file in texts if "/" not in file}
    for entry in source.iterdir():
        inside = f"{entry.name}/"
        below = {file.removeprefix(inside): text for file, text in texts.items() if file.startswith(inside)}
        if below:
            _link(entry, copy / entry.name, below)
        elif entry.name == "__pycache__" and stems:
            # Links to what Python and numba have compiled, too: they know a file by its time and size.
            (copy / entry.name).mkdir()
            for compiled in entry.iterdir():
                if compiled.name.split(".")[0] not in stems:
                    (copy / entry.name / compiled.name).symlink_to(compiled)
        elif entry.name not in texts:
            (copy / entry.name).symlink_to(entry)
    for file, text in texts.items():
        if "/" not in file:
            (copy / file).write_text(text, encoding="utf-8")


def read_mutants(folder: Path = FOLDER, ids: Sequence[str] = ()) -> list[KnownBug]:
    """The mutants of a folder in the order of their ids, or those asked for; `UNCHANGED` is one only if it is.

    Raises:
        ConfigError: there is no such folder or id, or a file is no mutant.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder}: there are no mutants; run this in a checkout")
    files = {file.stem: file for file in sorted(folder.glob("*.yaml")) if file.stem != "equivalent"}
    if unknown := [name for name in ids if name not in files and name != UNCHANGED]:
        raise ConfigError(f"--id {unknown[0]}: there is no such mutant; {folder} has {', '.join(files)}")
    return [_read(files[name]) if name in files else KnownBug(name, (), "", {}, ()) for name in (ids or files)]


def _read(file: Path) -> KnownBug:
    import yaml

    try:
        parts: dict[str, Any] = yaml.safe_load(file.read_text(encoding="utf-8"))
        settings = dict(part.split("=") for part in parts.pop("settings").split())
        changes = tuple(Change(**change) for change in parts.pop("changes"))
        mutant = KnownBug(file.stem, tuple(parts.pop("references")), parts.pop("mechanism"), settings, changes)
    except (yaml.YAMLError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{file} is no mutant: {type(error).__name__}: {error}") from None
    if not ID.fullmatch(mutant.id) or not changes or parts:
        raise ConfigError(f"{file} is no mutant: its id is none, it changes nothing, or {list(parts)} is unknown")
    return mutant
