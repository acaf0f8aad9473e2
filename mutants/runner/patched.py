"""Known bugs as patches of another engine's own source, and what finds them.

A patch begins with `# ID: what goes wrong` and `# settings: CELL; CELL`, the cells of the guard's
matrix that should show it, the cheapest first; `plain` is the plainest one, and `model=linear` in a
cell chooses another exact model. `# why not: …` may follow where it is not found, and `# family: …`
where the checkpoint is another family's. `layer_*.patch` change layers and kernels, which the exact
model replaces: only other weights are run with them. `healthy.patch` mends what is known of this
release and is part of each run, where there is one; alone, it must be right in all its cells. With
`--weights released` it is left out: what the release does by itself counts as before.

What is not found may have a proof, `unreached/NAME.patch` with the same head: it raises an error,
or puts a value that nothing survives, where the bug would act. Nothing may be found with it,
either.
"""

from __future__ import annotations

import argparse
import csv
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, fields
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import Any, Protocol

from hybrid_kv.check.probes.guarded import Guarded, Settings, ask
from hybrid_kv.check.probes.known import name_known
from hybrid_kv.check.probes.run import FINE, signs_of
from hybrid_kv.check.probes.session import Outcome
from hybrid_kv.check.targets import remote
from hybrid_kv.check.targets.kinds import kind_of, model_folder
from hybrid_kv.check.targets.target import Kind
from mutants.runner.mutant import inject

HEALTHY = "healthy"
EXACT = "exact"  # weights
RELEASED = "released"  # a variant: patches of the release as it is
LAYER = "layer_"
UNREACHED = "unreached/"
Signs = tuple[Any, ...]
Cell = tuple[str, str]  # an exact model, and settings
TITLES = {"random": "random", "designed": "exact"}  # of weights, in tables


@dataclass(frozen=True)
class PatchedEngine:
    """An engine whose source has patches.

    Attributes:
        name: of the engine, its package, and the folder of its patches.
        title: as its authors write it.
        model: the exact model of a cell that names none.
        levels: of each cell that does not name others.
        variants: levels of further runs with the exact models, by a name that stands where others
            have the kind of weights.
        checkpoints: sizes of other checkpoints than the exact models, by the kind of their weights.
        families: of these, each with levels that it needs; the first one's patches name none.
        without: part of the cells in which these are not run, and why.
        wrong_read: what a sanitizer saw first of a wrong outcome.
    """

    name: str
    title: str
    model: str = "mixed"
    levels: Mapping[str, str] = field(default_factory=dict)
    variants: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    checkpoints: Mapping[str, str] = field(default_factory=dict)
    families: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    without: tuple[str, str] = ("", "")
    wrong_read: Callable[[Guarded, Outcome], str] | None = None

    @property
    def folder(self) -> Path:
        """Return the folder of its patches."""
        return Path(__file__).parents[1] / self.name

    def names(self) -> list[str]:
        """Return the names of all patches and proofs: their paths without the suffix."""
        patches = sorted(self.folder.rglob("*.patch"))
        return [patch.relative_to(self.folder).with_suffix("").as_posix() for patch in patches]

    def patches_of(self, name: str, is_healed: bool = True) -> list[Path]:
        """Return the patches that a run with a patch applies."""
        first = (HEALTHY,) if is_healed else ()
        files = [self.folder / f"{each}.patch" for each in dict.fromkeys((*first, name))]
        return [file for file in files if file.is_file()]

    def files_of(self, patch: Path) -> set[str]:
        """Return the files that a patch changes, by their paths in the package."""
        return set(re.findall(rf"(?m)^\+\+\+ b/{self.name}/(\S+)", patch.read_text()))

    def family_of(self, name: str) -> str:
        """Return the family of the checkpoints that a patch is run with."""
        text = self.patches_of(name)[-1].read_text()
        return "".join(re.findall(r"(?m)^# family: (\S+)", text)) or next(iter(self.families))

    def cell_of(self, text: str) -> Cell:
        """Return the exact model of a cell, and its settings."""
        model = "".join(re.findall(r"model=(\S+)", text)) or self.model
        return model, re.sub(r"model=\S+|plain", "", text).strip()

    def overlay(self, package: Path, patches: Sequence[Path], folder: Path) -> None:
        """Make a package of symlinks in which only patched files are copies.

        Raises:
            subprocess.CalledProcessError: a patch does not apply.
        """
        names = {name for patch in patches for name in self.files_of(patch)}
        texts = {name: (package / name).read_text(encoding="utf-8") for name in names}
        inject(folder, texts, package)
        for patch in patches:
            command = ["git", "apply", str(patch)]
            subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)


