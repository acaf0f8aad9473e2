"""The user's entry: `LLM(model).generate(prompts, SamplingParams(...))`."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, fields, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from tqdm.auto import tqdm

from hybrid_kv.cache.backend import BackendContext, get_backend
from hybrid_kv.cache.columns import NO_HIT, PrefixHit
from hybrid_kv.cache.manager import KVCacheManager
from hybrid_kv.cache.offload import KVOffload, check_offloadable
from hybrid_kv.cache.plan import CachePlan, apply_block_sizes, plan_cache, update_block_size_for_backend
from hybrid_kv.cache.spec import KVCacheConfig, KVCacheSpec, MambaSpec, group_layers, replay_spec, with_speculation
from hybrid_kv.config import (
    CacheConfig,
    ConfigError,
    EngineConfig,
    HybridKVError,
    SchedulerConfig,
    SpeculativeConfig,
    from_dict,
    is_int,
)
from hybrid_kv.engine.runner import Model, ModelRunner, Proposer, StepOutput
from hybrid_kv.engine.scheduler import Scheduler
from hybrid_kv.request import Request, ScheduledRequest
from hybrid_kv.sampling import SamplingParams
from hybrid_kv.sanitizer import Sanitizer
from hybrid_kv.spec_decode.propose import NgramProposer

DEFAULT_CPU_CACHE_BYTES = 2**30
TAIL_MARGIN = 8  # tokens and characters before a stop string that a tail may show otherwise than the whole text does

LOGGER = logging.getLogger(__name__)


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that the engine uses."""

    eos_token_id: int | None

    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...


