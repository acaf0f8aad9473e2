"""The user's entry: `LLM(model).generate(prompts, SamplingParams(...))`."""

from __future__ import annotations

import logging
import operator
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from hybrid_kv.cache.request_blocks import NO_HIT, PrefixHit
from hybrid_kv.config import ConfigError, HybridKVError, engine_config, is_int
from hybrid_kv.engine.build import build, drafter_identity, rounding_of, weights_identity
from hybrid_kv.engine.kv_transfer import KVTransfer, check_fits, pack, unpack
from hybrid_kv.engine.runner import Proposer, StepOutput
from hybrid_kv.engine.text import Tokenizer, may_stop, stop_position
from hybrid_kv.models.interface import Model
from hybrid_kv.request import Request, ScheduledRequest
from hybrid_kv.sampling import SamplingParams, TokenLogprobs

LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class RequestOutput:
    """The outcome of one prompt.

    `finish_reason` is stop, length, abort or error; only an error has `error` set.

    `prompt_token_ids` is empty where an error is that the prompt has none: no text, no integers, no
    tokenizer.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: str
    num_preemptions: int = 0
    error: str | None = None
    # Of the prompt, taken from the prefix cache when the request was first admitted
    cached_tokens: int = 0
    hit: PrefixHit = NO_HIT
    num_verifications: int = 0  # steps that verified drafts
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    logprobs: list[TokenLogprobs] | None = None  # [len(token_ids)], if the request wants them
    # [len(prompt_token_ids) - 1], likewise: the first has none
    prompt_logprobs: list[TokenLogprobs] | None = None


class LLM:
    """A model, its cache and a scheduler.

    Args:
        model: a checkpoint folder, or a model object (see `models.interface.Model`). For an offload
            folder an object that is no `torch.nn.Module` needs a `fingerprint`, a text that differs
            whenever its weights do.
        tokenizer: overrides the checkpoint's own; None with a model object means token ids only.
        proposer: where drafts come from, instead of `speculative_method`.
        options: fields of `EngineConfig`, `CacheConfig`, `SchedulerConfig` and `SpeculativeConfig`.

    Raises:
        ConfigError: the model, an option or the cache plan cannot be used; nothing is allocated
            then.

    Attributes:
        is_sleeping: between `sleep` and `wake_up`.
        observers: notified of what the engine does (`hybrid_kv.observe`), in this order; append
            your own.
    """

    def __init__(
        self,
        model: str | Path | Model,
        tokenizer: Tokenizer | None = None,
        proposer: Proposer | None = None,
        **options: Any,
    ) -> None:
        self.config = engine_config(options)
        parts = build(model, tokenizer, proposer, self.config)
        self.model = parts.model
        self.tokenizer = parts.tokenizer
        self.eos_token_ids = parts.eos_token_ids
        self.plan = parts.plan
        self.manager = parts.manager
        self.runner = parts.runner
        self.scheduler = parts.scheduler
        self.observers = parts.runner.observers
        self._given_model = model
        self.num_steps = 0
        self.is_sleeping = False
        self._num_requests = 0
        self._aborted: set[str] = set()
        # Steps that have run, but whose tokens are not known yet; between two steps `_num_late` of
        # them at most.
        self._in_flight: deque[StepOutput] = deque()
        self._num_late = int(self.config.async_scheduling)
        # Warn once if no prompt is long enough to hit the prefix cache.
        self._watches_lengths = self.config.cache.enable_prefix_caching

    def make_request(self, prompt: str | Sequence[int], params: SamplingParams) -> Request:
        """Tokenise a prompt and number it.

        Raises:
            ConfigError: it is neither text nor token ids of the vocabulary, or a tokenizer is
                needed and missing.
        """
        return self._request(self._next_number(), self._token_ids(prompt), params)

    def add_request(self, prompt: str | Sequence[int], params: SamplingParams) -> Request:
        """Queue a prompt for the steps to come.

        Raises:
            ConfigError: it can never run, and is not queued.
        """
        request = self.make_request(prompt, params)
        self.scheduler.add(request)
        return request

    def send_request(self, request: Request) -> KVTransfer:
        """Let go of a running request that has its first token; another engine may go on with it.

        Raises:
            ConfigError: nothing tells the weights of the model object from another's.
            HybridKVError: it is not running, its prompt is not computed yet, or the step in flight
                ends it, as `step` will say. It stays as it is.
        """
        if request not in self.scheduler.running or request.request_id in self._aborted:
            raise HybridKVError(f"send_request: request {request.request_id} is not running here")
        weights = self._weights  # nothing may fail once its states are moved
        self._look_ahead(request)
        if request.num_computed_tokens + 1 != request.num_tokens or not request.output_token_ids:
            raise HybridKVError(
                f"send_request: request {request.request_id} has no token of its answer yet, "
                f"{request.num_computed_tokens} of its {request.num_tokens} tokens are computed; "
                "run another step"
            )
        self.scheduler.publish_flushed(request)  # before the states go beyond the last boundary
        self.runner.flush_all(request)
        kv_transfer = pack(request, self.runner, weights)
        self.scheduler.finish(request)
        return kv_transfer

    def receive_request(self, kv_transfer: KVTransfer) -> Request:
        """Queue a request that another engine has begun.

        It goes on as if its prompt had been computed here.

        Raises:
            ConfigError: it does not fit, or can never run here; nothing is queued or allocated
                then.
        """
        check_fits(kv_transfer, self.runner, self._weights)
        request = self._request(
            self._next_number(), kv_transfer.prompt_token_ids, kv_transfer.params
        )
        request.seed = kv_transfer.seed
        request.output_token_ids = list(kv_transfer.output_token_ids)
        request.logprobs = list(kv_transfer.logprobs)
        request.prompt_logprobs = list(kv_transfer.prompt_logprobs)
        request.arrival = partial(unpack, kv_transfer, self.runner)
        self.scheduler.add(request)
        return request

    @cached_property
    def _weights(self) -> str:
        identity = weights_identity(self._given_model, self.model) + drafter_identity(self.config)
        # States that are rounded with another seed are others from the next token on.
        rounding = rounding_of(self.config)
        return identity if rounding is None else f"{identity} {rounding}"

    def _look_ahead(self, request: Request) -> None:
        """Take in the step in flight for one request alone, unless it ends with it."""
        if request.in_flight is None:
            return
        ((place, item),) = (
            (place, item)
            for place, output in enumerate(self._in_flight)
            for item in output.batch
            if item.request is request
        )
        output = self._in_flight[place]
        _, reason = self.finish_index(request, output.tokens.get(request.request_id, []))
        if reason is not None:
            raise HybridKVError(
                f"send_request: request {request.request_id} ends with the step in flight"
            )
        self._process(replace(output, batch=[item]))
        self._in_flight[place] = replace(
            output, batch=[other for other in output.batch if other is not item]
        )

    def _next_number(self) -> int:
        self._num_requests += 1
        return self._num_requests - 1

    def _token_ids(self, prompt: str | Sequence[int]) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ConfigError(
                    "this model has no tokenizer: give token ids, or LLM(..., tokenizer=...)"
                )
            try:
                prompt.encode()
            except UnicodeEncodeError as error:
                raise ConfigError(
                    f"character {error.start} of the prompt is {prompt[error.start]!r}, half of a "
                    "surrogate pair; decode the input with errors='replace'"
                ) from None
            return list(self.tokenizer.encode(prompt))
        try:
            if isinstance(prompt, bytes | Mapping | Set):
                raise TypeError
            return [operator.index(token) for token in prompt]
        except TypeError:
            raise ConfigError(
                f"a prompt of type {type(prompt).__name__} is neither text nor a sequence of "
                "integer token ids"
            ) from None

    def _request(self, number: int, token_ids: list[int], params: SamplingParams) -> Request:
        if params.stop and self.tokenizer is None:
            raise ConfigError(
                "stop strings need a tokenizer: use stop_token_ids, or LLM(..., tokenizer=...)"
            )
        for token in token_ids:
            if not 0 <= token < self.model.vocab_size:
                raise ConfigError(
                    f"request {number}: token {token} is outside the vocabulary of "
                    f"{self.model.vocab_size}"
                )
        seed = params.seed if params.seed is not None else self.config.seed * 1_000_003 + number
        return Request(str(number), token_ids, params, seed)

    def step(self) -> list[tuple[Request, str]]:
        """Run one step; returns the requests that have finished, with their finish reasons.

        Raises:
            HybridKVError: the engine sleeps.
        """
        if self.is_sleeping:
            raise HybridKVError(
                "the engine sleeps, and its cache has no memory: call wake_up first"
            )
        finished = self._drop_aborted()
        scheduled = self.scheduler.schedule()
        if not scheduled and not finished and not self._in_flight:
            raise RuntimeError(
                "the scheduler has requests but schedules none of them: this is a bug"
            )
        output = self.runner.execute(scheduled) if scheduled else None
        if output is not None:
            self.num_steps += 1
            self._in_flight.append(output)
        # Nothing to run: the tokens that all requests wait for are taken in at once.
        is_due = len(self._in_flight) > self._num_late or (output is None and self._in_flight)
        finished += self._process(self._in_flight.popleft()) if is_due else self._drop_aborted()
        if self._num_late:
            for item in scheduled:
                if not item.request.is_finished:
                    item.request.in_flight = item
        return finished

    def abort(self, request_id: str) -> None:
        """End a request, waiting or running, with the tokens it has; ignore an unknown id.

        It ends at the start of the next step. The steps before have written its blocks by then, so
        that their next owner writes last (vllm!45096). Of a step whose tokens were not looked at
        yet (with `async_scheduling` there is always one) it gets no token and publishes no block
        (vllm!56525).
        """
        # Ids are numbers: one kept for later would end another request.
        if any(
            request.request_id == request_id
            for request in (*self.scheduler.running, *self.scheduler.waiting)
        ):
            self._aborted.add(request_id)

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> None:
        """Forget what the device has cached for other requests; the offload tier keeps what it has.

        Args:
            reset_running_requests: preempt them, so that their prefixes are computed anew, too.
        """
        if reset_running_requests:
            self.scheduler.preempt_all()
        self.manager.reset_prefix_cache()

    def sleep(self) -> None:
        """Free the memory of the cache until `wake_up`; weights stay.

        Others may use the device meanwhile.

        What is cached on the device is forgotten, since its blocks are. What runs is preempted, and
        waits with all that come meanwhile; the offload tier keeps what it has. Does nothing if it
        sleeps already.
        """
        if self.is_sleeping:
            return
        self.reset_prefix_cache(reset_running_requests=True)
        if self.manager.offload is not None:
            self.manager.offload.synchronize()
            self.manager.offload.bind(())
        self.runner.free_memory()
        self.is_sleeping = True

    def wake_up(self) -> None:
        """Take the memory again, and go on. Does nothing if it does not sleep."""
        if self.is_sleeping:
            self.runner.allocate_memory()
            if self.manager.offload is not None:
                self.manager.offload.bind(self.runner.raw_buffers)
            self.is_sleeping = False

    @property
    def has_work(self) -> bool:
        """True if `step` has something to do."""
        return self.scheduler.has_requests and not self.is_sleeping

    def _drop_aborted(self) -> list[tuple[Request, str]]:
        if not self._aborted:
            return []
        known = [*self.scheduler.running, *self.scheduler.waiting]
        dropped = [request for request in known if request.request_id in self._aborted]
        for request in dropped:
            self.scheduler.finish(request)
        self._aborted.clear()
        return [(request, "abort") for request in dropped]

    def _process(self, output: StepOutput) -> list[tuple[Request, str]]:
        """Give a step's tokens to their requests, publish full blocks, release ended requests."""
        finished = []
        for item in output.batch:
            request = item.request
            request.in_flight = None
            if request.is_finished or request.request_id in self._aborted:
                continue
            sampled = output.tokens.get(request.request_id, [])
            num_kept, reason = self.finish_index(request, sampled)
            self.scheduler.update(item, sampled, num_kept)
            if output.logprobs or output.prompt_logprobs:
                self._keep_logprobs(item, output)
            request.draft_token_ids = (
                output.drafts.get(request.request_id, []) if not item.is_stale else []
            )
            if reason is not None:
                self.scheduler.finish(request)
                finished.append((request, reason))
        return finished + self._drop_aborted()

    def _keep_logprobs(self, item: ScheduledRequest, output: StepOutput) -> None:
        request = item.request
        start = item.num_computed_tokens
        request.logprobs += output.logprobs.get(request.request_id, [])
        # Those after the token that ended it
        del request.logprobs[len(request.output_token_ids) :]
        new = output.prompt_logprobs.get(request.request_id, [])
        request.prompt_logprobs[start : start + len(new)] = new  # a second time after a preemption

    def finish_index(self, request: Request, sampled: Sequence[int]) -> tuple[int, str | None]:
        """Return how many of a step's tokens a request keeps, and why the last of these ends it.

        The reason is None if it goes on.
        """
        params = request.params
        known = request.output_token_ids
        room = min(
            params.max_tokens - len(known), self.config.scheduler.max_model_len - request.num_tokens
        )
        ends = (
            params.stop_token_ids
            if params.ignore_eos
            else {*params.stop_token_ids, *self.eos_token_ids}
        )
        for count, token in enumerate(sampled, 1):
            if token in ends or (
                params.stop and self._has_stop_string([*known, *sampled[:count]], params.stop)
            ):
                return count, "stop"
            if count >= room:
                return count, "length"
        return len(sampled), None

    def _has_stop_string(self, token_ids: Sequence[int], stops: Sequence[str]) -> bool:
        assert self.tokenizer is not None  # make_request has seen to it
        return (
            may_stop(self.tokenizer, token_ids, stops)
            and stop_position(self.tokenizer.decode(token_ids), stops) is not None
        )

    def _text(self, request: Request) -> str:
        return self.tokenizer.decode(request.output_token_ids) if self.tokenizer is not None else ""

    def output(self, request: Request, reason: str, prompt: str | None = None) -> RequestOutput:
        """Return the outcome of a request that a step has finished, for `reason`."""
        text = self._text(request)
        position = stop_position(text, request.params.stop)
        if position is not None:
            text = text[:position]
        elif (
            reason == "stop"
            and self.tokenizer is not None
            and request.output_token_ids[-1] in self.eos_token_ids
        ):
            text = self.tokenizer.decode(request.output_token_ids[:-1])
        return RequestOutput(
            request.request_id,
            prompt,
            request.prompt_token_ids,
            request.output_token_ids,
            text,
            reason,
            request.num_preemptions,
            cached_tokens=request.hit.num_tokens,
            hit=request.hit,
            num_verifications=request.num_verifications,
            num_draft_tokens=request.num_draft_tokens,
            num_accepted_draft_tokens=request.num_accepted_draft_tokens,
            logprobs=request.logprobs if request.params.logprobs is not None else None,
            prompt_logprobs=request.prompt_logprobs
            if request.params.prompt_logprobs is not None
            else None,
        )

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: bool = True,
        on_step: Callable[[LLM], None] | None = None,
    ) -> list[RequestOutput]:
        """Continue every prompt; outputs come in the order of the prompts.

        A prompt that cannot run (empty, too long, no text) becomes an output with `finish_reason`
        "error"; the others go on.

        Args:
            prompts: texts, or sequences of token ids.
            params: one for all, or one per prompt.
            progress: show a bar.
            on_step: called before every step, for tests that disturb the engine.

        Raises:
            ConfigError: `prompts` is one prompt, or `params` does not fit it.
            HybridKVError: the engine has requests already.
        """
        if self.scheduler.has_requests:
            raise HybridKVError(
                "generate() while the engine has requests (from on_step, or added by hand): let "
                "them end first"
            )
        pairs = _paired(prompts, params)
        texts = [prompt if isinstance(prompt, str) else None for prompt, _ in pairs]
        outputs: list[RequestOutput | None] = [None] * len(pairs)
        index: dict[str, int] = {}
        with tqdm(total=len(pairs), disable=not progress, unit="req", desc="generate") as bar:
            try:
                for i, (prompt, sampling) in enumerate(pairs):
                    queued = self._queue(prompt, sampling)
                    if isinstance(queued, Request):
                        index[queued.request_id] = i
                    else:
                        outputs[i] = queued
                        bar.update()
                self._watch_lengths(list(self.scheduler.waiting))
                while self.scheduler.has_requests:
                    if on_step is not None:
                        on_step(self)
                    for request, reason in self.step():
                        i = index[request.request_id]
                        outputs[i] = self.output(request, reason, texts[i])
                        bar.update()
            finally:
                self._clear()
        return [output for output in outputs if output is not None]

    def _queue(
        self, prompt: str | Sequence[int], params: SamplingParams
    ) -> Request | RequestOutput:
        """Queue a prompt; return its request, or the output of one that cannot run."""
        number = self._next_number()
        token_ids: list[int] = []
        try:
            token_ids = self._token_ids(prompt)
            request = self._request(number, token_ids, params)
            self.scheduler.add(request)
        except ConfigError as error:
            text = prompt if isinstance(prompt, str) else None
            return RequestOutput(str(number), text, token_ids, [], "", "error", error=str(error))
        return request

    def _clear(self) -> None:
        """Let go of all requests: after an error or an interrupt the engine is as good as new."""
        self._in_flight.clear()
        self._aborted.clear()
        if self.scheduler.has_requests:
            for observer in self.observers:
                observer.on_failure()
        for request in [*self.scheduler.running, *self.scheduler.waiting]:
            self.scheduler.finish(request, publish=False)

    def _watch_lengths(self, requests: Sequence[Request]) -> None:
        """Warn once if no prompt is long enough to hit the prefix cache.

        A cache without hits looks like one at work.
        """
        if not self._watches_lengths or not requests:
            return
        self._watches_lengths = False
        unit = self.manager.hit_granularity
        longest = max(len(request.prompt_token_ids) for request in requests)
        if longest <= unit:
            LOGGER.warning(
                "prefix caching is on, but a hit is a multiple of %d tokens and the longest prompt "
                "so far has %d: none can be found again; a smaller block_size may help, where the "
                "plan can keep it",
                unit,
                longest,
            )


def _paired(
    prompts: Sequence[str | Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams] | None,
) -> list[tuple[str | Sequence[int], SamplingParams]]:
    """Return each prompt with its parameters.

    Raises:
        ConfigError: `prompts` is one prompt, or `params` does not fit it.
    """
    if not isinstance(prompts, Iterable) or isinstance(prompts, bytes | Mapping | Set):
        raise ConfigError(f"generate() takes a list of prompts, not {type(prompts).__name__}")
    prompts = [prompts] if isinstance(prompts, str) else list(prompts)
    if prompts and all(is_int(prompt) for prompt in prompts):
        raise ConfigError(
            "generate() takes a list of prompts; of one prompt of token ids write [[1, 2, 3]]"
        )
    each = (
        list(params)
        if isinstance(params, Sequence)
        else [params or SamplingParams()] * len(prompts)
    )
    if len(each) != len(prompts):
        raise ConfigError(f"{len(prompts)} prompts but {len(each)} sampling parameters")
    for sampling in each:
        if not isinstance(sampling, SamplingParams):
            raise ConfigError(f"params must be SamplingParams, not {type(sampling).__name__}")
    return list(zip(prompts, each, strict=True))
