"""`hybrid-kv guard --target`: probes of another engine, and their failures replayed."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hybrid_kv.cli.options import show
from hybrid_kv.errors import VOID, require
from hybrid_kv.files import read_text, write_whole
from hybrid_kv.guard.registry import Size
from hybrid_kv.guard.workers import num_workers
from hybrid_kv.models.registry import sized
from hybrid_kv.probes.guarded import Guarded
from hybrid_kv.probes.reproducer import FORMAT, case_of, from_json, replay, write_files
from hybrid_kv.probes.run import check_level, guard, matrix_of
from hybrid_kv.probes.session import Outcome
from hybrid_kv.probes.shrink import distinct, shrink
from hybrid_kv.targets.kinds import kind_of
from hybrid_kv.targets.models import model_folder
from hybrid_kv.targets.target import TargetError
from hybrid_kv.threads import is_small, threads_for

AMOUNTS: dict[Size, int] = {"quick": 1, "full": 1, "long": 10}  # rounds of each probe
SHRINK_SECONDS = {"quick": 30.0, "full": 30.0, "long": 300.0}  # for all failures of a run: one bug makes many
STYLES = {
    "right": "green",
    "wrong": "bold red",
    "inconclusive": "yellow",
    "void": "yellow",
    "not supported": "dim",
}


def guard_target(
    target: str,
    model: str,
    against: str | None,
    matrix: Sequence[str] | None,
    select: Sequence[str] | None,
    seed: int,
    size: Size,
    jobs: int | None,
    repro: Path,
    as_json: bool,
    out: Path | None,
) -> int:
    """Returns the exit code: 0 if every supported probe was shown to be right, `VOID` if others were void alone."""
    require("safetensors", "tokenizers", "transformers")
    kind, other = kind_of(target), kind_of(against) if against is not None else None
    cells = matrix_of(kind, matrix) if matrix else None
    model = f"{model}:{kind.size}" if model in sized() and kind.size != "tiny" else model
    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    with model_folder(model) as folder, threads_for(folder):
        guarded = Guarded(kind, folder, other, seed, AMOUNTS[size])
        seen: list[Outcome] = []
        files: list[str] = []

        def document() -> dict[str, Any]:
            return {
                "target": target, "version": guarded.version, "model": model, "seed": seed, "amount": guarded.amount,
                **_sums(seen), "seconds": round(sum(one.seconds for one in seen), 1),
                "outcomes": [_document(one) for one in seen], "files": files,
            }  # fmt: skip

        def report(outcome: Outcome) -> None:
            line = f"{_setting(outcome.settings)}: {outcome.probe} "
            console.print(line, Text(outcome.verdict, STYLES[outcome.verdict]), f" {outcome.detail}", sep="")
            seen.append(outcome)
            if out is not None:  # results survive an interruption
                write_whole(out, json.dumps(document(), indent=2) + "\n")

        at_once = jobs or (num_workers(None) if is_small(folder) else 1)
        seen = guard(guarded, cells, select or (), report, at_once, size)
        failures = distinct([failure for outcome in seen for failure in outcome.failures])
        end = time.perf_counter() + SHRINK_SECONDS[size]
        for i, failure in enumerate(failures):
            share = min(120.0, (end - time.perf_counter()) / (len(failures) - i))
            shrunk = shrink(failure, lambda failure=failure: guarded.session(failure.settings), share)  # type: ignore[misc]
            case = case_of(shrunk.failure, target, guarded.version, model, guarded.judge_of(failure.settings).limit)
            files += map(str, write_files(case, repro))
            small = f"{shrunk.num_requests} requests, {shrunk.num_prompt_tokens} prompt tokens"
            console.print(f"{failure.probe}: shrunk to {small} in {shrunk.seconds:.0f} s: {files[-1]}")
    title = f"{target} {guarded.version}, {model}"
    show(document(), as_json, out, lambda: _print(title, seen))
    verdicts = {one.verdict for one in seen}
    return 1 if verdicts & {"wrong", "inconclusive"} else VOID if "void" in verdicts else 0


def is_case(file: Path) -> bool:
    """Whether a file is a failing case of a target."""
    try:
        return bool(json.loads(read_text(file))["format"] == FORMAT)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


def replay_case(file: Path) -> int:
    """Replay a failing case of a target; returns 1 while it fails."""
    require("safetensors", "tokenizers", "transformers", "pydantic")
    case = from_json(read_text(file), str(file))
    kind = kind_of(case.target)
    for factor, level in case.settings.items():
        check_level(kind, factor, level)
    with model_folder(case.model) as folder, threads_for(folder):
        target = kind.start(folder, case.settings)
        try:
            answer = replay(case, target)
        except TargetError as error:
            print(error)
            return 1
        finally:
            target.close()
    wrong = case.is_wrong(answer)
    print(f"{case.target} {target.version}, {_setting(case.settings)}: {'still wrong' if wrong else 'right'}")
    if wrong:
        print(answer.error or f"{case.problem}; now {list(answer.token_ids[: len(case.expected)])}")
    return int(wrong)


def _setting(settings: Mapping[str, str]) -> str:
    return " ".join(f"{factor}={level}" for factor, level in settings.items()) or "plain"


def _document(outcome: Outcome) -> dict[str, Any]:
    return {key: value for key, value in vars(outcome).items() if key not in ("failures", "is_last")}


def _sums(outcomes: Sequence[Outcome]) -> dict[str, int]:
    """Sums over all probes; without calibration and references."""
    return {key: sum(getattr(one, key) for one in outcomes) for key in ("num_answers", "num_tokens", "num_judged")}


def _print(title: str, outcomes: Sequence[Outcome]) -> None:
    settings = list(dict.fromkeys(_setting(one.settings) for one in outcomes))
    probes = list(dict.fromkeys(one.probe for one in outcomes))
    found = {(one.probe, _setting(one.settings)): one for one in outcomes}
    table = Table(
        "probe", *settings, box=box.SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False, show_edge=False
    )
    for probe in probes:
        cells = [found.get((probe, setting)) for setting in settings]
        table.add_row(probe, *("" if one is None else Text(_cell(one), STYLES[one.verdict]) for one in cells))
    Console(markup=False, width=None if sys.stdout.isatty() else 30 + 22 * len(settings)).print(table)
    for one in outcomes:
        if one.verdict not in ("right", "not supported"):
            print(f"{one.verdict}: {one.probe}, {_setting(one.settings)}: {one.detail}")
    sums = _sums(outcomes)
    said = f"{sums['num_answers']:,} answers, {sums['num_tokens']:,} tokens with their prompts"
    print(f"{said}; {sums['num_judged']:,} judged right or wrong")


def _cell(one: Outcome) -> str:
    return f"right, {one.num_answers}" if one.verdict == "right" else one.verdict
