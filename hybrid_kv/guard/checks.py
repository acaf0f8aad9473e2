"""The checks of `hybrid-kv guard`. Each returns results; none of them decides what is printed."""

from __future__ import annotations

import json
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from multiprocessing import get_context
from typing import Any

import numpy as np
import torch

from hybrid_kv.attention.mamba import DecodeReplay
from hybrid_kv.cache.backend import BackendContext, FlashAttentionBackend, TorchBackend, init_attn_backend
from hybrid_kv.cache.layout import allocate_raw_buffers, bind_views
from hybrid_kv.cache.plan import plan_cache
from hybrid_kv.cache.spec import FullAttentionSpec, KVCacheSpec, MambaSpec
from hybrid_kv.config import CacheConfig
from hybrid_kv.engine.llm import LLM, RequestOutput
from hybrid_kv.errors import deaf_to_ctrl_c
from hybrid_kv.guard.observer import Observer
from hybrid_kv.guard.patterns import REQUIRED
from hybrid_kv.guard.poison import poison
from hybrid_kv.guard.scenario import Cell, Scenario, ScriptedProposer, answer_book
from hybrid_kv.guard.traffic import (
    SCENARIOS_PER_RUN,
    combinations_of,
    draw_scenario,
    draw_trio,
    required_combinations,
)
from hybrid_kv.models.layers import ForwardContext
from hybrid_kv.sampling import SamplingParams

Progress = Callable[[int], object]


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


@dataclass
class Differences:
    """What scenarios had wrong (nothing, if all is well), and what happened in them."""

    wrong: list[str] = field(default_factory=list)
    seen: Counter[str] = field(default_factory=Counter)
    cells: list[Cell] = field(default_factory=list)  # of the covering design, those that had their effect
    num_requests: int = 0
    num_scenarios: int = 0

    def __iadd__(self, other: Differences) -> Differences:
        self.wrong += other.wrong
        self.seen += other.seen
        self.cells += other.cells
        self.num_requests += other.num_requests
        self.num_scenarios += other.num_scenarios
        return self


@contextmanager
def unwarned() -> Iterator[None]:
    """Scenarios do on purpose what a user is warned of: room for drafts that nobody proposes, prompts below a block."""
    logger = logging.getLogger("hybrid_kv.engine")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


@unwarned()
def run_scenario(scenario: Scenario) -> Differences:
    """Run one scenario against the oracle, every step under the observer's rules."""
    return _play(scenario)[0]


def _play(scenario: Scenario) -> tuple[Differences, list[RequestOutput]]:
    options, book = scenario.options, answer_book(scenario.layers)
    limit = options["max_model_len"]
    requests = list(zip(scenario.prompts, scenario.params, strict=True))
    sequences = [[*prompt, *book.without_stop(prompt, params, limit)] for prompt, params in requests]
    answers = [book.answer(prompt, params, limit) for prompt, params in requests]
    ends = [len(prompt) + len(answer) for prompt, answer in zip(scenario.prompts, answers, strict=True)]
    observer = Observer(scenario, sequences, ends)
    result = Differences(seen=observer.seen, num_requests=len(requests), num_scenarios=1)
    outputs: list[RequestOutput] = []
    try:
        llm = _engine(scenario, sequences)
        poison(llm)
        observer.watch(llm)
        for wave in scenario.waves or (len(requests),):
            part = slice(len(outputs), len(outputs) + wave)
            prompts, params = scenario.prompts[part], scenario.params[part]
            outputs += llm.generate(prompts, params, progress=False, on_step=observer)
        observer.finish(llm, outputs)
    except Exception as error:
        result.wrong = [f"{scenario}: {type(error).__name__}: {error}"]
        return result, outputs
    result.cells = [observer.cell] if observer.cell is not None else []
    for i, (output, expected) in enumerate(zip(outputs, answers, strict=True)):
        if output.finish_reason == "abort" and str(i) in observer.aborted:
            expected = expected[: len(output.token_ids)]
        if output.finish_reason == "error" and observer.never_fits(llm, i):
            expected = []
        if output.token_ids != expected:
            pairs = zip(output.token_ids, expected, strict=False)
            first = next((j for j, (a, b) in enumerate(pairs) if a != b), min(len(output.token_ids), len(expected)))
            result.wrong.append(
                f"{scenario}: request {i} ({len(scenario.prompts[i])} prompt tokens) differs at output token {first}"
                f"{': ' + output.error if output.error else ''}"
            )
    return result, outputs


