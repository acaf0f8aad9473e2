"""Reduces a failing scenario: what can go without another rule being the first to break, goes.

Over requests, disturbances, layers, engine options, prompt tokens and sampling parameters, until nothing more can go.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any, Literal

from hybrid_kv.check.guard.play import Failure, play, run_scenario, unwarned
from hybrid_kv.check.guard.scenario import (
    SCRIPTS,
    Event,
    Scenario,
    SmallBlocksFirst,
    SmallKVFirst,
    answer_book,
)
from hybrid_kv.check.guard.step import common_prefix
from hybrid_kv.check.minimize import Shrinker, TimeUpError
from hybrid_kv.observe import EngineObserver
from hybrid_kv.request import ScheduledRequest
from hybrid_kv.sampling import SamplingParams

ROOMY = 400  # blocks: no scenario of the guard fills them
TIGHT = (4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 50, 60)
# Without these an engine would choose by itself, or the sanitizer would have no story to tell.
_KEPT = ("block_size", "device", "mamba_block_size", "max_model_len", "num_blocks", "sanitize")
# The simpler, the earlier. What an option has is not tried, nor what comes behind it.
_SIMPLER: dict[str, tuple[Any, ...]] = {
    "attention_backend": (SmallBlocksFirst.name, SmallKVFirst.name),
    "block_size": (4, 8),
    "mamba_block_size": (4, 8),
    "captured_batch_sizes": ((), (4,)),
    "max_model_len": (32, 64, 96),
    "max_num_batched_tokens": (
        4,
        8,
        16,
        32,
        64,
    ),  # where chunks are needed, prompts are as long as they are
    "max_num_seqs": (1, 2, 3, 4),
    "num_blocks": (ROOMY,),
    "num_speculative_tokens": (1, 2, 3, 4, 5, 6),
}


@dataclass(frozen=True)
class Shrunk:
    """A failure as small as it got. `seconds` are of one core; `is_minimal`: nothing more could go in that time."""

    failure: Failure
    num_plays: int
    seconds: float
    is_minimal: bool


class _Steps(EngineObserver):
    """Counts steps; a play that goes on for much longer than the best one is ended."""

    def __init__(self, most: int) -> None:
        self.count = 0
        self._most = most

    def on_schedule(self, scheduled: Sequence[ScheduledRequest]) -> None:
        self.count += 1
        if self.count > self._most:
            raise TimeUpError


def shrink(failure: Failure, seconds: float = 60.0) -> Shrunk:
    """The smallest scenario that could be found in the time, and that breaks the same rule first.

    The sanitizer is turned on if the scenario still fails then, since it names the first thing that is wrong; what is
    kept is the rule that breaks first with it. The same failure gives the same scenario, as long as time is left.
    """
    begin = time.process_time()
    sanitized = replace(
        failure.scenario, options={**failure.scenario.options, "sanitize": True}, cell={}
    )
    seen = run_scenario(sanitized).wrong
    shrinker = _Shrinker(seen[0] if seen else failure, begin + seconds - time.process_time())
    with unwarned():
        shrinker.run()
    return Shrunk(
        shrinker.failure, shrinker.num_plays, time.process_time() - begin, shrinker.is_minimal
    )


@dataclass(frozen=True)
class _Text:
    """A prompt: `num_answer` tokens of what request `parent` got behind that one's prompt, then its own tokens.

    A second turn stays one when the first becomes shorter and gets another answer.
    """

    own: list[int]
    parent: int | None = None
    num_answer: int = 0


def _texts(scenario: Scenario) -> list[_Text]:
    found = []
    for i, prompt in enumerate(scenario.prompts):
        text = _Text(prompt)
        for parent in range(i):
            known = [*scenario.prompts[parent], *_answer(scenario, parent)]
            first = len(scenario.prompts[parent])
            same = common_prefix(prompt, known)
            if same > first + text.num_answer:
                text = _Text(prompt[same:], parent, same - first)
        found.append(text)
    return found


def _answer(scenario: Scenario, i: int) -> list[int]:
    limit = scenario.options["max_model_len"]
    return answer_book(scenario.layers).answer(scenario.prompts[i], scenario.params[i], limit)


def _with_texts(scenario: Scenario, texts: Sequence[_Text]) -> Scenario:
    """With these prompts; an empty one gets a token."""
    made = replace(scenario, prompts=[])
    for text in texts:
        before: list[int] = []
        if text.parent is not None:
            before = [*made.prompts[text.parent], *_answer(made, text.parent)[: text.num_answer]]
        made.prompts.append([*before, *text.own] or [0])
    return made


class _Shrinker(Shrinker[Scenario]):
    def __init__(self, failure: Failure, seconds: float) -> None:
        super().__init__(failure.scenario, seconds)
        self.failure = failure
        self._most_steps = sys.maxsize

    def play(self, case: Scenario) -> Scenario | None:
        steps = _Steps(self._most_steps)
        wrong = play(case, [steps])[0].wrong
        if not wrong or wrong[0].rule != self.failure.rule:
            return None
        self.failure = wrong[0]
        self._most_steps = steps.count + 8
        return case

    def passes(self) -> Sequence[Callable[[], object]]:
        again = partial(self.fails, self.case)  # counts its steps
        return (
            again,
            self._requests,
            self._disturbances,
            self._options,
            self._blocks,
            self._tokens,
            self._params,
        )

    def _requests(self) -> None:
        scenario = self.case
        ends = [*accumulate(scenario.waves or (len(scenario.prompts),))]
        wave_of = [sum(i >= end for end in ends) for i in range(len(scenario.prompts))]

        def keep(kept: Sequence[int]) -> Scenario | None:
            if not kept:
                return None
            counts = [sum(wave_of[i] == wave for i in kept) for wave in range(len(ends))]
            waves = tuple(count for count in counts if count)
            return replace(
                scenario,
                prompts=[scenario.prompts[i] for i in kept],
                params=[scenario.params[i] for i in kept],
                waves=waves if len(waves) > 1 else (),
            )

        self.leave_out(range(len(scenario.prompts)), keep)
        if self.case.waves:
            self.fails(replace(self.case, waves=()))

    def _disturbances(self) -> None:
        scenario = self.case
        self.leave_out(scenario.events, lambda kept: replace(scenario, events=tuple(kept)))
        if self.case.options.get("num_blocks", ROOMY) < ROOMY:
            self._make_room()
        for num_blocks in TIGHT:  # Where a pool has to be full, fewer requests fill a smaller one.
            is_smaller = num_blocks < self.case.options.get("num_blocks", 0) < ROOMY
            options = {**self.case.options, "num_blocks": num_blocks}
            if is_smaller and self.fails(replace(self.case, options=options)):
                break
        for i, event in enumerate(self.case.events):
            events = [*self.case.events]
            for first in {0, event.first}:
                events[i] = replace(event, first=first, every=0)
                if self.fails(replace(self.case, events=tuple(events))):
                    break

    def _make_room(self) -> None:
        """What a full pool does, done on purpose in one with room."""
        options = {**self.case.options, "num_blocks": ROOMY}
        whats: tuple[Literal["preempt", "evict"], ...] = ("preempt", "evict")
        for what in whats:
            for step in range(10):
                event = Event(what, step)
                if self.fails(
                    replace(self.case, options=options, events=(*self.case.events, event))
                ):
                    return

    def _options(self) -> None:
        texts = _texts(self.case)
        scenario = self.case
        self.leave_out(
            scenario.layers,
            lambda kept: (
                _with_texts(replace(scenario, layers="".join(kept)), texts) if kept else None
            ),
        )
        for drafts in SCRIPTS[: SCRIPTS.index(self.case.drafts)]:
            options = dict(self.case.options)
            if drafts == "ngram":
                continue
            if drafts == "none":
                options["num_speculative_tokens"] = 0
            if self.fails(replace(self.case, drafts=drafts, options=options)):
                break
        for key in self.case.options:
            if key not in _KEPT:
                self._option(key, None)
        for key, values in _SIMPLER.items():
            for value in values:
                if key not in self.case.options or value == self.case.options[key]:
                    break
                if key == "max_num_batched_tokens" and value > self.case.options[key]:
                    break
                if self._option(key, value):
                    break

    def _option(self, key: str, value: Any) -> bool:
        """Set an option; None leaves it out."""
        options = {**self.case.options, key: value}
        if value is None:
            del options[key]
        elif key == "max_num_batched_tokens":  # A step has room for a token of each request.
            options["max_num_seqs"] = min(value, options.get("max_num_seqs", value))
        is_needed = key == "num_speculative_tokens" and value is None and self.case.drafts != "none"
        return not is_needed and self.fails(replace(self.case, options=options))

    def _blocks(self) -> None:
        """Smaller blocks: of each block of tokens the first ones are kept, or some from everywhere."""
        key = "block_size" if "block_size" in self.case.options else "mamba_block_size"
        size = self.case.options.get(key, 0)
        for smaller in (4, 8, 16):
            if smaller < size and any(map(self.fails, self._in_blocks_of(key, size, smaller))):
                return

    def _in_blocks_of(self, key: str, size: int, smaller: int) -> Iterator[Scenario]:
        scenario = self.case
        backends: tuple[dict[str, str], ...] = (
            {"attention_backend": SmallBlocksFirst.name},
            {"attention_backend": SmallKVFirst.name},
            {},
        )
        for keeps in (lambda i: i < smaller, lambda i: i * smaller % size < smaller):
            texts = _kept(_texts(scenario), scenario, lambda i, keeps=keeps: keeps(i % size))  # type: ignore[misc]
            for scale in (smaller / size, 1):
                params = [
                    replace(own, max_tokens=max(1, round(own.max_tokens * scale)))
                    for own in scenario.params
                ]
                budget = scenario.options.get("max_num_batched_tokens", 256)
                for backend in backends:
                    options = {**scenario.options, key: smaller, **backend}
                    options["max_num_batched_tokens"] = max(len(texts), round(budget * scale))
                    yield _with_texts(replace(scenario, options=options, params=params), texts)

    def _tokens(self) -> None:
        """The same tokens of all prompts, so that what they share they share still; then those of each one."""
        scenario = self.case
        texts = _texts(self.case)

        def keep(kept: Sequence[int]) -> Scenario:
            positions = set(kept)
            return _with_texts(scenario, _kept(texts, scenario, positions.__contains__))

        self.leave_out(range(max(map(len, scenario.prompts))), keep)
        for i in range(len(texts)):
            self.leave_out(
                _texts(self.case)[i].own, self._with_text(i, lambda kept: {"own": list(kept)})
            )
            num_answer = _texts(self.case)[i].num_answer
            self.leave_out(
                range(num_answer), self._with_text(i, lambda kept: {"num_answer": len(kept)})
            )

    def _with_text(
        self, i: int, change: Callable[[Sequence[int]], dict[str, Any]]
    ) -> Callable[[Sequence[int]], Scenario]:
        """The case as it is now, but for one of its texts."""
        scenario = self.case
        texts = _texts(self.case)
        return lambda kept: _with_texts(
            scenario, [*texts[:i], replace(texts[i], **change(kept)), *texts[i + 1 :]]
        )

    def _params(self) -> None:
        for i in range(len(self.case.params)):
            own = self.case.params[i]
            self._param(i, SamplingParams(max_tokens=own.max_tokens))
            for name, default in vars(SamplingParams()).items():
                if name != "max_tokens":
                    self._param(i, replace(self.case.params[i], **{name: default}))

            def shorter(kept: Sequence[int], i: int = i) -> Scenario | None:
                own = self.case.params[i]
                return self._with_param(i, replace(own, max_tokens=len(kept))) if kept else None

            self.leave_out(range(own.max_tokens), shorter)

    def _param(self, i: int, params: SamplingParams) -> bool:
        """Where tokens are drawn the seed stays: without one there is no right answer."""
        known = params.seed is not None or params.is_greedy
        return known and params != self.case.params[i] and self.fails(self._with_param(i, params))

    def _with_param(self, i: int, params: SamplingParams) -> Scenario:
        scenario = self.case
        return replace(scenario, params=[*scenario.params[:i], params, *scenario.params[i + 1 :]])


def _kept(texts: Sequence[_Text], scenario: Scenario, keeps: Callable[[int], bool]) -> list[_Text]:
    """The tokens at these positions, counted in the prompts as they are."""
    starts = [
        len(prompt) - len(text.own) for prompt, text in zip(scenario.prompts, texts, strict=True)
    ]
    return [
        replace(text, own=[token for i, token in enumerate(text.own, start) if keeps(i)])
        for text, start in zip(texts, starts, strict=True)
    ]
