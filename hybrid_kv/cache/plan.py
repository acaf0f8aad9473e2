"""The only place that decides block sizes.

The order is platform, then model and cache configuration, then the attention backend, then
`update_block_size_for_backend`: (1) the backend's preferred block size, unless the user gave one;
(2) for a hybrid model, the alignment that makes one attention page hold one Mamba state. Running
(2) before (1) is vllm!37467's bug: a page aligned for 16-token blocks is not divisible by the
64-token blocks that an XPU then chose.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import lcm
from typing import Any

from hybrid_kv.cache.backend import (
    DEFAULT_BLOCK_SIZE,
    AttentionBackend,
    BackendContext,
    GDNBackend,
    backend_of,
    init_attn_backend,
    smallest,
)
from hybrid_kv.cache.modes import MODES
from hybrid_kv.cache.ranks import of_stage, over_context
from hybrid_kv.cache.spec import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    group_layers,
    kind_of,
    window_of,
    with_block_size,
)
from hybrid_kv.config import CacheConfig, ConfigError
from hybrid_kv.kernels.common.integers import cdiv

# Of a Mamba state, relative to its bytes; beyond it half of the memory of states holds nothing.
MUCH_PADDING = 1.0
# Tokens that decode kernels of latent attention want blocks of a hybrid model on a GPU to be
# multiples of (vLLM 0.32).
LATENT_GRAIN = 128


@dataclass(frozen=True)
class BlockSizes:
    """The decided sizes.

    They are in tokens, except `page_size_bytes`; `mamba_block_size` is None without Mamba layers.

    Without Mamba layers a page may be smaller than `page_size_bytes`, which is that of the widest
    layer.
    """

    block_size: int
    mamba_block_size: int | None
    page_size_bytes: int
    mamba_state_bytes: int

    @property
    def padding(self) -> float:
        """Share of each Mamba page that is padding, relative to the state (0.03 is 3 %)."""
        return self.page_size_bytes / self.mamba_state_bytes - 1 if self.mamba_state_bytes else 0.0


def _attention_token_bytes(layers: dict[str, KVCacheSpec]) -> int:
    """Bytes per token of the widest attention layers, those with a sliding window left out.

    Only where all have one do these count: a drafter's window must not change the blocks of others.

    Beside Mamba layers narrower ones have more tokens in a page of the same bytes; without, smaller
    pages.
    """
    attention = [spec for spec in layers.values() if isinstance(spec, FullAttentionSpec)]
    full = [spec for spec in attention if window_of(spec) is None]
    sizes = {with_block_size(spec, 1).page_size_bytes for spec in full or attention}
    widest = max(sizes, default=0)
    if share_pages(layers) and any(widest % size for size in sizes):
        raise ConfigError(
            f"attention layers with {sorted(sizes)} bytes per token cannot share one pool with "
            "Mamba layers: no "
            "multiple fits the other"
        )
    return widest


def share_pages(layers: dict[str, KVCacheSpec]) -> bool:
    """Return whether layers of several kinds share the blocks, so that all pages are of one size.

    Attention layers that see as far as each other are one kind.
    """
    return len({(isinstance(spec, MambaSpec), window_of(spec)) for spec in layers.values()}) > 1


def update_block_size_for_backend(
    layers: dict[str, KVCacheSpec],
    cache: CacheConfig,
    backend: type[AttentionBackend],
    context: BackendContext,
    max_model_len: int,
    mamba_chunk_size: int | None = None,
) -> BlockSizes:
    """Decide the block sizes of a model whose layers are `layers`.

    Their own block sizes are ignored.

    Formulas (vLLM 0.22, `platforms/interface.py`): with `A` of `_alignment`, `t` attention bytes
    per token and `m` Mamba state bytes, modes `none` and `align` take `A * ceil(m / (A * t))`
    tokens; mode `all` the smallest multiple of `lcm(Mamba block or chunk size, A)` that covers
    `ceil(m / t)` tokens.

    Raises:
        ConfigError: a size that no kernel block divides, or a Mamba block size that cannot be kept.
    """
    if not layers:
        raise ConfigError("the model has no layer that keeps anything in the cache")
    mamba = [spec for spec in layers.values() if isinstance(spec, MambaSpec)]
    token_bytes = _attention_token_bytes(layers)
    if not mamba and cache.mamba_block_size is not None:
        raise ConfigError(
            f"--mamba-block-size {cache.mamba_block_size}: the model has no Mamba layer; drop the "
            "flag"
        )
    if not token_bytes:
        if cache.block_size is not None:
            raise ConfigError(
                f"--block-size {cache.block_size}: the model has no attention layer; use "
                "--mamba-block-size"
            )
        # Without an attention backend a state fills the page, and in mode `none` a block stands for
        # the whole request.
        mode = MODES[cache.mamba_cache_mode]
        block_size = mode.lone_block_size(cache.mamba_block_size, mamba_chunk_size, max_model_len)
        if block_size is None:
            raise ConfigError(
                "a model without a chunk size needs --mamba-block-size in this cache mode"
            )
        state_bytes = max(spec.state_bytes for spec in mamba)
        return BlockSizes(block_size, block_size, state_bytes, state_bytes)

    supported = backend.get_supported_kernel_block_sizes(context)
    block_size = cache.block_size or backend.get_preferred_block_size(DEFAULT_BLOCK_SIZE, context)
    if not any(block_size % smallest(size) == 0 for size in supported):
        allowed = ", ".join(
            f"multiples of {s.base}" if not isinstance(s, int) else str(s) for s in supported
        )
        raise ConfigError(
            f"block size {block_size} does not fit {backend.name}, whose kernel blocks are "
            f"{allowed}"
        )
    if not mamba:
        return BlockSizes(block_size, None, block_size * token_bytes, 0)
    alignment = _alignment(layers, backend, context, block_size)
    return _align_hybrid(
        mamba, cache, alignment, block_size, token_bytes, max_model_len, mamba_chunk_size
    )


def _alignment(
    layers: dict[str, KVCacheSpec],
    backend: type[AttentionBackend],
    context: BackendContext,
    block_size: int,
) -> int:
    """Return the tokens of which a block is a multiple where it is raised to hold a state.

    They are those of the chosen block, and at least of the smallest kernel block. On a GPU some
    kernels want more.
    """
    alignment = max(
        min(map(smallest, backend.get_supported_kernel_block_sizes(context))), block_size
    )
    specs = layers.values()
    if context.platform == "xpu" and any(backend_of(spec, backend) is GDNBackend for spec in specs):
        alignment = lcm(alignment, 64)
    if context.platform != "cpu" and any(isinstance(spec, MLAAttentionSpec) for spec in specs):
        alignment = max(alignment, LATENT_GRAIN)
    return alignment


def _align_hybrid(
    mamba: list[MambaSpec],
    cache: CacheConfig,
    alignment: int,
    block_size: int,
    token_bytes: int,
    max_model_len: int,
    mamba_chunk_size: int | None,
) -> BlockSizes:
    mode = MODES[cache.mamba_cache_mode]
    state_bytes = max(spec.state_bytes for spec in mamba)
    base = cache.mamba_block_size or mamba_chunk_size
    if base is None and mode.needs_unit:
        raise ConfigError(
            f"mode {mode.name} needs a chunk size in config.json or --mamba-block-size; or use "
            "mode align"
        )
    unit = mode.unit(alignment, base)
    aligned = unit * cdiv(cdiv(state_bytes, token_bytes), unit)
    block_size = max(block_size, aligned)
    mamba_block_size = mode.block_size(cache.mamba_block_size, aligned, block_size, max_model_len)
    if cache.mamba_block_size is not None and not mode.may_replace(
        cache.mamba_block_size, mamba_block_size
    ):
        raise ConfigError(
            f"--mamba-block-size {cache.mamba_block_size} cannot be kept: mode {mode.name} needs "
            "the attention block "
            f"size {block_size}; drop the flag or use mode all"
        )
    return BlockSizes(block_size, mamba_block_size, block_size * token_bytes, state_bytes)


def apply_block_sizes(
    layers: dict[str, KVCacheSpec], sizes: BlockSizes, mode: str
) -> dict[str, KVCacheSpec]:
    """Return the layers with the decided block sizes and the padded Mamba page.

    Attention layers of one kind share their blocks with no other: they all have the same block
    size, whatever that takes.

    Raises:
        ConfigError: a token of a sliding window does not divide the page that the others have.
    """
    result: dict[str, KVCacheSpec] = {}
    is_shared = share_pages(layers)
    for name, spec in layers.items():
        if isinstance(spec, MambaSpec):
            assert sizes.mamba_block_size is not None
            result[name] = replace(
                spec,
                block_size=sizes.mamba_block_size,
                page_size_padded=sizes.page_size_bytes,
                mamba_cache_mode=mode,
            )
        elif not is_shared:
            result[name] = with_block_size(spec, sizes.block_size)
        else:
            token_bytes = with_block_size(spec, 1).page_size_bytes
            if sizes.page_size_bytes % token_bytes:
                raise ConfigError(
                    f"layer {name} (sliding window) has {token_bytes} bytes per token, of which no "
                    f"multiple is a page of {sizes.page_size_bytes} B; choose another block_size"
                )
            result[name] = with_block_size(spec, sizes.page_size_bytes // token_bytes)
    return result


@dataclass(frozen=True)
class CachePlan:
    """A whole plan, before anything is allocated. Counts exclude the null block.

    `config` has the layers of all pipeline stages, with one tensor and context parallel rank's
    pages; `stages` has what each of them keeps.
    """

    sizes: BlockSizes
    config: KVCacheConfig
    kernel_block_sizes: tuple[int, ...]
    max_model_len: int
    max_num_seqs: int = 0  # rows of the engine
    notes: tuple[str, ...] = ()
    stages: tuple[KVCacheConfig, ...] = ()
    context_parallel: int = 1

    @property
    def usable_blocks(self) -> int:
        return self.config.num_blocks - 1

    @property
    def fullest(self) -> KVCacheConfig:
        """The stage that needs most memory."""

        def bytes_of(stage: KVCacheConfig) -> int:
            return stage.total_bytes + self.max_num_seqs * stage.bytes_per_row

        return max(self.stages, key=bytes_of)

    @property
    def row_bytes(self) -> int:
        """Bytes that the rollback scheme keeps for all rows of the fullest stage."""
        return self.max_num_seqs * self.fullest.bytes_per_row

    @property
    def counted(self) -> KVCacheConfig:
        """The groups as the block manager counts: see `over_context`."""
        return over_context(self.config, self.context_parallel)

    @property
    def hit_granularity(self) -> int:
        """Tokens of which every prefix hit is a multiple."""
        return lcm(*(group.spec.block_size for group in self.counted.groups))

    @property
    def blocks_per_request(self) -> int:
        """Blocks that one request of `max_model_len` tokens holds."""
        return self.counted.max_blocks_per_request(self.max_model_len)

    @property
    def max_concurrency(self) -> float:
        """The number of requests of `max_model_len` tokens that fit at once."""
        return self.usable_blocks / self.blocks_per_request

    @property
    def longest_request(self) -> int:
        """Tokens of the longest request that fits alone, at most `max_model_len`."""
        low = 0
        high = self.max_model_len
        counted = self.counted
        while low < high:
            middle = (low + high + 1) // 2
            if counted.max_blocks_per_request(middle) <= self.usable_blocks:
                low = middle
            else:
                high = middle - 1
        return low

    @property
    def token_capacity(self) -> int:
        """Tokens that requests of the longest length hold together when the pool is full."""
        longest = self.longest_request
        return longest * self.usable_blocks // self.counted.max_blocks_per_request(longest)

    @property
    def unused_layer_slots(self) -> int:
        """Layer slots of a block that no layer of a short group uses."""
        return sum(self.config.num_buffers - len(group.layer_names) for group in self.config.groups)


def plan_cache(
    layers: dict[str, KVCacheSpec],
    cache: CacheConfig,
    backend: type[AttentionBackend],
    context: BackendContext,
    max_model_len: int,
    mamba_chunk_size: int | None = None,
    max_num_seqs: int = 0,
    stages: Sequence[Iterable[str]] | None = None,
    context_parallel: int = 1,
) -> CachePlan:
    """Plan the pool: block sizes, groups, number of blocks.

    Args:
        layers: of all pipeline stages, with one tensor parallel rank's heads; what rolling back
            drafts takes is in them already (`cache.spec.with_rollback`).
        max_num_seqs: rows of the engine; `memory_bytes` pays for what the rollback scheme keeps for
            them.
        stages: the names of each pipeline stage's layers; default: one stage. `memory_bytes` is
            that of one rank.
        context_parallel: ranks that the tokens of an attention block lie on.

    Raises:
        ConfigError: the memory holds no whole request; the message names both sizes and a flag that
            helps. Or `prefix_match_unit` does not divide the block sizes.
    """
    if context_parallel > 1 and not any(
        isinstance(spec, FullAttentionSpec) for spec in layers.values()
    ):
        raise ConfigError(
            f"--decode-context-parallel-size {context_parallel}: the model has no attention; drop "
            "the flag"
        )
    sizes = update_block_size_for_backend(
        layers, cache, backend, context, max_model_len, mamba_chunk_size
    )
    specs = apply_block_sizes(layers, sizes, cache.mamba_cache_mode)
    groups = group_layers(specs)
    if cache.prefix_match_unit is not None:
        _check_match_unit(cache.prefix_match_unit, [group.spec for group in groups])
    whole = KVCacheConfig(0, groups)
    parts = (whole,) if stages is None else tuple(of_stage(whole, names) for names in stages)
    num_blocks = min(
        _num_blocks(stage, cache, max_num_seqs) for stage in parts if stage.block_bytes
    )
    config = replace(whole, num_blocks=num_blocks)
    kernel_sizes = tuple(
        group.kernel_block_size for group in init_attn_backend(config, backend, context)
    )
    parts = tuple(replace(stage, num_blocks=num_blocks) for stage in parts)
    plan = CachePlan(
        sizes,
        config,
        kernel_sizes,
        max_model_len,
        max_num_seqs,
        stages=parts,
        context_parallel=context_parallel,
    )
    needed = plan.counted.max_blocks_per_request(1)
    if plan.usable_blocks < needed:
        block_bytes = max(stage.block_bytes for stage in parts)
        memory = max(
            (needed + 1) * stage.block_bytes + max_num_seqs * stage.bytes_per_row for stage in parts
        )
        way_out = f"{memory} B of memory" if cache.num_blocks is None else f"{needed + 1} blocks"
        raise ConfigError(
            f"the cache has {num_blocks} blocks of {block_bytes} B, one of them the null block, "
            "but a request of "
            f"one token needs {needed}: give it at least {way_out}"
        )

    def sizes_in(mode: str) -> BlockSizes:
        other = replace(cache, mamba_cache_mode=mode, mamba_block_size=None, prefix_match_unit=None)
        return update_block_size_for_backend(
            layers, other, backend, context, max_model_len, mamba_chunk_size
        )

    caching = [mode for mode, policy in MODES.items() if policy.keeps_states]
    possible = [
        mode for mode in caching if mamba_chunk_size is not None or not MODES[mode].needs_unit
    ]
    return replace(
        plan, notes=(*_notes(plan, cache), *_padding_notes(sizes, cache, specs, possible, sizes_in))
    )


def _check_match_unit(unit: int, specs: Sequence[KVCacheSpec]) -> None:
    sizes = sorted({spec.block_size for spec in specs})
    if not any(isinstance(spec, MambaSpec) for spec in specs):
        raise ConfigError(
            f"prefix_match_unit={unit} is for models with states; this one hits at every block of "
            f"{sizes} tokens: leave it out"
        )
    if any(size % unit for size in sizes):
        raise ConfigError(
            f"prefix_match_unit={unit} does not divide the block sizes {sizes}; use a common "
            "divisor of them"
        )


def _num_blocks(rank: KVCacheConfig, cache: CacheConfig, max_num_seqs: int) -> int:
    """Return the blocks that a rank can afford."""
    if cache.num_blocks is not None:
        return cache.num_blocks
    if cache.memory_bytes is None:
        raise ConfigError(
            "the pool has no size: give --num-blocks or --gpu-memory (num_blocks or memory_bytes)"
        )
    return max(0, cache.memory_bytes - max_num_seqs * rank.bytes_per_row) // rank.block_bytes


def _notes(plan: CachePlan, cache: CacheConfig) -> list[str]:
    """Return notes on what a user would not expect from the flags alone."""
    sizes = plan.sizes
    notes = []
    if cache.block_size not in (None, sizes.block_size):
        notes.append(
            f"--block-size {cache.block_size} was raised to {sizes.block_size}: an attention page "
            "must hold one Mamba "
            f"state ({sizes.mamba_state_bytes} B)"
        )
    mode = MODES[cache.mamba_cache_mode]
    if cache.mamba_block_size is not None and not mode.keeps_states:
        notes.append(
            f"--mamba-block-size {cache.mamba_block_size} changes nothing in mode {mode.name}: a "
            "request has one state"
        )
    elif cache.mamba_block_size not in (None, sizes.mamba_block_size):
        notes.append(
            f"--mamba-block-size {cache.mamba_block_size} was raised to its multiple "
            f"{sizes.mamba_block_size}, so that "
            "one attention page holds one state"
        )
    if plan.unused_layer_slots:
        slots = plan.config.num_buffers * len(plan.config.groups)
        notes.append(
            f"{plan.unused_layer_slots} of {slots} layer slots are unused, because the layers do "
            "not divide into "
            f"groups of {plan.config.num_buffers}"
        )
    if plan.longest_request < plan.max_model_len:
        notes.append(
            f"no request longer than {plan.longest_request} tokens fits; lower --max-model-len "
            f"{plan.max_model_len} or "
            "give the cache more memory"
        )
    keeps_prefixes = sizes.mamba_block_size is None or mode.keeps_states
    # A prompt leaves room for a token of output, and its last token is always computed.
    longest_hit = plan.max_model_len - 2
    granularity = cache.prefix_match_unit or plan.hit_granularity
    if keeps_prefixes and granularity > longest_hit:
        notes.append(
            f"no prompt can hit the prefix cache: hits are multiples of {granularity} tokens; "
            f"raise --max-model-len {plan.max_model_len} to at least {granularity + 2}"
        )
    return notes


def _padding_notes(
    sizes: BlockSizes,
    cache: CacheConfig,
    specs: dict[str, KVCacheSpec],
    possible: Sequence[str],
    sizes_in: Callable[[str], BlockSizes],
) -> list[str]:
    """Return, where most of a Mamba page is padding, a note on a better mode.

    It is that of `possible` which also caches prefixes and pads least.
    """
    if sizes.padding <= MUCH_PADDING or not MODES[cache.mamba_cache_mode].keeps_states:
        return []
    note = (
        f"mode {cache.mamba_cache_mode} pads each Mamba state of {sizes.mamba_state_bytes} B by "
        f"{100 * sizes.padding:.0f} %, to the {sizes.page_size_bytes} B of {sizes.block_size} "
        "tokens in attention"
    )
    others = {mode: sizes_in(mode).padding for mode in possible}
    best = min(others, key=others.__getitem__)
    if others[best] < sizes.padding:
        note += (
            f"; --mamba-cache-mode {best} caches prefixes too and pads by {100 * others[best]:.0f} "
            "%"
        )
    if any(
        isinstance(spec, MambaSpec) and spec.mamba_type == "gdn_attention"
        for spec in specs.values()
    ):
        note += " (vLLM 0.22 falls back to mode align for gated delta net layers)"
    return [note]


def _describe_rows(plan: CachePlan) -> dict[str, Any]:
    """Return the rollback scheme's memory outside of blocks, if it has any."""
    if not plan.config.bytes_per_row:
        return {}
    specs = (spec for group in plan.config.groups for spec in group.layer_specs)
    spec = next(spec for spec in specs if isinstance(spec, MambaSpec))
    return spec.rollback.describe() | {
        "ring_bytes_per_row_and_layer": spec.row_bytes,
        "ring_bytes_per_row": plan.fullest.bytes_per_row,
        "ring_rows": plan.max_num_seqs,
        "ring_total_bytes": plan.row_bytes,
    }