@dataclass(frozen=True)
class RequestOutput:
    """What became of one prompt. `finish_reason` is stop, length, abort or error; only an error has `error` set.

    `prompt_token_ids` is empty where an error is that the prompt has none: no text, no integers, no tokenizer.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: str
    num_preemptions: int = 0
    error: str | None = None
    cached_tokens: int = 0  # of the prompt, taken from the prefix cache when the request was first admitted
    hit: PrefixHit = NO_HIT
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0


def engine_config(options: dict[str, Any]) -> EngineConfig:
    """An `EngineConfig` from flat options such as `num_blocks=64, max_num_seqs=8, attention_backend="FLASH_ATTN"`.

    Raises:
        ConfigError: an option that no part of the configuration knows.
    """
    parts: tuple[tuple[str, type], ...] = (
        ("cache", CacheConfig),
        ("scheduler", SchedulerConfig),
        ("speculative", SpeculativeConfig),
    )
    nested: dict[str, dict[str, Any]] = {"engine": {}, **{name: {} for name, _ in parts}}
    for key, value in options.items():
        owner = next((name for name, cls in parts if key in {f.name for f in fields(cls)}), "engine")
        nested[owner][key] = value
    engine = nested["engine"]
    if given := sorted(engine.keys() & {name for name, _ in parts}):
        raise ConfigError(f"give the options of {given[0]} by their own names, not as an object")
    for name, cls in parts:
        if nested[name]:
            engine[name] = from_dict(cls, nested[name])
    config: EngineConfig = from_dict(EngineConfig, engine)
    return config


class LLM:
    """A model, its cache and a scheduler.

    Args:
        model: a checkpoint folder, or a model object (see `engine.runner.Model`). For an offload folder an object that
            is no `torch.nn.Module` needs a `fingerprint`, a text that differs whenever its weights do.
        tokenizer: overrides the checkpoint's own; None with a model object means token ids only.
        proposer: where drafts come from, instead of `speculative_method`.
        options: fields of `EngineConfig`, `CacheConfig`, `SchedulerConfig` and `SpeculativeConfig`.

    Raises:
        ConfigError: the model, an option or the cache plan cannot be used; nothing is allocated then.
    """

    def __init__(
        self,
        model: str | Path | Model,
        tokenizer: Tokenizer | None = None,
        proposer: Proposer | None = None,
        **options: Any,
    ) -> None:
        self.config = engine_config(options)
        self._check_together(model, proposer)
        self.device = _device(self.config.device)
        self.eos_token_ids: frozenset[int] = frozenset()
        if isinstance(model, str | Path):
            from hybrid_kv.models.loader import load_eos_token_ids, load_model, load_tokenizer

            tokenizer = tokenizer or load_tokenizer(model)
            self.model: Model = load_model(model, self.config, self.device)
            self.eos_token_ids |= load_eos_token_ids(model)
        else:
            self.model = model
        self.tokenizer = tokenizer
        if tokenizer is not None and tokenizer.eos_token_id is not None:
            self.eos_token_ids |= {tokenizer.eos_token_id}
        speculative = self.config.speculative
        if proposer is None and speculative.speculative_method == "ngram":
            proposer = NgramProposer(
                speculative.num_speculative_tokens, speculative.prompt_lookup_max, speculative.prompt_lookup_min
            )
        head = self._load_head(model) if proposer is None and speculative.speculative_method == "mtp" else None
        layers = self.model.layer_specs | (head.layer_specs if head is not None else {})
        K, late = speculative.num_speculative_tokens, self.config.async_scheduling
        replay = replay_spec(self.config.cache, K, late, list(layers.values()))
        self.layer_specs = {name: with_speculation(spec, K, replay) for name, spec in layers.items()}
        self.plan = self._plan()
        limits, caching = self.config.scheduler, self.config.cache
        self.manager = KVCacheManager(
            self.plan.config,
            caching.enable_prefix_caching,
            num_lookahead_tokens=speculative.num_speculative_tokens if head is not None else 0,
            max_model_len=limits.max_model_len,
            num_uncertain_tokens=speculative.num_speculative_tokens if self.config.async_scheduling else 0,
        )
        if head is not None:
            # Hits end at multiples of the block size. Without a cache too, so that the head drafts the same there.
            head.grid = self.plan.sizes.block_size
        is_aligned = caching.mamba_cache_mode == "align" and any(
            isinstance(group.spec, MambaSpec) for group in self.plan.config.groups
        )
        has_offload = bool(caching.kv_offload_bytes) or caching.kv_offload_folder is not None
        if has_offload:
            check_offloadable(self.plan.config, self.plan.sizes.block_size)
        self.runner = ModelRunner(
            self.model, self.plan, self._backend, self._context, self.config, self.device, proposer, head
        )
        self.scheduler = Scheduler(
            limits,
            self.manager,
            self.plan.sizes.mamba_block_size if is_aligned else None,
            speculative.num_speculative_tokens,
            self.runner.fold if replay is not None else None,
        )
        if has_offload:
            self.manager.offload = offload = KVOffload(
                self.plan.config,
                self.runner.raw_buffers,
                self.plan.sizes.block_size,
                host_bytes=caching.kv_offload_bytes,
                folder=caching.kv_offload_folder,
                folder_bytes=caching.kv_offload_folder_bytes,
                namespace=self._identity(model) if caching.kv_offload_folder is not None else "",
            )
            if 0 < caching.kv_offload_bytes < (largest := max(offload.block_bytes)):
                LOGGER.warning(
                    "kv_offload_bytes=%d is less than one block of %d B: host memory will restore nothing; raise it",
                    caching.kv_offload_bytes,
                    largest,
                )
        if self.config.sanitize:
            is_private = caching.kv_offload_folder is None
            sanitizer = Sanitizer(
                self.manager.pool, self.runner.groups, self.runner.raw_buffers, limits, is_private, self.runner.rings
            )
            self.manager.sanitizer = self.runner.sanitizer = sanitizer
        self.num_steps = 0
        self._num_requests = 0
        self._aborted: set[str] = set()
        self._unseen: StepOutput | None = None  # of the last step, with asynchronous scheduling
        self._watches_lengths = caching.enable_prefix_caching  # until a prompt is long enough for a hit, or said so

    def _check_together(self, model: str | Path | Model, proposer: Proposer | None) -> None:
        """Refuse options that contradict the other arguments, before anything is loaded or allocated."""
        speculative = self.config.speculative
        if proposer is not None and speculative.speculative_method is not None:
            raise ConfigError(
                f"speculative_method={speculative.speculative_method!r} and proposer= are two sources of drafts; "
                "give one of them"
            )
        if proposer is not None and not speculative.num_speculative_tokens:
            raise ConfigError("a proposer needs num_speculative_tokens >= 1")
        if speculative.num_speculative_tokens and proposer is None and speculative.speculative_method is None:
            # Not refused: the columns of K drafts that nobody makes are a layout worth testing.
            LOGGER.warning(
                "num_speculative_tokens=%d takes cache, but nothing drafts; give speculative_method or proposer=",
                speculative.num_speculative_tokens,
            )
        fingerprint = getattr(model, "fingerprint", None)
        is_known = isinstance(model, str | Path | torch.nn.Module) or (isinstance(fingerprint, str) and fingerprint)
        if self.config.cache.kv_offload_folder is not None and not is_known:
            raise ConfigError(
                "kv_offload_folder: files outlive this process, and nothing tells the weights of this "
                f"{type(model).__name__} from another's; give it a text `fingerprint`, or use kv_offload_bytes alone"
            )

    def _load_head(self, model: str | Path | Model) -> Any:
        from hybrid_kv.models.loader import load_mtp
        from hybrid_kv.models.nemotron_h import NemotronH

        if not isinstance(model, str | Path) or not isinstance(self.model, NemotronH):
            raise ConfigError('speculative_method="mtp" needs a checkpoint folder; give LLM(..., proposer=...) instead')
        return load_mtp(model, self.model)

    def _identity(self, model: str | Path | Model) -> str:
        """What a stored block depends on besides the plan: the weights, and how a page is laid out."""
        layout = [self._backend.name, *(str(group.kernel_block_size) for group in self.runner.groups)]
        if isinstance(model, str | Path):
            from hybrid_kv.models.loader import fingerprint

            # The dtype of the arithmetic is not always the cache's.
            dtypes = {str(weight.dtype) for weight in cast(torch.nn.Module, self.model).parameters()}
            return " ".join([*layout, str(self.model.vocab_size), *sorted(dtypes), fingerprint(model)])
        if not isinstance(self.model, torch.nn.Module):
            return " ".join([*layout, str(cast(Any, self.model).fingerprint)])  # _check_together has seen it
        weights = blake2b(repr(self.model).encode())
        for name, tensor in self.model.state_dict().items():
            weights.update(name.encode() + tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        return " ".join([*layout, weights.hexdigest()])

    def _plan(self) -> CachePlan:
        config, model = self.config, self.model
        platform = config.platform if config.platform != "auto" else self.device.type
        self._backend = get_backend(config.attention_backend, platform)
        self._context = BackendContext.for_layers(platform, self.layer_specs)
        cache = config.cache
        eight_bit = [name for name, spec in self.layer_specs.items() if any(d.itemsize == 1 for d in spec.cache_dtypes)]
        if eight_bit:
            raise ConfigError(
                f"layer {eight_bit[0]} has an fp8 cache, which can be planned but not run yet; use bfloat16"
            )
        arguments = (self._backend, self._context, config.scheduler.max_model_len, model.mamba_chunk_size)
        if cache.num_blocks is None and cache.memory_bytes is None:
            cache = replace(cache, num_blocks=self._default_num_blocks(self.layer_specs, cache, arguments))
        K, rows = config.speculative.num_speculative_tokens, config.scheduler.max_num_seqs
        return plan_cache(self.layer_specs, cache, *arguments, K, rows)

    def _default_num_blocks(self, specs: dict[str, KVCacheSpec], cache: CacheConfig, arguments: tuple[Any, ...]) -> int:
        """Room for `max_num_seqs` requests of full length, within 1 GiB on a CPU or 90 % of a GPU's free memory."""
        sizes = update_block_size_for_backend(specs, cache, *arguments)
        num_speculative_tokens = self.config.speculative.num_speculative_tokens
        groups = group_layers(apply_block_sizes(specs, sizes, cache.mamba_cache_mode, num_speculative_tokens))
        scheduler = self.config.scheduler
        wanted = 1 + scheduler.max_num_seqs * sum(
            g.spec.max_blocks_per_request(scheduler.max_model_len) for g in groups
        )
        memory = DEFAULT_CPU_CACHE_BYTES
        if self.device.type == "cuda":
            memory = torch.cuda.mem_get_info(self.device)[0] * 9 // 10
        memory -= scheduler.max_num_seqs * KVCacheConfig(0, groups).ring_bytes_per_row
        return max(2, min(wanted, memory // (sizes.page_size_bytes * max(len(group.layer_names) for group in groups))))

    def make_request(self, prompt: str | Sequence[int], params: SamplingParams) -> Request:
        """Tokenise a prompt and number it.

        Raises:
            ConfigError: it is neither text nor token ids of the vocabulary, or a tokenizer is needed and missing.
        """
        return self._request(self._next_number(), self._token_ids(prompt), params)

    def _next_number(self) -> int:
        self._num_requests += 1
        return self._num_requests - 1

    def _token_ids(self, prompt: str | Sequence[int]) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ConfigError("this model has no tokenizer: give token ids, or LLM(..., tokenizer=...)")
            return list(self.tokenizer.encode(prompt))
        try:
            if isinstance(prompt, bytes | Mapping | Set):
                raise TypeError
            return [operator.index(token) for token in prompt]
        except TypeError:
            raise ConfigError(
                f"a prompt of type {type(prompt).__name__} is neither text nor a sequence of integer token ids"
            ) from None

    def _request(self, number: int, token_ids: list[int], params: SamplingParams) -> Request:
        if params.stop and self.tokenizer is None:
            raise ConfigError("stop strings need a tokenizer: use stop_token_ids, or LLM(..., tokenizer=...)")
        for token in token_ids:
            if not 0 <= token < self.model.vocab_size:
                raise ConfigError(
                    f"request {number}: token {token} is outside the vocabulary of {self.model.vocab_size}"
                )
        seed = params.seed if params.seed is not None else self.config.seed * 1_000_003 + number
        return Request(str(number), token_ids, params, seed)

    def step(self) -> list[tuple[Request, str]]:
        """Run one step; returns the requests that have finished, with their finish reasons."""
        finished = self._drop_aborted()
        scheduled = self.scheduler.schedule()
        if not scheduled and not finished and self._unseen is None:
            raise RuntimeError("the scheduler has requests but schedules none of them: this is a bug")
        output = self.runner.execute(scheduled) if scheduled else None
        self.num_steps += output is not None
        if not self.config.async_scheduling:
            return finished + self._process(output)
        previous, self._unseen = self._unseen, output
        finished += self._process(previous)
        for item in scheduled:
            if not item.request.is_finished:
                item.request.in_flight = item
        return finished

    def abort(self, request_id: str) -> None:
        """End a request, waiting or running, with the tokens it has; an id that is neither is ignored.

        It ends at the start of the next step. The steps before have written its blocks by then, so that their next
        owner writes last (vllm!45096). Of a step whose tokens were not looked at yet (with `async_scheduling` there is
        always one) it gets no token and publishes no block (vllm!56525).
        """
        # An id kept for later would end a request that nobody asked to end: ids are numbers.
        if any(request.request_id == request_id for request in (*self.scheduler.running, *self.scheduler.waiting)):
            self._aborted.add(request_id)

    def reset_prefix_cache(self) -> None:
        """Forget what the device has cached for other requests; the offload tier keeps what it has."""
        self.manager.reset_prefix_cache()

    def _drop_aborted(self) -> list[tuple[Request, str]]:
        if not self._aborted:
            return []
        known = [*self.scheduler.running, *self.scheduler.waiting]
        dropped = [request for request in known if request.request_id in self._aborted]
        for request in dropped:
            self.scheduler.finish(request)
        self._aborted.clear()
        return [(request, "abort") for request in dropped]

    def _process(self, output: StepOutput | None) -> list[tuple[Request, str]]:
        """Give a step's tokens to their requests, publish what is complete, and let go of who has ended."""
        finished = []
        for item in output.batch if output is not None else ():
            assert output is not None
            request = item.request
            request.in_flight = None
            if request.is_finished or request.request_id in self._aborted:
                continue
            flushed = output.num_flushed_tokens.get(request.request_id)
            reason = self._update(item, output.tokens.get(request.request_id, []), flushed)
            request.draft_token_ids = output.drafts.get(request.request_id, []) if not item.is_stale else []
            if reason is not None:
                self.scheduler.finish(request)
                finished.append((request, reason))
        return finished + self._drop_aborted()

    def _update(self, item: ScheduledRequest, sampled: list[int], num_flushed_tokens: int | None) -> str | None:
        """Take a step's tokens one by one, up to the one that ends the request, if any does."""
        request = item.request
        known = len(request.output_token_ids)
        reason = None
        for token in sampled:
            request.output_token_ids.append(token)
            reason = self._finish_reason(request, token)
            if reason is not None:
                break
        kept = len(request.output_token_ids) - known
        del request.output_token_ids[known:]
        self.scheduler.update(item, sampled, kept, num_flushed_tokens)
        return reason

    def _finish_reason(self, request: Request, token: int) -> str | None:
        params = request.params
        if token in params.stop_token_ids or (token in self.eos_token_ids and not params.ignore_eos):
            return "stop"
        if params.stop and self._may_stop(request) and self._stop_position(request, self._text(request)) is not None:
            return "stop"
        if (
            len(request.output_token_ids) >= params.max_tokens
            or request.num_tokens >= self.config.scheduler.max_model_len
        ):
            return "length"
        return None

    def _may_stop(self, request: Request) -> bool:
        """Whether a stop string is in the end of the text, the part that the last token has changed.

        The whole text at every token would be quadratic. Tokens without a character of their own make the tail longer.
        """
        assert self.tokenizer is not None  # make_request has seen to it
        token_ids, stops = request.output_token_ids, request.params.stop
        wanted = max(map(len, stops)) + TAIL_MARGIN
        length = wanted
        while len(text := self.tokenizer.decode(token_ids[-length:])) < wanted and length < len(token_ids):
            length *= 2
        return any(stop in text for stop in stops)

    @staticmethod
    def _stop_position(request: Request, text: str) -> int | None:
        """Where the first stop string begins in the generated text."""
        found = [position for stop in request.params.stop if (position := text.find(stop)) >= 0]
        return min(found, default=None)

    def _text(self, request: Request) -> str:
        return self.tokenizer.decode(request.output_token_ids) if self.tokenizer is not None else ""

    def _output(self, request: Request, prompt: str | None, reason: str) -> RequestOutput:
        text = self._text(request)
        position = self._stop_position(request, text)
        if position is not None:
            text = text[:position]
        elif reason == "stop" and self.tokenizer is not None and request.output_token_ids[-1] in self.eos_token_ids:
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
            num_draft_tokens=request.num_draft_tokens,
            num_accepted_draft_tokens=request.num_accepted_draft_tokens,
        )

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: bool = True,
        on_step: Callable[[LLM], None] | None = None,
    ) -> list[RequestOutput]:
        """Continue every prompt; outputs come in the order of the prompts.

        A prompt that cannot run (empty, too long, no text) becomes an output with `finish_reason` "error"; the others
        go on.

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
                "generate() while the engine has requests (from on_step, or added by hand): let them end first"
            )
        prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        if prompts and all(is_int(prompt) for prompt in prompts):
            raise ConfigError("generate() takes a list of prompts; of one prompt of token ids write [[1, 2, 3]]")
        each = [params or SamplingParams()] * len(prompts) if not isinstance(params, Sequence) else list(params)
        if len(each) != len(prompts):
            raise ConfigError(f"{len(prompts)} prompts but {len(each)} sampling parameters")
        if wrong := [sampling for sampling in each if not isinstance(sampling, SamplingParams)]:
            raise ConfigError(f"params must be SamplingParams, not {type(wrong[0]).__name__}")
        texts = [prompt if isinstance(prompt, str) else None for prompt in prompts]
        outputs: list[RequestOutput | None] = [None] * len(prompts)
        index: dict[str, int] = {}
        with tqdm(total=len(prompts), disable=not progress, unit="req", desc="generate") as bar:
            try:
                for i, (prompt, sampling) in enumerate(zip(prompts, each, strict=True)):
                    number, token_ids = self._next_number(), list[int]()
                    try:
                        token_ids = self._token_ids(prompt)
                        request = self._request(number, token_ids, sampling)
                        self.scheduler.add(request)
                    except ConfigError as error:
                        outputs[i] = RequestOutput(str(number), texts[i], token_ids, [], "", "error", error=str(error))
                        bar.update()
                    else:
                        index[request.request_id] = i
                self._watch_lengths(list(self.scheduler.waiting))
                while self.scheduler.has_requests:
                    if on_step is not None:
                        on_step(self)
                    for request, reason in self.step():
                        i = index[request.request_id]
                        outputs[i] = self._output(request, texts[i], reason)
                        bar.update()
            finally:
                # After an error or an interrupt the engine must be as good as new.
                self._unseen = None
                self._aborted.clear()
                if self.runner.sanitizer is not None and self.scheduler.has_requests:
                    self.runner.sanitizer.on_failure()
                for request in [*self.scheduler.running, *self.scheduler.waiting]:
                    self.scheduler.finish(request, publish=False)
        return [output for output in outputs if output is not None]

    def _watch_lengths(self, requests: Sequence[Request]) -> None:
        """Say once that no prompt is long enough to be found again: a cache without hits looks like one at work."""
        if not self._watches_lengths or not requests:
            return
        self._watches_lengths = False
        unit, longest = self.manager.hit_unit, max(len(request.prompt_token_ids) for request in requests)
        if longest <= unit:
            LOGGER.warning(
                "prefix caching is on, but a hit is a multiple of %d tokens and the longest prompt so far has %d: none "
                "can be found again; a smaller block_size may help, where the plan can keep it",
                unit,
                longest,
            )


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device={name!r} is unknown; use auto, cpu or cuda") from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device={name!r} is not supported; use auto, cpu or cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device={name!r}: torch sees no GPU here; use cpu")
    return device
