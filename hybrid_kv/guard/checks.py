"""The checks of `hybrid-kv guard`. Each returns results; none of them decides what is printed."""

from __future__ import annotations

import json
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
from hybrid_kv.cache.spec import FullAttentionSpec, KVCacheSpec, MambaSpec
from hybrid_kv.config import CacheConfig
from hybrid_kv.engine.llm import LLM, RequestOutput
from hybrid_kv.engine.sampling import SamplingParams, sample
from hybrid_kv.guard.traffic import REQUIRED, Observer, Scenario, draw_scenario
from hybrid_kv.models.exact import ExactConfig, ExactModel, ExactOracle
from hybrid_kv.models.layers import ForwardContext

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


def run_scenario(scenario: Scenario) -> tuple[list[str], Counter[str]]:
    """Run one scenario; returns what is wrong with it (nothing, if all is well) and the patterns that happened."""
    model = ExactModel(ExactConfig(pattern=scenario.pattern))
    observer = Observer(scenario)
    try:
        llm = LLM(model, **scenario.options)
        poison(llm)
        outputs = llm.generate(scenario.prompts, scenario.params, progress=False, on_step=observer)
        observer.finish(llm, outputs)
    except Exception as error:
        return [f"{scenario}: {type(error).__name__}: {error}"], observer.seen
    oracle = ExactOracle(model)
    wrong = []
    for i, (output, prompt, params) in enumerate(zip(outputs, scenario.prompts, scenario.params, strict=True)):
        expected = _alone(oracle, prompt, params, scenario.options["max_model_len"])
        if output.token_ids != expected:
            pairs = zip(output.token_ids, expected, strict=False)
            first = next((j for j, (a, b) in enumerate(pairs) if a != b), min(len(output.token_ids), len(expected)))
            wrong.append(
                f"{scenario}: request {i} ({len(prompt)} prompt tokens) differs at output token {first}"
                f"{': ' + output.error if output.error else ''}"
            )
    return wrong, observer.seen


def _alone(oracle: ExactOracle, prompt: Sequence[int], params: SamplingParams, max_model_len: int) -> list[int]:
    """What the request must become, whatever runs beside it; nothing for a prompt that cannot run."""
    if len(prompt) >= max_model_len:
        return []

    def choose(logits: Any, position: int) -> int:
        assert params.seed is not None or params.is_greedy
        row = torch.from_numpy(logits).double().unsqueeze(0)
        return sample(row, [params], [params.seed or 0], [position])[0]

    max_tokens = min(params.max_tokens, max_model_len - len(prompt))
    return oracle.generate(prompt, max_tokens, params.stop_token_ids, choose)


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
        progress(min(len(scenario.prompts), num_requests - done))
        done += len(scenario.prompts)
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


def poison(llm: LLM) -> None:
    """Fill the cache with what no reader may use: NaN in every float format, -1 in integers."""
    for buffer in llm.runner.raw_buffers:
        buffer.fill_(-1)


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
    llm: LLM,
    prompts: Sequence[str] | Sequence[Sequence[int]],
    params: SamplingParams,
    disturb: Callable[[LLM], None] | None = None,
) -> Iterator[tuple[RequestOutput, torch.Tensor]]:
    """Each request's output, and the logits [num_tokens, vocab_size] that the engine computed for all of its tokens.

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
        yield output, torch.stack([own[i] for i in range(len(own))])


# In float64 the engine and the plain forward pass differ by 2e-13 on logits of up to 40, and the mildest damage of the
# guard model's card (an SSM state one token behind) moves a logit by 0.018: any limit in between will do.
FLOAT64_LIMIT = 1e-9
# In float32 both round: 3.4e-6 of the largest logit was measured, and 2e-5 is what transformers is held to.
FLOAT32_LIMIT = 2e-5
LARGEST = 1e300

# Engine settings in which the guard model's logits are held against its plain forward pass.
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
)


def _preempt_now_and_then(llm: LLM) -> None:
    if llm.num_steps % 11 == 10 and len(llm.scheduler.running) > 1:
        llm.scheduler.preempt(llm.scheduler.running[-1])


def logit_difference(logits: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """The largest difference of each token's logits; NaN and infinity are the largest there is, never unseen."""
    return (logits - expected).abs().nan_to_num(nan=LARGEST, posinf=LARGEST).amax(-1)


def check_guard_logits(prompts: Sequence[str], progress: Progress) -> list[CheckResult]:
    """Logits of every prompt and answer token, engine against the plain forward pass of the same weights in float64.

    Tokens of a trained model hide damage (a state one token behind changes no answer); logits do not.
    """
    from accuracy.guard_model import FOLDER
    from accuracy.guard_model.model import load_checkpoint

    plain = load_checkpoint(FOLDER).eval().double()
    params = SamplingParams(max_tokens=48, stop=("Question:",))
    results = []
    num_preemptions = num_wrong = num_all = 0
    for cell in LOGIT_CELLS:
        begin = time.perf_counter()
        llm = LLM(FOLDER, max_model_len=512, max_num_seqs=8, device="cpu", mamba_ssm_cache_dtype=cell["dtype"], **cell)
        poison(llm)
        worst, largest, where, num_tokens = 0.0, 0.0, "", 0
        for output, logits in record_logits(llm, prompts, params, _preempt_now_and_then):
            ids = torch.tensor([output.prompt_token_ids + output.token_ids])
            with torch.inference_mode():
                expected = plain(ids)[0, : len(logits)]
            difference = logit_difference(logits, expected)
            largest = max(largest, float(expected.abs().max()))
            if float(difference.max()) > worst:
                worst = float(difference.max())
                where = f"{cell}, request {output.request_id}, token {int(difference.argmax())} of {len(logits)}"
            start = len(output.prompt_token_ids) - 1
            num_wrong += int((expected[start:].argmax(-1) != ids[0, start + 1 :]).sum())
            num_tokens += len(logits)
            num_preemptions += output.num_preemptions
            progress(1)
        limit = FLOAT64_LIMIT if cell["dtype"] == "float64" else FLOAT32_LIMIT * largest
        name = f"largest logit difference, {cell['dtype']}, {cell['attention_backend']}"
        detail = where if worst > limit else ""
        seconds = time.perf_counter() - begin
        num_all += num_tokens
        results.append(
            CheckResult(
                "guard model", name, not detail, worst, "logit", f"{limit:.1g}", num_tokens, seconds, detail, cell
            )
        )
    void = "" if num_preemptions else "void: no request was preempted"
    detail = f"{num_wrong} tokens differ" if num_wrong else void
    used = {"cells": len(LOGIT_CELLS), "prompts": len(prompts), "preemptions": num_preemptions}
    name = "tokens that the plain forward pass would not choose"
    return [
        *results,
        CheckResult("guard model", name, not detail, num_wrong, "tokens", "0", num_all, 0.0, detail, used),
    ]


def check_accuracy(limit: int, progress: Progress) -> list[CheckResult]:
    """The guard model on `gsm8k_synth`, against the recorded share of correct answers.

    An alarm needs a count of correct answers that the lower end of the recorded share's 95 % interval would give less
    than once in 1000 runs (one-sided binomial).
    """
    from scipy.stats import binom

    from accuracy.guard_model import FOLDER
    from accuracy.run import evaluate_guard_model

    # Written by `hybrid-kv accuracy --limit 500 --json accuracy/guard_model/recorded.json`.
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
    from bench.kernel_blocks import quick_ratios, recorded_ratios, required_ratio

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
