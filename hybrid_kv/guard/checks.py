"""The checks of `hybrid-kv guard`. Each returns results; none of them decides what is printed."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from hybrid_kv.cache.backend import BackendContext, FlashAttentionBackend, TorchBackend, init_attn_backend
from hybrid_kv.cache.layout import allocate_raw_buffers, bind_views
from hybrid_kv.cache.plan import plan_cache
from hybrid_kv.config import CacheConfig
from hybrid_kv.engine.llm import LLM, RequestOutput
from hybrid_kv.engine.sampling import SamplingParams
from hybrid_kv.guard.traffic import REQUIRED, Observer, Scenario, draw_scenario
from hybrid_kv.models.exact import ExactConfig, ExactModel, ExactOracle
from hybrid_kv.models.layers import ForwardContext

Progress = Callable[[int], None]


@dataclass(frozen=True)
class CheckResult:
    """One line of the guard's table.

    `value` is the figure, `limit` what it was held against (empty if nothing), `detail` the first thing that is wrong.
    """

    section: str
    name: str
    passed: bool
    value: float
    unit: str
    limit: str
    n: int
    seconds: float
    detail: str = ""
    params: dict[str, Any] = field(default_factory=dict)


def run_scenario(scenario: Scenario) -> tuple[list[str], Counter[str]]:
    """Run one scenario; returns what is wrong with it (nothing, if all is well) and the patterns that happened."""
    model = ExactModel(ExactConfig(pattern=scenario.pattern))
    observer = Observer(scenario)
    try:
        llm = LLM(model, **scenario.options)
        outputs = llm.generate(scenario.prompts, scenario.params, progress=False, on_step=observer)
        observer.finish(llm, sum(o.num_preemptions for o in outputs), [o.finish_reason for o in outputs])
    except (AssertionError, IndexError, RuntimeError, ValueError) as error:
        return [f"{scenario}: {type(error).__name__}: {error}"], observer.seen
    oracle = ExactOracle(model)
    wrong = []
    for i, (output, prompt, params) in enumerate(zip(outputs, scenario.prompts, scenario.params, strict=True)):
        expected = oracle.generate(prompt, params.max_tokens, params.stop_token_ids)
        if output.token_ids != expected:
            pairs = zip(output.token_ids, expected, strict=False)
            first = next((j for j, (a, b) in enumerate(pairs) if a != b), min(len(output.token_ids), len(expected)))
            wrong.append(
                f"{scenario}: request {i} ({len(prompt)} prompt tokens) differs at output token {first}"
                f"{': ' + output.error if output.error else ''}"
            )
    return wrong, observer.seen


def check_exact_model(seed: int, num_requests: int, progress: Progress) -> list[CheckResult]:
    """Engine against oracle on the integer model, until `num_requests` requests ran; tokens must be equal."""
    begin = time.perf_counter()
    seen: Counter[str] = Counter()
    wrong: list[str] = []
    done = scenarios = 0
    while done < num_requests:
        scenario = draw_scenario(seed + scenarios)
        errors, patterns = run_scenario(scenario)
        wrong += errors
        seen += patterns
        scenarios += 1
        done += len(scenario.prompts)
        progress(len(scenario.prompts))
    seconds = time.perf_counter() - begin
    missing = [name for name in REQUIRED if not seen[name]]
    params = {"seed": seed, "scenarios": scenarios}
    return [
        CheckResult(
            "exact model", "requests whose tokens differ from the oracle", not wrong, len(wrong), "requests", "0", done,
            seconds, wrong[0] if wrong else "", params,
        ),
        CheckResult(
            "exact model", "request patterns that happened", not missing, len(REQUIRED) - len(missing), "patterns",
            str(len(REQUIRED)), scenarios, 0.0, f"void: never happened: {', '.join(missing)}" if missing else "",
            {**params, "seen": {name: seen[name] for name in REQUIRED}},
        ),
    ]  # fmt: skip


def check_layout(seed: int, trials: int, progress: Progress) -> list[CheckResult]:
    """Writing page b through any view of a layer must change bytes of page b only, and all views must agree on it."""
    begin = time.perf_counter()
    rng = np.random.default_rng(seed)
    wrong: list[str] = []
    for trial in range(trials):
        backend = (TorchBackend, FlashAttentionBackend)[trial % 2]
        # Two blocks make (2, num_blocks, …) and (num_blocks, 2, …) the same shape: vllm!37236.
        num_blocks = 2 if trial % 4 < 2 else int(rng.integers(3, 9))
        wrong += _layout_errors(backend, num_blocks, rng)
        progress(1)
    return [
        CheckResult(
            "layout", "views that leave their page", not wrong, len(wrong), "views", "0", trials,
            time.perf_counter() - begin, wrong[0] if wrong else "", {"seed": seed},
        )
    ]  # fmt: skip


def _layout_errors(backend: type[TorchBackend] | type[FlashAttentionBackend], num_blocks: int, rng: np.random.Generator) -> list[str]:
    model = ExactModel(ExactConfig(pattern="M*", width=int(rng.integers(1, 5)), state_size=int(rng.integers(1, 6))))
    context = BackendContext()
    cache = CacheConfig(block_size=16 * int(rng.integers(1, 4)), num_blocks=max(3, num_blocks))
    plan = plan_cache(model.layer_specs, cache, backend, context, max_model_len=64)
    config = type(plan.config)(num_blocks, plan.config.groups)
    groups = init_attn_backend(config, backend, context)
    raw_buffers = allocate_raw_buffers(config, torch.device("cpu"))
    page = config.page_size_bytes
    errors = []
    for group in groups:
        views = bind_views(config, groups, raw_buffers)[group.layer_names[0]]
        split = 1 if group.backend.is_ssm() else group.spec.block_size // group.kernel_block_size
        for block in range(num_blocks):
            raw_buffers[0].zero_()
            for view in views:
                view[block * split : (block + 1) * split] = -1
            touched = raw_buffers[0].nonzero().flatten()
            expected = sum(view[block * split : (block + 1) * split].numel() * view.element_size() for view in views)
            if len(touched) != expected or touched.min() < block * page or touched.max() >= (block + 1) * page:
                errors.append(f"{group.backend.name} with {num_blocks} blocks: page {block} is not bytes {block * page}…")
    return errors


class HiddenRecorder:
    """A model that keeps every step's hidden states, so that logits of *all* tokens can be compared."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.vocab_size = model.vocab_size
        self.mamba_chunk_size = model.mamba_chunk_size
        self.layer_specs = model.layer_specs
        self.hidden = torch.empty(0)

    def __call__(self, input_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        self.hidden = self._model(input_ids, positions, context)
        return self.hidden

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """As the model's."""
        logits: torch.Tensor = self._model.compute_logits(hidden)
        return logits


def record_logits(
    llm: LLM, prompts: Sequence[str] | Sequence[Sequence[int]], params: SamplingParams, disturb: Callable[[LLM], None] | None = None
) -> Iterator[tuple[RequestOutput, torch.Tensor]]:
    """Each request's output and the logits [num_tokens, vocab_size] of its prompt and output, as the engine computed them.

    A token that was computed twice (after a preemption) keeps its last logits.
    """
    recorder = HiddenRecorder(llm.runner.model)
    rows: dict[str, dict[int, torch.Tensor]] = {}

    def harvest(llm: LLM) -> None:
        start = 0
        for item in llm.runner.batch:
            logits = recorder.compute_logits(recorder.hidden[start : start + item.num_tokens])
            start += item.num_tokens
            own = rows.setdefault(item.request.request_id, {})
            own.update(zip(range(item.num_computed_tokens, item.num_computed_tokens + item.num_tokens), logits, strict=True))
        if disturb is not None:
            disturb(llm)

    plain = llm.runner.model
    llm.runner.model = recorder
    llm.runner.batch = []
    try:
        outputs = llm.generate(prompts, params, progress=False, on_step=harvest)
        disturb = None
        harvest(llm)
    finally:
        llm.runner.model = plain
    for output in outputs:
        own = rows[output.request_id]
        yield output, torch.stack([own[i] for i in range(len(own))])
