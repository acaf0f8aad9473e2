"""A study's file, and the cells that it declares.

    runs:
      - accuracy --limit 50 --model {model} --mamba-cache-mode {mode} --num-speculative-tokens {K} {drafts}
      - guard --quick --only mode={mode}
    axes:
      model: [guard_model, guard_model_qwen3_5]
      mode: [none, align]
      K: [0, 3]
    where:                       # words that follow from levels; an empty one is left out
      drafts: {K=3: --speculative-method ngram}
    without:
      - {mode: none, K: 3}
    gpus: 0                      # of one cell

A run stands once for each combination of the axes that it names. Its cells are the same command on the same code, and
so have the same name wherever they run.
"""

from __future__ import annotations

import hashlib
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from itertools import product
from pathlib import Path
from string import Formatter
from typing import Any

from hybrid_kv.config import ConfigError
from hybrid_kv.files import refuse_device

# What appends rows: the module, and the option that says where; a name of a file, or empty for a folder.
PROGRAMS = {
    "accuracy": (("hybrid_kv.cli", "accuracy"), "--results", ""),
    "bench": (("bench",), "--out", "microbench.csv"),
    "guard": (("hybrid_kv.cli", "guard"), "--results", ""),
    "kernels": (("hybrid_kv.cli", "kernels"), "--results", ""),
}
_OWN = ("--results", "--record", "--out", "--json")
_KEYS = {"runs", "axes", "where", "without", "gpus"}


@dataclass(frozen=True)
class Cell:
    """One run.

    Attributes:
        id: of the command, the code and the packages: what was done is known again by it.
        text: the command as the file has it.
        words: behind Python's, up to the folder for rows.
        file: that rows go to in that folder; empty: the program knows.
        levels: by axis, of those that the run names.
        gpus: that it needs for itself.
    """

    id: str
    text: str
    words: tuple[str, ...]
    file: str
    levels: Mapping[str, str]
    gpus: float = 0

    def command(self, folder: str) -> list[str]:
        """The process that appends its rows to CSVs in `folder`, with the Python of whoever runs it."""
        return [sys.executable, *self.words, f"{folder}/{self.file}"]


def read_study(file: Path) -> list[Cell]:
    """The cells of a study, each once, in the order of its runs and axes.

    Raises:
        ConfigError: the file cannot be read, or declares what cannot be run.
    """
    import yaml

    refuse_device(file)
    try:
        found = yaml.safe_load(file.read_text(encoding="utf-8"))
        return _cells(found)
    except OSError as error:
        raise ConfigError(f"study {file} cannot be read: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"study {file} is no YAML: {' '.join(str(error).split())}") from None
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"study {file}: {' '.join(str(error).split())}") from None


def _cells(found: Any) -> list[Cell]:
    if not isinstance(found, dict) or (unknown := sorted(map(str, found.keys() - _KEYS))):
        raise ValueError(f"it has {unknown[0]!r}" if isinstance(found, dict) else "it names no runs")
    runs, gpus = found.get("runs"), found.get("gpus", 0)
    if not isinstance(runs, list) or not runs or not all(isinstance(run, str) for run in runs):
        raise ValueError("runs must be a list of commands, such as 'accuracy --limit 50 --model {model}'")
    if isinstance(gpus, bool) or not isinstance(gpus, int | float) or not 0 <= gpus < 1000:
        raise ValueError(f"gpus={gpus!r} is no number of GPUs")
    axes = {str(name): _texts(name, levels) for name, levels in _table(found, "axes").items()}
    where = {str(name): _table(found["where"], name) for name in _table(found, "where")}
    without = [{str(axis): str(level) for axis, level in one.items()} for one in found.get("without") or ()]
    for one in without:
        _check_levels(one, axes)
    cells = [cell for run in runs for cell in _cells_of(run, axes, where, without, gpus)]
    if not cells:
        raise ValueError("'without' leaves nothing to run")
    return list({cell.id: cell for cell in cells}.values())


def _cells_of(
    run: str, axes: Mapping[str, Sequence[str]], where: Mapping[str, Mapping[Any, Any]],
    without: Sequence[Mapping[str, str]], gpus: float,
) -> list[Cell]:  # fmt: skip
    names = [name for _, name, _, _ in Formatter().parse(run) if name is not None]
    if unknown := [name for name in names if name not in axes and name not in where]:
        raise ValueError(f"{run!r} names {{{unknown[0]}}}, which is no axis; there are {', '.join(axes) or 'none'}")
    rules = {name: [(_condition(key, axes), str(words)) for key, words in where[name].items()] for name in where}
    asked = {axis for name in names if name in where for levels, _ in rules[name] for axis in levels}
    used = [axis for axis in axes if axis in names or axis in asked]
    cells = []
    for chosen in product(*(axes[axis] for axis in used)):
        levels = dict(zip(used, chosen, strict=True))
        if any(one.items() <= levels.items() for one in without):
            continue
        words = {
            name: " ".join(text for condition, text in rules[name] if condition.items() <= levels.items())
            for name in names
            if name in where
        }
        text = " ".join(run.format_map({**levels, **words}).split())
        cells.append(Cell(_id(text), text, *_words(text), levels, gpus))
    return cells


def _condition(key: Any, axes: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """`K=3 mode=align` as levels by axis."""
    parts = [part.partition("=") for part in str(key).split()]
    levels = {axis: level for axis, _, level in parts}
    _check_levels(levels, axes)
    return levels


def _check_levels(levels: Mapping[str, str], axes: Mapping[str, Sequence[str]]) -> None:
    for axis, level in levels.items():
        if level not in axes.get(axis, ()):
            raise ValueError(f"{axis}={level} is no level of an axis")


def _words(text: str) -> tuple[tuple[str, ...], str]:
    name, *words = shlex.split(text) or [""]
    if name not in PROGRAMS:
        raise ValueError(f"{text!r} begins with none of {', '.join(PROGRAMS)}")
    if taken := [word for word in words if word.split("=")[0] in _OWN]:
        raise ValueError(f"{text!r} has {taken[0]}; the study says itself where rows go")
    module, option, file = PROGRAMS[name]
    return ("-m", *module, *words, option), file


def _table(found: Mapping[Any, Any], key: Any) -> Mapping[Any, Any]:
    value = found.get(key) or {}
    if not isinstance(value, dict):
        raise ValueError(f"{key} must be a table")
    return value


def _texts(name: Any, levels: Any) -> list[str]:
    if not isinstance(levels, list) or not levels or any(isinstance(one, dict | list) for one in levels):
        raise ValueError(f"axis {name} must be a list of levels")
    # YAML reads on and off as true and false.
    return ["on" if one is True else "off" if one is False else str(one) for one in levels]


def _id(text: str) -> str:
    return hashlib.sha256(f"{text}\n{code_digest()}".encode()).hexdigest()[:16]


@cache
def code_digest() -> str:
    """Of this package's files and of the packages that decide what it computes."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parents[1].rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            digest.update(path.relative_to(Path(__file__).parents[1]).as_posix().encode() + path.read_bytes())
    for package in ("torch", "triton", "transformers", "lm_eval"):
        try:
            digest.update(f"{package}=={metadata.version(package)}".encode())
        except metadata.PackageNotFoundError:
            digest.update(f"no {package}".encode())
    return digest.hexdigest()
