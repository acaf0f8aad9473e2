"""Scenarios of three prompts, sent twice."""

from __future__ import annotations

from typing import Any

from hybrid_kv.check.guard.forced import Draw
from hybrid_kv.check.guard.scenario import Scenario, SmallKVFirst


def scenario(mode: str, K: int = 0, drafts: str = "none", **options: Any) -> Scenario:
    """Three prompts, twice."""
    d, layers = Draw(4), "**" if mode == "attention" else "M*MM*"
    options = {
        "attention_backend": SmallKVFirst.name,
        "max_num_batched_tokens": 20,
        "max_model_len": 80,
    } | options
    prompts = d.prompts(13, 24, 31) * 2
    return d.scenario(
        prompts,
        [14] * 6,
        modes=(mode,),
        layers=layers,
        num_drafts=K,
        drafts=drafts,
        waves=(3, 3),
        **options,
    )
