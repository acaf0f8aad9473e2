"""The cache of one layer, and how many bytes of it one block holds.

A *page* is one manager block of one layer. In a hybrid pool all groups have the same
`page_size_bytes`, so that any block id can serve an attention layer (`block_size` tokens of K and
V) or a Mamba layer (one recurrent state). Names follow vLLM's `v1/kv_cache_interface.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from hybrid_kv.cache.modes import MODES, Mode
from hybrid_kv.errors import ConfigError
from hybrid_kv.kernels.common.integers import cdiv
from hybrid_kv.kernels.common.rounding import StateRounding

if TYPE_CHECKING:
    import torch


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
        """Dtypes of a page's contents."""
        raise NotImplementedError

    def max_blocks_per_request(self, max_model_len: int) -> int:
        """Return the most blocks that one request of `max_model_len` tokens holds at any time."""
        raise NotImplementedError

    def block_table_width(self, max_model_len: int) -> int:
        """Return the logical blocks that a request's row of the block table needs."""
        return self.max_blocks_per_request(max_model_len)

    def max_memory_usage_bytes(self, max_model_len: int) -> int:
        """Return the bytes that one request of `max_model_len` tokens can hold in this layer."""
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
class MLAAttentionSpec(FullAttentionSpec):
    """One vector per token, from which all heads take K and V.

    A page has `block_size * head_size` elements.
    """

    num_kv_heads: int = field(default=1, init=False)

    @property
    def page_size_bytes(self) -> int:
        return self.block_size * self.head_size * self.dtype.itemsize


@dataclass(frozen=True)
class SlidingWindowSpec(FullAttentionSpec):
    """K and V of the last tokens alone: a query at position p reads from `p - sliding_window + 1`.

    A request gives back the blocks that end before the window of its next query, so it never holds
    more than the window and a step take, however long it is.

    Attributes:
        sliding_window: tokens, the query's own included.
        max_step_tokens: the most tokens that a request's block tables may be ahead of those that
            are accounted for: a step's, twice that with asynchronous scheduling, and what a draft
            head writes ahead. None: unknown, so that it may hold all of its tokens.
    """

    sliding_window: int
    max_step_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.sliding_window < 1:
            raise ConfigError(f"sliding_window={self.sliding_window} must be an integer >= 1")

    @property
    def num_tail_blocks(self) -> int:
        """Blocks before the end of a prefix from which it is restored: those that a query reads."""
        return cdiv(self.sliding_window - 1, self.block_size)

    def first_seen(self, num_computed_tokens: int) -> int:
        """Return the position of the first token that a query after so many tokens reads."""
        return max(0, num_computed_tokens - self.sliding_window + 1)

    def first_needed(self, num_computed_tokens: int) -> int:
        """Return the first block that a query after so many tokens reads."""
        return self.first_seen(num_computed_tokens) // self.block_size

    def max_blocks_per_request(self, max_model_len: int) -> int:
        """Return how many blocks of a span of tokens a request holds at most.

        A span of n tokens that begins anywhere touches `ceil((n - 1) / block_size) + 1` blocks.
        """
        every = super().max_blocks_per_request(max_model_len)
        if self.max_step_tokens is None:
            return every
        span = self.sliding_window - 1 + self.max_step_tokens
        return min(every, cdiv(span - 1, self.block_size) + 1)

    def block_table_width(self, max_model_len: int) -> int:
        """Return the width of a row: it is indexed by position, so freed blocks keep theirs."""
        return super().max_blocks_per_request(max_model_len)


