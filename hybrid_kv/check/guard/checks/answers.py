"""The guard models' answers in every combination of cache mode and drafts, question by question.

All prompts share their five worked examples, so hits must happen; each cell names its hit rate and
its acceptance, and one without hits, or without an accepted draft, is void. The tokens must be
those of the plainest cell (no cache, no drafts), the acceptance must not depend on the cache, and
the hit rate must not depend on the drafts, as counts.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from hybrid_kv.cache.modes import MODES
from hybrid_kv.check.guard.poison import poison
from hybrid_kv.check.guard.registry import CheckResult, Run, check
from hybrid_kv.check.guard.trained import TRAINED, Trained, five_shot
from hybrid_kv.config import CacheConfig
from hybrid_kv.engine.llm import LLM, RequestOutput
from hybrid_kv.sampling import SamplingParams

DRAFTS = ((None, 0), ("ngram", 3), ("mtp", 1), ("mtp", 3), ("mtp", 5))
RECOMPUTED = (
    ("none", "mtp", 3),
    ("align", "ngram", 3),
    ("align", "mtp", 3),
    ("all", "ngram", 3),
    ("all", "mtp", 1),
    ("all", "mtp", 5),
)  # also in state scheme `recompute`
DEFAULT_SCHEME = CacheConfig().state_scheme
TRIED = tuple(MODES)
NUM_CELLS = len(TRIED) * len(DRAFTS) + 2 + len(RECOMPUTED)
QUESTIONS_SEED = 1  # the hit rates and acceptances in README are those of these questions
LEAST = 16  # questions: fewer end before the device has forgotten anything
FORGET_EVERY = (
    10  # steps: then the device forgets what it has cached, and only the offload tier still has it
)


@dataclass(frozen=True)
class AnsweredCell:
    """One engine configuration and what it made of the questions."""

    mode: str
    method: str | None
    num_speculative_tokens: int
    outputs: list[RequestOutput]
    num_loaded_blocks: int | None = None  # from the offload tier, where there is one
    scheme: str = DEFAULT_SCHEME
    model: Trained = TRAINED["nemotron_h"]

    @property
    def name(self) -> str:
        drafts = f"{self.method} {self.num_speculative_tokens}" if self.method else "no drafts"
        scheme = "" if self.scheme == DEFAULT_SCHEME else f", {self.scheme}"
        offload = ", offload" if self.num_loaded_blocks is not None else ""
        return f"{self.mode}, {drafts}{scheme}{offload}"

    @property
    def tokens(self) -> list[list[int]]:
        return [output.token_ids for output in self.outputs]

    @property
    def cached_tokens(self) -> list[int]:
        return [output.cached_tokens for output in self.outputs]

    @property
    def hit_rate(self) -> float:
        num_tokens = sum(len(output.prompt_token_ids) for output in self.outputs)
        return sum(self.cached_tokens) / num_tokens

    @property
    def least_acceptance(self) -> float:
        """Return the share of drafts that must be accepted."""
        return self.model.least_acceptance(
            self.method or "", self.num_speculative_tokens, len(self.outputs)
        )

    @property
    def drafts(self) -> tuple[int, int]:
        """Return how many drafts were accepted and verified."""
        accepted = sum(output.num_accepted_draft_tokens for output in self.outputs)
        return accepted, sum(output.num_draft_tokens for output in self.outputs)


def _forget(llm: LLM) -> None:
    if llm.num_steps % FORGET_EVERY == FORGET_EVERY - 1:
        llm.reset_prefix_cache()


def run_cell(
    prompts: Sequence[str],
    mode: str,
    method: str | None,
    k: int,
    on_step: Callable[[LLM], None] | None = None,
    model: Trained = TRAINED["nemotron_h"],
    **options: Any,
) -> AnsweredCell:
    """Answer all questions in one configuration."""
    llm = LLM(
        model.folder,
        max_model_len=640,
        max_num_seqs=8,
        block_size=model.block_size,
        mamba_cache_mode=mode,
        speculative_method=method,
        num_speculative_tokens=k,
        **options,
    )
    poison(llm)
    outputs = llm.generate(
        prompts, SamplingParams(max_tokens=64, stop=("Question:",)), progress=False, on_step=on_step
    )
    tier = llm.manager.offload
    loaded = None if tier is None else tier.stats.loaded_blocks
    return AnsweredCell(mode, method, k, outputs, loaded, llm.config.cache.state_scheme, model)


def cells(
    prompts: Sequence[str], device: str = "cpu", model: Trained = TRAINED["nemotron_h"]
) -> Iterator[AnsweredCell]:
    """Yield every mode with every kind of draft, then engines that load blocks.

    They load them from host memory, and from files after a restart.
    """
    run = partial(run_cell, device=device, model=model)
    for mode in TRIED:
        for method, k in DRAFTS:
            yield run(prompts, mode, method, k)
    for mode, method, k in RECOMPUTED:
        yield run(prompts, mode, method, k, state_scheme="recompute")
    yield run(prompts, "all", "mtp", 3, _forget, kv_offload_bytes=2**28)
    with tempfile.TemporaryDirectory() as folder:
        run(prompts[: len(prompts) // 2], "align", None, 0, kv_offload_folder=folder)
        yield run(prompts, "align", None, 0, kv_offload_folder=folder)


@check(
    "answers",
    quick=0,
    full=24,
    long=200,
    seconds=1.5,
    place=50,
    needs="safetensors tokenizers transformers",
)
def check_answers(run: Run) -> Iterator[CheckResult]:
    """Yield a line per model and cell: how many answers differ from mode none without drafts."""
    for model in TRAINED.values():
        prompts = five_shot(QUESTIONS_SEED, model.amount(run.amount, LEAST))
        seen: dict[str, AnsweredCell] = {}
        for cell in cells(prompts, run.device, model):
            seen[cell.name] = cell
            yield _result(cell, seen)
            run.progress(run.amount / NUM_CELLS / len(TRAINED))


def _result(cell: AnsweredCell, seen: dict[str, AnsweredCell]) -> CheckResult:
    pairs = zip(cell.tokens, seen["none, no drafts"].tokens, strict=True)
    wrong = [i for i, (answer, plain) in enumerate(pairs) if answer != plain]
    detail = f"question {wrong[0]} has another answer" if wrong else _other_faults(cell, seen)
    accepted, drafted = cell.drafts
    params = {
        "mode": cell.mode,
        "scheme": cell.scheme,
        "method": cell.method,
        "K": cell.num_speculative_tokens,
    }
    loaded = cell.num_loaded_blocks
    metrics = {
        "hit_rate": cell.hit_rate,
        "accepted": accepted,
        "drafted": drafted,
        "loaded_blocks": loaded,
    }
    shown = metrics_in_words(cell.mode, cell.hit_rate, accepted, drafted, loaded)
    name = f"{cell.name}{cell.model.suffix}{': ' if shown else ''}{shown}"
    return CheckResult(
        name,
        len(wrong),
        "answers",
        "0",
        len(cell.outputs),
        detail,
        params | cell.model.params,
        metrics,
    )


def metrics_in_words(
    mode: str, hit_rate: float, accepted: int, drafted: int, loaded_blocks: int | None
) -> str:
    """Return what a line of the table says after its name."""
    shown = [f"hits {hit_rate:.1%}"] if MODES[mode].keeps_states else []
    shown += [f"accepted {accepted / drafted:.1%}"] if drafted else []
    shown += [f"{loaded_blocks} loads"] if loaded_blocks is not None else []
    return ", ".join(shown)


def _other_faults(cell: AnsweredCell, seen: dict[str, AnsweredCell]) -> str:
    accepted, drafted = cell.drafts
    if MODES[cell.mode].keeps_states and not cell.hit_rate:
        return "void: no prompt token came from the cache"
    if cell.num_loaded_blocks == 0:
        return "void: no block came from the offload tier"
    if cell.method is not None and not accepted:
        return "void: no draft was accepted"
    if cell.method is not None and accepted < cell.least_acceptance * drafted:
        return f"{accepted} of {drafted} drafts accepted, {cell.least_acceptance:.1%} are due"
    if cell.num_loaded_blocks is not None:
        return ""  # another cache, another schedule: the counts below are not comparable
    if cell.scheme != DEFAULT_SCHEME:
        slots = seen[cell.name.replace(f", {cell.scheme}", "")]
        if cell.drafts != slots.drafts:
            return f"{cell.drafts} drafts accepted and verified, {slots.drafts} with slots"
        return ""
    uncached = seen[cell.name.replace(cell.mode, "none", 1)]
    if cell.drafts != uncached.drafts:
        return f"{cell.drafts} drafts accepted and verified, {uncached.drafts} without a cache"
    undrafted = seen[f"{cell.mode}, no drafts"]
    num_cached = sum(cell.cached_tokens)
    num_undrafted = sum(undrafted.cached_tokens)
    if num_cached < num_undrafted:
        return f"{num_cached} cached tokens, {num_undrafted} without drafts"
    return ""
