"""The user's entry: `LLM(model).generate(prompts, SamplingParams(...))`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol

import torch
from tqdm.auto import tqdm

from hybrid_kv.cache.backend import BackendContext, get_backend
from hybrid_kv.cache.manager import NO_HIT, KVCacheManager, PrefixHit
from hybrid_kv.cache.offload import KVOffload
from hybrid_kv.cache.plan import CachePlan, apply_block_sizes, plan_cache, update_block_size_for_backend
from hybrid_kv.cache.spec import KVCacheSpec, MambaSpec, group_layers, with_speculation
from hybrid_kv.config import CacheConfig, ConfigError, EngineConfig, SchedulerConfig, SpeculativeConfig, from_dict
from hybrid_kv.engine.runner import Model, ModelRunner, Proposer, StepOutput
from hybrid_kv.engine.sampling import SamplingParams
from hybrid_kv.engine.scheduler import Request, ScheduledRequest, Scheduler
from hybrid_kv.sanitizer import Sanitizer
from hybrid_kv.spec_decode.propose import NgramProposer

DEFAULT_CPU_CACHE_BYTES = 2**30


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that the engine uses."""

    eos_token_id: int | None

    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...


@dataclass(frozen=True)
class RequestOutput:
    """What became of one prompt. `finish_reason` is stop, length, abort or error; only an error has `error` set."""

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
        model: a checkpoint folder, or a model object (see `engine.runner.Model`).
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
        if proposer is not None and not speculative.num_speculative_tokens:
            raise ConfigError("a proposer needs num_speculative_tokens >= 1")
        head = self._load_head(model) if proposer is None and speculative.speculative_method == "mtp" else None
        self.layer_specs = {
            name: with_speculation(spec, speculative.num_speculative_tokens)
            for name, spec in (self.model.layer_specs | (head.layer_specs if head is not None else {})).items()
        }
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
        self.scheduler = Scheduler(
            limits,
            self.manager,
            self.plan.sizes.mamba_block_size if is_aligned else None,
            speculative.num_speculative_tokens,
        )
        self.runner = ModelRunner(
            self.model, self.plan, self._backend, self._context, self.config, self.device, proposer, head
        )
        if caching.kv_offload_bytes or caching.kv_offload_folder is not None:
            self.manager.offload = KVOffload(
                self.plan.config,
                self.runner.raw_buffers,
                self.plan.sizes.block_size,
                host_bytes=caching.kv_offload_bytes,
                folder=caching.kv_offload_folder,
                folder_bytes=caching.kv_offload_folder_bytes,
                namespace=self._identity(model),
            )
        if self.config.sanitize:
            sanitizer = Sanitizer(self.manager.pool, self.runner.groups, self.runner.raw_buffers, limits)
            self.manager.sanitizer = self.runner.sanitizer = sanitizer
        self.num_steps = 0
        self._num_requests = 0
        self._aborted: set[str] = set()
        self._unseen: StepOutput | None = None  # of the last step, with asynchronous scheduling

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

            return " ".join([*layout, str(self.model.vocab_size), fingerprint(model)])
        weights = blake2b(repr(self.model).encode())
        if isinstance(self.model, torch.nn.Module):
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
        return plan_cache(self.layer_specs, cache, *arguments, config.speculative.num_speculative_tokens)

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
        return max(2, min(wanted, memory // (sizes.page_size_bytes * max(len(group.layer_names) for group in groups))))

    def make_request(self, prompt: str | Sequence[int], params: SamplingParams) -> Request:
        """Tokenise a prompt and number it."""
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ConfigError("this model has no tokenizer: give token ids, or LLM(..., tokenizer=...)")
            token_ids = list(self.tokenizer.encode(prompt))
        else:
            token_ids = [int(token) for token in prompt]
        if params.stop and self.tokenizer is None:
            raise ConfigError("stop strings need a tokenizer: use stop_token_ids, or LLM(..., tokenizer=...)")
        number = self._num_requests
        self._num_requests += 1
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
        """End a request, waiting or running, with the tokens it has.

        One whose step is under way ends after it: its blocks must not find an owner before the step has written them
        (vllm!45096), nor be published as if it had (vllm!56525).
        """
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
            reason = self._update(item, output.tokens.get(request.request_id, []))
            request.draft_token_ids = output.drafts.get(request.request_id, []) if not item.is_stale else []
            if reason is not None:
                self.scheduler.finish(request)
                finished.append((request, reason))
        return finished + self._drop_aborted()

    def _update(self, item: ScheduledRequest, sampled: list[int]) -> str | None:
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
        self.scheduler.update(item, sampled, kept)
        return reason

    def _finish_reason(self, request: Request, token: int) -> str | None:
        params = request.params
        if token in params.stop_token_ids or (token in self.eos_token_ids and not params.ignore_eos):
            return "stop"
        if params.stop and self._stop_position(request) is not None:
            return "stop"
        if (
            len(request.output_token_ids) >= params.max_tokens
            or request.num_tokens >= self.config.scheduler.max_model_len
        ):
            return "length"
        return None

    def _stop_position(self, request: Request) -> int | None:
        """Where the first stop string begins in the generated text."""
        text = self._text(request)
        found = [position for stop in request.params.stop if (position := text.find(stop)) >= 0]
        return min(found, default=None)

    def _text(self, request: Request) -> str:
        return self.tokenizer.decode(request.output_token_ids) if self.tokenizer is not None else ""

    def _output(self, request: Request, prompt: str | None, reason: str) -> RequestOutput:
        text = self._text(request)
        position = self._stop_position(request) if request.params.stop else None
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

        A prompt that cannot run (empty, too long) becomes an output with `finish_reason` "error"; the others go on.

        Args:
            prompts: texts, or sequences of token ids.
            params: one for all, or one per prompt.
            progress: show a bar.
            on_step: called before every step, for tests that disturb the engine.
        """
        prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        each = [params or SamplingParams()] * len(prompts) if not isinstance(params, Sequence) else list(params)
        if len(each) != len(prompts):
            raise ConfigError(f"{len(prompts)} prompts but {len(each)} sampling parameters")
        texts = [prompt if isinstance(prompt, str) else None for prompt in prompts]
        outputs: list[RequestOutput | None] = [None] * len(prompts)
        index: dict[str, int] = {}
        with tqdm(total=len(prompts), disable=not progress, unit="req", desc="generate") as bar:
            try:
                for i, (prompt, sampling) in enumerate(zip(prompts, each, strict=True)):
                    try:
                        request = self.make_request(prompt, sampling)
                        self.scheduler.add(request)
                    except ConfigError as error:
                        outputs[i] = RequestOutput("", texts[i], [], [], "", "error", error=str(error))
                        bar.update()
                    else:
                        index[request.request_id] = i
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
                for request in [*self.scheduler.running, *self.scheduler.waiting]:
                    self.scheduler.finish(request)
        return [output for output in outputs if output is not None]


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