@dataclass(frozen=True)
class StatePart:
    """One tensor of a layer's state in a block, or of one token's inputs to its recurrence.

    Attributes:
        role: `window`: rows of inputs, the oldest first; a rejected draft is rolled back by reading
            from an earlier row. `state`: rolled back by the scheme (`RollbackSpec`). `scale`: a
            factor for each row of the state before it, without which that means nothing.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    role: Literal["window", "state", "scale"] = "state"

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def window_and_states(
    window: tuple[tuple[int, ...], torch.dtype],
    state: tuple[tuple[int, ...], torch.dtype] | None = None,
    scale: torch.dtype | None = None,
) -> tuple[StatePart, ...]:
    """Return the parts `conv` and, if there is one, `ssm` of a layer with a convolution.

    Each is made from its shape and dtype.

    Args:
        scale: dtype of the scales that a state of 8 bits has, one for each row of its last
            dimension (vllm!40012).
    """
    conv = StatePart("conv", *window, role="window")
    if state is None:
        return (conv,)
    ssm = StatePart("ssm", *state)
    if scale is None or ssm.dtype.itemsize > 1:
        return conv, ssm
    return conv, ssm, StatePart("ssm_scale", ssm.shape[:-1], scale, role="scale")


class StateProgress:
    """The progress of a request: `computed` accepted tokens are in the cache.

    `flushed` of them are in its states' blocks.
    """

    __slots__ = ("computed", "flushed")

    def __init__(self, computed: int = 0, flushed: int = 0) -> None:
        self.computed = computed
        self.flushed = flushed


@dataclass(frozen=True)
class RollbackSpec(ABC):
    """The memory that rolling back rejected drafts takes of the cache, by one scheme.

    It decides nothing: `SlotsSpec` and `attention.rollback.RecomputeSpec` do.

    Attributes:
        num_speculative_tokens: K.
        scheme: which one it is, a key of `attention.rollback.SCHEMES`.
        needs_inputs: it keeps the inputs of tokens to the recurrence, so the layer must describe
            them.
        writes_late: states are written some tokens after those were computed (`StateProgress`).
    """

    num_speculative_tokens: int = 0
    scheme: ClassVar[str]
    needs_inputs: ClassVar[bool]
    writes_late: ClassVar[bool]

    @property
    @abstractmethod
    def num_blocks(self) -> int:
        """Blocks of a request for the states of drafts."""

    @abstractmethod
    def most_logical_blocks_behind(self, block_size: int) -> int:
        """Return how many logical blocks before the last scheduled token's a request may hold.

        It matters in mode `align`.
        """

    @abstractmethod
    def bytes_per_row(self, inputs: Sequence[StatePart]) -> int:
        """Return the bytes outside of blocks, for each row of the engine in one layer."""

    @abstractmethod
    def stored(self, state_part: StatePart) -> StatePart:
        """Return a part as it is in its block; the bytes are the same."""

    @abstractmethod
    def allocate(self, inputs: Sequence[StatePart], num_rows: int, device: torch.device) -> Any:
        """Allocate the memory of `bytes_per_row`, for all rows; None if there is none."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Return the scheme's sizes, for the plan, in JSON types."""

    @abstractmethod
    def num_seen(self, progress: StateProgress, start: int) -> int:
        """Return how many tokens the state has seen that a step from `start` on reads."""

    @abstractmethod
    def advance(
        self,
        progress: StateProgress,
        start: int,
        num_tokens: int,
        computed: int,
        block_size: int | None,
    ) -> None:
        """Account for a decode, in place: a step does this for every request.

        Args:
            start: where it began.
            num_tokens: that it ran, drafts included.
            computed: accepted tokens in the cache after it.
            block_size: of a logical block; None where no state is kept.
        """


@dataclass(frozen=True)
class SlotsSpec(RollbackSpec):
    """The memory of scheme `slots`: blocks alone, one for the state after each draft."""

    scheme: ClassVar[str] = "slots"
    needs_inputs: ClassVar[bool] = False
    writes_late: ClassVar[bool] = False

    @property
    def num_blocks(self) -> int:
        return self.num_speculative_tokens

    def most_logical_blocks_behind(self, block_size: int) -> int:
        return 1

    def bytes_per_row(self, inputs: Sequence[StatePart]) -> int:
        return 0

    def stored(self, state_part: StatePart) -> StatePart:
        return state_part

    def allocate(self, inputs: Sequence[StatePart], num_rows: int, device: torch.device) -> None:
        return None

    def describe(self) -> dict[str, Any]:
        return {}

    def num_seen(self, progress: StateProgress, start: int) -> int:
        return start

    def advance(
        self,
        progress: StateProgress,
        start: int,
        num_tokens: int,
        computed: int,
        block_size: int | None,
    ) -> None:
        progress.computed = progress.flushed = computed


