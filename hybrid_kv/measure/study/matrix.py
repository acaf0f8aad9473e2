"""A study's file, and the cells that it declares.

    runs:
      - accuracy --limit 50 --model {model} --mamba-cache-mode {mode} {drafts}
      - guard --quick --only mamba_cache_mode={mode}
    axes:
      model: [guard_model, guard_model_qwen3_5]
      mode: [none, align]
      drafts:                    # words by level
        none: ""
        ngram: --speculative-method ngram --num-speculative-tokens 3
    without:
      - {mode: none, drafts: ngram}
    gpus: 0                      # of one cell

A run stands once for each combination of the axes that it names. Its cells are the same command on
the same code, and so have the same name wherever they run.
"""

from __future__ import annotations

import hashlib
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from itertools import islice, product
from math import prod
from pathlib import Path
from string import Formatter
from typing import Any

from hybrid_kv.config import ConfigError
from hybrid_kv.files import read_text

# Programs that append rows: the module, the option for their place, and a file's name; empty for a
# folder.
PROGRAMS = {
    "accuracy": (("hybrid_kv.cli", "accuracy"), "--results", ""),
    "bench": (("bench",), "--out", "microbench.csv"),
    "guard": (("hybrid_kv.cli", "guard"), "--results", ""),
    "kernels": (("hybrid_kv.cli", "kernels", "--update"), "--baseline", "kernels.csv"),
}
_OWN = ("--results", "--record", "--out", "--json", "--help")
MAX_CELLS = 10_000
_KEYS = {"runs", "axes", "without", "gpus"}


@dataclass(frozen=True)
class StudyCell:
    """One run.

    Attributes:
        id: a hash of the command, the code and the packages.
        text: the command as the file has it.
        words: the arguments of Python, up to the folder for rows.
        file: name of the file of rows in that folder; empty: the program chooses it.
        levels: by axis, of those that the run names.
        gpus: GPUs that no other cell uses.
    """

    id: str
    text: str
    words: tuple[str, ...]
    file: str
    levels: Mapping[str, str]
    gpus: float = 0

    def command(self, folder: str) -> list[str]:
        """Return the command that appends its rows to CSVs in `folder`, with this Python."""
        return [sys.executable, *self.words, f"{folder}/{self.file}"]


def read_study(file: Path) -> list[StudyCell]:
    """Read the cells of a study, each once, in the order of its runs and axes.

    Raises:
        ConfigError: the file cannot be read, or declares what cannot be run.
    """
    import yaml

    try:
        declared = yaml.safe_load(read_text(file))
        return _cells(declared)
    except OSError as error:
        raise ConfigError(f"study {file} cannot be read: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"study {file} is not YAML: {' '.join(str(error).split())}") from None
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"study {file}: {' '.join(str(error).split())}") from None


def _cells(study: Any) -> list[StudyCell]:
    if not isinstance(study, dict):
        raise ValueError("it names no runs")
    unknown = sorted(map(str, study.keys() - _KEYS))
    if unknown:
        raise ValueError(f"it has {unknown[0]!r}")
    runs = study.get("runs")
    gpus = study.get("gpus", 0)
    if not isinstance(runs, list) or not runs or not all(isinstance(run, str) for run in runs):
        raise ValueError(
            "runs must be a list of commands, such as 'accuracy --limit 50 --model {model}'"
        )
    if isinstance(gpus, bool) or not isinstance(gpus, int | float) or not 0 <= gpus < 1000:
        raise ValueError(f"gpus={gpus!r} is not a number of GPUs")
    axes = study.get("axes") or {}
    if not isinstance(axes, dict):
        raise ValueError("axes must be a table")
    words = {str(name): _levels(name, levels) for name, levels in axes.items()}
    without = [
        {str(axis): _text(level) for axis, level in levels.items()}
        for levels in study.get("without") or ()
    ]
    for axis, level in (item for levels in without for item in levels.items()):
        if level not in words.get(axis, ()):
            raise ValueError(f"{axis}={level} is not a level of an axis")
    every = (cell for run in runs for cell in _cells_of(run, words, without, gpus))
    cells = list(islice(every, MAX_CELLS + 1))
    if len(cells) > MAX_CELLS:
        raise ValueError(f"it has more than {MAX_CELLS:,} cells; make several studies of it")
    if not cells:
        raise ValueError("'without' leaves nothing to run")
    return list({cell.id: cell for cell in cells}.values())


