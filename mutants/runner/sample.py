"""The choice of generated mutants to run: a sample, or those with an id.

What is proven equivalent or known is left out.
"""

from __future__ import annotations

import json
import random
import re
import subprocess
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

from hybrid_kv.config import ConfigError
from hybrid_kv.measure.results import read_beside
from mutants.runner.equivalent import read_equivalent
from mutants.runner.generated import Generated, Place, Source, files
from mutants.runner.mutant import PACKAGE
from mutants.runner.run import Row

ID = re.compile(r"([\w/]+\.py):(\d+):(\w+):(\d+)")


def choose(
    by: str | None,
    amount: int | None,
    seed: int,
    since: str | None,
    ids: Sequence[str],
    csv: Path,
    again: bool = False,
) -> tuple[list[Generated], list[Row]]:
    """Return the mutants to run, and the rows of those that were run before.

    Run before means: the same function, killed in the same ways.

    Args:
        by: see `generated.files`.
        amount: of a sample; None: those of `ids`, which are run in any case.
        since: a revision, from which the lines of the sample differ.
        csv: of rows; it need not exist.
        again: those that survived are run once more.

    Raises:
        ConfigError: as `by_id`, `changed_lines` and `read_equivalent`.
    """
    if amount is None:
        return [by_id(name) for name in ids], []
    equivalent = read_equivalent()
    drawn = draw(by, amount, seed, None if since is None else changed_lines(since))
    left, known, rows = [], [], read_known(csv)
    for mutant in drawn:
        row = rows.get((mutant.digest, "+".join(mutant.ways(""))))
        if row is not None and (row.caught or not again):
            known.append(replace(row, change=mutant.change))
        elif (mutant.file, mutant.change) not in equivalent:
            left.append(mutant)
    return left, known


def read_known(csv: Path) -> dict[tuple[str, str], Row]:
    """Return the newest rows of generated mutants, by digest and ways."""
    rows = read_beside(csv)
    rows = rows[(rows["suite"] == "mutants") & (rows["metric"] == "caught")]
    found: dict[tuple[str, str], Row] = {}
    for name, text, count in rows[["benchmark", "params", "n"]].to_numpy().tolist():
        params: dict[str, Any] = json.loads(text)
        if digest := params.get("digest"):
            section, rule = params.get("section", ""), params.get("rule", "")
            found[digest, params["by"]] = Row(name, section, rule, "", count, 0.0, digest=digest)
    return found


def draw(
    by: str | None, amount: int, seed: int, changed: Mapping[str, Set[int]] | None = None
) -> list[Generated]:
    """Draw a sample of the mutants, stratified by file.

    It has at least one of each file, and is in proportion to how many each has.

    A larger sample of the same seed begins with the smaller one.

    Args:
        changed: lines by file: of these alone, and one of each.
    """
    order: list[tuple[float, float, Source, list[Place]]] = []
    for file in files(by):
        if changed is not None and file not in changed:
            continue
        source, rng = Source(file), random.Random(f"{seed} {file}")
        places = source.places()
        rng.shuffle(places)
        strata = [[place] for place in places]
        if changed is not None:
            strata = [
                [place for place in places if place.line == line] for line in sorted(changed[file])
            ]
            rng.shuffle(strata)
        strata = [each for each in strata if each]
        keys = ((k + rng.random()) / len(strata) if k else 0.0 for k in range(len(strata)))
        order += [(key, rng.random(), source, each) for key, each in zip(keys, strata, strict=True)]
    found: list[Generated] = []
    known: set[tuple[str, Any]] = set()
    for _, _, source, each in sorted(order, key=lambda one: one[:2]):
        if len(found) == amount:
            break
        for place in each:
            made = source.mutant(place)
            if made is not None and (source.file, made[1]) not in known:
                known.add((source.file, made[1]))
                found.append(made[0])
                break
    return found


def by_id(name: str) -> Generated:
    """Return the mutant with this name.

    Raises:
        ConfigError: there is no such mutant.
    """
    match = ID.fullmatch(name)
    if match is None or match[1] not in files():
        raise ConfigError(
            f"--id {name}: use one that a row has, such as cache/manager.py:120:NumberReplacer:1"
        )
    source = Source(match[1])
    for place in source.places():
        if place.id == name and (made := source.mutant(place)):
            return made[0]
    raise ConfigError(f"--id {name}: there is no such mutant; the code may have moved")


def changed_lines(since: str) -> dict[str, set[int]]:
    """Return the lines of the engine that differ from a revision's, by file.

    Raises:
        ConfigError: git knows no such revision, or this is no checkout.
    """
    command = [
        "git",
        "diff",
        "--unified=0",
        "--no-color",
        "--no-ext-diff",
        "--relative",
        since,
        "--",
        ".",
    ]
    done = subprocess.run(command, cwd=PACKAGE, capture_output=True, text=True)
    if since.startswith("-") or done.returncode:
        raise ConfigError(
            f"--changed-since {since}: git knows no such revision here; "
            "give a commit, tag or branch"
        )
    found: dict[str, set[int]] = {}
    file = ""
    for line in done.stdout.splitlines():
        if line.startswith("+++ "):
            file = line.removeprefix("+++ b/")
        elif match := re.match(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@", line):
            begin = int(match[1])
            found.setdefault(file, set()).update(range(begin, begin + int(match[2] or 1)))
    return found
