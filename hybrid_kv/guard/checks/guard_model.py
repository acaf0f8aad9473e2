"""The trained models' logits, in engines of every kind, against their plain forward pass in float64."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hybrid_kv.engine.llm import LLM, RequestOutput
from hybrid_kv.engine.record import record_logits
from hybrid_kv.guard.exactness import FLOAT32_LIMIT, FLOAT64_LIMIT, logit_difference
from hybrid_kv.guard.poison import poison
from hybrid_kv.guard.prompts import five_shot
from hybrid_kv.guard.registry import CheckResult, Run, check
from hybrid_kv.guard.trained import TRAINED, Trained
from hybrid_kv.sampling import SamplingParams

PARAMS = SamplingParams(max_tokens=48, stop=("Question:",))
LEAST = 3  # prompts: two run at once where a cell has a cache, and only what comes behind them can hit
# Engine settings in which a guard model's logits are held against its plain forward pass. Those with a cache get
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


@check("guard model", quick=4, full=16, seconds=1.6, place=40, needs="safetensors tokenizers transformers")
def check_guard_logits(run: Run) -> list[CheckResult]:
    """Logits of every computed prompt and answer token, engine against the plain forward pass in float64.

    Tokens of a trained model hide damage (a state one token behind changes no answer); logits do not. Cells with a
    cache get prompts that begin alike. The plain pass runs on the CPU, whatever `run.device`.
    """
    results = []
    for model in TRAINED.values():
        cells = [cell for cell in LOGIT_CELLS if model.replays or "state_scheme" not in cell]
        if model.share < 1.0:
            cells = cells[run.seed % 2 :: 2]  # every other, by the seed
        asked = Questions(model, run.seed + 7, model.amount(run.amount, LEAST))
        found = []
        for cell in cells:
            found.append(asked.run(cell, run.device))
            run.progress(run.amount / len(TRAINED) / len(cells))
        results += [*(one.result(model, run.seed) for one in found), _tokens(model, found, asked, run.seed)]
    return results


class Questions:
    """What a trained model is asked, and its plain forward pass.

    Args:
        seed, count: of the questions.
    """

    def __init__(self, model: Trained, seed: int, count: int) -> None:
        from hybrid_kv.accuracy.guard_model.checkpoint import load_checkpoint
        from hybrid_kv.accuracy.guard_model.problems import eval_set

        self.model = model
        self.own = [item.prompt for item in eval_set(seed, count)]
        self.shared = five_shot(seed, count)
        self.plain = load_checkpoint(model.folder).double()

    def run(self, cell: dict[str, Any], device: str) -> Found:
        """Answer all of them in one engine."""
        begin = time.perf_counter()
        options = {"max_model_len": 512, "max_num_seqs": 8, "mamba_ssm_cache_dtype": cell["dtype"], **cell}
        llm = LLM(self.model.folder, device=device, **options)
        poison(llm)
        found = Found(cell, llm.manager.enable_prefix_caching)
        prompts = self.shared if found.caches else self.own
        for output, logits in record_logits(llm, prompts, PARAMS, _preempt_now_and_then):
            ids = torch.tensor([output.prompt_token_ids + output.token_ids])
            with torch.inference_mode():
                found.add(output, logits.cpu(), self.plain(ids)[0, :-1])
        found.seconds = time.perf_counter() - begin
        return found


@dataclass
class Found:
    """What one cell gave; `largest` logit, and the `worst` difference of one with the place where it is."""

    cell: dict[str, Any]
    caches: bool
    worst: float = 0.0
    largest: float = 0.0
    where: str = ""
    num_tokens: int = 0
    num_wrong: int = 0
    cached: int = 0
    accepted: int = 0
    preemptions: int = 0
    seconds: float = 0.0

    def add(self, output: RequestOutput, logits: torch.Tensor, whole: torch.Tensor) -> None:
        """One request's logits, and those of the plain pass for all its tokens but the last."""
        expected = whole[-len(logits) :]
        difference = logit_difference(logits, expected)
        self.largest = max(self.largest, float(expected.abs().max()))
        if float(difference.max()) > self.worst:
            self.worst = float(difference.max())
            token = int(difference.argmax()) + len(whole) - len(logits)
            self.where = f"{self.cell}, request {output.request_id}, token {token} of {len(whole)}"
        chosen = whole[len(output.prompt_token_ids) - 1 :].argmax(-1)
        self.num_wrong += int((chosen != torch.tensor(output.token_ids)).sum())
        self.num_tokens += len(logits)
        self.cached += output.cached_tokens
        self.accepted += output.num_accepted_draft_tokens
        self.preemptions += output.num_preemptions

    def result(self, model: Trained, seed: int) -> CheckResult:
        limit = FLOAT64_LIMIT if self.cell["dtype"] == "float64" else FLOAT32_LIMIT * self.largest
        features = [self.cell["dtype"], self.cell["attention_backend"], *_features(self.cell)]
        detail = self.where if self.worst > limit else ""
        if self.caches and not self.cached:
            detail = detail or "void: no prompt token came from the cache"
        if "num_speculative_tokens" in self.cell and not self.accepted:
            detail = detail or "void: no draft was accepted"
        return CheckResult(
            "guard model", f"largest logit difference, {', '.join(features)}{model.suffix}", not detail, self.worst,
            "logit", f"{limit:.1g}", self.num_tokens, self.seconds, detail,
            {**self.cell, "seed": seed, **model.params},
            {"cached_tokens": self.cached, "accepted": self.accepted},
        )  # fmt: skip


def _tokens(model: Trained, found: Sequence[Found], asked: Questions, seed: int) -> CheckResult:
    num_wrong, preemptions = sum(one.num_wrong for one in found), sum(one.preemptions for one in found)
    void = "" if preemptions else "void: no request was preempted"
    detail = f"{num_wrong} tokens differ" if num_wrong else void
    used = {
        "cells": len(found), "prompts": len(asked.own), "preemptions": preemptions,
        "cached_tokens": sum(one.cached for one in found), "accepted": sum(one.accepted for one in found),
    }  # fmt: skip
    return CheckResult(
        "guard model", f"tokens that the plain forward pass would not choose{model.suffix}", not detail, num_wrong,
        "tokens", "0", sum(one.num_tokens for one in found), 0.0, detail, {"seed": seed, **model.params}, used,
    )  # fmt: skip


def _features(cell: dict[str, Any]) -> list[str]:
    """What a cell has beyond paging."""
    drafts = [f"{cell['speculative_method']} {cell['num_speculative_tokens']}"] if "speculative_method" in cell else []
    late = ["async"] if cell.get("async_scheduling") else []
    late += [cell["state_scheme"]] if "state_scheme" in cell else []
    return [*([cell["mamba_cache_mode"]] if "mamba_cache_mode" in cell else []), *drafts, *late]
