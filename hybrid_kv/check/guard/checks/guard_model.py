"""Logits of the trained models, in engines of every kind, against their plain pass in float64."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from hybrid_kv.cache.modes import MODES
from hybrid_kv.check.guard.logits import Found, LogitCase, beside_plain, to_json
from hybrid_kv.check.guard.registry import CheckResult, Run, check
from hybrid_kv.check.guard.trained import TRAINED, Trained, five_shot
from hybrid_kv.models.loader import load_tokenizer

NUM_NEW = 48  # tokens of each answer
PREEMPTS = 11  # steps: then the youngest request makes room
OWN = ("device", "preempts", "in_chunks", "logprobs")  # of a cell, and no metric's name
LEAST = (
    3  # prompts: two run at once where a cell has a cache, and only what comes behind them can hit
)
_TORCH, _FA, _FI = (
    {"dtype": "float64", "attention_backend": name}
    for name in ("TORCH", "FLASH_ATTN", "FLASHINFER")
)
_NGRAM = {"speculative_method": "ngram", "num_speculative_tokens": 3, "max_num_seqs": 2}
_MTP = {
    "speculative_method": "mtp",
    "num_speculative_tokens": 3,
    "max_num_seqs": 2,
    "async_scheduling": True,
}
_REPLAY = {"state_scheme": "recompute"}
# Engine settings in which a guard model's logits are compared with its plain forward pass. Those
# with a cache get prompts that share their examples, and chunks so small that they do not jump over
# the shared boundaries.
LOGIT_CELLS: tuple[dict[str, Any], ...] = (
    _TORCH,
    {**_FA, "max_num_batched_tokens": 37, "captured_batch_sizes": (6,), "logprobs": 3},
    {**_FI, "max_num_batched_tokens": 64, "num_blocks": 28},
    {
        **_TORCH,
        "dtype": "float32",
        "block_size": 96,
        "max_num_batched_tokens": 128,
        "num_blocks": 20,
    },
    {**_TORCH, "mamba_cache_mode": "align", "max_num_batched_tokens": 150, "max_num_seqs": 2},
    # Three chunks to a step. The guard has one thread, with which prefills are scanned in another
    # way.
    {**_FI, **_NGRAM, "mamba_cache_mode": "all", "max_num_batched_tokens": 90, "in_chunks": True},
    {**_FA, **_MTP, "mamba_cache_mode": "align", "max_num_batched_tokens": 128, "logprobs": 0},
    {
        **_TORCH,
        **_REPLAY,
        **_NGRAM,
        "mamba_cache_mode": "align",
        "recompute_ring_len": 11,
        "max_num_batched_tokens": 150,
    },
    {**_FI, **_REPLAY, **_MTP, "mamba_cache_mode": "all", "max_num_batched_tokens": 90},
    {**_TORCH, **_REPLAY, "dtype": "float32", "max_num_batched_tokens": 128},
)


@check(
    "guard model",
    quick=4,
    full=8,
    long=16,
    seconds=1.6,
    place=40,
    needs="safetensors tokenizers transformers",
)
def check_guard_logits(run: Run) -> Iterator[CheckResult]:
    """Compare the logits of every computed token, engine against the plain pass in float64.

    Tokens of a trained model hide damage (a state one token behind changes no answer); logits do
    not. Cells with a cache get prompts that begin alike. The plain pass runs on the CPU, whatever
    `run.device`.
    """
    for model in TRAINED.values():
        # A share of the cells is every other one, by the seed.
        cells = LOGIT_CELLS if model.share == 1.0 else LOGIT_CELLS[run.seed % 2 :: 2]
        questions = Questions(model, run.seed + 7, model.amount(run.amount, LEAST))
        compared = []
        for cell in cells:
            compared.append(questions.run(cell, run.device))
            run.progress(run.amount / len(TRAINED) / len(cells))
            yield result_of(compared[-1], model, run.seed)
        yield _tokens(model, compared, questions, run.seed)


class Questions:
    """The prompts of a trained model.

    Args:
        seed, count: of the questions.
    """

    def __init__(self, model: Trained, seed: int, count: int) -> None:
        from hybrid_kv.check.guard_model.problems import eval_set

        tokenizer = load_tokenizer(model.folder)
        self.model = model
        self.unshared = [list(tokenizer.encode(item.prompt)) for item in eval_set(seed, count)]
        self.shared = [list(tokenizer.encode(prompt)) for prompt in five_shot(seed, count)]

    def run(self, cell: dict[str, Any], device: str) -> Found:
        """Answer all of them in one engine; a cell with a cache gets prompts that begin alike."""
        is_cached = MODES[cell.get("mamba_cache_mode", "none")].keeps_states
        prompts = self.shared if is_cached else self.unshared
        options = {**cell, "device": device, "preempts": PREEMPTS}
        return beside_plain(
            LogitCase("plain", self.model.folder.name, options, prompts, (), NUM_NEW)
        )


def result_of(compared: Found, model: Trained, seed: int) -> CheckResult:
    """Return the guard's line of a cell."""
    cell = {key: value for key, value in compared.cell.items() if key not in OWN}
    features = [cell["dtype"], cell["attention_backend"], *_features(cell)]
    rule, detail = compared.broken
    if rule in ("", "tokens"):  # `_tokens` counts wrong tokens.
        detail = compared.void or _too_few_accepted(compared, model)
    return CheckResult(
        f"largest logit difference, {', '.join(features)}{model.suffix}",
        compared.worst,
        "logit",
        f"{compared.limit:.1g}",
        compared.num_tokens,
        detail,
        {**cell, "seed": seed, **model.params},
        {"cached_tokens": compared.cached_tokens, "accepted": compared.accepted},
        case=to_json(compared.case, rule) if rule else "",
    )


