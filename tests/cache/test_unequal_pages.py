"""Attention layers with pages of unequal bytes, from the plan to a restored file (vllm!38554)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybrid_kv import LLM, SamplingParams
from hybrid_kv.cache.spec import UniformTypeKVCacheSpecs
from hybrid_kv.check.guard.poison import poison
from hybrid_kv.check.guard.scenario import SmallBlocksFirst, SmallKVFirst, answer_book

PARAMS = SamplingParams(max_tokens=9)
BOOK = answer_book("*+#*")
TOKEN_BYTES = [16, 32, 48, 16]  # layer by layer
# Two with a beginning in common, two without, all of them with full blocks.
DRAWN = [
    np.random.default_rng(3).integers(0, 97, size=length).tolist() for length in (21, 33, 18, 40)
]
PROMPTS = [*DRAWN, DRAWN[1][:24] + DRAWN[0]]


def engine(backend: str, **options: Any) -> LLM:
    llm = LLM(
        BOOK.model,
        attention_backend=backend,
        block_size=8,
        num_blocks=80,
        max_num_seqs=3,
        max_num_batched_tokens=20,
        max_model_len=80,
        device="cpu",
        enable_prefix_caching=True,
        sanitize=True,
        **options,
    )
    poison(llm)
    return llm


def check(llm: LLM) -> None:
    outputs = llm.generate(PROMPTS, PARAMS, progress=False)
    assert [output.token_ids for output in outputs] == [
        BOOK.answer(prompt, PARAMS, 80) for prompt in PROMPTS
    ]


@pytest.mark.parametrize("backend", [SmallBlocksFirst.name, SmallKVFirst.name])
def test_vllm_38554_blocks_of_unequal_pages_come_back_from_host_and_folder(
    backend: str, tmp_path: Path
) -> None:
    llm = engine(backend, kv_offload_bytes=1 << 20, kv_offload_folder=tmp_path)
    (group,) = llm.plan.config.groups
    assert isinstance(group.spec, UniformTypeKVCacheSpecs)
    assert [len(buffer) for buffer in llm.runner.raw_buffers] == [
        80 * 8 * size for size in TOKEN_BYTES
    ]
    check(llm)
    llm.reset_prefix_cache()
    check(llm)
    tier = llm.manager.offload
    assert tier is not None and tier.block_bytes == (8 * sum(TOKEN_BYTES),)
    assert tier.stats.host_hits == tier.stats.loaded_blocks >= 6

    restarted = engine(backend, kv_offload_folder=tmp_path)
    check(restarted)
    assert (
        restarted.manager.offload is not None and restarted.manager.offload.stats.folder_hits >= 6
    )
