"""`hybrid-kv guard --target`: probes of another engine, their failures replayed, and all of it again at each change."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any, Literal

from hybrid_kv.check.ci import Verdict, Word
from hybrid_kv.check.guard.registry import Size
from hybrid_kv.check.guard.workers import num_workers
from hybrid_kv.check.probes.guarded import Guarded
from hybrid_kv.check.probes.reproducer import FORMAT, case_of, from_json, replay, write_files, wrong_read
from hybrid_kv.check.probes.run import FINE, Run, check_level, compare_with, guard, matrix_of, text_of
from hybrid_kv.check.probes.script import script_of
from hybrid_kv.check.probes.session import Outcome
from hybrid_kv.check.probes.shrink import distinct, shrink
from hybrid_kv.check.targets.exact import is_exact
from hybrid_kv.check.targets.kinds import for_model, kind_of, model_folder
from hybrid_kv.check.targets.remote import python_of, renew_loader
from hybrid_kv.check.targets.target import Kind, TargetError
from hybrid_kv.cli.options import show
from hybrid_kv.cli.publish import publish
from hybrid_kv.config import ConfigError
from hybrid_kv.errors import VOID, HybridKVError, require
from hybrid_kv.files import read_text
from hybrid_kv.models.exact_weights.checkpoint import has_exact_weights
from hybrid_kv.models.registry import sized
from hybrid_kv.threads import is_small, threads_for

AMOUNTS: dict[Size, int] = {"quick": 1, "full": 1, "long": 10}  # rounds of each probe
SHRINK_SECONDS = {"quick": 30.0, "full": 40.0, "long": 300.0}  # for all failures of a run: one bug makes many
LOOK_SECONDS = 0.2  # between two looks at the files that are watched
WORDS: dict[str, Word] = {
    "right": "ok",
    "void": "void",
    "not supported": "skipped",
    "as before": "skipped",
    "known": "skipped",
}


def guard_target(
    target: str,
    model: str,
    python: Path | None,
    against: str | None,
    matrix: Sequence[str] | None,
    weights: Literal["exact", "random"] | None,
    select: Sequence[str] | None,
    seed: int,
    size: Size,
    jobs: int | None,
    repro: Path,
    verbose: bool,
    as_json: bool,
    out: Path | None,
    pages: Path | None,
    keep: Callable[[Sequence[Verdict]], None],
) -> int:
    """Returns the exit code: 0 if every supported probe was shown to be right, `VOID` if others were void alone."""
    require("safetensors", "tokenizers", "transformers")
    is_build = against is not None and os.sep in against and "://" not in against
    kind, before = kind_of(target, python), kind_of(target, against) if is_build else None
    other = kind_of(against) if against is not None and not is_build else None
    models = _models(kind, model, weights, bool(matrix), other is not None)
    parts: list[_Part] = []
    files: list[str] = []

    def document() -> dict[str, Any]:
        return {
            "target": target, "version": parts[-1].guarded.version, "models": models, "seed": seed,
            "amount": AMOUNTS[size], **_sums([one for part in parts for one in part.seen]),
            "seconds": round(sum(one.seconds for part in parts for one in part.seen), 1),
            "outcomes": [{"model": part.model, **_document(one)} for part in parts for one in part.seen],
            "files": files,
        }  # fmt: skip

    def write() -> None:
        keep([_verdict(one, part.prefix) for part in parts for one in part.seen])
        show(document(), False, out, lambda: None)  # results survive an interruption

    if kind.load is not None:
        kind.load()
    with ExitStack() as stack:
        for name in models:
            folder = stack.enter_context(model_folder(name))
            stack.enter_context(threads_for(folder))
            if weights == "exact" and not (is_exact(folder) or has_exact_weights(folder)):
                raise ConfigError(f"--exact: {name} has no exact weights; write some with hybrid-kv checkpoint --exact")
            prefix = f"{name}, " if len(models) > 1 else ""
            # Only random weights show how a model handles its cache, where that is left to models.
            is_random = not name.startswith("exact")
            has_all = is_random and (len(models) == 1 or not (kind.inside and kind.inside.is_central))
            thorough = size == "long" or bool(select) or has_all
            guarded = Guarded(kind, folder, other, seed, AMOUNTS[size], thorough)
            own: Size = "quick" if is_random and not has_all and size == "full" else size
            cells = matrix_of(guarded.kind, matrix) if matrix else None

            def report(outcome: Outcome, prefix: str = prefix) -> None:
                # The first is a sign of life of each setting.
                if verbose or outcome.verdict not in FINE or outcome.probe == "alone":
                    said = f"{outcome.verdict} {outcome.detail}".rstrip()
                    print(f"{prefix}{text_of(outcome.settings)}: {outcome.probe} {said}", file=sys.stderr)
                write()

            parts.append(_Part(name, prefix, own, Run(guarded, cells, select or (), report, own)))
        at_once = jobs or (num_workers(None) if all(is_small(part.guarded.folder) for part in parts) else 1)
        # A run of few settings would keep one process busy at the end.
        guard(sorted((part.run for part in parts), key=lambda run: len(run.cells)), at_once)
        for part in parts:
            part.seen = part.run.found()
            if before is not None:
                old = Guarded(before, part.guarded.folder, None, seed, AMOUNTS[size], part.guarded.thorough)
                compare_with(old, part.seen, at_once, part.size)
                write()
            if pages is not None:
                publish(pages, kind.name, part.guarded.version, part.model, seed, part.seen)
            files += _reduced(part, target, size, repro, at_once)
    show(document(), as_json, out, lambda: _print(target, parts))
    found = {one.verdict for part in parts for one in part.seen} - {*FINE}
    return VOID if found == {"void"} else int(bool(found))


def _models(kind: Kind, model: str, weights: str | None, has_matrix: bool, has_reference: bool) -> list[str]:
    """The models of a run: exact ones inside the engine, where it can run them, the one that was named, or both."""
    is_family = model in sized()
    inside = kind.inside
    if weights == "exact" and inside is None:
        return [f"{model}:exact" if is_family else model]
    if is_family and kind.size != "tiny":
        model = f"{model}:{kind.size}"
    is_exact_one = model.startswith("exact") or model.endswith(":exact") or has_exact_weights(model)
    if inside is None or weights == "random" or is_exact_one:
        return [model]
    exact = ["exact", *(f"exact:{name}" for name in inside.further if not has_matrix)]
    if weights == "exact":
        return exact
    return [model] if has_reference or has_matrix else [*exact, model]


@dataclass
class _Part:
    """A run with one model; `prefix` tells its lines from another one's, `size` is that of its matrix."""

    model: str
    prefix: str
    size: Size
    run: Run

    def __post_init__(self) -> None:
        self.guarded, self.seen = self.run.guarded, self.run.outcomes


