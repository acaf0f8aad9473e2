"""Views of the cache's memory: each layer's page is its own, whatever shape the backend gives it."""

from __future__ import annotations

import time

import numpy as np
import torch

from hybrid_kv.cache.backend import BackendContext, FlashAttentionBackend, TorchBackend, init_attn_backend
from hybrid_kv.cache.layout import allocate_raw_buffers, bind_views
from hybrid_kv.cache.plan import plan_cache
from hybrid_kv.cache.spec import FullAttentionSpec, KVCacheSpec, MambaSpec, window_and_states
from hybrid_kv.config import CacheConfig
from hybrid_kv.guard.registry import CheckResult, Run, check


@check("layout", quick=200, full=200, seconds=0.0005, place=10)
def check_layout(run: Run) -> list[CheckResult]:
    """Writing page b through any view of a layer must change bytes of page b only, and all views must agree on it."""
    begin = time.perf_counter()
    rng = np.random.default_rng(run.seed)
    wrong: list[str] = []
    for trial in range(run.amount):
        backend = (TorchBackend, FlashAttentionBackend)[trial % 2]
        # Two blocks make (2, num_blocks, …) and (num_blocks, 2, …) the same shape: vllm!37236.
        num_blocks = 2 if trial % 4 < 2 else int(rng.integers(3, 9))
        wrong += _layout_errors(backend, num_blocks, rng)
        run.progress(1)
    return [
        CheckResult(
            "layout", "views that leave their page", not wrong, len(wrong), "views", "0", run.amount,
            time.perf_counter() - begin, wrong[0] if wrong else "", {"seed": run.seed},
        )
    ]  # fmt: skip


def _layout_errors(
    backend: type[TorchBackend] | type[FlashAttentionBackend], num_blocks: int, rng: np.random.Generator
) -> list[str]:
    # bf16 windows before float32 states, as in real checkpoints: parts of one page need not have one dtype.
    width, heads = 2 * int(rng.integers(1, 5)), int(rng.integers(1, 6))
    specs: dict[str, KVCacheSpec] = {
        "mamba": MambaSpec(1, window_and_states(((3, width), torch.bfloat16), ((heads, width), torch.float32))),
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
