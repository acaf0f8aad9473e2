"""The engine's counts for Prometheus: vLLM's names and meanings, prefix `hybrid_kv:`.

Counts of the cache and of drafts come from watching the engine, so that a guard outside can check
whether what it wanted to test has happened. vLLM's `num_gpu_blocks` keeps its name on a CPU, too.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from hybrid_kv.engine.llm import LLM, RequestOutput
from hybrid_kv.observe import EngineObserver
from hybrid_kv.request import Request, ScheduledRequest

M = TypeVar("M", Counter, Gauge, Histogram)
# Bounds of all histograms.
SECONDS = [digit * 10.0**power for power in range(-3, 3) for digit in (1, 2.5, 5)]


class Metrics(EngineObserver):
    """Counters of one engine. Append it to `llm.observers`; it may be read from any thread."""

    def __init__(self, llm: LLM, model: str) -> None:
        self.registry = CollectorRegistry()
        self._batch: Sequence[ScheduledRequest] = ()
        # By the id of an open request: when it arrived, what its next token adds to, and since
        # when.
        self._times: dict[str, tuple[float, Histogram, float]] = {}

        def made(kind: type[M], name: str, help_text: str, *labels: str, **more: Any) -> M:
            metric = kind(
                f"hybrid_kv:{name}",
                help_text,
                ["model_name", *labels],
                registry=self.registry,
                **more,
            )
            return metric if labels else metric.labels(model)

        counter = partial(made, Counter)
        gauge = partial(made, Gauge)
        histogram = partial(made, Histogram, buckets=SECONDS)
        self.queries = counter(
            "prefix_cache_queries", "Prompt tokens that were looked up in the prefix cache."
        )
        self.hits = counter(
            "prefix_cache_hits", "Prompt tokens that were taken from the prefix cache."
        )
        self.thrown_away = counter(
            "prefix_cache_thrown_away",
            "Prompt tokens whose K and V the prefix cache had, and no states: computed again.",
        )
        self.drafts = counter("spec_decode_num_drafts", "Steps of a request that verified drafts.")
        self.draft_tokens = counter("spec_decode_num_draft_tokens", "Drafts that were verified.")
        self.accepted = counter("spec_decode_num_accepted_tokens", "Drafts that were right.")
        self.preemptions = counter(
            "num_preemptions", "Requests that lost their blocks, and run again."
        )
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of requests that have ended.")
        self.generation_tokens = counter(
            "generation_tokens", "Tokens that were generated for requests that have ended."
        )
        self.running = gauge("num_requests_running", "Requests that run.")
        self.waiting = gauge("num_requests_waiting", "Requests that wait to run.")
        self.usage = gauge("kv_cache_usage_perc", "Blocks that requests hold; 1 is all of them.")
        self.queue_time = histogram(
            "request_queue_time_seconds", "From a request's arrival to its first step."
        )
        self.first_token = histogram(
            "time_to_first_token_seconds", "From a request's arrival to its first token."
        )
        self.inter_token = histogram(
            "inter_token_latency_seconds", "From a step that gave a request tokens to the next."
        )
        self.e2e = histogram("e2e_request_latency_seconds", "From a request's arrival to its end.")
        self._success = counter("request_success", "Requests that have ended.", "finished_reason")
        help_text = "Drafts that were right, by their place in the draft."
        self._accepted_per_pos = counter(
            "spec_decode_num_accepted_tokens_per_pos", help_text, "position"
        )
        self._model = model
        self._scheduler = llm.scheduler
        self._pool = llm.manager.pool
        self._describe(llm)

    def _describe(self, llm: LLM) -> None:
        cache = llm.config.cache
        plan = llm.plan
        description = {
            "block_size": plan.sizes.block_size,
            "mamba_block_size": plan.sizes.mamba_block_size,
            "hit_granularity": llm.manager.hit_granularity,
            "num_gpu_blocks": plan.config.num_blocks,
            "enable_prefix_caching": cache.enable_prefix_caching,
            "mamba_cache_mode": cache.mamba_cache_mode,
            "state_scheme": cache.state_scheme,
            "num_speculative_tokens": llm.config.speculative.num_speculative_tokens,
            "max_num_batched_tokens": llm.config.scheduler.max_num_batched_tokens,
        }
        # An `Info` would add a second `_info` to vLLM's name.
        labels = {name: str(value) for name, value in description.items()}
        Gauge(
            "hybrid_kv:cache_config_info", "The cache.", list(labels), registry=self.registry
        ).labels(**labels).set(1)

    # ---- what the engine does ----

    def on_schedule(self, scheduled: Sequence[ScheduledRequest]) -> None:
        """Count admissions: the first, which looks the prompt up in the cache, or another."""
        now = time.perf_counter()
        for item in scheduled:
            if item.overwrite and item.request.num_preemptions:
                self.preemptions.inc()
            elif item.overwrite:
                self.queue_time.observe(now - self._times[item.request.request_id][0])
                caches = self._scheduler.manager.enable_prefix_caching
                if caches and item.request.params.reads_prefix_cache:
                    self.queries.inc(len(item.request.prompt_token_ids))
                    self.hits.inc(item.num_computed_tokens)
                    junction = item.request.junction
                    self.thrown_away.inc(max(0, junction - item.num_computed_tokens))

    def on_prepare(self, batch: Sequence[ScheduledRequest]) -> None:
        """Keep the batch: its drafts are known now."""
        self._batch = batch

    def on_commit(self, tokens: Sequence[Sequence[int]]) -> None:
        """Count right drafts: all tokens of a step but the last."""
        now = time.perf_counter()
        for item, new in zip(self._batch, tokens, strict=True):
            request_id = item.request.request_id
            if new and request_id in self._times:
                arrived, histogram, since = self._times[request_id]
                histogram.observe(now - since)
                self._times[request_id] = arrived, self.inter_token, now
            if item.num_drafts:
                self.drafts.inc()
                self.draft_tokens.inc(item.num_drafts)
                self.accepted.inc(len(new) - 1)
                for position in range(len(new) - 1):
                    self._accepted_per_pos.labels(self._model, position).inc()

    def begun(self, request: Request, arrived: float) -> None:
        """Note that a request is open."""
        self._times[request.request_id] = arrived, self.first_token, arrived

    def ended(self, output: RequestOutput) -> None:
        """Note that a request has ended."""
        self.e2e.observe(time.perf_counter() - self._times.pop(output.request_id)[0])
        self.prompt_tokens.inc(len(output.prompt_token_ids))
        self.generation_tokens.inc(len(output.token_ids))
        self._success.labels(self._model, output.finish_reason).inc()

    def text(self) -> bytes:
        """Return the counts in Prometheus' text format."""
        self.running.set(len(self._scheduler.running))
        self.waiting.set(len(self._scheduler.waiting))
        size = self._pool.num_blocks - 1  # without the null block
        self.usage.set(1 - self._pool.num_free_blocks / size)
        return generate_latest(self.registry)
