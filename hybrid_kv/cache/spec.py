"""What one layer keeps in the cache, and how many bytes of it one block holds.

A *page* is one manager block of one layer. In a hybrid pool all groups have the same `page_size_bytes`, so that any
block id can serve an attention layer (`block_size` tokens of K and V) or a Mamba layer (one recurrent state).
Names follow vLLM's `v1/kv_cache_interface.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import torch

from hybrid_kv.cache.modes import MODES, Mode
from hybrid_kv.config import CacheConfig, ConfigError
from hybrid_kv.kernels.common.integers import cdiv
from hybrid_kv.kernels.replay import default_ring_len, shortest_ring_len


@dataclass(frozen=True)
class KVCacheSpec:
    """The cache of one layer; `block_size` is the number of tokens that one block stands for."""

    block_size: int

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block of this layer."""
        raise NotImplementedError

    @property
    def cache_dtypes(self) -> tuple[torch.dtype, ...]:
        """Dtypes of what a page holds."""
        raise NotImplementedError

    def max_blocks_per_request(self, max_model_len: int) -> int:
        """The most blocks that one request of `max_model_len` tokens holds at any time."""
        raise NotImplementedError

    def block_table_width(self, max_model_len: int) -> int:
        """Columns that a request's row of the block table needs."""
        return self.max_blocks_per_request(max_model_len)

    def max_memory_usage_bytes(self, max_model_len: int) -> int:
        """Bytes that one request of `max_model_len` tokens can hold at once in this layer."""
        return self.max_blocks_per_request(max_model_len) * self.page_size_bytes


@dataclass(frozen=True)
class FullAttentionSpec(KVCacheSpec):
    """K and V of every token: `2 * block_size * num_kv_heads * head_size` elements a page."""

    num_kv_heads: int
    head_size: int
    dtype: torch.dtype

    @property
    def cache_dtypes(self) -> tuple[torch.dtype, ...]:
        return (self.dtype,)

    @property
    def page_size_bytes(self) -> int:
        return 2 * self.block_size * self.num_kv_heads * self.head_size * self.dtype.itemsize

    def max_blocks_per_request(self, max_model_len: int) -> int:
        return cdiv(max_model_len, self.block_size)


@dataclass(frozen=True)
class ReplaySpec:
    """State scheme `replay`: states are written now and then, the inputs of the tokens since are kept in a ring.

    `ring_len` tokens for each row of the engine. With asynchronous scheduling `num_uncertain_tokens` more of a step
    that is under way are not known when columns are chosen.
    """

    num_speculative_tokens: int
    ring_len: int
    num_uncertain_tokens: int = 0

    def most_columns_behind(self, block_size: int) -> int:
        """Mode align: how many columns before that of the last scheduled token a request may hold.

        The oldest one is that of the base, the state that the last step started from. The tokens behind the base lie in
        the ring, and so will the step's, and a step that finds a boundary passed folds them up to there: the one before
        found less than a block behind the base, and left at most 1 + K more.
        """
        longest = 1 + self.num_speculative_tokens
        span = min(self.ring_len, block_size - 1 + 2 * longest) + self.num_uncertain_tokens
        return cdiv(span, block_size)