@dataclass
class Found:
    """A patch and what found it: nothing, if there is no probe.

    Attributes:
        seconds: of probes in the settings so far, without imports and starts.
        answers: that came meanwhile.
        wrong_read: what the sanitizer saw first; "not async" and "not on a GPU" where it cannot
            run.
    """

    name: str
    weights: str
    probe: str = ""
    setting: str = ""
    seconds: float = 0.0
    answers: int = 0
    detail: str = ""
    wrong_read: str = ""


def head(patch: Path) -> tuple[str, str, list[str]]:
    """Return the id of a patch, what goes wrong, and the cells that should show it."""
    first, second = patch.read_text().splitlines()[:2]
    name, _, what = first.removeprefix("# ").partition(": ")
    return name, what, [cell.strip() for cell in second.removeprefix("# settings: ").split(";")]


def package_of(engine: PatchedEngine, python: str) -> Path:
    """Return the folder of an engine's package in the environment of a Python."""
    finds = f"u.find_spec({engine.name!r}).submodule_search_locations[0]"
    command = [python, "-c", f"import importlib.util as u; print({finds})"]
    ran = subprocess.run(command, check=True, capture_output=True, text=True)
    return Path(ran.stdout.strip())


class _WrongError(Exception):
    """A wrong outcome, which ends the probes of a cell."""


class Before:
    """What a release does by itself, by cell and probe: a patch has to do something else."""

    def __init__(self) -> None:
        self._signs: dict[Cell, dict[str, Signs | None]] = {}

    def __contains__(self, cell: Cell) -> bool:
        return cell in self._signs

    def note(self, cell: Cell, run: Callable[[], Mapping[str, Outcome]]) -> None:
        """Run the probes of a cell, twice if something is wrong.

        Of a probe that then differs nothing is expected.
        """
        first = again = run()
        if any(outcome.verdict not in FINE for outcome in first.values()):
            again = run()
        self._signs[cell] = {
            probe: signs if probe in again and signs_of(again[probe]) == signs else None
            for probe, signs in ((probe, signs_of(outcome)) for probe, outcome in first.items())
        }

    def expects(self, cell: Cell, outcome: Outcome) -> bool:
        """Return whether a release does the same, or now this and now that."""
        signs = self._signs.get(cell, {}).get(outcome.probe, ())
        return signs is None or signs == signs_of(outcome)


class Searches(Protocol):
    """What looks for a patch."""

    def run(self, name: str) -> Found:
        """Return what found it."""


class Search:
    """The probes that look for each patch of an engine.

    Args:
        models: a model of that name inside the engine; its judge knows answers from the searches
            before.
    """

    def __init__(
        self, engine: PatchedEngine, python: str, weights: str, models: Callable[[str], Guarded]
    ) -> None:
        self._engine = engine
        self._python = python
        self._weights = weights
        self._models = models
        self._before = Before()

    def run(self, name: str) -> Found:
        """Run the probes on the engine with a patch, in each of its cells.

        It ends with the first outcome that is not as it should be.
        """
        engine, found, ran = self._engine, Found(name, self._weights), list[Settings]()
        patches = engine.patches_of(name, is_healed=self._weights != RELEASED)
        if self._weights == RELEASED:
            self._note_before(name, head(patches[-1])[2])
        with tempfile.TemporaryDirectory() as folder:
            engine.overlay(package_of(engine, self._python), patches, Path(folder))
            os.environ["PYTHONPATH"] = folder
            for setting in head(patches[-1])[2]:
                if engine.checkpoints.get(self._weights) and engine.without[0] in setting:
                    found.detail = found.detail or engine.without[1]
                    continue
                found.setting, found.detail = setting, ""
                guarded, cell = self._cell(name, setting)
                # Other weights than the exact model's have one checkpoint, and fewer factors.
                if cell in ran:
                    continue
                ran.append(cell)
                try:
                    ask(guarded, cell, (), partial(self._report, guarded, found))
                except _WrongError as end:
                    if engine.wrong_read is not None:
                        found.wrong_read = engine.wrong_read(guarded, end.args[0])
                    break
            remote.end_loaders()
        return found

    def _note_before(self, name: str, settings: Sequence[str]) -> None:
        """Note what the release does in cells by itself."""
        new = [setting for setting in settings if self._engine.cell_of(setting) not in self._before]
        if not new:
            return
        os.environ.pop("PYTHONPATH", None)
        for setting in new:
            self._before.note(self._engine.cell_of(setting), partial(self._outcomes, name, setting))
        remote.end_loaders()

    def _outcomes(self, name: str, setting: str) -> dict[str, Outcome]:
        guarded, cell = self._cell(name, setting)
        seen: dict[str, Outcome] = {}

        def note(outcome: Outcome) -> None:
            name_known(guarded.kind, guarded.version, outcome)
            seen[outcome.probe] = outcome

        ask(guarded, cell, (), note)
        return seen

    def _cell(self, name: str, setting: str) -> tuple[Guarded, Settings]:
        """Return a cell's model in the engine, with the probes of a default run, and levels."""
        engine = self._engine
        model, text = engine.cell_of(setting)
        if size := engine.checkpoints.get(self._weights):
            family = engine.family_of(name)
            known, more = self._models(f"{family}:{size}"), engine.families[family]
        else:
            known, more = self._models(f"exact:{model}"), {}
        kind = kind_of(engine.name, self._python)
        # As in a default check: where no other weights run next to the exact model, it has all.
        is_only = kind.inside is not None and kind.inside.is_only
        guarded = Guarded(kind, known.folder, thorough=is_only)
        guarded.judges = known.judges
        for judge in guarded.judges.values():
            judge.trusted = True  # the patch before may have seemed to be the oracle's error
        levels = {
            **engine.levels,
            **engine.variants.get(self._weights, {}),
            **dict(level.split("=") for level in text.split()),
        }
        return guarded, {**_possible(levels, guarded.kind), **more}

    def _report(self, guarded: Guarded, found: Found, outcome: Outcome) -> None:
        name_known(guarded.kind, guarded.version, outcome)
        found.seconds = round(found.seconds + outcome.seconds, 1)
        found.answers += outcome.num_answers
        has_weights = self._weights in self._engine.checkpoints
        if has_weights and (outcome.probe, outcome.verdict) == ("start", "not supported"):
            found.detail = f"not run: {outcome.detail}"
        elif has_weights and outcome.verdict == "void":
            # as it may be without the patch: a healthy engine is run with the exact model alone
            return
        elif self._before.expects(self._engine.cell_of(found.setting), outcome):
            return
        elif outcome.verdict not in FINE or outcome.probe == "start":
            found.probe, found.detail = outcome.probe, f"{outcome.verdict}: {outcome.detail}"
            raise _WrongError(outcome)