def _cells_of(
    run: str,
    axes: Mapping[str, Mapping[str, str]],
    without: Sequence[Mapping[str, str]],
    gpus: float,
) -> Iterator[StudyCell]:
    names = [name for _, name, _, _ in Formatter().parse(run) if name is not None]
    unknown = [name for name in names if name not in axes]
    if unknown:
        raise ValueError(
            f"{run!r} names {{{unknown[0]}}}, which is not an axis; there are "
            f"{', '.join(axes) or 'none'}"
        )
    formats = [
        f"{{{name}{spec and ':' + spec}}}"
        for _, name, spec, way in Formatter().parse(run)
        if spec or way
    ]
    if formats:
        raise ValueError(f"{run!r} formats {formats[0]}; write the name of an axis alone in braces")
    used = [axis for axis in axes if axis in names]
    count = prod(len(axes[axis]) for axis in used)
    if count > MAX_CELLS:
        raise ValueError(
            f"{run!r} stands for {count:,} cells, more than {MAX_CELLS:,}; shorten an axis"
        )
    for chosen in product(*(axes[axis] for axis in used)):
        levels = dict(zip(used, chosen, strict=True))
        if not any(excluded.items() <= levels.items() for excluded in without):
            command = " ".join(
                run.format_map({axis: axes[axis][level] for axis, level in levels.items()}).split()
            )
            yield StudyCell(_id(command), command, *_words(command), levels, gpus)


def _levels(name: Any, levels: Any) -> dict[str, str]:
    """Return the words of each level; a list has those that are their own names."""
    table = levels if isinstance(levels, dict) else {_text(level): level for level in levels or ()}
    if not table or isinstance(levels, str):
        raise ValueError(f"axis {name} must be a list of levels, or a table of words")
    return {_text(level): _text(words) for level, words in table.items()}


def _text(level: Any) -> str:
    # Whose text may have any length: aliases repeat their parts.
    if isinstance(level, dict | list | set):
        raise ValueError("a level must be a text or a number, not a list or a table")
    # YAML reads on and off as true and false.
    return "on" if level is True else "off" if level is False else str(level)


def _words(command: str) -> tuple[tuple[str, ...], str]:
    name, *words = shlex.split(command) or [""]
    if name not in PROGRAMS:
        raise ValueError(f"{command!r} does not begin with one of {', '.join(PROGRAMS)}")
    taken = [word for word in words if word.split("=")[0] in _OWN]
    if taken:
        raise ValueError(
            f"{command!r} has {taken[0]}; a study sets the place of its rows itself, and keeps "
            "what "
            "is printed"
        )
    module, option, file = PROGRAMS[name]
    return ("-m", *module, *words, option), file


def _id(command: str) -> str:
    return hashlib.sha256(f"{command}\n{code_digest()}".encode()).hexdigest()[:16]


@cache
def code_digest() -> str:
    """Return a digest of this package's files and of the packages that decide what it computes."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parents[2].rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            digest.update(
                path.relative_to(Path(__file__).parents[2]).as_posix().encode() + path.read_bytes()
            )
    for package in ("torch", "triton", "transformers", "lm_eval"):
        try:
            digest.update(f"{package}=={metadata.version(package)}".encode())
        except metadata.PackageNotFoundError:
            digest.update(f"no {package}".encode())
    return digest.hexdigest()
