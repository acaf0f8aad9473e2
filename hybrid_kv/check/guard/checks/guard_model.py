"""The trained models' logits, in engines of every kind, against their plain forward pass in float64."""

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
# Engine settings in which a guard model's logits are compared with its plain forward pass. Those with a cache get
# prompts that share their examples, and chunks so small that they do not jump over the shared boundaries.
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
    # Three chunks to a step. The guard has one thread, with which prefills are scanned in another way.
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
    """Logits of every computed prompt and answer token, engine against the plain forward pass in float64.

    Tokens of a trained model hide damage (a state one token behind changes no answer); logits do not. Cells with a
    cache get prompts that begin alike. The plain pass runs on the CPU, whatever `run.device`.
    """
    for model in TRAINED.values():
        # A part of them is every other, by the seed.
        cells = LOGIT_CELLS if model.share == 1.0 else LOGIT_CELLS[run.seed % 2 :: 2]
        questions = Questions(model, run.seed + 7, model.amount(run.amount, LEAST))
        found = []
        for cell in cells:
            found.append(questions.run(cell, run.device))
            run.progress(run.amount / len(TRAINED) / len(cells))
            yield result_of(found[-1], model, run.seed)
        yield _tokens(model, found, questions, run.seed)


class Questions:
    """The prompts of a trained model.

    Args:
        seed, count: of the questions.
    """

    def __init__(self, model: Trained, seed: int, count: int) -> None:
        from hybrid_kv.check.guard_model.problems import eval_set

        tokenizer = load_tokenizer(model.folder)
        self.model = model
        self.own = [list(tokenizer.encode(item.prompt)) for item in eval_set(seed, count)]
        self.shared = [list(tokenizer.encode(prompt)) for prompt in five_shot(seed, count)]

    def run(self, cell: dict[str, Any], device: str) -> Found:
        """Answer all of them in one engine; a cell with a cache gets prompts that begin alike."""
        prompts = (
            self.shared if MODES[cell.get("mamba_cache_mode", "none")].keeps_states else self.own
        )
        options = {**cell, "device": device, "preempts": PREEMPTS}
        return beside_plain(
            LogitCase("plain", self.model.folder.name, options, prompts, (), NUM_NEW)
        )


def result_of(found: Found, model: Trained, seed: int) -> CheckResult:
    cell = {key: value for key, value in found.cell.items() if key not in OWN}
    features = [cell["dtype"], cell["attention_backend"], *_features(cell)]
    rule, detail = found.broken
    detail = (
        found.void or _too_few_accepted(found, model) if rule in ("", "tokens") else detail
    )  # tokens: see below
    return CheckResult(
        f"largest logit difference, {', '.join(features)}{model.suffix}",
        found.worst,
        "logit",
        f"{found.limit:.1g}",
        found.num_tokens,
        detail,
        {**cell, "seed": seed, **model.params},
        {"cached_tokens": found.cached_tokens, "accepted": found.accepted},
        case=to_json(found.case, rule) if rule else "",
    )


def _too_few_accepted(found: Found, model: Trained) -> str:
    """A head that drafts worse than it was trained to; where it is asked what its acceptance was measured with."""
    cell = found.cell
    if (
        cell.get("speculative_method") != "mtp"
        or not MODES[cell.get("mamba_cache_mode", "none")].keeps_states
    ):
        return ""
    due = model.least_acceptance("mtp", cell["num_speculative_tokens"], len(found.case.prompts))
    is_low = found.accepted < due * found.verified
    return f"{found.accepted} of {found.verified} drafts accepted, {due:.1%} are due" * is_low


def _tokens(model: Trained, found: Sequence[Found], questions: Questions, seed: int) -> CheckResult:
    num_wrong = sum(one.num_wrong for one in found)
    preemptions = sum(one.preemptions for one in found)
    void = "" if preemptions else "void: no request was preempted"
    detail = f"{num_wrong} tokens differ" if num_wrong else void
    case = next((to_json(one.case, "tokens") for one in found if one.broken[0] == "tokens"), "")
    used = {
        "cells": len(found),
        "prompts": len(questions.own),
        "preemptions": preemptions,
        "cached_tokens": sum(one.cached_tokens for one in found),
        "accepted": sum(one.accepted for one in found),
    }
    return CheckResult(
        f"wrong tokens, plain forward pass{model.suffix}",
        num_wrong,
        "tokens",
        "0",
        sum(one.num_tokens for one in found),
        detail,
        {"seed": seed, **model.params},
        used,
        case=case,
    )


def _features(cell: dict[str, Any]) -> list[str]:
    """What a cell has beyond paging."""
    drafts = (
        [f"{cell['speculative_method']} {cell['num_speculative_tokens']}"]
        if "speculative_method" in cell
        else []
    )
    late = ["async"] if cell.get("async_scheduling") else []
    late += [cell["state_scheme"]] if "state_scheme" in cell else []
    return [*([cell["mamba_cache_mode"]] if "mamba_cache_mode" in cell else []), *drafts, *late]
