"""Reduction of a failing scenario, as long as the same rule is the first to break.

Over requests, disturbances, layers, engine options, prompt tokens and sampling parameters, until
nothing more can go.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any, Literal

from hybrid_kv.check.guard.play import ScenarioFailure, play, run_scenario, unwarned
from hybrid_kv.check.guard.scenario import (
    SCRIPTS,
    Disturbance,
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
    # Where chunks are needed, prompts are as long as they are.
    "max_num_batched_tokens": (4, 8, 16, 32, 64),
    "max_num_seqs": (1, 2, 3, 4),
    "num_blocks": (ROOMY,),
    "num_speculative_tokens": (1, 2, 3, 4, 5, 6),
}


@dataclass(frozen=True)
class Shrunk:
    """A failure as small as it got.

    Attributes:
        seconds: of one core.
        is_minimal: nothing more could be left out before the time was up.
    """

    failure: ScenarioFailure
    num_plays: int
    seconds: float
    is_minimal: bool


class _Steps(EngineObserver):
    """A counter of steps that ends a play which runs for much longer than the best one."""

    def __init__(self, most: int) -> None:
        self.count = 0
        self._most = most

    def on_schedule(self, scheduled: Sequence[ScheduledRequest]) -> None:
        self.count += 1
        if self.count > self._most:
            raise TimeUpError


def shrink(failure: ScenarioFailure, seconds: float = 60.0) -> Shrunk:
    """Return the smallest scenario found in the time that breaks the same rule first.

    The sanitizer is turned on if the scenario still fails then, since it names the first thing that
    is wrong; what is kept is the rule that breaks first with it. The same failure gives the same
    scenario, as long as time is left.
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
class EditedPrompt:
    """A prompt that continues another request, or stands alone.

    It is the prompt of request `parent`, the first `num_answer` tokens of that one's answer, and
    `new` tokens. A second turn stays one when the first becomes shorter and gets another answer.
    """

    new: list[int]
    parent: int | None = None
    num_answer: int = 0


def prompts_of(scenario: Scenario) -> list[EditedPrompt]:
    prompts = []
    for i, token_ids in enumerate(scenario.prompts):
        prompt = EditedPrompt(token_ids)
        for parent in range(i):
            known = [*scenario.prompts[parent], *_answer(scenario, parent)]
            first = len(scenario.prompts[parent])
            same = common_prefix(token_ids, known)
            if same > first + prompt.num_answer:
                prompt = EditedPrompt(token_ids[same:], parent, same - first)
        prompts.append(prompt)
    return prompts


def _answer(scenario: Scenario, i: int) -> list[int]:
    limit = scenario.options["max_model_len"]
    return answer_book(scenario.layers).answer(scenario.prompts[i], scenario.params[i], limit)


def with_prompts(scenario: Scenario, prompts: Sequence[EditedPrompt]) -> Scenario:
    """Return the scenario with these prompts; an empty one gets a token."""
    made = replace(scenario, prompts=[])
    for prompt in prompts:
        before: list[int] = []
        if prompt.parent is not None:
            answer = _answer(made, prompt.parent)
            before = [*made.prompts[prompt.parent], *answer[: prompt.num_answer]]
        made.prompts.append([*before, *prompt.new] or [0])
    return made


