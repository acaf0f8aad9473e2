"""Error rates of `compare`: `hybrid-kv compare --self-test` runs it on equal and on slowed code.

A trial is one whole comparison of a version with itself, over all quick benchmarks of host code.
Without a inject every verdict but `same` is a false alarm, in either direction. With a inject, the
benchmarks in `INJECTED` do more work per call on the HEAD side, in proportion to their time, and
`slower` is a detection. All of them are slowed at once: each of their rates is a lower bound of
what it is for that one alone, since Holm's procedure requires no less of a benchmark when there are
more suspects. What is not injected in such a trial is equal code, but no false alarm is counted
there.

Each trial is one row, so that a self-test can be stopped and continued. Rates with their exact
intervals follow at the end; `bench.harness.verdicts` reads from them which benchmarks are
quarantined.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.harness import registry
from bench.harness.compare import STANDARD, Design, Selection, compare, find_revision
from bench.harness.inference import clopper_pearson
from bench.harness.verdicts import rows_here, timed_outcomes
from hybrid_kv.measure.results import Row, append_rows

SUITE = "operating_curve"
WHOLE = "any benchmark"
PERCENTS = (2, 5, 10)
# One of a suite, of 0.2 to 6 ms: host code in Python, in numpy and in torch.
INJECTED = (
    "block_tables/step[model=nemotron-3-nano,step=decode 64]",
    "slot_mapping/tokens[num_tokens=8192,cp_size=2]",
    "scheduler/decode[mode=none,K=0,num_reqs=16]",
    "causal_conv1d/prefill[model=nemotron-3-nano-tp8,num_tokens=256]",
    "state_update/slots[model=nemotron-3-nano-tp8,num_reqs=2,K=3]",
    "engine_step/decode_block[mode=all,K=3,num_reqs=4]",
)
# Two false alarms in 50 trials are too many, one is not: their 95 % lower bounds are 0.7 % and 0.1
# %.
TOLERATED_RATE = 0.005


@dataclass(frozen=True)
class Trial:
    """One comparison of a version with itself."""

    percent: int  # of the injected slowdown, 0 for none
    number: int
    slower: tuple[str, ...]
    faster: tuple[str, ...]
    suspects: tuple[str, ...]


def keeps_its_rate(false_alarms: int, trials: int) -> bool:
    """Return whether the true rate may be `TOLERATED_RATE`, at 95 %, by the false alarms."""
    return clopper_pearson(false_alarms, trials, level=0.90)[0] <= TOLERATED_RATE


def timed_keys() -> list[str]:
    """Return the benchmarks that a trial measures."""
    return [
        cell.key
        for cell in registry.cells(quick=True)
        if cell.tier == "cpu" and cell.promise is None
    ]


def experiment_id(keys: Sequence[str], design: Design) -> str:
    """Return an id of the benchmarks and the design: only trials of one id count together."""
    return f"{zlib.crc32(json.dumps([sorted(keys), asdict(design)], sort_keys=True).encode()):08x}"


def read_trials(file: Path, experiment: str) -> list[Trial]:
    """Return the trials of this experiment on this machine."""
    found = []
    for text in rows_here(file, "alarms")["params"]:
        params = json.loads(text)
        if params.pop("experiment") == experiment:
            found.append(
                Trial(**{k: tuple(v) if isinstance(v, list) else v for k, v in params.items()})
            )
    return found


def run_trial(revision: str, percent: int, number: int, design: Design, root: Path) -> Trial:
    """Compare the revision with itself, its HEAD side slowed by `percent`."""
    comparison = compare(
        revision,
        revision,
        Selection(tiers=("cpu",)),
        root=root,
        design=design,
        seed=1000 * percent + number,
        injects=dict.fromkeys(INJECTED, percent / 100) if percent else None,
    )
    outcomes = list(timed_outcomes(comparison.measured, design))

    def keys(verdict: str) -> tuple[str, ...]:
        return tuple(one.cell.key for one in outcomes if one.verdict == verdict)

    return Trial(percent, number, keys("slower"), keys("faster"), tuple(comparison.measured.repeat))


def trial_row(trial: Trial, experiment: str) -> Row:
    params = {**asdict(trial), "experiment": experiment}
    return Row(SUITE, "trial", "alarms", len(trial.slower), "alarms", params, better="equal")


def rates(trials: Sequence[Trial], keys: Sequence[str], experiment: str) -> Iterator[Row]:
    """Yield rates of false alarms, suspects and detections per benchmark.

    False alarms anywhere in the suite have a rate, too.
    """

    def rate(
        benchmark: str, metric: str, percent: int, hits: int, n: int, better: str, verdict: str = ""
    ) -> Row:
        low, high = clopper_pearson(hits, n)
        params = {"experiment": experiment, "inject_percent": percent}
        return Row(SUITE, benchmark, metric, hits / n, "", params, low, high, n, better, verdict)

    same = [trial for trial in trials if trial.percent == 0]
    if same:
        n = len(same)
        alarms = [{*trial.slower, *trial.faster} for trial in same]
        yield rate(WHOLE, "false_alarm_rate", 0, sum(map(bool, alarms)), n, "lower")
        for key in keys:
            hits = sum(key in found for found in alarms)
            yield rate(
                key,
                "false_alarm_rate",
                0,
                hits,
                n,
                "lower",
                "pass" if keeps_its_rate(hits, n) else "fail",
            )
            yield rate(
                key, "suspect_rate", 0, sum(key in trial.suspects for trial in same), n, "lower"
            )
    for percent in PERCENTS:
        injected = [trial for trial in trials if trial.percent == percent]
        for key in INJECTED if injected else ():
            hits = sum(key in trial.slower for trial in injected)
            yield rate(key, "detection_rate", percent, hits, len(injected), "higher")


def _schedule(repetitions: int, injects: int) -> Iterator[tuple[int, int]]:
    """Yield percent and number of each trial.

    Kinds take turns, so that a run that was stopped says something of each.
    """
    for kinds in ((0, 5), (2, 10)):
        for number in range(max(repetitions, injects)):
            yield from (
                (percent, number)
                for percent in kinds
                if number < (injects if percent else repetitions)
            )


def self_test(
    revision: str,
    file: Path,
    *,
    root: Path,
    repetitions: int = 50,
    injects: int = 20,
    design: Design = STANDARD,
) -> list[Row]:
    """Run the trials that `file` does not hold yet; append them and then the rates.

    Returns the rates.
    """
    commit = find_revision(root, revision).commit
    keys = timed_keys()
    experiment = experiment_id(keys, design)
    trials = read_trials(file, experiment)
    done = {(trial.percent, trial.number) for trial in trials}
    missing = [one for one in _schedule(repetitions, injects) if one not in done]
    try:
        for percent, number in missing:
            trial = run_trial(revision, percent, number, design, root)
            append_rows(file, [trial_row(trial, experiment)], commit=commit)
            trials.append(trial)
            kind = f"{percent} % injected" if percent else "equal code"
            slower, faster = (", ".join(keys) or "none" for keys in (trial.slower, trial.faster))
            said = f"slower: {slower}; faster: {faster}; {len(trial.suspects)} repeated"
            print(f"{kind}, trial {number}: {said}", flush=True)
    finally:
        summary = list(rates(trials, keys, experiment))
        if missing:
            append_rows(file, summary, commit=commit)
    return summary


def print_rates(summary: Sequence[Row]) -> None:
    """Print a line per benchmark."""
    import pandas as pd

    lines: dict[str, dict[str, str]] = {}
    for row in summary:
        assert row.ci_low is not None and row.ci_high is not None
        headings = {"false_alarm_rate": "false alarms", "suspect_rate": "repeated"}
        heading = headings.get(row.metric, f"{row.params['inject_percent']} % found")
        text = f"{row.value * row.n:.0f}/{row.n} ({row.ci_low:.0%}–{row.ci_high:.0%})"
        lines.setdefault(row.benchmark, {"benchmark": row.benchmark})[heading] = text
        if row.verdict == "fail":
            lines[row.benchmark]["quarantined"] = "quarantined"
    print(pd.DataFrame(lines.values()).fillna("").to_string(index=False))
