"""Views of the cache's memory: each layer's page is its own, whatever shape the backend gives it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import accumulate

import numpy as np
import torch

from hybrid_kv.attention.undo import ReplaySpec
from hybrid_kv.cache.backend import BackendContext, FlashAttentionBackend, TorchBackend, init_attn_backend
from hybrid_kv.cache.layout import allocate_raw_buffers, allocate_row_memory, bind_views
from hybrid_kv.cache.plan import plan_cache
from hybrid_kv.cache.spec import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    StatePart,
    UndoSpec,
    group_layers,
    window_and_states,
)
from hybrid_kv.config import CacheConfig, ConfigError
from hybrid_kv.guard.registry import CheckResult, Run, check
from hybrid_kv.kernels.replay import default_ring_len


@check("layout", quick=200, full=200, seconds=0.0005, place=10)
def check_layout(run: Run) -> list[CheckResult]:
    """Writing page b through all views of a layer must change the bytes of what it keeps, in page b only.

    What a request takes of a layer at most is so many pages, and its row of what the layer keeps beside them.
    """
    begin = time.perf_counter()
    rng = np.random.default_rng(run.seed)
    wrong: list[str] = []
    for trial in range(run.amount):
        backend = (TorchBackend, FlashAttentionBackend)[trial % 2]
        # Two blocks make (2, num_blocks, …) and (num_blocks, 2, …) the same shape: vllm!37236.
        num_blocks = 2 if trial % 4 < 2 else int(rng.integers(3, 9))
        wrong += [*_layout_errors(backend, num_blocks, rng), *_alignment_errors(rng), *_widths_errors(rng)]
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
    width, heads, num_rows = 2 * int(rng.integers(1, 5)), int(rng.integers(1, 6)), int(rng.integers(1, 4))
    state_bytes, (one_vector, is_replay) = 2 * 3 * width + 4 * heads * width, rng.integers(2, size=2)
    token_bytes = 2 * width if one_vector else 2 * 2 * heads * width
    parts = window_and_states(((3, width), torch.bfloat16), ((heads, width), torch.float32))
    inputs = tuple(StatePart(name, shape, torch.float32) for name, shape in (("x", (heads, 1)), ("B", (1, width))))
    undo = ReplaySpec(0, default_ring_len(1)) if is_replay else UndoSpec()
    specs: dict[str, KVCacheSpec] = {
        "mamba": MambaSpec(1, parts, undo=undo, inputs=(*inputs, StatePart("dt", (heads,), torch.float32))),
        "attention": MLAAttentionSpec(1, width, torch.bfloat16)
        if one_vector
        else FullAttentionSpec(1, heads, width, torch.bfloat16),
    }
    # With float32 states FlashAttention's kernel blocks are 16 to 64 tokens, parts of a longer block.
    context = BackendContext("cpu", float32_ssm_state=bool(rng.integers(2)))
    cache = CacheConfig(block_size=16 * int(rng.integers(1, 4)), num_blocks=max(3, num_blocks))
    plan = plan_cache(specs, cache, backend, context, max_model_len=64)
    config = type(plan.config)(num_blocks, plan.config.groups)
    groups = init_attn_backend(config, backend, context)
    raw_buffers = allocate_raw_buffers(config, torch.device("cpu"))
    rings = allocate_row_memory(config, num_rows, torch.device("meta"))
    page, errors = raw_buffers[0].nbytes // num_blocks, []
    for group in groups:
        name = group.layer_names[0]
        views, is_ssm = bind_views(config, groups, raw_buffers)[name], group.backend.is_ssm()
        split = 1 if is_ssm else group.spec.block_size // group.kernel_block_size
        expected = state_bytes if is_ssm else group.spec.block_size * token_bytes
        for block in range(num_blocks):
            raw_buffers[0].zero_()
            for view in views:
                # No byte of these is zero, in bf16, float32 and int16.
                view[block * split : (block + 1) * split] = 1 / 3 if view.is_floating_point() else 257
            touched = raw_buffers[0].nonzero().flatten()
            if len(touched) != expected or touched.min() < block * page or touched.max() >= (block + 1) * page:
                errors.append(
                    f"{group.backend.name} with {num_blocks} blocks: page {block} is not bytes {block * page}…"
                )
        ring_bytes = rings[name].nbytes // num_rows if name in rings else 0
        usage = group.spec.max_blocks_per_request(64) * page + ring_bytes
        if (told := group.spec.max_memory_usage_bytes(64)) != usage:
            errors.append(f"{name}: a request of 64 tokens takes {usage} B, not {told}")
    return errors


def _widths_errors(rng: np.random.Generator) -> Iterator[str]:
    """Attention layers of any widths share one block table, and each has pages of its own size; with states not."""
    widths = [1, *(int(width) for width in rng.integers(1, 4, size=rng.integers(1, 5)))]
    layers: dict[str, KVCacheSpec] = {
        f"layer{i}": FullAttentionSpec(16, width, 8, torch.bfloat16) for i, width in enumerate(widths)
    }
    config = KVCacheConfig(3, group_layers(layers))
    if [len(group.layer_names) for group in config.groups] != [len(layers)]:
        yield f"attention layers of widths {widths} are in {len(config.groups)} groups"
    elif (pages := config.buffer_page_sizes) != (due := tuple(width * 16 * 2 * 8 * 2 for width in widths)):
        yield f"attention layers of widths {widths} have pages of {pages} B, not {due}"
    elif config.page_size_bytes != (page := sum(due) if len({*due}) > 1 else due[0]):
        yield f"attention layers of widths {widths} have a page of {config.page_size_bytes} B, not {page}"
    state = MambaSpec(16, (StatePart("state", (8,), torch.float32),), 16 * 2 * 8 * 2)
    try:
        group_layers({**layers, "states": state})
        said = ""
    except ConfigError as error:
        said = str(error)
    if ("layers of one pool need one page size" in said) != (len({*widths}) > 1):
        yield f"states beside attention layers of widths {widths}: {said or 'taken'}"


def _alignment_errors(rng: np.random.Generator) -> Iterator[str]:
    """A part that begins where its dtype may not, or whose padded page does, is refused, and no other."""
    dtypes = [torch.int8, torch.bfloat16, torch.float32]
    drawn = [(int(rng.integers(1, 6)), dtypes[rng.integers(3)]) for _ in range(rng.integers(1, 5))]
    parts = tuple(StatePart(f"part{i}", (count,), dtype) for i, (count, dtype) in enumerate(drawn))
    *starts, whole = accumulate((count * dtype.itemsize for count, dtype in drawn), initial=0)
    padded = whole + int(rng.integers(8)) if rng.integers(2) else None
    due = [
        f"a {dtype} state part at byte {start} of a {padded or whole} B page is not aligned to {dtype.itemsize} B"
        for start, (_, dtype) in zip(starts, drawn, strict=True)
        if start % dtype.itemsize or (padded is not None and padded % dtype.itemsize)
    ]
    try:
        MambaSpec(1, parts, padded)
        said = ""
    except ConfigError as error:
        said = str(error)
    if (due[0] if due else "") not in said or bool(due) != bool(said):
        yield f"parts {drawn} in a page of {padded} B: {said or 'taken'}; {due[0] if due else 'nothing'} is due"
