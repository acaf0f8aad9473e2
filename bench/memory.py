"""Memory, exactly: what a request holds, and what a plan makes of a GPU.

Peaks of a process are asv's (`peakmem_`).
"""

from __future__ import annotations

from bench._requests import manager, prompts, requests, scheduler, slots, step
from bench._shapes import CONFIGS
from bench.harness.cells import Cell, Count, Counts, grid
from hybrid_kv.cache.backend import BackendContext, get_backend
from hybrid_kv.cache.plan import plan_cache
from hybrid_kv.cache.spec import with_rollback
from hybrid_kv.config import CacheConfig
from hybrid_kv.models.shapes import model_shape

HELD = dict.fromkeys(("most", "prompt", "mamba", "attention", "published"), "blocks")
PLAN = {
    "bytes_per_request": "B",
    "block_size": "tokens",
    "page_size_bytes": "B",
    "num_blocks": "blocks",
    "token_capacity": "tokens",
    "blocks_per_request": "blocks",
}
PROMPT, DECODED = 1000, 128
BETTER = {
    "published": "equal",
    "block_size": "equal",
    "num_blocks": "higher",
    "token_capacity": "higher",
}
MEMORY, MAX_MODEL_LEN = 60 << 30, 131072


def held(seed: int, mode: str, K: int) -> Counts:
    """Count the blocks of one request after its prompt, and after 128 decoded tokens.

    The prompt has 1,000 tokens, in chunks of at most 256.

    Mamba blocks are those of four groups.
    """
    pool = manager(mode, K, 2000)
    subject = scheduler(pool, mode, K, 1, budget=256)
    (request,) = requests(prompts(seed, 1, PROMPT), 2 * DECODED)
    subject.add(request)
    most = prompt = 0
    while len(request.output_token_ids) < DECODED:
        step(subject, K)
        blocks = [len(ids) for ids in pool.block_ids(request.request_id)]
        most = max(most, sum(blocks))
        if not prompt and request.output_token_ids:
            prompt = sum(blocks)
    *states, attention = blocks
    published = pool.pool.num_published_blocks
    values = {
        "prompt": prompt,
        "mamba": sum(states),
        "attention": attention,
        "most": most,
        "published": published,
    }
    return {
        name: Count(value, HELD[name], BETTER.get(name, "lower")) for name, value in values.items()
    }


def plan(seed: int, model: str, mode: str, K: int) -> Counts:
    """Plan 60 GiB for requests of up to 131,072 tokens, with FlashAttention."""
    cache = CacheConfig(
        mamba_cache_mode=mode, enable_prefix_caching=mode != "none", memory_bytes=MEMORY
    )
    shape = model_shape(CONFIGS[model], cache=cache, num_speculative_tokens=K)
    layers = {name: with_rollback(spec, slots(K)) for name, spec in shape.layers.items()}
    backend, context = get_backend("FLASH_ATTN", "cuda"), BackendContext.for_layers("cuda", layers)
    made = plan_cache(layers, cache, backend, context, MAX_MODEL_LEN, shape.mamba_chunk_size)
    sizes, per_request = made.sizes, made.blocks_per_request
    block_bytes = made.config.total_bytes // made.config.num_blocks
    values = {
        "block_size": sizes.block_size,
        "page_size_bytes": sizes.page_size_bytes,
        "num_blocks": made.config.num_blocks,
        "token_capacity": made.token_capacity,
        "blocks_per_request": per_request,
        "bytes_per_request": per_request * block_bytes,
    }
    return {
        name: Count(value, PLAN[name], BETTER.get(name, "lower")) for name, value in values.items()
    }


def cells() -> list[Cell]:
    """Return cells by modes and drafts, of two models."""
    modes = ("none", "align", "all")
    drafts = (0, 1, 3, 7)
    return [
        *grid(
            "memory",
            "held",
            "count",
            held,
            {"mode": modes, "K": drafts},
            [("all", 3), ("align", 3)],
            units=HELD,
        ),
        *grid(
            "memory",
            "plan",
            "count",
            plan,
            {"model": tuple(CONFIGS), "mode": modes, "K": drafts},
            [("nemotron-3-nano", "all", 3)],
            units=PLAN,
        ),
    ]
