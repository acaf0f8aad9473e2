"""Probes of another engine, its failures reduced and replayed, and reruns at each change."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

from hybrid_kv.check.ci import Verdict, Word
from hybrid_kv.check.guard.registry import Size
from hybrid_kv.check.guard.workers import num_workers
from hybrid_kv.check.probes.guarded import Guarded
from hybrid_kv.check.probes.reproducer import (
    FORMAT,
    case_of,
    from_json,
    replay,
    write_files,
    wrong_read,
)
from hybrid_kv.check.probes.run import (
    FINE,
    ProbeRun,
    check_level,
    compare_with,
    guard,
    matrix_of,
    text_of,
)
from hybrid_kv.check.probes.script import script_of
from hybrid_kv.check.probes.session import Failure as ProbeFailure
from hybrid_kv.check.probes.session import Outcome
from hybrid_kv.check.probes.shrink import distinct, shrink
from hybrid_kv.check.targets.exact import is_exact
from hybrid_kv.check.targets.kinds import for_model, kind_of, model_folder
from hybrid_kv.check.targets.remote import python_of, renew_loader
from hybrid_kv.check.targets.target import Kind, TargetError
from hybrid_kv.cli.options import Amount, Output, SubjectOptions, show, write_document
from hybrid_kv.cli.publish import EngineRun, publish
from hybrid_kv.config import ConfigError
from hybrid_kv.errors import VOID, HybridKVError, require
from hybrid_kv.files import read_text
from hybrid_kv.models.exact_weights.checkpoint import has_exact_weights
from hybrid_kv.models.registry import sized
from hybrid_kv.threads import is_small, threads_for

AMOUNTS: dict[Size, int] = {"quick": 1, "full": 1, "long": 10}  # rounds of each probe
# For all failures of a run: a bug makes many.
SHRINK_SECONDS = {"quick": 30.0, "full": 40.0, "long": 300.0}
LOOK_SECONDS = 0.2  # between two looks at the files that are watched
WORDS: dict[str, Word] = {
    "right": "ok",
    "void": "void",
    "not supported": "skipped",
    "as before": "skipped",
    "known": "skipped",
}


@dataclass
class ModelRun:
    """A run of an engine with one model, and its results.

    Attributes:
        model: name of the model.
        prefix: start of its lines, which tells them from those of another model.
        size: of its matrix.
        run: the probes.
        outcomes: results so far, or those at the end.
    """

    model: str
    prefix: str
    size: Size
    run: ProbeRun

    def __post_init__(self) -> None:
        self.outcomes: list[Outcome] = self.run.outcomes

    @property
    def guarded(self) -> Guarded:
        """The engine with this model."""
        return self.run.guarded


class EngineCheck:
    """Probes of an engine with one or more models.

    Args:
        engine: its name, or the URL of a server.
        subject: models and settings.
        amount: rounds of the probes, seed, probes.
        output: places of the results.
        keep: gets the verdicts so far after each probe.

    Raises:
        HybridKVError: there is no such engine, or it cannot run these models and settings.
    """

    def __init__(
        self,
        engine: str,
        subject: SubjectOptions,
        amount: Amount,
        output: Output,
        keep: Callable[[Sequence[Verdict]], None],
    ) -> None:
        require("safetensors", "tokenizers", "transformers")
        self._engine = engine
        self._subject = subject
        self._amount = amount
        self._output = output
        self._keep = keep
        self._size: Size = "quick" if amount.quick else "long" if amount.long else "full"
        self._kind = kind_of(engine, subject.python)
        self._old_build, self._reference = self._compared()
        self._models = models_of(
            self._kind,
            subject.model,
            subject.weights,
            has_matrix=bool(subject.matrix),
            has_reference=self._reference is not None,
        )
        self._runs: list[ModelRun] = []
        self._files: list[str] = []

    def run(self) -> int:
        """Run all probes, and keep and print their results.

        Returns:
            0 if every supported probe was shown to be right, `VOID` if others were void alone, 1 if
            one was wrong.
        """
        with ExitStack() as stack:
            for name in self._models:
                folder = stack.enter_context(model_folder(name))
                stack.enter_context(threads_for(folder))
                self._runs.append(self._model_run(name, folder))
            at_once = self._num_at_once()
            # A run of few settings would keep one process busy at the end.
            runs = sorted((model_run.run for model_run in self._runs), key=_num_cells)
            guard(runs, at_once)
            for model_run in self._runs:
                self._conclude(model_run, at_once)
        document = self._document()
        show(document, self._output.as_json, self._output.out, self._print)
        bad = {outcome.verdict for outcome in self._outcomes()} - {*FINE}
        return VOID if bad == {"void"} else int(bool(bad))

    def _compared(self) -> tuple[Kind | None, Kind | None]:
        """Return the old build and the other engine that `against` names, at most one of them."""
        against = self._subject.against
        if against is None:
            return None, None
        is_build = os.sep in against and "://" not in against
        return (kind_of(self._engine, against), None) if is_build else (None, kind_of(against))

    def _model_run(self, name: str, folder: str) -> ModelRun:
        """Return the run with one of the models, not begun yet."""
        has_weights = is_exact(folder) or has_exact_weights(folder)
        if self._subject.weights == "exact" and not has_weights:
            raise ConfigError(
                f"--exact: {name} has no exact weights; "
                "write some with hybrid-kv checkpoint --exact"
            )
        is_alone = len(self._models) == 1
        prefix = "" if is_alone else f"{name}, "
        size = self._size
        amount = self._amount
        # Only random weights show how a model handles its cache, where that is left to models.
        is_random = not name.startswith("exact")
        inside = self._kind.inside
        is_central = inside is not None and inside.is_central
        is_only = inside is not None and inside.is_only
        has_all = is_only or (is_random and (is_alone or not is_central))
        thorough = size == "long" or bool(amount.select) or has_all
        guarded = Guarded(
            self._kind, folder, self._reference, amount.seed or 0, AMOUNTS[size], thorough
        )
        if is_random and not has_all and size == "full":
            size = "quick"
        cells = None
        if self._subject.matrix:
            cells = matrix_of(guarded.kind, self._subject.matrix)
        report = partial(self._report, prefix)
        return ModelRun(
            name, prefix, size, ProbeRun(guarded, cells, amount.select or (), report, size)
        )

    def _report(self, prefix: str, outcome: Outcome) -> None:
        """Print the outcome of a probe if it is news, and keep all so far."""
        # The first is a sign of life of each setting.
        is_news = outcome.verdict not in FINE or outcome.probe == "alone"
        if self._output.verbose or is_news:
            verdict = f"{outcome.verdict} {outcome.detail}".rstrip()
            line = f"{prefix}{text_of(outcome.settings)}: {outcome.probe} {verdict}"
            print(line, file=sys.stderr)
        self._write()

    def _num_at_once(self) -> int:
        """Return how many processes run at a time."""
        if self._amount.jobs:
            return self._amount.jobs
        all_small = all(is_small(model_run.guarded.folder) for model_run in self._runs)
        return num_workers(None) if all_small else 1

    def _conclude(self, model_run: ModelRun, at_once: int) -> None:
        """Compare a run with the old build, publish its rows and reduce its failures."""
        seed = self._amount.seed or 0
        guarded = model_run.guarded
        runner = guarded.kind.factors.get("runner", ("",))[0]
        subject = EngineRun(self._kind.name, guarded.version, model_run.model, seed, runner)
        try:
            model_run.outcomes = model_run.run.found()
        except ConfigError:
            if self._subject.publish is not None:  # that it is refused is a result, too
                publish(self._subject.publish, subject, model_run.run.outcomes)
            raise
        if self._old_build is not None:
            rounds = AMOUNTS[self._size]
            old = Guarded(self._old_build, guarded.folder, None, seed, rounds, guarded.thorough)
            compare_with(old, model_run.outcomes, at_once, model_run.size)
            self._write()
        if self._subject.publish is not None:
            publish(self._subject.publish, subject, model_run.outcomes)
        reducer = Reducer(
            model_run, self._engine, SHRINK_SECONDS[self._size], self._output.repro, at_once
        )
        self._files += reducer.reduce_all()

    def _outcomes(self) -> list[Outcome]:
        return [outcome for model_run in self._runs for outcome in model_run.outcomes]

    def _document(self) -> dict[str, Any]:
        outcomes = self._outcomes()
        return {
            "target": self._engine,
            "version": self._runs[-1].guarded.version,
            "models": self._models,
            "seed": self._amount.seed or 0,
            "amount": AMOUNTS[self._size],
            **_sums(outcomes),
            "seconds": round(sum(outcome.seconds for outcome in outcomes), 1),
            "outcomes": [
                {"model": model_run.model, **_document(outcome)}
                for model_run in self._runs
                for outcome in model_run.outcomes
            ],
            "files": self._files,
        }

    def _write(self) -> None:
        """Keep the results so far: they survive an interruption."""
        verdicts = [
            _verdict(outcome, model_run.prefix)
            for model_run in self._runs
            for outcome in model_run.outcomes
        ]
        self._keep(verdicts)
        write_document(self._document(), self._output.out)

    def _print(self) -> None:
        """Print for each model a line for each setting, and below it all that was not right."""
        for model_run in self._runs:
            for setting in dict.fromkeys(
                text_of(outcome.settings) for outcome in model_run.outcomes
            ):
                outcomes = [
                    outcome
                    for outcome in model_run.outcomes
                    if text_of(outcome.settings) == setting
                ]
                counts = Counter(outcome.verdict for outcome in outcomes)
                words = [f"{count} {verdict}" for verdict, count in counts.items()]
                print(f"{setting}: {', '.join(words)}")
                for outcome in outcomes:
                    if outcome.verdict not in FINE or outcome.verdict == "known":
                        print(f"    {outcome.verdict}: {outcome.probe}: {outcome.detail}")
            sums = _sums(model_run.outcomes)
            title = f"{self._engine} {model_run.guarded.version}, {model_run.model}"
            amount = (
                f"{sums['num_answers']:,} answers, {sums['num_tokens']:,} tokens with their prompts"
            )
            print(f"{title}: {amount}; {sums['num_judged']:,} judged right or wrong")
        known = [outcome for outcome in self._outcomes() if outcome.verdict == "known"]
        if known:
            names = dict.fromkeys(outcome.detail.partition(":")[0] for outcome in known)
            print(f"{len(known)} known: {', '.join(names)} (docs/found.md)")


def models_of(
    kind: Kind, model: str, weights: str | None, *, has_matrix: bool, has_reference: bool
) -> list[str]:
    """Return the models of a run: exact ones inside the engine, the one that was named, or both."""
    is_family = model in sized()
    inside = kind.inside
    if weights == "exact" and inside is None:
        return [f"{model}:exact" if is_family else model]
    if is_family and kind.size != "tiny":
        model = f"{model}:{kind.size}"
    is_exact_model = (
        model.startswith("exact") or model.endswith(":exact") or has_exact_weights(model)
    )
    if inside is not None and inside.is_only and weights == "random":
        raise ConfigError(f"--weights random: {kind.name} runs exact models alone; leave it out")
    if inside is None or weights == "random" or is_exact_model:
        return [model]
    default = "exact" if inside.model == "mixed" else f"exact:{inside.model}"
    exact = [default, *(f"exact:{name}" for name in inside.further if not has_matrix)]
    if weights == "exact" or inside.is_only:
        return exact
    return [model] if has_reference or has_matrix else [*exact, model]


@dataclass
class Reducer:
    """The failures of a run, each reduced as far as its share of the time goes.

    Attributes:
        model_run: the run.
        engine: the engine's name, for the cases.
        seconds: for all failures together.
        repro: folder for the cases.
        at_once: threads that may reduce.
    """

    model_run: ModelRun
    engine: str
    seconds: float
    repro: Path
    at_once: int

    def reduce_all(self) -> list[str]:
        """Reduce all failures, and return the files that were written."""
        guarded = self.model_run.guarded
        # Targets in this process share what they change of their package.
        shares_nothing = is_exact(guarded.folder) and guarded.kind.package
        num_threads = self.at_once if shares_nothing else 1
        failures = self._failures()
        end = time.perf_counter() + self.seconds

        def reduce(i: int) -> list[str]:
            rest = end - time.perf_counter()
            num_requests = sum(failure.num_requests for failure in failures[i:])
            part_of_rest = failures[i].num_requests / num_requests
            return self._reduce(failures[i], min(120.0, rest, num_threads * rest * part_of_rest))

        every = range(len(failures))
        if num_threads == 1:
            return [file for i in every for file in reduce(i)]
        with ThreadPool(num_threads) as pool:  # Ctrl-C does not wait for these threads
            return [file for files in pool.map(reduce, every, 1) for file in files]

    def _failures(self) -> list[ProbeFailure]:
        """Return different failures, the smallest first: the largest have the time that is left."""
        failures = distinct(
            [failure for outcome in self.model_run.outcomes for failure in outcome.failures]
        )
        if is_exact(self.model_run.guarded.folder):
            # A bug is in most answers of its setting: the one with the fewest requests shows it.
            failures.sort(key=_num_requests, reverse=True)
            failures = [*{text_of(failure.settings): failure for failure in failures}.values()]
            failures.sort(key=_num_requests)
        return failures

    def _reduce(self, failure: ProbeFailure, seconds: float) -> list[str]:
        """Reduce a failure, and return the files of its case."""
        guarded = self.model_run.guarded
        shrunk = shrink(failure, lambda: guarded.session(failure.settings), seconds)
        limit = guarded.judge_of(failure.settings).limit
        case = case_of(shrunk.failure, self.engine, guarded.version, self.model_run.model, limit)
        line = wrong_read(guarded, case)
        if line:
            case = replace(case, problem=f"{case.problem}; the first wrong read: {line}")
        files = [*map(str, write_files(case, self.repro, script_of(case)))]
        small = f"{shrunk.failure.num_requests} requests, {shrunk.num_prompt_tokens} prompt tokens"
        cause = f"{failure.probe}: the first wrong read: {line}\n" if line else ""
        effort = f"shrunk to {small} in {shrunk.seconds:.0f} s: {files[-1]}"
        print(f"{cause}{failure.probe}: {effort}", file=sys.stderr)
        return files


def _num_cells(run: ProbeRun) -> int:
    return len(run.cells)


def _num_requests(failure: ProbeFailure) -> int:
    return failure.num_requests


def is_case(file: Path) -> bool:
    """Return whether a file is a failing case of a target."""
    try:
        return bool(json.loads(read_text(file))["format"] == FORMAT)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


def replay_case(file: Path, python: Path | None = None) -> int:
    """Replay a failing case of a target; return 1 while it fails."""
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
    verdict = "still wrong" if wrong else "right"
    print(f"{case.target} {target.version}, {text_of(case.settings)}: {verdict}")
    if wrong:
        token_ids = list(answer.token_ids[: len(case.expected)])
        print(answer.error or f"{case.problem}; now {token_ids}")
    return int(wrong)


def watch(paths: Sequence[Path], kind: Kind, run: Callable[[], int]) -> None:
    """Run now and after each change of a Python file in one of these paths, until Ctrl-C.

    Raises:
        ConfigError: there is no such path, or the engine has no environment of its own.
    """
    missing = [path for path in paths if not path.exists()]
    if missing:
        raise ConfigError(
            f"--watch {missing[0]}: there is no such file or folder; name the source of your engine"
        )
    if not kind.package:
        raise ConfigError(f"--watch: {kind.name} has no environment of its own; check vllm or mlx")
    while True:
        begin = time.perf_counter()
        before = _stamps(paths)
        try:
            ending = f"exit code {run()}"
        except HybridKVError as error:  # as a syntax error while a change is typed
            ending = f"error: {error}"
        seconds = time.perf_counter() - begin
        places = ", ".join(map(str, paths))
        print(f"{ending} after {seconds:.0f} s; waits for a change in {places}", file=sys.stderr)
        renew_loader(kind.name, kind.python or python_of(kind.name, kind.package))
        after = _stamps(paths)
        while after == before:
            time.sleep(LOOK_SECONDS)
            after = _stamps(paths)
        changed = {path for path, _ in {*after.items()} ^ {*before.items()}}
        print(f"changed: {', '.join(sorted(map(str, changed)))}", file=sys.stderr)


def _stamps(paths: Sequence[Path]) -> dict[Path, int]:
    """Return the time at which each Python file was written last, in nanoseconds."""
    files = [file for path in paths for file in ([path] if path.is_file() else path.rglob("*.py"))]
    return {file: file.stat().st_mtime_ns for file in files if file.exists()}


def _verdict(outcome: Outcome, prefix: str) -> Verdict:
    word = WORDS.get(outcome.verdict, "failed")
    message = "" if outcome.verdict == "right" else f"{outcome.verdict}: {outcome.detail}"
    name = f"{prefix}{text_of(outcome.settings)}: {outcome.probe}"
    return Verdict(name, word, message, outcome.seconds)


def _document(outcome: Outcome) -> dict[str, Any]:
    hidden = ("failures", "is_last")
    return {key: value for key, value in vars(outcome).items() if key not in hidden}


def _sums(outcomes: Sequence[Outcome]) -> dict[str, int]:
    """Return sums over all probes; without calibration and references."""
    keys = ("num_answers", "num_tokens", "num_judged")
    return {key: sum(getattr(outcome, key) for outcome in outcomes) for key in keys}