def _too_few_accepted(compared: Found, model: Trained) -> str:
    """Return how a head drafts worse than it was trained to; empty if it does not.

    It is asked only in cells that its acceptance was measured with.
    """
    cell = compared.cell
    if (
        cell.get("speculative_method") != "mtp"
        or not MODES[cell.get("mamba_cache_mode", "none")].keeps_states
    ):
        return ""
    due = model.least_acceptance("mtp", cell["num_speculative_tokens"], len(compared.case.prompts))
    is_low = compared.accepted < due * compared.verified
    return f"{compared.accepted} of {compared.verified} drafts accepted, {due:.1%} are due" * is_low


def _tokens(
    model: Trained, compared: Sequence[Found], questions: Questions, seed: int
) -> CheckResult:
    num_wrong = sum(result.num_wrong for result in compared)
    preemptions = sum(result.preemptions for result in compared)
    void = "" if preemptions else "void: no request was preempted"
    detail = f"{num_wrong} tokens differ" if num_wrong else void
    case = next(
        (to_json(result.case, "tokens") for result in compared if result.broken[0] == "tokens"), ""
    )
    used = {
        "cells": len(compared),
        "prompts": len(questions.unshared),
        "preemptions": preemptions,
        "cached_tokens": sum(result.cached_tokens for result in compared),
        "accepted": sum(result.accepted for result in compared),
    }
    return CheckResult(
        f"wrong tokens, plain forward pass{model.suffix}",
        num_wrong,
        "tokens",
        "0",
        sum(result.num_tokens for result in compared),
        detail,
        {"seed": seed, **model.params},
        used,
        case=case,
    )


def _features(cell: dict[str, Any]) -> list[str]:
    """Return what a cell has beyond paging."""
    features = []
    if "mamba_cache_mode" in cell:
        features.append(cell["mamba_cache_mode"])
    if "speculative_method" in cell:
        features.append(f"{cell['speculative_method']} {cell['num_speculative_tokens']}")
    if cell.get("async_scheduling"):
        features.append("async")
    if "state_scheme" in cell:
        features.append(cell["state_scheme"])
    return features