def _engine(scenario: Scenario, sequences: Sequence[Sequence[int]]) -> LLM:
    model, options = answer_book(scenario.layers).model, scenario.options
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


def _run_all(seeds: Iterator[int], workers: int) -> Generator[Differences]:
    """Scenarios in the order of their seeds, whatever the number of processes."""
    if workers == 1:
        yield from (run_scenario(draw_scenario(seed)) for seed in seeds)
        return
    # Fork would hand on the locks of torch's threads.
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        under_way: deque[Future[list[Differences]]] = deque()
        try:
            while True:
                with deaf_to_ctrl_c():  # A submit may start a worker.
                    while len(under_way) < 3 * workers:
                        under_way.append(pool.submit(_run_batch, list(islice(seeds, 4))))
                yield from under_way.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)


def check_exact_model(seed: int, num_requests: int, progress: Progress, workers: int = 1) -> list[CheckResult]:
    """Engine against oracle on the integer model, until `num_requests` requests ran; tokens must be equal."""
    begin = time.perf_counter()
    total = Differences()
    first = seed * SCENARIOS_PER_RUN
    runs = _run_all(iter(range(first, first + SCENARIOS_PER_RUN)), workers)
    while total.num_requests < num_requests:
        result = next(runs)
        progress(min(result.num_requests, num_requests - total.num_requests))
        total += result
    runs.close()
    seconds = time.perf_counter() - begin
    wrong = total.wrong
    missing = [name for name in REQUIRED if not total.seen[name]]
    wanted = required_combinations()
    untried = sorted(wanted.difference(*map(combinations_of, total.cells)), key=repr)
    params = {"seed": seed, "scenarios": total.num_scenarios}
    return [
        CheckResult(
            "exact model", "scenarios and requests unlike the oracle", not wrong, len(wrong), "requests", "0",
            total.num_requests, seconds, wrong[0] if wrong else "", params,
        ),
        CheckResult(
            "exact model", "request patterns that happened", not missing, len(REQUIRED) - len(missing), "patterns",
            str(len(REQUIRED)), total.num_scenarios, 0.0,
            f"void: never happened: {', '.join(missing)}" if missing else "",
            {**params, "seen": {name: total.seen[name] for name in REQUIRED}},
        ),
        CheckResult(
            "exact model", "pairs and triples of settings that ran", not untried, len(wanted) - len(untried),
            "settings", str(len(wanted)), total.num_scenarios, 0.0,
            f"void: {len(untried)} never ran, such as {dict(untried[0])}" if untried else "", params,
        ),
    ]  # fmt: skip


