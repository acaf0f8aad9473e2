"""Plays scenarios: an engine under the observer's rules, its answers against the oracle's."""

from __future__ import annotations

import logging
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

import torch

from hybrid_kv.check.guard.observer import Observer
from hybrid_kv.check.guard.poison import poison
from hybrid_kv.check.guard.registry import CheckResult, Run
from hybrid_kv.check.guard.scenario import Cell, Scenario, ScriptedProposer, answer_book
from hybrid_kv.check.guard.step import RuleError, common_prefix
from hybrid_kv.check.guard.traffic import draw_scenario
from hybrid_kv.engine.llm import LLM, RequestOutput
from hybrid_kv.errors import deaf_to_ctrl_c
from hybrid_kv.observe import EngineObserver
from hybrid_kv.sanitizer import SanitizerError

LOGPROB_LIMIT = 1e-3  # differences of residues are integers


@dataclass(frozen=True)
class Failure:
    """A scenario that went wrong: the first `rule` that it broke, and how.

    The rule is one of the sanitizer's or of the observer's, `tokens` for a request that differs from the oracle, or,
    if the engine failed by itself, the kind of error and the function that raised it.
    """

    scenario: Scenario
    rule: str
    report: str

    def __str__(self) -> str:
        return f"{self.scenario}: {self.report}"


@dataclass
class Differences:
    """What scenarios had wrong (nothing, if all is well), and what happened in them."""

    wrong: list[Failure] = field(default_factory=list)
    seen: Counter[str] = field(default_factory=Counter)
    cells: list[Cell] = field(
        default_factory=list
    )  # of the covering design, those that had their effect
    num_requests: int = 0
    num_scenarios: int = 0

    def __iadd__(self, other: Differences) -> Differences:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)
        return self


def rule_of(error: Exception) -> str:
    """What an engine that failed by itself has broken: the kind of error and the function that raised it."""
    return f"{type(error).__name__} in {traceback.extract_tb(error.__traceback__)[-1].name}"


@contextmanager
def unwarned() -> Iterator[None]:
    """A guard does on purpose what a user is warned of: drafts without a proposer, short prompts, damaged files."""
    logger = logging.getLogger("hybrid_kv")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


@unwarned()
def run_scenario(scenario: Scenario) -> Differences:
    """Run one scenario against the oracle, every step under the observer's rules."""
    return play(scenario)[0]


def play(
    scenario: Scenario, observers: Sequence[EngineObserver] = ()
) -> tuple[Differences, list[RequestOutput]]:
    """`run_scenario`, and the outputs. `observers` see each step before the observer does."""
    options = scenario.options
    book = answer_book(scenario.layers)
    limit = options["max_model_len"]
    requests = list(zip(scenario.prompts, scenario.params, strict=True))
    sequences = [
        [*prompt, *book.without_stop(prompt, params, limit)] for prompt, params in requests
    ]
    answers = [book.answer(prompt, params, limit) for prompt, params in requests]
    ends = [
        len(prompt) + len(answer) for prompt, answer in zip(scenario.prompts, answers, strict=True)
    ]
    observer = Observer(scenario, sequences, ends)
    result = Differences(seen=observer.seen, num_requests=len(requests), num_scenarios=1)
    outputs: list[RequestOutput] = []
    try:
        llm = _engine(scenario, sequences)
        poison(llm)
        llm.observers[:0] = observers
        observer.watch(llm)
        for wave in scenario.waves or (len(requests),):
            part = slice(len(outputs), len(outputs) + wave)
            prompts = scenario.prompts[part]
            params = scenario.params[part]
            outputs += llm.generate(prompts, params, progress=False, on_step=observer)
        observer.finish(llm, outputs)
    except (RuleError, SanitizerError) as error:
        result.wrong = [Failure(scenario, error.rule, str(error))]
        return result, outputs
    except Exception as error:
        result.wrong = [Failure(scenario, rule_of(error), f"{type(error).__name__}: {error}")]
        return result, outputs
    result.cells = [observer.cell] if observer.cell is not None else []
    for i, (output, expected) in enumerate(zip(outputs, answers, strict=True)):
        if output.finish_reason == "abort" and str(i) in observer.aborted:
            expected = expected[: len(output.token_ids)]
        if output.finish_reason == "error" and observer.never_fits(llm, i):
            expected = []
        if output.token_ids != expected:
            first = common_prefix(output.token_ids, expected)
            report = f"request {i} ({len(scenario.prompts[i])} prompt tokens) differs at output token {first}"
            error_text = f": {output.error}" if output.error else ""
            result.wrong.append(Failure(scenario, "tokens", report + error_text))
        elif expected and (num_top := scenario.params[i].logprobs) is not None:
            due = book.logprobs([*scenario.prompts[i], *expected])
            if problem := wrong_logprob(output, due, num_top, LOGPROB_LIMIT):
                result.wrong.append(Failure(scenario, "logprobs", f"request {i}{problem}"))
    return result, outputs


