"""The trained model's logits, in engines of every kind, against its plain forward pass in float64."""

from __future__ import annotations

import time
from typing import Any

import torch

from hybrid_kv.engine.llm import LLM
from hybrid_kv.engine.record import record_logits
from hybrid_kv.guard.exactness import FLOAT32_LIMIT, FLOAT64_LIMIT, logit_difference
from hybrid_kv.guard.poison import poison
from hybrid_kv.guard.prompts import five_shot
from hybrid_kv.guard.registry import CheckResult, Run, check
from hybrid_kv.sampling import SamplingParams

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


@check("guard model", quick=4, full=16, seconds=1.25, place=40, needs="safetensors tokenizers transformers")
def check_guard_logits(run: Run) -> list[CheckResult]:
    """Logits of every computed prompt and answer token, engine against the plain forward pass in float64.

    Tokens of a trained model hide damage (a state one token behind changes no answer); logits do not. Cells with a
    cache get prompts that begin alike. The plain pass runs on the CPU, whatever `run.device`.
    """
    from hybrid_kv.accuracy.guard_model import FOLDER
    from hybrid_kv.accuracy.guard_model.model import load_checkpoint
    from hybrid_kv.accuracy.guard_model.problems import eval_set

    prompts = [item.prompt for item in eval_set(run.seed + 7, run.amount)]
    shared = five_shot(run.seed + 7, run.amount)
    plain = load_checkpoint(FOLDER).eval().double()
    params = SamplingParams(max_tokens=48, stop=("Question:",))
    results = []
    num_preemptions = num_wrong = num_all = num_cached = num_accepted = 0
    for cell in LOGIT_CELLS:
        begin = time.perf_counter()
        options = {"max_model_len": 512, "max_num_seqs": 8, "mamba_ssm_cache_dtype": cell["dtype"], **cell}
        llm = LLM(FOLDER, device=run.device, **options)
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
            run.progress(1 / len(LOGIT_CELLS))
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
                f"{limit:.1g}", num_tokens, seconds, detail, {**cell, "seed": run.seed},
                {"cached_tokens": cached, "accepted": accepted},
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
        CheckResult(
            "guard model", name, not detail, num_wrong, "tokens", "0", num_all, 0.0, detail, {"seed": run.seed}, used
        ),
    ]


def _features(cell: dict[str, Any]) -> list[str]:
    """What a cell has beyond paging."""
    drafts = [f"{cell['speculative_method']} {cell['num_speculative_tokens']}"] if "speculative_method" in cell else []
    late = ["async"] if cell.get("async_scheduling") else []
    late += [cell["state_scheme"]] if "state_scheme" in cell else []
    return [*([cell["mamba_cache_mode"]] if "mamba_cache_mode" in cell else []), *drafts, *late]
