"""What exact weights alone find of a bug: probes of a changed copy of the engine, by one process.

The probes know nothing of the bug; each is probed in the same settings, without a tolerance. Right
answers are recorded once, of the engine without a bug, each held against transformers.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mutants.runner.guard import Catch, LoopError, time_limit

if TYPE_CHECKING:
    from hybrid_kv.check.probes.session import Outcome

WEIGHTS = "weights"
LIMIT = 60.0  # CPU seconds of all probes
RECORD_LIMIT = 2400.0  # the same, where transformers judges each answer


class Cell(NamedTuple):
    """A checkpoint, a setting and the probes that are asked of it."""

    family: str
    settings: Mapping[str, str]
    probes: Sequence[str]


_CROWDED = {"prefix": "align", "spec": "ngram3", "rows": "16", "blocks": "tight", "async": "on"}
# Those first in which most bugs act for least: windows alone, in blocks of 16 tokens, with drafts
# across their boundaries, and more rows than a step has tokens; states at each boundary; one row,
# with drafts of the model's own head; a pool that evicts, loads and lets requests sit steps out;
# the same with a history of inputs instead of states, in blocks that attention takes in parts.
CELLS = (
    Cell(
        "lfm2",
        {"prefix": "align", "spec": "ngram3", "chunk": "17", "rows": "16"},
        (
            "one token behind a hit",
            "one token beside others",
            "as long as a verify step",
            "one token is left",
            "answers across a boundary",
            "asleep",
        ),
    ),
    Cell(
        "granitemoehybrid",
        {"prefix": "all", "spec": "ngram3"},
        ("one token behind a hit",),
    ),
    Cell("qwen3_5_text", {"spec": "mtp1", "rows": "1"}, ("alone",)),
    Cell("lfm2", {**_CROWDED, "offload": "host"}, ("many at once, all with drafts",)),
    Cell(
        "granitemoehybrid",
        {**_CROWDED, "scheme": "recompute", "layout": "flashinfer"},
        ("many at once, all with drafts",),
    ),
)
ANSWERS = "answers.json"

Answers = dict[tuple[int, ...], tuple[int, ...]]  # the longest right one by its prompt


def write_checkpoints(folder: Path) -> None:
    """Write the checkpoints of all cells."""
    from hybrid_kv.models.exact_weights.checkpoint import write_exact_weights

    for family in {cell.family for cell in CELLS}:
        write_exact_weights(family, folder / family)


def run(task: Mapping[str, Any], case: Path) -> dict[str, Any]:
    """Probe the copy in each cell until an answer is wrong; `task` names the `folder`."""
    folder = Path(task["folder"])
    texts = json.loads((folder / ANSWERS).read_text()) if (folder / ANSWERS).exists() else {}
    known = {family: _read(answers) for family, answers in texts.items()}
    catch = Catch()
    try:
        with time_limit(RECORD_LIMIT if task.get("record") else LIMIT):
            catch = _first(folder, known)
    except LoopError as error:  # what the time allowed has found nothing
        if task.get("record"):
            catch = Catch("run", "time limit", str(error))
    except Exception as error:
        catch = Catch("crash", type(error).__name__, str(error))
    if task.get("record"):
        if catch.section:
            raise AssertionError(f"without a bug, {catch}")
        written = {family: _written(answers) for family, answers in known.items()}
        (folder / ANSWERS).write_text(json.dumps(written))
    return {**asdict(catch), "seconds": sum(os.times()[:4])}


def _read(answers: Mapping[str, list[int]]) -> Answers:
    return {tuple(map(int, key.split())): tuple(answer) for key, answer in answers.items()}


def _written(answers: Answers) -> dict[str, tuple[int, ...]]:
    return {" ".join(map(str, prompt)): answer for prompt, answer in answers.items()}


class _WrongError(Exception):
    """Ends the probes; its argument is the outcome."""


def _first(folder: Path, known: dict[str, Answers]) -> Catch:
    """Return what the first cell finds that finds something."""
    import torch

    from hybrid_kv.check.probes.guarded import Guarded, ask
    from hybrid_kv.check.targets.ours import KIND

    torch.set_num_threads(1)
    num_answers = 0

    def report(outcome: Outcome) -> None:
        nonlocal num_answers
        num_answers += outcome.num_answers
        is_dead = outcome.probe == "start" or outcome.is_last
        if outcome.verdict == "wrong" or is_dead:
            raise _WrongError(outcome)

    for family, settings, probes in CELLS:
        guarded = Guarded(KIND, str(folder / family))
        judge = judge_of(folder / family, known.setdefault(family, {}))
        guarded.judges["float32"] = judge
        try:
            ask(guarded, dict(settings), probes, report)
        except _WrongError as wrong:
            (outcome,) = wrong.args
            setting = " ".join([family, *(f"{name}={level}" for name, level in settings.items())])
            return Catch("probes", outcome.probe, outcome.detail, num_answers, setting)
    return Catch(requests=num_answers)


def judge_of(folder: Path, known: Answers) -> Any:
    """Return a judge that knows recorded answers, and asks transformers for others."""
    from hybrid_kv.check.probes.judge import RIGHT, AnswerJudgement, Judge, WeightsJudge
    from hybrid_kv.check.targets.target import Answer, Ask

    class Recorded(Judge):
        """That of exact weights: an answer is the recorded one, token by token, or it is wrong."""

        is_exact = True

        def __init__(self) -> None:
            super().__init__(None)
            self.trusted = self.is_calibrated = True
            self._weights: WeightsJudge | None = None

        def needs_alone(self, ask: Ask) -> bool:
            return False

        def _judge(self, ask: Ask, answer: Answer, alone: Answer | None) -> AnswerJudgement:
            expected, texts = known.get(ask.prompt, ()), (answer.token_ids, *answer.others)
            least = min(ask.max_tokens, ask.abort_after or ask.max_tokens)
            if len(expected) < max(least, *map(len, texts)):
                return self._by_transformers(ask, answer)
            for tokens in texts:
                if tokens != expected[: len(tokens)] or len(tokens) < least:
                    said = f"{list(tokens)}, not {list(expected[: ask.max_tokens])}"
                    return AnswerJudgement("wrong", said)
            sure = zip(answer.token_ids, answer.logprobs, strict=False)
            if any(row[token] != 0.0 for token, row in sure):
                return AnswerJudgement("wrong", "the log-probability of a right token is not 0")
            return RIGHT

        def _by_transformers(self, ask: Ask, answer: Answer) -> AnswerJudgement:
            self._weights = self._weights or WeightsJudge(str(folder))
            greedy = replace(ask, temperature=0.0)
            judgement = self._weights.judge(greedy, self._weights.possible(answer), None)
            is_longer = len(answer.token_ids) > len(known.get(ask.prompt, ()))
            if judgement is RIGHT and is_longer:
                known[ask.prompt] = answer.token_ids
            return judgement

    return Recorded()
