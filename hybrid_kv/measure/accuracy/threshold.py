"""Floors: scores below which a run is an alarm, computed from at least ten runs.

A floor is a smoke alarm. It notices that a model has broken; it cannot see a loss of two points,
which takes a paired comparison (`accuracy.compare`). It is one-sided, and for the number of
questions that it was made from.

What it allows for depends on what varied between the runs (`sd` is between them):

- The questions did (gsm8k_synth, several seeds): `min(mean - 4 sd, prediction)`. `prediction` is
  the score that the next run misses with a chance of 3.2e-5 (what four sd are in a normal
  distribution), given all answers so far: a beta-binomial with Jeffreys' prior. A model that made
  no mistake has sd 0, and the first one shall be no alarm: 3,000 right answers leave 250 new ones a
  floor of 98.8 %.
- The same questions, other answers (a real model on a GPU): `mean - 4 sd`, where sd is at least one
  question.
- Nothing (a deterministic engine, the same questions): sd is 0, and ten runs tell no more than one.
  What may come, say another version of torch, is unknown; `prediction` from that one run is the
  widest that binomial noise explains.
"""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from scipy.stats import betabinom, norm

from hybrid_kv.config import ConfigError, HybridKVError
from hybrid_kv.files import read_text, write_whole
from hybrid_kv.measure.accuracy.run import FLEXIBLE, STRICT, AccuracyResult
from hybrid_kv.measure.results import Row

if TYPE_CHECKING:
    import pandas as pd


FILE = Path(__file__).with_name("thresholds.yaml")
MAX_QUESTIONS = 10**6  # a floor takes memory for each
MIN_RUNS = 10
NUM_SD = 4
METRICS = {STRICT: "exact_match_strict", FLEXIBLE: "exact_match_flexible"}
# A run with any other parameter used the engine in a special way: floors are of the plain one, and
# hold for all.
_PLAIN = {"model", "task", "seed", "limit", "num_fewshot", "lm_eval"}
_HEAD = (
    "# Written by `hybrid-kv accuracy threshold` from rows of results. Do not edit: a changed "
    "floor is refused.\n"
)


@dataclass(frozen=True)
class Floor:
    """An entry of thresholds.yaml.

    `distinct`: different questions in all runs; `mean` and `sd` are of their scores.
    """

    model: str
    task: str
    filter: str
    questions: int
    runs: int
    distinct: int
    mean: float
    sd: float
    floor: float
    date: str
    commit: str

    def __post_init__(self) -> None:
        kinds = {"int": int, "float": float, "str": str}
        for field in fields(self):
            value = getattr(self, field.name)
            if type(value) is not kinds[str(field.type)]:
                raise ConfigError(f"{field.name}: {value!r} is not of type {field.type}")
        if self.runs < MIN_RUNS:
            raise ConfigError(f"runs: {self.runs} are too few for a floor; it takes {MIN_RUNS}")
        for name in ("questions", "distinct"):
            count = getattr(self, name)
            if not 1 <= count <= MAX_QUESTIONS:
                raise ConfigError(f"{name}: {count} must be 1 to {MAX_QUESTIONS:,}")
        expected = floor_of(self.mean, self.sd, self.questions, self.distinct)
        if not math.isclose(self.floor, expected, abs_tol=1e-9):
            raise ConfigError(
                f"floor: {self.floor} does not follow from the runs ({expected:.6g}); was it "
                "edited?"
            )

    @property
    def key(self) -> tuple[str, str, str, int]:
        return self.model, self.task, self.filter, self.questions


def floor_of(mean: float, sd: float, questions: int, distinct: int) -> float:
    """Compute the floor of a run of `questions` from runs with `distinct` different ones.

    See the module's docstring.
    """
    if sd > 0 and distinct == questions:
        return max(0.0, mean - NUM_SD * max(sd, 1 / questions))
    right = mean * distinct
    prediction = (
        betabinom.ppf(norm.sf(NUM_SD), questions, right + 0.5, distinct - right + 0.5) / questions
    )
    return max(0.0, min(mean - NUM_SD * sd, float(prediction)))


