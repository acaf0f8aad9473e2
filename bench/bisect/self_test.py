"""Error rates of `hybrid-kv bisect`: `--self-test` bisects histories whose answer is known.

Each has 200 commits and a known first bad one.

There are two kinds of history. *Drawn*: the answers of commits come from a model; the search, the
tests and the last check are those of the command. Tokens and counts are exact. A time is a pair of
equal code that was measured on this machine, by `measure_noise`, sampled with replacement and
shifted by the injected 5 %; each trial keeps to one benchmark. Answers are 500 questions, nine in
ten right; one commit in fifty changes one in a hundred, as often to right as to wrong, and the
first bad commit loses one in twenty. One commit in twenty cannot run. In equal code any commit that
is found is a good one.

*Injected*: a clone of this checkout with 200 commits (`generated`), bisected by the command's own
code. Each test of a commit is a process of its own; CPU seconds and seconds are those of the whole
bisect.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import resource
import statistics
import tempfile
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import reduce
from pathlib import Path
from typing import Any

from bench.bisect.answers import Answered, Answers
from bench.bisect.cells import Runs, fill_benchmarks, find_cell
from bench.bisect.counts import Counts
from bench.bisect.find import Finding, Memory, find
from bench.bisect.generated import Edit, broken, generate
from bench.bisect.history import Trees, fill_package
from bench.bisect.question import NotMeasurableError, Outcome, Question
from bench.bisect.times import Times
from bench.bisect.tokens import Tokens, played_by
from bench.harness.inference import center, clopper_pearson, estimate
from bench.harness.verdicts import rows_here
from hybrid_kv.config import HybridKVError
from hybrid_kv.measure.results import Receipt, Row, append_rows, timing_row
from hybrid_kv.measure.timing.clock import wall_clock
from mutants.runner.mutant import Change, read_mutants

SUITE = "bisect"
COMMITS = 200
SLOWER = 0.05
NOISE_PAIRS = 24
# Host code in Python, in numpy and in torch.
NOISY = (
    "slot_mapping/tokens[num_tokens=8192,cp_size=2]",
    "scheduler/decode[mode=none,K=0,num_reqs=16]",
    "causal_conv1d/prefill[model=nemotron-3-nano-tp8,num_tokens=256]",
    "state_update/slots[model=nemotron-3-nano-tp8,num_reqs=2,K=3]",
)
QUESTIONS = 500
# Bugs of `mutants/` that the guard's exact traffic finds at once.
BUGS = ("B01", "D03", "F16")
COUNTED = "engine_step/operations[mode=all]"
TIMED = "scheduler/decode[mode=none,K=0,num_reqs=16]"


@dataclass(frozen=True)
class Trial:
    """One bisect of a history whose first bad commit is known.

    Attributes:
        outcome: `right`, `wrong` (a good commit was found) or `open` (no single commit was found).
        questions: commits that were tested between the ends.
        pairs: worker pairs that were measured.
        seconds, cpu_seconds: of the whole bisect; of a drawn time the latter, its pairs times what
            one took.
    """

    kind: str
    way: str
    number: int
    outcome: str
    questions: int
    pairs: int
    seconds: float
    cpu_seconds: float


def judge(finding: Finding, first_bad: str | None) -> str:
    """Return whether a finding is right; a first bad commit that is one of several is `open`."""
    if finding.verdict != "found" or finding.between:
        return "open"
    return "right" if finding.first_bad == first_bad else "wrong"


# ---- drawn ----


@dataclass(frozen=True)
class Noise:
    """Worker pairs of equal code: log-ratios around 0, and the CPU seconds of one pair."""

    log_ratios: tuple[float, ...]
    seconds: float


class _Drawn:
    """A history with known answers; commits are called by their numbers, GOOD is -1."""

    def __init__(self, rng: random.Random, is_equal: bool = False) -> None:
        self.rng = rng
        self.first_bad = COMMITS if is_equal else rng.randrange(COMMITS)
        self.broken = broken(COMMITS, self.first_bad, rng)
        self.num_pairs = 0

    def is_bad(self, commit: str) -> bool:
        if int(commit) >= 0 and self.broken[int(commit)]:
            raise NotMeasurableError("cannot run")
        return int(commit) >= self.first_bad

    def play(self, commit: str) -> Outcome:
        is_bad = self.is_bad(commit)
        return Outcome("bad" if is_bad else "good", "", {"rule": "tokens"} if is_bad else {})

    def count(self, commit: str) -> dict[str, int]:
        return {"blocks": 12 + 2 * self.is_bad(commit), "bytes": 100}

    def measured(self, noise: Noise) -> Callable[[str, str], Generator[float, None, None]]:
        def measure(base: str, head: str) -> Generator[float, None, None]:
            shift = (self.is_bad(head) - self.is_bad(base)) * math.log1p(SLOWER)
            while True:
                self.num_pairs += 1
                yield shift + self.rng.choice(noise.log_ratios)

        return measure

    def answered(self) -> Callable[[str, int], Answered]:
        """Return the answers of all commits to two sets of questions."""
        answers: dict[tuple[str, int], str] = {}
        for seed in (0, 1):
            right = [number < 0.9 * QUESTIONS for number in range(QUESTIONS)]
            for number in range(-1, COMMITS):
                if number >= 0 and self.rng.random() < 0.02:
                    self._flip(right, 0.005 * QUESTIONS, 0.005 * QUESTIONS)
                if number == self.first_bad:
                    self._flip(right, SLOWER * QUESTIONS, 0)
                answers[str(number), seed] = "".join(str(int(one)) for one in right)

        def answer(commit: str, seed: int) -> Answered:
            self.is_bad(commit)
            return Answered(answers[commit, seed], str(seed))

        return answer

    def _flip(self, right: list[bool], lost: float, gained: float) -> None:
        """Change some answers, on average so many each way."""
        chances = {True: lost / right.count(True), False: gained / right.count(False)}
        for number, one in enumerate(right):
            right[number] = one ^ (self.rng.random() < chances[one])


KINDS = ("tokens", "counts", "time", "equal time", "answers")


def draw(kind: str, number: int, noises: Sequence[Noise]) -> Trial:
    """Make one drawn trial; the same number is the same history."""
    drawn = _Drawn(random.Random(f"{kind} {number}"), is_equal=kind == "equal time")
    noise = noises[number % len(noises)] if noises else Noise((0.0,), 0.0)
    questions: dict[str, Callable[[], Question]] = {
        "tokens": lambda: Tokens(drawn.play, "scenario"),
        "counts": lambda: Counts(drawn.count),
        "time": lambda: Times(drawn.measured(noise)),
        "equal time": lambda: Times(drawn.measured(noise)),
        "answers": lambda: Answers(drawn.answered(), 0),
    }
    finding = find("-1", tuple(map(str, range(COMMITS))), questions[kind]())
    return Trial(
        kind,
        "drawn",
        number,
        judge(finding, str(drawn.first_bad)),
        finding.tested,
        drawn.num_pairs,
        0.0,
        drawn.num_pairs * noise.seconds,
    )


def measure_noise(root: Path, commit: str, file: Path, folder: Path) -> list[Noise]:
    """Return pairs of equal code of some benchmarks; measure those that `file` has not.

    Their rows are appended, the log-ratios in `params`, around their trimmed mean.
    """
    frame = rows_here(file, "equal_code")
    found = dict(zip(frame["benchmark"], map(json.loads, frame["params"]), strict=True))
    for key in NOISY:
        if key in found:
            continue
        runs = Runs(
            Trees(folder / key.partition("/")[0], fill_benchmarks(root)),
            find_cell(key),
            random.Random(key),
        )
        begin = _cpu_seconds()
        pairs = [*itertools.islice(runs.measure(commit, commit), NOISE_PAIRS)]
        seconds = (_cpu_seconds() - begin) / NOISE_PAIRS
        middle = center(pairs)
        params: dict[str, Any] = {
            "log_ratios": [round(pair - middle, 5) for pair in pairs],
            "cpu_seconds_per_pair": round(seconds, 2),
            "spread": round(statistics.stdev(pairs), 5),
        }
        ratio = estimate(pairs)
        row = timing_row(
            receipt=Receipt(checked_before=True, checked_after=True, max_error=runs.max_error),
            suite=SUITE,
            benchmark=key,
            metric="equal_code",
            value=ratio.ratio,
            unit="time ratio",
            ci_low=ratio.low,
            ci_high=ratio.high,
            n=ratio.n,
            params=params,
        )
        append_rows(file, [row], commit=commit)
        print(
            f"equal code, {key}: spread {params['spread']:.2%}, {seconds:.1f} CPU s a pair",
            flush=True,
        )
        found[key] = params
    return [
        Noise(tuple(found[key]["log_ratios"]), found[key]["cpu_seconds_per_pair"]) for key in NOISY
    ]


# ---- injected ----


def _edits(name: str, *changes: Change) -> dict[str, Edit]:
    """Return the changes, by file."""

    def edit(file: str) -> Edit:
        own = [change for change in changes if change.file == file]
        return lambda text: reduce(lambda text, change: change.apply(text, name), own, text)

    return {f"hybrid_kv/{change.file}": edit(change.file) for change in changes}


def _bug(name: str) -> dict[str, Edit]:
    (mutant,) = read_mutants(ids=[name])
    return _edits(name, *mutant.changes)


def _more_operations() -> dict[str, Edit]:
    """Return an edit that adds one tensor operation per step."""
    old = "greedy = logits.argmax(-1)"
    return _edits("operations", Change("sampling.py", old, "greedy = logits.clone().argmax(-1)"))


def _slower_steps(loops: int) -> dict[str, Edit]:
    """Return an edit that adds a loop that does nothing to each step of the scheduler."""
    line = "budget = self.config.max_num_batched_tokens"
    return _edits(
        "loop", Change("engine/scheduler.py", line, f"for _ in range({loops}):\n    pass\n{line}")
    )


def _loops(root: Path, commit: str, folder: Path) -> int:
    """Return how many loops are `SLOWER` of a call of `TIMED`, measured once."""
    loops, clone = 4000, folder / "clone"
    (slower,) = generate(
        root, commit, clone, _slower_steps(loops), num=1, first_bad=0, rng=random.Random(0)
    )
    runs = Runs(Trees(folder / "trees", fill_benchmarks(clone)), find_cell(TIMED), random.Random(0))
    pairs = [*itertools.islice(runs.measure(commit, slower), 12)]
    return round(loops * math.log1p(SLOWER) / center(pairs))


def inject(kind: str, number: int, root: Path, commit: str, folder: Path, loops: int) -> Trial:
    """Make one injected trial: a history on top of `commit` in `folder`, and its bisect.

    Args:
        loops: of `_slower_steps`.
    """
    rng = random.Random(f"injected {kind} {number}")
    first_bad = rng.randrange(1, COMMITS)
    bug = BUGS[number % len(BUGS)]
    injects: dict[str, Callable[[], dict[str, Edit]]] = {
        "tokens": lambda: _bug(bug),
        "counts": _more_operations,
        "time": lambda: _slower_steps(loops),
    }
    clone = folder / "clone"
    commits = generate(
        root, commit, clone, injects[kind](), num=COMMITS, first_bad=first_bad, rng=rng
    )
    package = Trees(folder / "trees", fill_package(clone))
    benchmarks = Trees(folder / "benchmarks", fill_benchmarks(clone))
    if kind == "tokens":
        (scenario,) = _scenarios(package, commits[first_bad], folder / bug)
        question: Question = Tokens(played_by(package, scenario), scenario.name)
    else:
        runs = Runs(benchmarks, find_cell(COUNTED if kind == "counts" else TIMED), rng)
        question = Counts(runs.count) if kind == "counts" else Times(runs.measure, runs.profile)
    memory = Memory()
    begin, cpu = wall_clock(), _cpu_seconds()
    finding = find(commit, commits, question, memory)
    seconds, cpu = wall_clock() - begin, _cpu_seconds() - cpu
    pairs = sum(len(one.metrics.get("log_ratios", ())) for one in memory.outcomes.values())
    outcome = judge(finding, commits[first_bad])
    return Trial(
        kind, "injected", number, outcome, finding.tested, pairs, round(seconds, 1), round(cpu, 1)
    )


def _scenarios(trees: Trees, commit: str, folder: Path) -> list[Path]:
    """Return the cases that the commit's own guard writes when it fails."""
    quick = ("--quick", "-k", "exact model", "--fail-fast", "--jobs", "1")
    trees.run(commit, "guard", *quick, "--repro", str(folder), "--results", str(folder))
    found = sorted(folder.glob("*.json"))[:1]
    if not found:
        raise HybridKVError(f"the guard of {commit[:9]} finds nothing wrong; inject another bug")
    return found


