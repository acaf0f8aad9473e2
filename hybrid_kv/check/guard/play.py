"""Plays of scenarios: an engine under the observer's rules, its answers against the oracle's."""

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
class ScenarioFailure:
    """A scenario that went wrong: the first `rule` that it broke, and how.

    The rule is one of the sanitizer's or of the observer's, `tokens` for a request that differs
    from the oracle, or, if the engine failed by itself, the kind of error and the function that
    raised it.
    """

    scenario: Scenario
    rule: str
    report: str

    def __str__(self) -> str:
        return f"{self.scenario}: {self.report}"


@dataclass
class Differences:
    """The failures of scenarios, and how often each pattern happened in them."""

    wrong: list[ScenarioFailure] = field(default_factory=list)
    seen: Counter[str] = field(default_factory=Counter)
    # Of the covering design, those that had their effect.
    cells: list[Cell] = field(default_factory=list)
    num_requests: int = 0
    num_scenarios: int = 0

    def __iadd__(self, other: Differences) -> Differences:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)
        return self


def rule_of(error: Exception) -> str:
    """Return the name of the rule for an engine that failed by itself.

    It is the kind of the error and the function that raised it.
    """
    return f"{type(error).__name__} in {traceback.extract_tb(error.__traceback__)[-1].name}"


@contextmanager
def unwarned() -> Iterator[None]:
    """Silence the warnings that a guard provokes on purpose.

    Such as drafts without a proposer, short prompts, damaged files.
    """
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
    """Run a scenario as `run_scenario` does, and return the outputs too.

    Args:
        observers: they see each step before the guard's observer does.
    """
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
            in_wave = slice(len(outputs), len(outputs) + wave)
            prompts = scenario.prompts[in_wave]
            params = scenario.params[in_wave]
            outputs += llm.generate(prompts, params, progress=False, on_step=observer)
        observer.finish(llm, outputs)
    except (RuleError, SanitizerError) as error:
        result.wrong = [ScenarioFailure(scenario, error.rule, str(error))]
        return result, outputs
    except Exception as error:
        result.wrong = [
            ScenarioFailure(scenario, rule_of(error), f"{type(error).__name__}: {error}")
        ]
        return result, outputs
    result.cells = [observer.cell] if observer.cell is not None else []
    for i, (output, expected) in enumerate(zip(outputs, answers, strict=True)):
        if output.finish_reason == "abort" and str(i) in observer.aborted:
            expected = expected[: len(output.token_ids)]
        if output.finish_reason == "error" and observer.never_fits(llm, i):
            expected = []
        result.wrong += _wrong_output(scenario, i, output, expected)
    return result, outputs


def _wrong_output(
    scenario: Scenario, number: int, output: RequestOutput, expected: list[int]
) -> list[ScenarioFailure]:
    """Return how a request's output differs from the expected answer; empty if it does not."""
    prompt = scenario.prompts[number]
    if output.token_ids != expected:
        first = common_prefix(output.token_ids, expected)
        report = f"request {number} ({len(prompt)} prompt tokens) differs at output token {first}"
        error_text = f": {output.error}" if output.error else ""
        return [ScenarioFailure(scenario, "tokens", report + error_text)]
    num_top = scenario.params[number].logprobs
    if not expected or num_top is None:
        return []
    due = answer_book(scenario.layers).logprobs([*prompt, *expected])
    problem = wrong_logprob(output, due, num_top, LOGPROB_LIMIT)
    return [ScenarioFailure(scenario, "logprobs", f"request {number}{problem}")] if problem else []


def wrong_logprob(output: RequestOutput, due: torch.Tensor, num_top: int, limit: float) -> str:
    """Return the first token whose log-probability, or whose best ones, are wrong; empty if none.

    Args:
        due: [num_tokens - 1, vocab_size], of the tokens after the first.
        num_top: how many of the best tokens the request wants.
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
    for place, (logprob, row, token) in enumerate(
        zip(given, due[begin:], tokens, strict=True), begin + 1
    ):
        ids = [token, *(best for best, _ in logprob.top)]
        values = [logprob.logprob, *(value for _, value in logprob.top)]
        reported = torch.tensor([*values, *values[1:]], dtype=row.dtype)
        expected = torch.cat([row[ids], row.topk(num_top).values])
        if reported.shape != expected.shape or float((reported - expected).abs().max()) > limit:
            expected_values = expected[: 1 + num_top].tolist()
            return f", token {place}: log-probabilities {values}, not {expected_values}"
    return ""


def _engine(scenario: Scenario, sequences: Sequence[Sequence[int]]) -> LLM:
    model = answer_book(scenario.layers).model
    options = scenario.options
    if scenario.drafts in ("none", "ngram", "dflash"):
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
    """Yield the results of scenarios in the order of their seeds, however many processes run them.

    Args:
        seeds: may be without end.
    """
    if pool is None:
        yield from (run_scenario(draw_scenario(seed)) for seed in seeds)
        return
    in_flight: deque[Future[list[Differences]]] = deque()
    try:
        while True:
            with deaf_to_ctrl_c():  # A submit may start a worker.
                while len(in_flight) < 3 * workers:
                    batch = list(islice(seeds, 4))
                    if not batch:
                        break
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
        seen: how often each pattern happened.
    """

    name: str
    seen: Counter[str]

    def problems(self) -> Iterator[str]:
        """Yield what is wrong; nothing if all is well. An exception is wrong, too."""


def play_seeds(
    run: Run, make: Callable[[int], Play], required: Sequence[str], name: str, counted: str
) -> CheckResult:
    """Play a section as often as `run` wants, each time with another seed, and sum up in a line.

    Args:
        required: patterns that must happen in one of the plays, or they are void.
        counted: the pattern that happens as often as something could be wrong.
    """
    begin = time.perf_counter()
    failed_after = None
    wrong = list[str]()
    seen = Counter[str]()
    for i in range(run.amount):
        with unwarned():
            play = make(run.seed * 1_000_003 + i)
            try:
                problems = list(play.problems())
            except Exception as error:
                problems = [f"{rule_of(error)}: {error}"]
        wrong += (f"{play.name}: {problem}" for problem in problems)
        seen += play.seen
        if wrong and failed_after is None:
            failed_after = time.perf_counter() - begin
        run.progress(1)
        if wrong and run.fail_fast:
            break
    missing = [pattern for pattern in required if not seen[pattern]]
    if not wrong and missing:
        wrong.append(f"void: never {', '.join(missing)}")
    return CheckResult(
        name,
        value=len(wrong),
        unit="requests",
        limit="0",
        n=seen[counted],
        detail=wrong[0] if wrong else "",
        params={"seed": run.seed},
        metrics={pattern.replace(" ", "_"): seen[pattern] for pattern in required},
        failed_after=failed_after,
    )