def describe(plan: CachePlan) -> dict[str, Any]:
    """Return the plan in JSON types."""
    groups = [
        {
            "kind": kind_of(group.layer_specs[0]),
            "num_layers": len(group.layer_names),
            "layers": list(group.layer_names),
            "block_size": group.spec.block_size,
            "page_sizes_bytes": [spec.page_size_bytes for spec in group.layer_specs],
            "kernel_block_size": kernel_block_size,
            "blocks_per_request": counted.spec.max_blocks_per_request(plan.max_model_len),
        }
        for group, counted, kernel_block_size in zip(
            plan.config.groups, plan.counted.groups, plan.kernel_block_sizes, strict=True
        )
    ]
    return {
        "block_size": plan.sizes.block_size,
        "mamba_block_size": plan.sizes.mamba_block_size,
        "page_size_bytes": plan.sizes.page_size_bytes,
        "mamba_state_bytes": plan.sizes.mamba_state_bytes,
        "mamba_padding_percent": round(100 * plan.sizes.padding, 2),
        "groups": groups,
        "num_buffers": plan.config.num_buffers,
        "unused_layer_slots": plan.unused_layer_slots,
        "num_blocks": plan.config.num_blocks,
        "total_bytes": plan.fullest.total_bytes,
        "stages": [
            {
                "layers": [name for group in stage.groups for name in group.layer_names],
                "block_bytes": stage.block_bytes,
                "total_bytes": stage.total_bytes,
            }
            for stage in plan.stages
        ],
        **_describe_rows(plan),
        "max_model_len": plan.max_model_len,
        "longest_request": plan.longest_request,
        "blocks_per_request": plan.blocks_per_request,
        "max_concurrency": round(plan.max_concurrency, 2),
        "token_capacity": plan.token_capacity,
        "notes": list(plan.notes),
    }