@dataclass(frozen=True)
class MambaSpec(KVCacheSpec):
    """One recurrent state a page: its parts, one after the other.

    A window has `kernel - 1 + K` rows when K draft tokens are verified per step, so that a rejected
    draft can be rolled back. `page_size_padded` is the attention page of the same pool.

    `inputs` are what a token feeds to the recurrence; a layer that does not say cannot be rolled
    back by running it again. `rounding` is None where states are rounded to the nearest value.
    """

    parts: tuple[StatePart, ...]
    page_size_padded: int | None = None
    mamba_type: str = "mamba2"
    mamba_cache_mode: str = "none"
    rollback: RollbackSpec = SlotsSpec()
    inputs: tuple[StatePart, ...] = ()
    rounding: StateRounding | None = None

    def __post_init__(self) -> None:
        if self.page_size_padded is not None and self.page_size_padded < self.state_bytes:
            raise ConfigError(
                f"the padded Mamba page ({self.page_size_padded} B) is smaller than the state "
                f"({self.state_bytes} B)"
            )
        offset = 0
        for state_part in self.parts:
            size = state_part.dtype.itemsize
            if offset % size or (self.page_size_padded or 0) % size:
                raise ConfigError(
                    f"a {state_part.dtype} state part at byte {offset} of a "
                    f"{self.page_size_bytes} B page is not aligned to {size} B; give all state "
                    "parts one dtype"
                )
            offset += state_part.nbytes

    @property
    def mode(self) -> Mode:
        """The rules of its `mamba_cache_mode`."""
        return MODES[self.mamba_cache_mode]

    @property
    def state_bytes(self) -> int:
        """Bytes of the state itself, without padding."""
        return sum(state_part.nbytes for state_part in self.parts)

    @property
    def num_speculative_tokens(self) -> int:
        """K: each window has as many rows more."""
        return self.rollback.num_speculative_tokens

    @property
    def num_speculative_blocks(self) -> int:
        """Blocks of a request for the states of drafts."""
        return self.rollback.num_blocks

    @property
    def row_bytes(self) -> int:
        """Bytes that a row of the engine takes outside of pages."""
        return self.rollback.bytes_per_row(self.inputs)

    @property
    def cache_dtypes(self) -> tuple[torch.dtype, ...]:
        return tuple(state_part.dtype for state_part in self.parts)

    @property
    def page_size_bytes(self) -> int:
        return self.page_size_padded or self.state_bytes

    def max_blocks_per_request(self, max_model_len: int) -> int:
        """Return how many blocks a request holds at most.

        In mode `none` the running state, in `align` the running one and the last boundary's, in
        `all` one per boundary; in each as many more as the rollback scheme has for drafts
        (vllm!41233 added them to `all`).
        """
        logical_blocks = self.mode.num_logical_blocks(max_model_len, self.block_size)
        behind = self.rollback.most_logical_blocks_behind(self.block_size)
        return self.mode.held_at_most(logical_blocks, behind) + self.num_speculative_blocks

    def max_memory_usage_bytes(self, max_model_len: int) -> int:
        return super().max_memory_usage_bytes(max_model_len) + self.row_bytes

    def block_table_width(self, max_model_len: int) -> int:
        """Return the width of a row: `align` and `all` index it by position.

        So freed boundaries keep their logical block.
        """
        return (
            self.mode.num_logical_blocks(max_model_len, self.block_size)
            + self.num_speculative_blocks
        )


