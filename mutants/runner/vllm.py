"""Known bugs as patches of vLLM's own source, `mutants/vllm/*.patch`, and what finds them.

    python -m mutants.runner.vllm --python PYTHON [--weights random|designed] [--out FILE.csv] [NAME
    ...] python -m mutants.runner.vllm --table

The exact model inside it, or the probes with random weights, or with those of a checkpoint whose
every operation is exact (`designed`: without a tolerance); the sanitizer plays again what failed of
the first.

A patch begins with `# ID: what goes wrong` and `# settings: CELL; CELL`, the cells of the guard's
matrix that should show it, the cheapest first; `plain` is the plainest one, and `model=linear` in a
cell chooses another exact model. `# why not: …` may follow where it is not found. `--table` writes
the tables of `mutants/vllm/README.md` from `mutants/vllm/found.csv`. `healthy.patch` mends what is
known of this release and is part of each run; alone, it must be right in all their cells.
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
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from statistics import median

from hybrid_kv.check.probes.guarded import Guarded, Settings, ask
from hybrid_kv.check.probes.known import name_known
from hybrid_kv.check.probes.reproducer import case_of, wrong_read
from hybrid_kv.check.probes.run import FINE
from hybrid_kv.check.probes.session import Outcome
from hybrid_kv.check.targets import remote
from hybrid_kv.check.targets.exact import VOCABULARY
from hybrid_kv.check.targets.kinds import kind_of, model_folder
from hybrid_kv.check.targets.target import Kind
from mutants.runner.mutant import inject

FOLDER = Path(__file__).parents[1] / "vllm"
HEALTHY = "healthy"
# A delta net on a CPU takes no other dtype.
CHECKPOINTS = {
    "random": ("qwen3_5_text:small", {"dtype": "bfloat16"}),
    "designed": ("granitemoehybrid:exact", {}),
}
# n-grams change these models' answers in vLLM 0.32 as it is: `examples/found/vllm_no_drafts.py`.
WITHOUT = "spec=", "not run: with drafts it is wrong without the patch, too"


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


def patches_of(name: str) -> list[Path]:
    """Return the patches that a run with a patch applies."""
    return [FOLDER / f"{one}.patch" for one in dict.fromkeys((HEALTHY, name))]


def head(patch: Path) -> tuple[str, str, list[str]]:
    """Return the id of a patch, what goes wrong, and the cells that should show it."""
    first, second = patch.read_text().splitlines()[:2]
    name, _, what = first.removeprefix("# ").partition(": ")
    return name, what, [cell.strip() for cell in second.removeprefix("# settings: ").split(";")]


def files_of(patch: Path) -> set[str]:
    """Return the files that a patch changes, by their paths in the package."""
    return set(re.findall(r"(?m)^\+\+\+ b/vllm/(\S+)", patch.read_text()))


def cell_of(text: str) -> tuple[str, str]:
    """Return the exact model of a cell, and its settings."""
    model = "".join(re.findall(r"model=(\S+)", text)) or "mixed"
    return model, re.sub(r"model=\S+|plain", "", text).strip()


def overlay(package: Path, patches: Sequence[Path], folder: Path) -> None:
    """Make a package of symlinks in which only patched files are copies.

    Raises:
        subprocess.CalledProcessError: a patch does not apply.
    """
    names = {name for patch in patches for name in files_of(patch)}
    inject(folder, {name: (package / name).read_text(encoding="utf-8") for name in names}, package)
    for patch in patches:
        subprocess.run(
            ["git", "apply", str(patch)], cwd=folder, check=True, capture_output=True, text=True
        )


class _WrongError(Exception):
    """A wrong outcome, which ends the probes of a cell."""


def search(python: str, name: str, weights: str, models: Callable[[str], Guarded]) -> Found:
    """Run the probes on vLLM with a patch, in each of its cells.

    It ends with the first outcome that is not as it should be.

    Args:
        models: a model of that name inside vLLM; its judge knows answers from the searches before.
    """
    patches, found, ran = patches_of(name), Found(name, weights), list[Settings]()
    code = "import importlib.util as u; print(u.find_spec('vllm').submodule_search_locations[0])"

    def report(outcome: Outcome) -> None:
        name_known(guarded.kind, guarded.version, outcome)
        found.seconds = round(found.seconds + outcome.seconds, 1)
        found.answers += outcome.num_answers
        if weights in CHECKPOINTS and (outcome.probe, outcome.verdict) == (
            "start",
            "not supported",
        ):
            found.detail = f"not run: {outcome.detail}"
        elif weights in CHECKPOINTS and outcome.verdict == "void":
            # as it may be without the patch: a healthy engine is run with the exact model alone
            return
        elif outcome.verdict not in FINE or outcome.probe == "start":
            found.probe, found.detail = outcome.probe, f"{outcome.verdict}: {outcome.detail}"
            raise _WrongError(outcome)

    with tempfile.TemporaryDirectory() as folder:
        package = subprocess.run(
            [python, "-c", code], check=True, capture_output=True, text=True
        ).stdout.strip()
        overlay(Path(package), patches, Path(folder))
        os.environ["PYTHONPATH"] = folder
        for setting in head(patches[-1])[2]:
            if weights in CHECKPOINTS and WITHOUT[0] in setting:
                found.detail = found.detail or WITHOUT[1]
                continue
            found.setting, found.detail = setting, ""
            model, text = cell_of(setting)
            checkpoint, dtype = CHECKPOINTS.get(weights, (f"exact:{model}", {}))
            known = models(checkpoint)
            guarded = Guarded(
                kind_of("vllm", python), known.folder, thorough=False
            )  # the probes of a default run
            guarded.judges = known.judges
            for judge in guarded.judges.values():
                judge.trusted = True  # the patch before may have seemed to be the oracle's error
            # Patches of the runners of GPUs name theirs.
            levels = {"runner": "cpu", **dict(part.split("=") for part in text.split())}
            cell = _possible(levels, guarded.kind)
            cell |= dtype
            if (
                cell in ran
            ):  # other weights than the exact model's have one checkpoint, and fewer factors
                continue
            ran.append(cell)
            try:
                ask(guarded, cell, (), report)
            except _WrongError as end:
                found.wrong_read = _wrong_read(guarded, end.args[0])
                break
        remote.end_loaders()
    return found


def _possible(cell: Mapping[str, str], kind: Kind) -> Settings:
    """Return the factors that an engine has, each with its next level if it lacks this one."""
    levels = kind.factors
    return {
        name: level if level in levels[name] else levels[name][1]
        for name, level in cell.items()
        if name in levels
    }


def _wrong_read(guarded: Guarded, outcome: Outcome) -> str:
    if not outcome.failures or guarded.vocab_size != VOCABULARY:
        return ""
    if outcome.settings.get("runner") != "cpu":
        return "not on a GPU"
    if outcome.settings.get("async") == "on":
        return "not async"
    case = case_of(outcome.failures[-1], "vllm", guarded.version, "exact", 0.0)
    return wrong_read(guarded, case) or "nothing"


def tables(rows: Sequence[Mapping[str, str]]) -> str:
    """Return the patches that were found as a table, fastest first, and those that were not.

    The last row of each patch and kind of weights counts.
    """
    exact = {
        row["name"]: row for row in rows if row["weights"] == "exact" and row["name"] != HEALTHY
    }
    random, designed = (_by_checkpoint(rows, weights) for weights in CHECKPOINTS)
    found = sorted(
        (row for row in exact.values() if row["probe"]),
        key=lambda row: (float(row["seconds"]), row["name"]),
    )
    seconds = [float(row["seconds"]) for row in found]
    lines = [
        f"**{len(found)} of {len(exact)} are found**, in a median of {median(seconds):.1f} s of "
        f"probes, at most {max(seconds):.0f} s.\n",
        "| patch | id | what goes wrong | found by | setting | s | random weights | exact weights "
        "| first wrong read |",
        "|---|---|---|---|---|--:|---|---|---|",
    ]
    for row in found:
        id, what, _ = head(FOLDER / f"{row['name']}.patch")
        name = row["name"]
        cells = (
            row["probe"],
            row["setting"],
            row["seconds"],
            random.get(name, ""),
            designed.get(name, ""),
            row["wrong_read"],
        )
        lines.append(f"| {' | '.join((name, id, what, *cells))} |")
    lines += [
        "\n## Not found\n",
        "| patch | id | what goes wrong | settings | random weights | exact weights | why |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in sorted({*exact} - {row["name"] for row in found}):
        patch = FOLDER / f"{name}.patch"
        id, what, settings = head(patch)
        why = "".join(re.findall(r"(?m)^# why not: (.*)", patch.read_text()))
        cells = "; ".join(settings), random.get(name, ""), designed.get(name, ""), why
        lines.append(f"| {' | '.join((name, id, what, *cells))} |")
    return "\n".join(lines) + "\n"


def _by_checkpoint(rows: Sequence[Mapping[str, str]], weights: str) -> dict[str, str]:
    """Return what found each patch with a checkpoint of these weights."""
    return {
        row["name"]: row["probe"] or row["detail"].partition(":")[0] or "no"
        for row in rows
        if row["weights"] == weights
    }


def _rewrite() -> None:
    page = FOLDER / "README.md"
    text = page.read_text(encoding="utf-8")
    with (FOLDER / "found.csv").open(newline="", encoding="utf-8") as file:
        page.write_text(
            text[: text.index("**")] + tables([*csv.DictReader(file)]), encoding="utf-8"
        )


def main() -> None:
    """Write a row for each patch as it comes.

    The exit code is 1 if the healthy engine is not right.
    """
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--table", action="store_true", help="only rewrite the README's tables")
    parser.add_argument("--python", help="of an environment with vLLM")
    parser.add_argument(
        "--weights",
        choices=("exact", *CHECKPOINTS),
        default="exact",
        help="default: the exact model",
    )
    parser.add_argument("--out", type=Path, help="a CSV file to append rows to")
    parser.add_argument(
        "names", nargs="*", help="default: all, behind a healthy engine in all of their cells"
    )
    chosen = parser.parse_args()
    if chosen.table:
        return _rewrite()
    if chosen.python is None:
        parser.error("--python is missing: the Python of an environment with vLLM")
    weights = chosen.weights
    with ExitStack() as stack:

        @cache
        def models(name: str) -> Guarded:
            folder = stack.enter_context(model_folder(name))
            return Guarded(kind_of("vllm", chosen.python), folder, thorough=False)

        file = (
            stack.enter_context(chosen.out.open("a", newline="", buffering=1))
            if chosen.out
            else sys.stdout
        )
        if not chosen.out or not file.tell():
            csv.writer(file).writerow(one.name for one in fields(Found))
        for name in chosen.names or [
            HEALTHY,
            *sorted({one.stem for one in FOLDER.glob("*.patch")} - {HEALTHY}),
        ]:
            found = search(chosen.python, name, weights, models)
            csv.writer(file).writerow(asdict(found).values())
            file.flush()
            if name == HEALTHY and found.probe:
                raise SystemExit(f"without a bug, {found.setting}, {found.probe}: {found.detail}")


if __name__ == "__main__":
    main()