def _cpu_seconds() -> float:
    both = [resource.getrusage(of) for of in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(used.ru_utime + used.ru_stime for used in both)


# ---- both ----


def self_test(root: Path, commit: str, file: Path, repetitions: int, trials: int) -> list[Row]:
    """Draw `repetitions` histories of each kind, and make `trials` real ones in git.

    Append a row for each, and the rates.

    Injected trials that `file` has are not run again.
    """
    with tempfile.TemporaryDirectory(prefix="hybrid-kv-bisect-") as temporary:
        place = Path(temporary)
        noises = measure_noise(root, commit, file, place / "noise") if repetitions else []
        done = [draw(kind, number, noises) for kind in KINDS for number in range(repetitions)]
        known = [Trial(**json.loads(text)) for text in rows_here(file, "trial")["params"]]
        loops = 0
        for number in range(trials):
            for kind in ("tokens", "counts", "time"):
                if any((one.kind, one.number) == (kind, number) for one in known):
                    continue
                if kind == "time" and not loops:
                    loops = _loops(root, commit, place / "loops")
                with tempfile.TemporaryDirectory(dir=place) as folder:
                    trial = inject(kind, number, root, commit, Path(folder), loops)
                row = Row(
                    SUITE,
                    trial.kind,
                    "trial",
                    float(trial.outcome == "right"),
                    params=asdict(trial),
                )
                append_rows(file, [row], commit=commit)
                print(
                    f"injected {kind} {number}: {trial.outcome}, {trial.seconds:.0f} s", flush=True
                )
                known.append(trial)
    summary = list(rates([*done, *known]))
    append_rows(file, summary, commit=commit)
    return summary


def rates(trials: Sequence[Trial]) -> Iterator[Row]:
    """Yield for each kind and way how many trials were right and how many named a good commit.

    The intervals are exact, of 95 %.
    """
    for way, kind in itertools.product(("drawn", "injected"), KINDS):
        own = [trial for trial in trials if (trial.way, trial.kind) == (way, kind)]
        if not own:
            continue
        params = {
            "way": way,
            "commits": COMMITS,
            "questions": round(statistics.mean(trial.questions for trial in own), 1),
            "pairs": round(statistics.mean(trial.pairs for trial in own)),
            "longest_minutes": round(max(trial.seconds for trial in own) / 60, 1),
            "longest_cpu_minutes": round(max(trial.cpu_seconds for trial in own) / 60, 1),
        }
        for outcome, better in (("right", "higher"), ("wrong", "lower")):
            hits = sum(trial.outcome == outcome for trial in own)
            low, high = clopper_pearson(hits, len(own))
            yield Row(
                SUITE,
                kind,
                f"{outcome}_rate",
                hits / len(own),
                "",
                params,
                low,
                high,
                len(own),
                better,
            )


def print_rates(summary: Sequence[Row]) -> None:
    """Print a line for each kind and way."""
    for right, wrong in zip(summary[::2], summary[1::2], strict=True):
        print(
            f"{right.params['way']:8} {right.benchmark:11} right {right.value * right.n:.0f} of "
            f"{right.n}, a good commit named in {wrong.value * wrong.n:.0f}; "
            f"{right.params['questions']} commits tested, {right.params['pairs']} pairs, "
            f"at most {right.params['longest_cpu_minutes']} CPU minutes"
        )