def _possible(cell: Mapping[str, str], kind: Kind) -> Settings:
    """Return the factors that an engine has, each with its next level if it lacks this one."""
    levels = kind.factors
    return {
        name: level if level in levels[name] else levels[name][1]
        for name, level in cell.items()
        if name in levels
    }


def tables(engine: PatchedEngine, rows: Sequence[Mapping[str, str]]) -> str:
    """Return the patches that were found as a table, fastest first, and those that were not.

    The last row of each patch and kind of weights counts.
    """
    exact = {row["name"]: row for row in rows if row["weights"] == EXACT and row["name"] != HEALTHY}
    proofs = {name: row for name, row in exact.items() if name.startswith(UNREACHED)}
    exact = {name: row for name, row in exact.items() if name not in proofs}
    columns = [*engine.variants, *engine.checkpoints]
    others = [_by_checkpoint(rows, column) for column in columns]
    names = [f"{TITLES[name]} weights" if name in TITLES else name for name in columns]
    found = sorted(
        (row for row in exact.values() if row["probe"]),
        key=lambda row: (float(row["seconds"]), row["name"]),
    )
    seconds = [float(row["seconds"]) for row in found]
    reads = ["first wrong read"] if engine.wrong_read is not None else []
    titles = ["patch", "id", "what goes wrong", "found by", "setting", "s", *names, *reads]
    marks = ["--:" if title == "s" else "---" for title in titles]
    lines = [
        f"**{len(found)} of {len(exact)} are found**, in a median of {median(seconds):.1f} s of "
        f"probes, at most {max(seconds):.0f} s.\n",
        _line(titles),
        f"|{'|'.join(marks)}|",
    ]
    for row in found:
        id, what, _ = head(engine.folder / f"{row['name']}.patch")
        more = [other.get(row["name"], "") for other in others]
        read = [row["wrong_read"]] if reads else []
        cells = row["probe"], row["setting"], row["seconds"]
        lines.append(_line([row["name"], id, what, *cells, *more, *read]))
    titles = ["patch", "id", "what goes wrong", "settings", *names, "why", "proof"]
    lines += ["\n## Not found\n", _line(titles), f"|{'---|' * len(titles)}"]
    for name in sorted({*exact} - {row["name"] for row in found}):
        patch = engine.folder / f"{name}.patch"
        id, what, settings = head(patch)
        why = "".join(re.findall(r"(?m)^# why not: (.*)", patch.read_text()))
        more = [other.get(name, "") for other in others]
        proof = _proof(engine, proofs.get(f"{UNREACHED}{name}"))
        lines.append(_line([name, id, what, "; ".join(settings), *more, why, proof]))
    lines += _layers(engine, rows)
    return "\n".join(lines) + "\n"