@dataclass(frozen=True)
class UniformTypeKVCacheSpecs(KVCacheSpec):
    """Layers of one type and block size whose pages differ in bytes.

    They have one block table, and a page size for each layer.
    """

    specs: tuple[tuple[str, KVCacheSpec], ...]

    def __post_init__(self) -> None:
        kinds = {(type(spec), window_of(spec)) for _, spec in self.specs}
        sizes = {spec.block_size for _, spec in self.specs}
        if len(kinds) != 1 or sizes != {self.block_size}:
            raise ConfigError(
                f"layers of {len(kinds)} types with block sizes {sorted(sizes)} cannot share one "
                "table"
            )

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
    """Return the spec of each layer of a group, in the order of its names."""
    if not isinstance(spec, UniformTypeKVCacheSpecs):
        return (spec,) * len(layer_names)
    specs = dict(spec.specs)
    missing = [name for name in layer_names if name not in specs]
    if missing:
        raise ConfigError(
            f"layers {', '.join(missing)} have no spec in their group; list one for every layer"
        )
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
    """The allocated cache: `num_blocks` pages in each raw buffer.

    Buffer i belongs to the i-th layer of every group.
    """

    num_blocks: int
    groups: tuple[KVCacheGroupSpec, ...]

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one page, the same in every buffer.

        Of `UniformTypeKVCacheSpecs`, of one block of all its layers.
        """
        return self.groups[0].spec.page_size_bytes

    @property
    def num_buffers(self) -> int:
        return max(len(group.layer_names) for group in self.groups)

    @property
    def buffer_page_sizes(self) -> tuple[int, ...]:
        """Bytes of one page of each raw buffer.

        Raises:
            ConfigError: layers of one buffer whose pages differ, so that a block id would mean two
                places; or pages that an element of a layer's cache does not divide.
        """
        sizes: dict[int, int] = {}
        for group in self.groups:
            for i, spec in enumerate(group.layer_specs):
                if sizes.setdefault(i, spec.page_size_bytes) != spec.page_size_bytes:
                    raise ConfigError(
                        f"layer {i} of one group has pages of {sizes[i]} B and of another "
                        f"{spec.page_size_bytes} B, "
                        "in one buffer; layers that share a buffer need one page size"
                    )
                for dtype in spec.cache_dtypes:
                    if spec.page_size_bytes % dtype.itemsize:
                        raise ConfigError(
                            f"layer {i} of a group has {dtype} in pages of {spec.page_size_bytes} "
                            "B, no multiple of "
                            f"{dtype.itemsize}; give all state parts one dtype"
                        )
        return tuple(sizes[i] for i in range(len(sizes)))

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all buffers."""
        return sum(self.buffer_page_sizes)

    @property
    def total_bytes(self) -> int:
        return self.num_blocks * self.block_bytes

    @property
    def bytes_per_row(self) -> int:
        """Bytes that the rollback scheme keeps for each row of the engine, over all layers."""
        specs = (spec for group in self.groups for spec in group.layer_specs)
        return sum(spec.row_bytes for spec in specs if isinstance(spec, MambaSpec))

    def max_blocks_per_request(self, max_model_len: int) -> int:
        """Return the blocks that one request of `max_model_len` tokens can hold."""
        return sum(group.spec.max_blocks_per_request(max_model_len) for group in self.groups)


def group_layers(specs: dict[str, KVCacheSpec]) -> tuple[KVCacheGroupSpec, ...]:
    """Split layers into groups of one spec each and (nearly) equal length, in layer order.

    Layers of one type and block size whose pages differ become one group, each with pages of its
    own size (vLLM's `UniformTypeKVCacheSpecs`): no other group wants their blocks. All else needs
    pages of one size.

    The group length is the smallest number of layers of any spec, or the largest when that is less
    than 1.5 times the smallest (vLLM's rule: 12 + 13 layers are better padded to 13 + 13 than split
    into 12 + 12 + 1). Layers are dealt round-robin, so a short group lacks its last layer.
    """
    if not specs:
        raise ConfigError("the model has no layer that keeps anything in the cache")
    if len({spec.page_size_bytes for spec in specs.values()}) > 1:
        kinds = {(type(spec), window_of(spec), spec.block_size) for spec in specs.values()}
        if len(kinds) == 1:
            ((_, _, block_size),) = kinds
            return (
                KVCacheGroupSpec(
                    tuple(specs), UniformTypeKVCacheSpecs(block_size, tuple(specs.items()))
                ),
            )
        sizes = sorted({spec.page_size_bytes for spec in specs.values()})
        raise ConfigError(
            f"layers of one pool need one page size, got {sizes} bytes; plan the block sizes first"
        )
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