def _reduced(part: _Part, target: str, size: Size, repro: Path, at_once: int) -> list[str]:
    """The files of all failures of a run, each reduced as far as its share of the time goes."""
    guarded = part.guarded
    failures = distinct([failure for outcome in part.seen for failure in outcome.failures])
    # Targets in this process share what they change of their package.
    num_threads = at_once if is_exact(guarded.folder) and guarded.kind.package else 1
    if is_exact(guarded.folder):  # a bug is in most answers of its setting: the one with the fewest requests shows it
        failures.sort(key=lambda one: -one.num_requests)
        failures = [*{text_of(one.settings): one for one in failures}.values()]
        failures.sort(key=lambda one: one.num_requests)  # the largest have what time the others leave
    end = time.perf_counter() + SHRINK_SECONDS[size]

    def reduce(i: int) -> list[str]:
        failure, rest = failures[i], end - time.perf_counter()
        part_of_rest = failure.num_requests / sum(one.num_requests for one in failures[i:])
        share = min(120.0, rest, num_threads * rest * part_of_rest)
        shrunk = shrink(failure, lambda: guarded.session(failure.settings), share)
        case = case_of(shrunk.failure, target, guarded.version, part.model, guarded.judge_of(failure.settings).limit)
        if line := wrong_read(guarded, case):
            case = replace(case, problem=f"{case.problem}; the first wrong read: {line}")
        files = [*map(str, write_files(case, repro, script_of(case)))]
        small = f"{shrunk.failure.num_requests} requests, {shrunk.num_prompt_tokens} prompt tokens"
        said = f"{failure.probe}: the first wrong read: {line}\n" * bool(line)
        print(f"{said}{failure.probe}: shrunk to {small} in {shrunk.seconds:.0f} s: {files[-1]}", file=sys.stderr)
        return files

    every = range(len(failures))
    if num_threads == 1:
        return [file for i in every for file in reduce(i)]
    with ThreadPool(num_threads) as pool:  # Ctrl-C does not wait for these threads
        return [file for files in pool.map(reduce, every, 1) for file in files]