def wrong_logprob(output: RequestOutput, due: torch.Tensor, num_top: int, limit: float) -> str:
    """The first token whose log-probability is not `due`, or the best ones beside it; empty if none.

    Args:
        due: [num_tokens - 1, vocab_size], of the tokens behind the first.
        num_top: how many of the best ones it wants.
        limit: of a difference.
    """
    given = output.logprobs
    begin = len(output.prompt_token_ids) - 1
    if given is None:
        return ""
    if output.prompt_logprobs is not None:
        given = [*output.prompt_logprobs, *given]
        begin = 0
    if len(given) != len(due) - begin:
        return f": {len(given)} log-probabilities, not {len(due) - begin}"
    tokens = [*output.prompt_token_ids, *output.token_ids][begin + 1 :]
    for place, (one, row, token) in enumerate(
        zip(given, due[begin:], tokens, strict=True), begin + 1
    ):
        ids = [token, *(best for best, _ in one.top)]
        values = [one.logprob, *(value for _, value in one.top)]
        found = torch.tensor([*values, *values[1:]], dtype=row.dtype)
        expected = torch.cat([row[ids], row.topk(num_top).values])
        if found.shape != expected.shape or float((found - expected).abs().max()) > limit:
            return f", token {place}: log-probabilities {values}, not {expected[: 1 + num_top].tolist()}"
    return ""


def _engine(scenario: Scenario, sequences: Sequence[Sequence[int]]) -> LLM:
    model = answer_book(scenario.layers).model
    options = scenario.options
    if scenario.drafts in ("none", "ngram"):
        return LLM(model, **options)
    proposer = ScriptedProposer(
        scenario.drafts,
        options["num_speculative_tokens"],
        sequences,
        [len(prompt) for prompt in scenario.prompts],
        options.get("block_size", options.get("mamba_block_size", 8)),
        model.vocab_size,
    )
    return LLM(model, proposer=proposer, **options)


def _run_batch(seeds: Sequence[int]) -> list[Differences]:
    torch.set_num_threads(1)
    return [run_scenario(draw_scenario(seed)) for seed in seeds]


def run_scenarios(
    seeds: Iterator[int], pool: Executor | None, workers: int
) -> Generator[Differences]:
    """Scenarios in the order of their seeds, which may be without end, whatever the number of processes."""
    if pool is None:
        yield from (run_scenario(draw_scenario(seed)) for seed in seeds)
        return
    in_flight: deque[Future[list[Differences]]] = deque()
    try:
        while True:
            with deaf_to_ctrl_c():  # A submit may start a worker.
                while len(in_flight) < 3 * workers and (batch := list(islice(seeds, 4))):
                    in_flight.append(pool.submit(_run_batch, batch))
            if not in_flight:
                return
            yield from in_flight.popleft().result()
    finally:
        for future in in_flight:
            future.cancel()


class Play(Protocol):
    """A play of a section, by its seed.

    Attributes:
        name: the seed and what it has drawn.
        seen: how often what happened.
    """

    name: str
    seen: Counter[str]

    def problems(self) -> Iterator[str]:
        """What is wrong; nothing if all is well. An exception is wrong, too."""


def play_seeds(
    run: Run, make: Callable[[int], Play], required: Sequence[str], name: str, counted: str
) -> CheckResult:
    """As many plays of a section as `run` wants, each by a seed of its own, as one line.

    Args:
        required: what has to happen in one of them, or they are void.
        counted: what happens as often as something could be wrong.
    """
    begin = time.perf_counter()
    failed_after = None
    wrong = list[str]()
    seen = Counter[str]()
    for i in range(run.amount):
        with unwarned():
            play = make(run.seed * 1_000_003 + i)
            try:
                found = list(play.problems())
            except Exception as error:
                found = [f"{rule_of(error)}: {error}"]
        wrong += (f"{play.name}: {text}" for text in found)
        seen += play.seen
        if wrong and failed_after is None:
            failed_after = time.perf_counter() - begin
        run.progress(1)
        if wrong and run.fail_fast:
            break
    if not wrong and (missing := [what for what in required if not seen[what]]):
        wrong.append(f"void: never {', '.join(missing)}")
    return CheckResult(
        name,
        len(wrong),
        "requests",
        "0",
        seen[counted],
        wrong[0] if wrong else "",
        {"seed": run.seed},
        {what.replace(" ", "_"): seen[what] for what in required},
        failed_after=failed_after,
    )