@dataclass(frozen=True)
class MambaSpec(KVCacheSpec):
    """One recurrent state a page: `shapes` and `dtypes` of its parts (convolution window first, then SSM state).

    The convolution part has `conv_kernel - 1 + K` rows when K draft tokens are verified per step, so that a rejected
    draft can be undone. `page_size_padded` is the attention page of the same pool.

    `input_shapes` and `input_dtypes` are what a token feeds to the recurrence; a layer without any cannot `replay`.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    page_size_padded: int | None = None
    mamba_type: str = "mamba2"
    mamba_cache_mode: str = "none"
    num_speculative_blocks: int = 0  # of scheme `slots`, for the states of draft tokens
    input_shapes: tuple[tuple[int, ...], ...] = ()
    input_dtypes: tuple[torch.dtype, ...] = ()
    replay: ReplaySpec | None = None  # None: scheme `slots`

    def __post_init__(self) -> None:
        if self.page_size_padded is not None and self.page_size_padded < self.state_bytes:
            raise ConfigError(
                f"the padded Mamba page ({self.page_size_padded} B) is smaller than the state ({self.state_bytes} B)"
            )
        offset = 0
        for shape, dtype in zip(self.shapes, self.dtypes, strict=True):
            if offset % dtype.itemsize or (self.page_size_padded or 0) % dtype.itemsize:
                raise ConfigError(
                    f"a {dtype} state part at byte {offset} of a {self.page_size_bytes} B page is not aligned to "
                    f"{dtype.itemsize} B; give all state parts one dtype"
                )
            offset += prod(shape) * dtype.itemsize

    @property
    def mode(self) -> Mode:
        """The rules of its `mamba_cache_mode`."""
        return MODES[self.mamba_cache_mode]

    @property
    def state_bytes(self) -> int:
        """Bytes of the state itself, without padding."""
        return sum(prod(shape) * dtype.itemsize for shape, dtype in zip(self.shapes, self.dtypes, strict=True))

    @property
    def num_speculative_tokens(self) -> int:
        """K: the convolution window has as many rows more."""
        return self.num_speculative_blocks if self.replay is None else self.replay.num_speculative_tokens

    @property
    def ring_bytes(self) -> int:
        """Bytes of the ring of one row in scheme `replay`, beside the pages."""
        if self.replay is None:
            return 0
        pairs = zip(self.input_shapes, self.input_dtypes, strict=True)
        return self.replay.ring_len * sum(prod(shape) * dtype.itemsize for shape, dtype in pairs)

    @property
    def cache_dtypes(self) -> tuple[torch.dtype, ...]:
        return self.dtypes

    @property
    def page_size_bytes(self) -> int:
        return self.page_size_padded or self.state_bytes

    def max_blocks_per_request(self, max_model_len: int) -> int:
        """`none`: the running state. `align`: the running one and the last boundary's. `all`: one per boundary.

        In each mode K more for the states of draft tokens (vllm!41233 added them to mode `all`). Scheme `replay` has no
        such states; in mode `align` it holds the base that it replays from until a later state is written, which with
        blocks longer than the ring is the last boundary's at most.
        """
        columns = self.mode.num_columns(max_model_len, self.block_size)
        behind = 1 if self.replay is None else self.replay.most_columns_behind(self.block_size)
        return self.mode.held_at_most(columns, behind) + self.num_speculative_blocks

    def max_memory_usage_bytes(self, max_model_len: int) -> int:
        return super().max_memory_usage_bytes(max_model_len) + self.ring_bytes

    def block_table_width(self, max_model_len: int) -> int:
        """`align` and `all` index the row by position, so boundaries that are no longer held keep their column."""
        return self.mode.num_columns(max_model_len, self.block_size) + self.num_speculative_blocks


@dataclass(frozen=True)
class UniformTypeKVCacheSpecs(KVCacheSpec):
    """Layers of one type and block size whose pages differ in bytes; they share one block table, not one page size."""

    specs: tuple[tuple[str, KVCacheSpec], ...]

    def __post_init__(self) -> None:
        kinds = {type(spec) for _, spec in self.specs}
        sizes = {spec.block_size for _, spec in self.specs}
        if len(kinds) != 1 or sizes != {self.block_size}:
            raise ConfigError(f"layers of {len(kinds)} types with block sizes {sorted(sizes)} cannot share one table")

    @property
    def cache_dtypes(self) -> tuple[torch.dtype, ...]:
        return tuple(dtype for _, spec in self.specs for dtype in spec.cache_dtypes)

    @property
    def page_size_bytes(self) -> int:
        return sum(spec.page_size_bytes for _, spec in self.specs)

    def max_blocks_per_request(self, max_model_len: int) -> int:
        return max(spec.max_blocks_per_request(max_model_len) for _, spec in self.specs)

    def block_table_width(self, max_model_len: int) -> int:
        return max(spec.block_table_width(max_model_len) for _, spec in self.specs)


def layer_specs(layer_names: Sequence[str], spec: KVCacheSpec) -> tuple[KVCacheSpec, ...]:
    """The spec of each layer of a group, in the order of its names."""
    if not isinstance(spec, UniformTypeKVCacheSpecs):
        return (spec,) * len(layer_names)
    specs = dict(spec.specs)
    if missing := [name for name in layer_names if name not in specs]:
        raise ConfigError(f"layers {', '.join(missing)} have no spec in their group; list one for every layer")
    return tuple(specs[name] for name in layer_names)


@dataclass(frozen=True)
class KVCacheGroupSpec:
    """Layers that share one block table."""

    layer_names: tuple[str, ...]
    spec: KVCacheSpec

    @property
    def layer_specs(self) -> tuple[KVCacheSpec, ...]:
        """The spec of each layer, in the order of the names."""
        return layer_specs(self.layer_names, self.spec)


@dataclass(frozen=True)
class KVCacheConfig:
    """The allocated cache: `num_blocks` pages in each raw buffer; buffer i belongs to the i-th layer of every group."""

    num_blocks: int
    groups: tuple[KVCacheGroupSpec, ...]

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one page, the same in every buffer; of `UniformTypeKVCacheSpecs`, of one block of all its layers."""
        return self.groups[0].spec.page_size_bytes

    @property
    def num_buffers(self) -> int:
        return max(len(group.layer_names) for group in self.groups)

    @property
    def buffer_page_sizes(self) -> tuple[int, ...]:
        """Bytes of one page of each raw buffer.

        Raises:
            ConfigError: layers of one buffer whose pages differ, so that a block id would mean two places.
        """
        sizes: dict[int, int] = {}
        for group in self.groups:
            for i, spec in enumerate(group.layer_specs):
                if sizes.setdefault(i, spec.page_size_bytes) != spec.page_size_bytes:
                    raise ConfigError(
                        f"layer {i} of one group has pages of {sizes[i]} B and of another {spec.page_size_bytes} B, "
                        "in one buffer; layers that share a buffer need one page size"
                    )
        return tuple(sizes[i] for i in range(len(sizes)))

    @property
    def total_bytes(self) -> int:
        return self.num_blocks * sum(self.buffer_page_sizes)

    @property
    def ring_bytes_per_row(self) -> int:
        """Bytes that scheme `replay` keeps for each row of the engine beside the blocks, over all layers."""
        specs = (spec for group in self.groups for spec in group.layer_specs)
        return sum(spec.ring_bytes for spec in specs if isinstance(spec, MambaSpec))

    def max_blocks_per_request(self, max_model_len: int) -> int:
        """Blocks that one request of `max_model_len` tokens can hold at once, over all groups."""
        return sum(group.spec.max_blocks_per_request(max_model_len) for group in self.groups)