def is_case(file: Path) -> bool:
    """Return whether a file is a failing case of a target."""
    try:
        return bool(json.loads(read_text(file))["format"] == FORMAT)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


def replay_case(file: Path, python: Path | None = None) -> int:
    """Replay a failing case of a target; returns 1 while it fails."""
    require("safetensors", "tokenizers", "transformers", "pydantic")
    case = from_json(read_text(file), str(file))
    with model_folder(case.model) as folder, threads_for(folder):
        kind = for_model(kind_of(case.target, python), folder)
        for factor, level in case.settings.items():
            check_level(kind, factor, level)
        target = kind.start(folder, case.settings)
        try:
            answer = replay(case, target)
        except TargetError as error:
            print(error)
            return 1
        finally:
            target.close()
    wrong = case.is_wrong(answer)
    print(f"{case.target} {target.version}, {text_of(case.settings)}: {'still wrong' if wrong else 'right'}")
    if wrong:
        print(answer.error or f"{case.problem}; now {list(answer.token_ids[: len(case.expected)])}")
    return int(wrong)


def watch(paths: Sequence[Path], kind: Kind, run: Callable[[], int]) -> None:
    """Run now and after each change of a Python file in one of these paths, until Ctrl-C.

    Raises:
        ConfigError: there is no such path, or the engine is not one that runs in an environment of its own.
    """
    if missing := [path for path in paths if not path.exists()]:
        raise ConfigError(f"--watch {missing[0]}: there is no such file or folder; name the source of your engine")
    if not kind.package:
        raise ConfigError(f"--watch: {kind.name} has no environment of its own; use --target vllm or mlx")
    while True:
        begin, seen = time.perf_counter(), _stamps(paths)
        try:
            said = f"exit code {run()}"
        except HybridKVError as error:  # as a syntax error while a change is typed
            said = f"error: {error}"
        where = ", ".join(map(str, paths))
        print(f"{said} after {time.perf_counter() - begin:.0f} s; waits for a change in {where}", file=sys.stderr)
        renew_loader(kind.name, kind.python or python_of(kind.name, kind.package))
        while not (changed := {*_stamps(paths).items()} ^ {*seen.items()}):
            time.sleep(LOOK_SECONDS)
        print(f"changed: {', '.join(sorted({str(path) for path, _ in changed}))}", file=sys.stderr)


def _stamps(paths: Sequence[Path]) -> dict[Path, int]:
    """When each Python file was written last, in nanoseconds."""
    files = [file for path in paths for file in ([path] if path.is_file() else path.rglob("*.py"))]
    return {file: file.stat().st_mtime_ns for file in files if file.exists()}


def _verdict(outcome: Outcome, prefix: str) -> Verdict:
    word = WORDS.get(outcome.verdict, "failed")
    message = "" if outcome.verdict == "right" else f"{outcome.verdict}: {outcome.detail}"
    return Verdict(f"{prefix}{text_of(outcome.settings)}: {outcome.probe}", word, message, outcome.seconds)


def _document(outcome: Outcome) -> dict[str, Any]:
    return {key: value for key, value in vars(outcome).items() if key not in ("failures", "is_last")}


def _sums(outcomes: Sequence[Outcome]) -> dict[str, int]:
    """Sums over all probes; without calibration and references."""
    return {key: sum(getattr(one, key) for one in outcomes) for key in ("num_answers", "num_tokens", "num_judged")}


def _print(target: str, parts: Sequence[_Part]) -> None:
    """Of each model a line for each setting, and below it what was not shown to be right."""
    for part in parts:
        title = f"{target} {part.guarded.version}, {part.model}"
        for setting in dict.fromkeys(text_of(one.settings) for one in part.seen):
            own = [one for one in part.seen if text_of(one.settings) == setting]
            counts = Counter(one.verdict for one in own)
            print(f"{setting}: {', '.join(f'{count} {verdict}' for verdict, count in counts.items())}")
            for one in own:
                if one.verdict not in FINE or one.verdict == "known":
                    print(f"    {one.verdict}: {one.probe}: {one.detail}")
        sums = _sums(part.seen)
        said = f"{sums['num_answers']:,} answers, {sums['num_tokens']:,} tokens with their prompts"
        print(f"{title}: {said}; {sums['num_judged']:,} judged right or wrong")