def check_costs(seed: int, trials: int, progress: Progress) -> list[CheckResult]:
    """The same requests with and without drafts, and with and without a cache.

    Drafts must not cost a cached token, caching must not cost an accepted draft.
    """
    begin = time.perf_counter()
    wrong: list[str] = []
    num_cached = num_accepted = 0
    for trial in range(trials):
        trio = draw_trio(seed * SCENARIOS_PER_RUN + trial)
        results, outputs = zip(*map(_play, trio), strict=True)
        errors = [error for result in results for error in result.wrong]
        for i, (both, cached, drafted) in enumerate(zip(*outputs, strict=not errors)):
            num_cached += both.cached_tokens
            num_accepted += both.num_accepted_draft_tokens
            figures = (both.cached_tokens, both.num_accepted_draft_tokens)
            due = (cached.cached_tokens, drafted.num_accepted_draft_tokens)
            if figures != due:
                errors.append(
                    f"{trio[0]}: request {i} has {figures[0]} cached tokens and {figures[1]} accepted drafts; without "
                    f"drafts {due[0]} are cached, without a cache {due[1]} are accepted"
                )
        wrong += errors
        progress(1)
    detail = wrong[0] if wrong else "" if num_cached and num_accepted else "void: no hit, or no accepted draft"
    params = {"seed": seed, "cached_tokens": num_cached, "accepted_drafts": num_accepted}
    return [
        CheckResult(
            "exact model", "hits lost to drafts, drafts lost to caching", not detail, len(wrong),
            "requests", "0", trials, time.perf_counter() - begin, detail, params,
        )
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


def _layout_errors(
    backend: type[TorchBackend] | type[FlashAttentionBackend], num_blocks: int, rng: np.random.Generator
) -> list[str]:
    # bf16 windows before float32 states, as in real checkpoints: parts of one page need not have one dtype.
    width, heads = 2 * int(rng.integers(1, 5)), int(rng.integers(1, 6))
    specs: dict[str, KVCacheSpec] = {
        "mamba": MambaSpec(1, ((3, width), (heads, width)), (torch.bfloat16, torch.float32)),
        "attention": FullAttentionSpec(1, heads, width, torch.bfloat16),
    }
    context = BackendContext()
    cache = CacheConfig(block_size=16 * int(rng.integers(1, 4)), num_blocks=max(3, num_blocks))
    plan = plan_cache(specs, cache, backend, context, max_model_len=64)
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
                view[block * split : (block + 1) * split] = 1 / 3  # no byte of it is zero, in bf16 and in float32
            touched = raw_buffers[0].nonzero().flatten()
            expected = sum(view[block * split : (block + 1) * split].numel() * view.element_size() for view in views)
            if len(touched) != expected or touched.min() < block * page or touched.max() >= (block + 1) * page:
                errors.append(
                    f"{group.backend.name} with {num_blocks} blocks: page {block} is not bytes {block * page}…"
                )
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

    def fold(self, replays: dict[str, DecodeReplay], context: ForwardContext) -> None:
        """As the model's."""
        self._model.fold(replays, context)


def record_logits(
    llm: LLM,
    prompts: Sequence[str] | Sequence[Sequence[int]],
    params: SamplingParams,
    disturb: Callable[[LLM], None] | None = None,
) -> Iterator[tuple[RequestOutput, torch.Tensor]]:
    """Each request's output, and the logits [num_computed, vocab_size] that the engine computed for its tokens.

    They are those of its last tokens but one: what came from the cache has none, and nothing follows the last token. A
    token that was computed twice (after a preemption, or first as another token's draft) keeps its last logits.
    """
    recorder = HiddenRecorder(llm.runner.model)
    rows: dict[str, dict[int, torch.Tensor]] = {}

    def harvest(llm: LLM) -> None:
        start = 0
        for item in llm.runner.batch:
            logits = recorder.compute_logits(recorder.hidden[start : start + item.num_tokens])
            start += item.num_tokens
            own = rows.setdefault(item.request.request_id, {})
            own.update(
                zip(range(item.num_computed_tokens, item.num_computed_tokens + item.num_tokens), logits, strict=True)
            )
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
        # Behind the last computed token lie drafts that were rejected.
        end = len(output.prompt_token_ids) + len(output.token_ids) - 1
        yield output, torch.stack([own[i] for i in range(min(own), end)])


# In float64 the engine and the plain forward pass differ by 2e-13 on logits of up to 40, and the mildest damage of the
# guard model's card (an SSM state one token behind) moves a logit by 0.018: any limit in between will do.
FLOAT64_LIMIT = 1e-9
# In float32 both round: 3.4e-6 of the largest logit was measured, and 2e-5 is what transformers is held to.
FLOAT32_LIMIT = 2e-5
LARGEST = 1e300

# Engine settings in which the guard model's logits are held against its plain forward pass. Those with a cache get
# prompts that share their examples.
LOGIT_CELLS: tuple[dict[str, Any], ...] = (
    {"dtype": "float64", "attention_backend": "TORCH"},
    {"dtype": "float64", "attention_backend": "FLASH_ATTN", "max_num_batched_tokens": 37, "captured_batch_sizes": (6,)},
    {"dtype": "float64", "attention_backend": "FLASHINFER", "max_num_batched_tokens": 64, "num_blocks": 28},
    {
        "dtype": "float32",
        "attention_backend": "TORCH",
        "block_size": 96,
        "max_num_batched_tokens": 128,
        "num_blocks": 20,
    },
    {
        "dtype": "float64",
        "attention_backend": "TORCH",
        "mamba_cache_mode": "align",
        "max_num_batched_tokens": 150,  # A larger chunk would jump over the shared boundaries.
        "max_num_seqs": 2,
    },
    {
        "dtype": "float64",
        "attention_backend": "FLASHINFER",
        "mamba_cache_mode": "all",
        "speculative_method": "ngram",
        "num_speculative_tokens": 3,
        "max_num_batched_tokens": 90,
        "max_num_seqs": 2,
    },
    {
        "dtype": "float64",
        "attention_backend": "FLASH_ATTN",
        "mamba_cache_mode": "align",
        "speculative_method": "mtp",
        "num_speculative_tokens": 3,
        "async_scheduling": True,
        "max_num_batched_tokens": 128,
        "max_num_seqs": 2,
    },
    {
        "dtype": "float64",
        "attention_backend": "TORCH",
        "state_scheme": "replay",
        "mamba_cache_mode": "align",
        "speculative_method": "ngram",
        "num_speculative_tokens": 3,
        "replay_ring_len": 11,
        "max_num_batched_tokens": 150,
        "max_num_seqs": 2,
    },
    {
        "dtype": "float64",
        "attention_backend": "FLASHINFER",
        "state_scheme": "replay",
        "mamba_cache_mode": "all",
        "speculative_method": "mtp",
        "num_speculative_tokens": 3,
        "async_scheduling": True,
        "max_num_batched_tokens": 90,
        "max_num_seqs": 2,
    },
    {
        "dtype": "float32",
        "attention_backend": "TORCH",
        "state_scheme": "replay",
        "max_num_batched_tokens": 128,
    },
)


def _preempt_now_and_then(llm: LLM) -> None:
    if llm.num_steps % 11 == 10 and len(llm.scheduler.running) > 1:
        llm.scheduler.preempt(llm.scheduler.running[-1])


def logit_difference(logits: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """The largest difference of each token's logits; NaN and infinity are the largest there is, never unseen."""
    return (logits - expected).abs().nan_to_num(nan=LARGEST, posinf=LARGEST).amax(-1)


def check_guard_logits(
    prompts: Sequence[str], shared: Sequence[str], progress: Progress, device: str = "cpu"
) -> list[CheckResult]:
    """Logits of every computed prompt and answer token, engine against the plain forward pass in float64.

    Tokens of a trained model hide damage (a state one token behind changes no answer); logits do not.

    Args:
        prompts: for cells without a cache.
        shared: for those with one; they begin alike.
        device: of the engine; the plain pass runs on the CPU.
    """
    from hybrid_kv.accuracy.guard_model import FOLDER
    from hybrid_kv.accuracy.guard_model.model import load_checkpoint

    plain = load_checkpoint(FOLDER).eval().double()
    params = SamplingParams(max_tokens=48, stop=("Question:",))
    results = []
    num_preemptions = num_wrong = num_all = num_cached = num_accepted = 0
    for cell in LOGIT_CELLS:
        begin = time.perf_counter()
        options = {"max_model_len": 512, "max_num_seqs": 8, "mamba_ssm_cache_dtype": cell["dtype"], **cell}
        llm = LLM(FOLDER, device=device, **options)
        poison(llm)
        worst, largest, where, num_tokens, cached, accepted = 0.0, 0.0, "", 0, 0, 0
        own = shared if llm.manager.enable_prefix_caching else prompts
        for output, logits in record_logits(llm, own, params, _preempt_now_and_then):
            ids = torch.tensor([output.prompt_token_ids + output.token_ids])
            with torch.inference_mode():
                whole = plain(ids)[0, :-1]
            expected = whole[-len(logits) :]
            difference = logit_difference(logits.cpu(), expected)
            largest = max(largest, float(expected.abs().max()))
            if float(difference.max()) > worst:
                worst = float(difference.max())
                token = int(difference.argmax()) + len(whole) - len(logits)
                where = f"{cell}, request {output.request_id}, token {token} of {len(whole)}"
            start = len(output.prompt_token_ids) - 1
            num_wrong += int((whole[start:].argmax(-1) != ids[0, start + 1 :]).sum())
            num_tokens += len(logits)
            num_preemptions += output.num_preemptions
            cached += output.cached_tokens
            accepted += output.num_accepted_draft_tokens
            progress(1)
        limit = FLOAT64_LIMIT if cell["dtype"] == "float64" else FLOAT32_LIMIT * largest
        features = [cell["dtype"], cell["attention_backend"], *_features(cell)]
        detail = where if worst > limit else ""
        if llm.manager.enable_prefix_caching and not cached:
            detail = detail or "void: no prompt token came from the cache"
        if "num_speculative_tokens" in cell and not accepted:
            detail = detail or "void: no draft was accepted"
        seconds = time.perf_counter() - begin
        num_all += num_tokens
        num_cached += cached
        num_accepted += accepted
        results.append(
            CheckResult(
                "guard model", f"largest logit difference, {', '.join(features)}", not detail, worst, "logit",
                f"{limit:.1g}", num_tokens, seconds, detail, {**cell, "cached_tokens": cached, "accepted": accepted},
            )
        )  # fmt: skip
    void = "" if num_preemptions else "void: no request was preempted"
    detail = f"{num_wrong} tokens differ" if num_wrong else void
    used = {
        "cells": len(LOGIT_CELLS), "prompts": len(prompts), "preemptions": num_preemptions,
        "cached_tokens": num_cached, "accepted": num_accepted,
    }  # fmt: skip
    name = "tokens that the plain forward pass would not choose"
    return [
        *results,
        CheckResult("guard model", name, not detail, num_wrong, "tokens", "0", num_all, 0.0, detail, used),
    ]


def _features(cell: dict[str, Any]) -> list[str]:
    """What a cell has beyond paging."""
    drafts = [f"{cell['speculative_method']} {cell['num_speculative_tokens']}"] if "speculative_method" in cell else []
    late = ["async"] if cell.get("async_scheduling") else []
    late += ["replay"] if cell.get("state_scheme") == "replay" else []
    return [*([cell["mamba_cache_mode"]] if "mamba_cache_mode" in cell else []), *drafts, *late]


def check_accuracy(limit: int, progress: Progress) -> list[CheckResult]:
    """The guard model on `gsm8k_synth`, against the recorded share of correct answers.

    An alarm needs a count of correct answers that the lower end of the recorded share's 95 % interval would give less
    than once in 1000 runs (one-sided binomial).
    """
    from scipy.stats import binom

    from hybrid_kv.accuracy.guard_model import FOLDER
    from hybrid_kv.accuracy.run import evaluate_guard_model

    # Written by `hybrid-kv accuracy --limit 500 --json hybrid_kv/accuracy/guard_model/recorded.json`.
    recorded = json.loads((FOLDER / "recorded.json").read_text())
    begin = time.perf_counter()
    result = evaluate_guard_model(limit=limit, seed=recorded["params"]["seed"])
    seconds = time.perf_counter() - begin
    progress(limit)
    correct = sum(record.correct for record in result.records)
    invalid = sum(record.invalid for record in result.records)
    floor = int(binom.ppf(0.001, limit, recorded["accuracy_ci"][0]))
    params = {"recorded_accuracy": recorded["accuracy"], "recorded_n": recorded["n"], "floor": floor}
    wrong = f"{correct} of {limit} correct, recorded were {recorded['accuracy']:.1%}"
    return [
        CheckResult(
            "accuracy", "correct answers to gsm8k_synth", correct >= floor, correct / limit, "share",
            f">= {floor / limit:.3f}", limit, seconds, "" if correct >= floor else wrong, params,
        ),
        CheckResult(
            "accuracy", "answers without a number", invalid <= limit - floor, invalid / limit, "share",
            f"<= {1 - floor / limit:.3f}", limit, 0.0, f"{invalid} invalid answers" if invalid > limit - floor else "",
            params,
        ),
    ]  # fmt: skip


def check_expansion(progress: Progress) -> list[CheckResult]:
    """The engine's block-id path against the alternatives, as ratios in one run.

    A ratio must reach what the benchmark requires, and half of the best that `results/microbench.csv` has for this
    kind of machine: the other half is left to a busy one.
    """
    from hybrid_kv.timing.block_ids import quick_ratios, recorded_ratios, required_ratio

    begin = time.perf_counter()
    all_recorded = recorded_ratios()
    cells = []
    for benchmark, params, ratio, low, high in quick_ratios():
        recorded = all_recorded.get((benchmark, json.dumps(params, sort_keys=True)), 0.0)
        required = max(required_ratio(benchmark, params), recorded / 2)
        rival = f"{params['scenario']}, {params['subject']}" if benchmark == "step" else "one append, fastest rival"
        cells.append((rival, ratio / required, ratio, low, high, required, params))
    progress(1)
    seconds = time.perf_counter() - begin
    results = []
    for name in dict.fromkeys(cell[0] for cell in cells):
        own = [cell for cell in cells if cell[0] == name]
        _, _, ratio, low, high, required, params = min(own, key=lambda cell: cell[1])
        where = ", ".join(f"{key}={value}" for key, value in params.items())
        detail = "" if high >= required else f"{where}: interval {low:.2f} to {high:.2f} is below {required:.3g}"
        results.append(
            CheckResult(
                "block ids", f"{name}, over the engine", not detail, ratio, "time ratio", f">= {required:.3g}",
                len(own), seconds, detail, {**params, "ci_low": low, "ci_high": high},
            )
        )  # fmt: skip
        seconds = 0.0
    return results