class _Shrinker(Shrinker[Scenario]):
    def __init__(self, failure: ScenarioFailure, seconds: float) -> None:
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
        """Replace what a full pool does by events in a pool with room."""
        options = {**self.case.options, "num_blocks": ROOMY}
        kinds: tuple[Literal["preempt", "evict"], ...] = ("preempt", "evict")
        for kind in kinds:
            for step in range(10):
                events = (*self.case.events, Disturbance(kind, step))
                if self.fails(replace(self.case, options=options, events=events)):
                    return

    def _options(self) -> None:
        self._layers()
        self._drafts()
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

    def _layers(self) -> None:
        scenario = self.case
        prompts = prompts_of(scenario)

        def keep(kept: Sequence[str]) -> Scenario | None:
            if not kept:
                return None
            return with_prompts(replace(scenario, layers="".join(kept)), prompts)

        self.leave_out(scenario.layers, keep)

    def _drafts(self) -> None:
        """Try each simpler script of drafts, the simplest first."""
        for drafts in SCRIPTS[: SCRIPTS.index(self.case.drafts)]:
            options = dict(self.case.options)
            if drafts == "ngram":
                continue
            if drafts == "none":
                options["num_speculative_tokens"] = 0
                options.pop("num_speculative_tokens_per_batch_size", None)
            if self.fails(replace(self.case, drafts=drafts, options=options)):
                break

    def _option(self, key: str, value: Any) -> bool:
        """Try another value of an option; None leaves it out."""
        options = {**self.case.options, key: value}
        if value is None:
            del options[key]
        elif key == "max_num_batched_tokens":  # A step has room for a token of each request.
            options["max_num_seqs"] = min(value, options.get("max_num_seqs", value))
        is_needed = key == "num_speculative_tokens" and value is None and self.case.drafts != "none"
        return not is_needed and self.fails(replace(self.case, options=options))

    def _blocks(self) -> None:
        """Try smaller blocks: keep the first tokens of each block, or some from everywhere."""
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

        def keeps_first(i: int) -> bool:
            return i % size < smaller

        def keeps_some(i: int) -> bool:
            return i % size * smaller % size < smaller

        for keeps in (keeps_first, keeps_some):
            prompts = _kept(prompts_of(scenario), scenario, keeps)
            for scale in (smaller / size, 1):
                params = [
                    replace(each, max_tokens=max(1, round(each.max_tokens * scale)))
                    for each in scenario.params
                ]
                budget = scenario.options.get("max_num_batched_tokens", 256)
                for backend in backends:
                    options = {**scenario.options, key: smaller, **backend}
                    options["max_num_batched_tokens"] = max(len(prompts), round(budget * scale))
                    yield with_prompts(replace(scenario, options=options, params=params), prompts)

    def _tokens(self) -> None:
        """Drop the same tokens of all prompts, preserving shared prefixes; then of each one."""
        scenario = self.case
        prompts = prompts_of(self.case)

        def keep(kept: Sequence[int]) -> Scenario:
            positions = set(kept)
            return with_prompts(scenario, _kept(prompts, scenario, positions.__contains__))

        self.leave_out(range(max(map(len, scenario.prompts))), keep)
        for i in range(len(prompts)):
            with_new = self._with_prompt(i, lambda kept: {"new": list(kept)})
            self.leave_out(prompts_of(self.case)[i].new, with_new)
            with_answer = self._with_prompt(i, lambda kept: {"num_answer": len(kept)})
            self.leave_out(range(prompts_of(self.case)[i].num_answer), with_answer)

    def _with_prompt(
        self, i: int, change: Callable[[Sequence[int]], dict[str, Any]]
    ) -> Callable[[Sequence[int]], Scenario]:
        """Return a function that changes one prompt of the current case."""
        scenario = self.case
        prompts = prompts_of(self.case)

        def changed(kept: Sequence[int]) -> Scenario:
            prompt = replace(prompts[i], **change(kept))
            return with_prompts(scenario, [*prompts[:i], prompt, *prompts[i + 1 :]])

        return changed

    def _params(self) -> None:
        for i in range(len(self.case.params)):
            params = self.case.params[i]
            self._param(i, SamplingParams(max_tokens=params.max_tokens))
            for name, default in vars(SamplingParams()).items():
                if name != "max_tokens":
                    self._param(i, replace(self.case.params[i], **{name: default}))

            def shorter(kept: Sequence[int], i: int = i) -> Scenario | None:
                if not kept:
                    return None
                return self._with_param(i, replace(self.case.params[i], max_tokens=len(kept)))

            self.leave_out(range(params.max_tokens), shorter)

    def _param(self, i: int, params: SamplingParams) -> bool:
        """Try the default of a sampling parameter.

        A sampled request keeps its seed: without a seed there is no right answer.
        """
        known = params.seed is not None or params.is_greedy
        return known and params != self.case.params[i] and self.fails(self._with_param(i, params))

    def _with_param(self, i: int, params: SamplingParams) -> Scenario:
        scenario = self.case
        return replace(scenario, params=[*scenario.params[:i], params, *scenario.params[i + 1 :]])


def _kept(
    prompts: Sequence[EditedPrompt], scenario: Scenario, keeps: Callable[[int], bool]
) -> list[EditedPrompt]:
    """Return the tokens at these positions, counted in the prompts as they are."""
    starts = [
        len(token_ids) - len(prompt.new)
        for token_ids, prompt in zip(scenario.prompts, prompts, strict=True)
    ]
    return [
        replace(prompt, new=[token for i, token in enumerate(prompt.new, start) if keeps(i)])
        for prompt, start in zip(prompts, starts, strict=True)
    ]