def window_of(spec: KVCacheSpec) -> int | None:
    """Return how many tokens a query of a layer sees; None if all before it."""
    return spec.sliding_window if isinstance(spec, SlidingWindowSpec) else None


def kind_of(spec: KVCacheSpec) -> str:
    """Return the kind of a layer's cache for people: `attention`, `window 512`, `mamba2`."""
    if isinstance(spec, MambaSpec):
        return spec.mamba_type
    window = window_of(spec)
    return "attention" if window is None else f"window {window}"


def with_max_step_tokens(spec: KVCacheSpec, max_step_tokens: int) -> KVCacheSpec:
    """Return the spec with what bounds the blocks of a sliding window; others are unchanged."""
    if not isinstance(spec, SlidingWindowSpec):
        return spec
    return replace(spec, max_step_tokens=max_step_tokens)


def with_block_size(spec: KVCacheSpec, block_size: int) -> KVCacheSpec:
    """Return the spec with another number of tokens per block."""
    return replace(spec, block_size=block_size)


def with_rollback(spec: KVCacheSpec, rollback: RollbackSpec) -> KVCacheSpec:
    """Return the spec with this rollback; each window grows by K rows.

    Raises:
        ConfigError: the scheme keeps inputs, and the layer does not say what they are.
    """
    if not isinstance(spec, MambaSpec):
        return spec
    if (
        rollback.needs_inputs
        and not spec.inputs
        and any(state_part.role == "state" and state_part.nbytes for state_part in spec.parts)
    ):
        raise ConfigError(
            f'state_scheme="{rollback.scheme}" is not for {spec.mamba_type} layers; use slots'
        )
    if rollback.needs_inputs and any(state_part.role == "scale" for state_part in spec.parts):
        raise ConfigError(
            f'state_scheme="{rollback.scheme}" does not store the state after each token, to which '
            "states of 8 bits are rounded; use slots"
        )
    more = rollback.num_speculative_tokens - spec.num_speculative_tokens

    def grown(state_part: StatePart) -> StatePart:
        if state_part.role != "window":
            return state_part
        rows, *channels = state_part.shape
        return replace(state_part, shape=(rows + more, *channels))

    return replace(spec, parts=tuple(map(grown, spec.parts)), rollback=rollback)


def with_rounding(spec: KVCacheSpec, rounding: StateRounding | None) -> KVCacheSpec:
    """Return the spec with states that are rounded so; one without states is unchanged.

    Raises:
        ConfigError: the states have a dtype that none is rounded to, or the rollback scheme does
            not store the state after each token.
    """
    if rounding is None or not isinstance(spec, MambaSpec):
        return spec
    dtypes = {
        str(state_part.dtype)
        for state_part in spec.parts
        if state_part.role == "state" and state_part.nbytes
    }
    exact = sorted(dtypes & {"torch.float64", "torch.float32", "torch.bfloat16"})
    if exact:
        raise ConfigError(
            f"enable_mamba_cache_stochastic_rounding: the states are {exact[0]}; load the model "
            "with mamba_ssm_cache_dtype float16, int8 or fp8"
        )
    if dtypes and spec.rollback.writes_late:
        raise ConfigError(
            f'state_scheme="{spec.rollback.scheme}" does not store the state after each token, '
            "which is what enable_mamba_cache_stochastic_rounding rounds; use slots"
        )
    return replace(spec, rounding=rounding) if dtypes else spec
