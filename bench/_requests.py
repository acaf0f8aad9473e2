"""Requests, pools and schedulers as the engine makes them, without a model: to time the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from hybrid_kv.cache import spec
from hybrid_kv.cache.manager import KVCacheManager
from hybrid_kv.cache.spec import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    StatePart,
)
from hybrid_kv.config import SchedulerConfig
from hybrid_kv.engine.scheduler import Scheduler
from hybrid_kv.request import Request
from hybrid_kv.sampling import SamplingParams

BLOCK_SIZE = 16
LIMIT = 16384  # max_model_len
MAMBA_GROUPS = 4  # and one of attention, as Nemotron-3-Nano has them


def slots(K: int) -> Any:
    """Return the rollback of K drafts that keeps a slot for each; it has had other names."""
    if hasattr(spec, "SlotsSpec"):
        return spec.SlotsSpec(K)
    if hasattr(spec, "RollbackSpec"):  # before it was abstract
        return spec.RollbackSpec(K)
    return spec.UndoSpec(K)  # before commit 79aa965


def _drafts(K: int) -> dict[str, Any]:
    """Return the field of `MambaSpec` that tells the draft tokens."""
    return {"rollback" if hasattr(spec, "RollbackSpec") else "undo": slots(K)}


def manager(mode: str, K: int, num_blocks: int) -> KVCacheManager:
    """Return a manager; that of mode `attention` has no Mamba groups."""
    specs: list[KVCacheGroupSpec] = []
    if mode != "attention":
        parts = (StatePart("state", (1,), torch.int32),)
        state = MambaSpec(BLOCK_SIZE, parts, mamba_cache_mode=mode, **_drafts(K))
        specs += [KVCacheGroupSpec((f"mamba {i}",), state) for i in range(MAMBA_GROUPS)]
    specs.append(KVCacheGroupSpec(("attention",), FullAttentionSpec(BLOCK_SIZE, 1, 1, torch.int32)))
    return KVCacheManager(
        KVCacheConfig(num_blocks, tuple(specs)), mode != "none", max_model_len=LIMIT
    )


def scheduler(
    subject: KVCacheManager, mode: str, K: int, max_num_seqs: int, budget: int = 1 << 16
) -> Scheduler:
    """Return a scheduler.

    Its budget, in tokens of a step, holds every prompt of the suites unless a smaller one is given.
    """
    config = SchedulerConfig(max_num_seqs, budget, LIMIT)
    return Scheduler(config, subject, K)


def prompts(seed: int, num_reqs: int, length: int) -> list[list[int]]:
    """Return random tokens, so that no two prompts share a block."""
    tokens: list[list[int]] = (
        np.random.default_rng(seed).integers(0, 1 << 15, (num_reqs, length)).tolist()
    )
    return tokens


def requests(prompt_tokens: Sequence[Sequence[int]], max_tokens: int) -> list[Request]:
    """Return requests that never end: a suite makes fewer steps than they have tokens to come."""
    params = SamplingParams(max_tokens=max_tokens)
    return [Request(str(i), list(tokens), params, i) for i, tokens in enumerate(prompt_tokens)]


def step(subject: Scheduler, K: int) -> None:
    """Schedule, and take the step's tokens: every draft is accepted, and as many follow."""
    for item in subject.schedule():
        request = item.request
        if item.samples:
            tokens = [7] * (1 + item.num_drafts)
            subject.update(item, tokens, len(tokens))
            request.draft_token_ids = [7] * K
        else:
            subject.update(item, [], 0)