def group_layers(specs: dict[str, KVCacheSpec]) -> tuple[KVCacheGroupSpec, ...]:
    """Split layers into groups of one spec each and (nearly) equal length, in layer order.

    The group length is the smallest number of layers of any spec, or the largest when that is less than 1.5 times the
    smallest (vLLM's rule: 12 + 13 layers are better padded to 13 + 13 than split into 12 + 12 + 1). Layers are dealt
    round-robin, so a short group lacks its last layer.
    """
    if not specs:
        raise ConfigError("the model has no layer that keeps anything in the cache")
    if len({spec.page_size_bytes for spec in specs.values()}) > 1:
        sizes = sorted({spec.page_size_bytes for spec in specs.values()})
        raise ConfigError(f"layers of one pool need one page size, got {sizes} bytes; plan the block sizes first")
    by_spec: dict[KVCacheSpec, list[str]] = {}
    for name, spec in specs.items():
        by_spec.setdefault(spec, []).append(name)
    counts = [len(names) for names in by_spec.values()]
    length = max(counts) if max(counts) < 1.5 * min(counts) else min(counts)
    groups = []
    for spec, names in by_spec.items():
        num_groups = cdiv(len(names), length)
        groups += [KVCacheGroupSpec(tuple(names[i::num_groups]), spec) for i in range(num_groups)]
    return tuple(groups)


def with_block_size(spec: KVCacheSpec, block_size: int) -> KVCacheSpec:
    """The same layer with another number of tokens per block."""
    return replace(spec, block_size=block_size)


def with_speculation(spec: KVCacheSpec, num_speculative_tokens: int, replay: ReplaySpec | None = None) -> KVCacheSpec:
    """The same layer when K drafts are verified per step: K more rows in the convolution window, and K more states.

    With `replay` a ring in place of these states.

    Raises:
        ConfigError: the layer cannot replay.
    """
    if not isinstance(spec, MambaSpec):
        return spec
    if replay is not None and not spec.input_shapes:
        raise ConfigError(f'state_scheme="replay" is for Mamba-2 layers, not {spec.mamba_type}; use slots')
    (rows, *channels), *others = spec.shapes
    more = num_speculative_tokens - spec.num_speculative_tokens
    shapes = ((rows + more, *channels), *others)
    blocks = num_speculative_tokens if replay is None else 0
    return replace(spec, shapes=shapes, num_speculative_blocks=blocks, replay=replay)


def replay_spec(
    cache: CacheConfig, num_speculative_tokens: int, is_async: bool, specs: Sequence[KVCacheSpec]
) -> ReplaySpec | None:
    """What `cache` makes of the layers: None in scheme `slots`.

    Raises:
        ConfigError: the ring is too short, or no layer has a state.
    """
    if cache.state_scheme == "slots":
        return None
    if not any(isinstance(spec, MambaSpec) for spec in specs):
        raise ConfigError('state_scheme="replay": the model has no Mamba layer; use slots')
    longest = 1 + num_speculative_tokens
    ring_len = cache.replay_ring_len or default_ring_len(longest)
    if ring_len < (least := shortest_ring_len(longest)):
        raise ConfigError(
            f"replay_ring_len={ring_len} is too short for num_speculative_tokens={num_speculative_tokens}, which needs "
            f"{least}; raise it or leave it out"
        )
    return ReplaySpec(num_speculative_tokens, ring_len, longest if is_async else 0)