def floor_from_rows(
    frame: pd.DataFrame, model: str, task: str, answer_filter: str, questions: int
) -> Floor:
    """Compute a floor from clean runs of the plain engine.

    They are those of the newest commit that has enough of them.

    Args:
        frame: rows as `hybrid_kv.measure.results.read_rows` gives them.
        model, task, answer_filter, questions: which runs count.

    Raises:
        HybridKVError: there are fewer than ten, or their floor could never raise an alarm.
    """
    metric = METRICS[answer_filter]
    frame = frame[
        (frame["suite"] == "accuracy") & (frame["benchmark"] == task) & (frame["metric"] == metric)
    ]
    frame = frame[
        (frame["n"] == questions) & (frame["commit"] != "") & ~frame["dirty"].astype(bool)
    ]
    params = frame["params"].map(json.loads)
    plain = params.map(lambda settings: settings.get("model") == model and set(settings) <= _PLAIN)
    frame = frame[plain.astype(bool)]
    params = params[plain.astype(bool)]
    runs = frame.drop_duplicates("run_id").groupby("commit", sort=False)
    sizes = runs.size()
    most = max(sizes, default=0)
    if most < MIN_RUNS:
        raise HybridKVError(
            f"{most} clean runs of {model} on {questions} questions of {task} at one commit; a "
            f"floor takes {MIN_RUNS}: hybrid-kv accuracy --limit {questions} --seed 0, 1, 2 …"
        )
    commit = str(sizes[sizes >= MIN_RUNS].index[-1])
    used = runs.get_group(commit)
    scores = [float(score) for score in used["value"]]
    seeds = {repr(params[index].get("seed")) for index in used.index}
    mean = statistics.fmean(scores)
    sd = statistics.stdev(scores)
    # A seed of gsm8k chooses the shots; the questions stay.
    distinct = questions * (len(seeds) if task == "gsm8k_synth" else 1)
    floor = floor_of(mean, sd, questions, distinct)
    if floor == 0:
        raise HybridKVError(
            f"the floor of {model} on {task} would be 0 (mean {mean:.3f}): no run could fall below "
            "it"
        )
    day = str(used["time_utc"].max())[:10]
    return Floor(
        model, task, answer_filter, questions, len(scores), distinct, mean, sd, floor, day, commit
    )


def read_floors(file: str | Path = FILE) -> list[Floor]:
    """Read all entries of a thresholds file.

    Raises:
        ConfigError: it cannot be read, has an unknown or missing key, an entry twice, or one that
            was edited.
    """
    import yaml

    try:
        document = yaml.safe_load(read_text(Path(file)))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        reason = getattr(error, "strerror", None) or getattr(error, "problem", None) or error
        raise ConfigError(f"{file} cannot be read: {reason}") from None
    if (
        not isinstance(document, dict)
        or set(document) != {"floors"}
        or not isinstance(document["floors"], list)
    ):
        raise ConfigError(f"{file} must hold a list 'floors' and nothing else")
    floors: list[Floor] = []
    for number, entry in enumerate(document["floors"], 1):
        try:
            floor = Floor(**entry)
        except (TypeError, ConfigError) as error:  # the former of keys, and names them
            raise ConfigError(f"{file} entry {number}: {error}") from None
        if any(other.key == floor.key for other in floors):
            raise ConfigError(f"{file} entry {number}: {floor.key} is there twice")
        floors.append(floor)
    return floors


def find_floor(
    model: str, task: str, answer_filter: str, questions: int, file: str | Path = FILE
) -> Floor:
    """Return the floor for a run.

    Raises:
        ConfigError: there is none, also where there is one for another number of questions.
    """
    floors = read_floors(file)
    for floor in floors:
        if floor.key == (model, task, answer_filter, questions):
            return floor
    sizes = [str(f.questions) for f in floors if f.key[:3] == (model, task, answer_filter)]
    other = f"; there is one for --limit {' or '.join(sizes)}" if sizes else ""
    raise ConfigError(
        f"{file} has no floor for {model}, {task}, {answer_filter}, {questions} questions{other}"
    )


def write_floor(floor: Floor, file: str | Path = FILE) -> Floor | None:
    """Put a floor in the place of the one for the same runs, which is returned; the others stay."""
    import yaml

    file = Path(file)
    floors = {other.key: other for other in (read_floors(file) if file.exists() else [])}
    before = floors.get(floor.key)
    floors[floor.key] = floor
    entries = [asdict(floors[key]) for key in sorted(floors)]
    write_whole(file, _HEAD + yaml.safe_dump({"floors": entries}, sort_keys=False))
    return before


def mark(rows: list[Row], floor: Floor, passed: bool) -> list[Row]:
    """Return the rows of a run, with the floor's verdict on its score."""
    metric = METRICS[floor.filter]
    verdict = "pass" if passed else "fail"
    return [
        replace(row, verdict=verdict, baseline_commit=floor.commit) if row.metric == metric else row
        for row in rows
    ]


def check(result: AccuracyResult, floor: Floor) -> tuple[bool, str]:
    """Return whether a run is at or above its floor, and a line that says so.

    Raises:
        ConfigError: the run had another number of questions than the floor is for.
    """
    if result.n != floor.questions:
        raise ConfigError(f"the floor is for {floor.questions} questions, the run had {result.n}")
    score = result.accuracy if floor.filter == STRICT else result.accuracy_flexible
    passed = score >= floor.floor
    relation = ">=" if passed else "<"
    line = (
        f"{floor.filter} {score:.2%} {relation} floor {floor.floor:.2%} (mean {floor.mean:.2%}, sd "
        f"{floor.sd:.2%}, "
    )
    line += f"{floor.runs} runs at {floor.commit[:10]}); {result.invalid_rate:.1%} invalid"
    return passed, line