def _proof(engine: PatchedEngine, row: Mapping[str, str] | None) -> str:
    """Return the words of a table for the line that does not run, or for what ran it."""
    if row is None:
        return ""
    _, what, cells = head(engine.folder / f"{row['name']}.patch")
    ran = _verdict(row) if row["probe"] else f"nothing in {row['answers']} answers"
    return f"{what} ({'; '.join(cells)}): {ran}"


def _layers(engine: PatchedEngine, rows: Sequence[Mapping[str, str]]) -> list[str]:
    """Return what other weights than the exact model's find of layers and kernels, as a table."""
    patches = sorted(engine.folder.glob(f"{LAYER}*.patch"))
    if not patches:
        return []
    titles = ["patch", "id", "what goes wrong", "family"]
    for weights in engine.checkpoints:
        titles += [f"{TITLES[weights]} weights", "s"]
    marks = ["--:" if title == "s" else "---" for title in titles]
    lines = ["\n## Layers and kernels\n", _line(titles), f"|{'|'.join(marks)}|"]
    last = {(row["name"], row["weights"]): row for row in rows}
    for patch in patches:
        id, what, _ = head(patch)
        cells = [patch.stem, id, what, engine.family_of(patch.stem)]
        for weights in engine.checkpoints:
            row = last.get((patch.stem, weights), {})
            cells += [_verdict(row), row.get("seconds", "")]
        lines.append(_line(cells))
    return lines


def _verdict(row: Mapping[str, str]) -> str:
    """Return the probe that found a patch, or why none did; nothing where it was not run."""
    return (row["probe"] or row["detail"].partition(":")[0] or "no") if row else ""


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _by_checkpoint(rows: Sequence[Mapping[str, str]], weights: str) -> dict[str, str]:
    """Return what found each patch with a checkpoint of these weights."""
    return {row["name"]: _verdict(row) for row in rows if row["weights"] == weights}


def _rewrite(engine: PatchedEngine) -> None:
    page = engine.folder / "README.md"
    text = page.read_text(encoding="utf-8")
    with (engine.folder / "found.csv").open(newline="", encoding="utf-8") as file:
        table = tables(engine, [*csv.DictReader(file)])
    page.write_text(text[: text.index("**")] + table, encoding="utf-8")


def main(
    engine: PatchedEngine, searches: Mapping[str, Callable[[str, Path], Searches]] | None = None
) -> None:
    """Write a row for each patch as it comes.

    The exit code is 1 if the healthy engine is not right.

    Args:
        searches: of variants that do not run the probes, from the Python and an empty folder.
    """
    searches = searches or {}
    parser = argparse.ArgumentParser(description=f"Known bugs as patches of {engine.title}.")
    parser.add_argument("--table", action="store_true", help="only rewrite the README's tables")
    parser.add_argument("--python", help=f"of an environment with {engine.title}")
    weights = (EXACT, *engine.variants, *engine.checkpoints)
    parser.add_argument(
        "--weights", choices=weights, default=EXACT, help="default: the exact model"
    )
    parser.add_argument("--out", type=Path, help="a CSV file to append rows to")
    parser.add_argument(
        "names", nargs="*", help="default: all, after a healthy engine in all of their cells"
    )
    chosen = parser.parse_args()
    if chosen.table:
        return _rewrite(engine)
    if chosen.python is None:
        parser.error(f"--python is missing: the Python of an environment with {engine.title}")
    with ExitStack() as stack:

        @cache
        def models(name: str) -> Guarded:
            folder = stack.enter_context(model_folder(name))
            return Guarded(kind_of(engine.name, chosen.python), folder, thorough=False)

        opened = chosen.out and stack.enter_context(chosen.out.open("a", newline="", buffering=1))
        file = opened or sys.stdout
        if not opened or not opened.tell():
            csv.writer(file).writerow(column.name for column in fields(Found))
        names = sorted({*engine.names()} - {HEALTHY})
        if chosen.weights not in engine.checkpoints:
            names = [name for name in names if not name.startswith(LAYER)]
        if chosen.weights != EXACT:
            names = [name for name in names if not name.startswith(UNREACHED)]
        has_healthy = (engine.folder / f"{HEALTHY}.patch").is_file()
        is_healed = chosen.weights != RELEASED and chosen.weights not in searches
        healthy = [HEALTHY] if has_healthy and is_healed else []
        if chosen.weights in searches:
            scratch = stack.enter_context(tempfile.TemporaryDirectory())
            search = searches[chosen.weights](chosen.python, Path(scratch))
        else:
            search = Search(engine, chosen.python, chosen.weights, models)
        for name in chosen.names or [*healthy, *names]:
            found = search.run(name)
            csv.writer(file).writerow(asdict(found).values())
            file.flush()
            if name == HEALTHY and found.probe:
                raise SystemExit(f"without a bug, {found.setting}, {found.probe}: {found.detail}")
