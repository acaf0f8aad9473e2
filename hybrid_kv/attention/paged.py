"""Metadata of paged attention, and the ways to compute it.

A *compute* stores a step's K and V and attends over the cache. All of them are called alike, part
by part of a step:

| compute | where | launches for a layer and part |
|---|---|---|
| `torch` | everywhere | two gathers and `scaled_dot_product_attention` |
| `triton` | GPU | `kernels.paged_attention.paged_attention_varlen` |
| `flash_attn` | GPU with vllm, whose pages hold 16 tokens | `flash_attn_varlen_func` |
| `flashinfer` | GPU, flashinfer-python >= 0.2 | `BatchPrefillWithPagedKVCacheWrapper` |

`AttentionBackend.get_compute` names the one that a backend runs on a device, `compute_of` finds it.
The last two are adapters written against those packages' signatures and tested against stand-ins;
they never ran on a GPU.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, Protocol

import numpy as np
import torch

from hybrid_kv.attention.common import CommonAttentionMetadata
from hybrid_kv.config import ConfigError
from hybrid_kv.kernels.common.integers import cdiv
from hybrid_kv.kernels.common.ragged import Ragged
from hybrid_kv.kernels.common.strided import gather_tokens
from hybrid_kv.kernels.paged_attention import (
    SlotCells,
    attend_tokens,
    attend_with_bias,
    attention_mask,
    paged_attention_varlen,
    sees_nothing,
    slot_cells,
    store_kv,
    token_index,
    window_index,
    window_mask,
    window_positions,
    write_kv,
)

# K and V, views of [num_kernel_blocks, kernel_block_size, num_kv_heads, head_size].
Caches = tuple[torch.Tensor, torch.Tensor]
FLASHINFER_WORKSPACE_BYTES = 128 << 20  # what its documentation recommends


def computed_dtype(stored: torch.dtype, model: torch.dtype) -> torch.dtype:
    """Return the dtype in which tokens of a cache are computed: 8 bits are stored alone."""
    return model if stored.itemsize == 1 else stored


class Compute(Protocol):
    """A way to store K and V, and to attend.

    `has_sinks`: it takes `sinks`; others are called without.
    """

    has_sinks: bool

    def store(
        self, key: torch.Tensor, value: torch.Tensor, caches: Caches, slot_mapping: SlotMapping
    ) -> None:
        """Store K and V [num_tokens, num_kv_heads, head_size] in their slots; -1 stores nothing."""

    def attend(
        self,
        query: torch.Tensor,
        caches: Caches,
        segment: AttentionPart,
        scale: float,
        *,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend causally from a part's queries to the tokens of their rows, up to the query's own.

        Where the part has a window, only the last tokens of it are seen, the query's own included.

        Args:
            query: [num_tokens, num_heads, head_size], of the part.
            sinks: [num_heads], see `kernels.paged_attention`; None: the layer has none.

        Returns:
            The same shape.
        """


class TorchCompute:
    """Gathers of each row's keys, padded to the longest, for `scaled_dot_product_attention`."""

    has_sinks = True

    def store(
        self, key: torch.Tensor, value: torch.Tensor, caches: Caches, slot_mapping: SlotMapping
    ) -> None:
        write_kv(key, value, *caches, slot_mapping.cells(caches[0].shape[1]))

    def attend(
        self,
        query: torch.Tensor,
        caches: Caches,
        segment: AttentionPart,
        scale: float,
        grid: int | None = None,
        *,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend as `Compute.attend`; tokens at multiples of a `grid` are hidden (`models.mtp`)."""
        padded = segment.rows.padded(query)
        shape = (len(padded), segment.num_keys, *caches[0].shape[2:])
        key, value = (
            gather_tokens(cache, segment.token_index(cache, grid)).to(query.dtype).view(shape)
            for cache in caches
        )
        mask = segment.mask(query.shape[1] // key.shape[2], query.dtype, grid)
        out = attend_tokens(padded, key, value, mask, scale, sinks)
        if grid is not None:
            out = out.masked_fill_(sees_nothing(segment.positions, grid)[..., None, None], 0)
        return segment.rows.flat(out)

    def attend_with_bias(
        self,
        query: torch.Tensor,
        caches: Caches,
        segment: AttentionPart,
        scale: float,
        bias: torch.Tensor,
    ) -> torch.Tensor:
        """Attend as `Compute.attend`, with a bias [num_tokens, num_heads, extent] by distance.

        See `kernels.paged_attention.attend_with_bias`.
        """
        rows = segment.rows
        padded = rows.padded(query)
        shape = (len(padded), segment.num_keys, *caches[0].shape[2:])
        key, value = (
            gather_tokens(cache, segment.token_index(cache)).view(shape) for cache in caches
        )
        out = attend_with_bias(
            padded, key, value, segment.distances, rows.padded(bias), scale, segment.window
        )
        return rows.flat(out)


class _Stores:
    """Storing K and V in one launch."""

    has_sinks = False

    def store(
        self, key: torch.Tensor, value: torch.Tensor, caches: Caches, slot_mapping: SlotMapping
    ) -> None:
        store_kv(key, value, *caches, slot_mapping.slots)


class TritonCompute(_Stores):
    """One launch to store, one to attend; `grid` as `TorchCompute.attend` has it."""

    has_sinks = True

    def attend(
        self,
        query: torch.Tensor,
        caches: Caches,
        segment: AttentionPart,
        scale: float,
        grid: int | None = None,
        *,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        where = segment.block_table, segment.query_start_loc, segment.seq_lens
        return paged_attention_varlen(
            query,
            *caches,
            *where,
            segment.rows.max_len,
            scale,
            grid or 0,
            segment.window or 0,
            sinks,
        )


class FlashAttentionCompute(_Stores):
    """`vllm.vllm_flash_attn.flash_attn_varlen_func` over a paged cache.

    Its causal mask is aligned to the last key. It is not that of the package flash-attn, whose
    pages are multiples of 256 tokens.

    Not that of the package flash-attn: its pages are multiples of 256 tokens.
    """

    def __init__(self) -> None:
        self._attend = importlib.import_module("vllm.vllm_flash_attn").flash_attn_varlen_func

    def attend(
        self,
        query: torch.Tensor,
        caches: Caches,
        segment: AttentionPart,
        scale: float,
        *,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert sinks is None, "`has_sinks` says that this takes none"
        # Longest rows, as far as the host knows them; a window says nothing of their length.
        longest = segment.num_keys
        if segment.window is not None:
            longest = segment.block_table.shape[1] * caches[0].shape[1]
        out: torch.Tensor = self._attend(
            query,
            *caches,
            max_seqlen_q=segment.rows.max_len,
            cu_seqlens_q=segment.query_start_loc,
            seqused_k=segment.seq_lens,
            max_seqlen_k=longest,
            softmax_scale=scale,
            causal=True,
            window_size=(segment.tokens_before, 0),
            block_table=segment.block_table,
        )
        return out


class FlashInferCompute(_Stores):
    """`flashinfer.BatchPrefillWithPagedKVCacheWrapper`, planned once per geometry in a step."""

    def __init__(self) -> None:
        self._wrapper = importlib.import_module("flashinfer").BatchPrefillWithPagedKVCacheWrapper
        self._workspaces: dict[torch.device, torch.Tensor] = {}

    def attend(
        self,
        query: torch.Tensor,
        caches: Caches,
        segment: AttentionPart,
        scale: float,
        *,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert sinks is None, "`has_sinks` says that this takes none"
        key_cache, _ = caches
        geometry = (query.shape[1:], key_cache.shape[2], scale, query.dtype, key_cache.dtype)
        if geometry not in segment.plans:
            segment.plans[geometry] = self._plan(query, key_cache, segment, scale)
        out: torch.Tensor = segment.plans[geometry].run(query, caches)
        return out

    def _plan(
        self, query: torch.Tensor, key_cache: torch.Tensor, segment: AttentionPart, scale: float
    ) -> Any:
        device = query.device
        page_size = key_cache.shape[1]
        if device not in self._workspaces:
            self._workspaces[device] = torch.empty(
                FLASHINFER_WORKSPACE_BYTES, dtype=torch.uint8, device=device
            )
        pages = (segment.seq_lens + page_size - 1) // page_size
        used = torch.arange(segment.block_table.shape[1], device=device) < pages[:, None]
        wrapper = self._wrapper(self._workspaces[device], "NHD")
        wrapper.plan(
            qo_indptr=segment.query_start_loc,
            paged_kv_indptr=torch.nn.functional.pad(pages.cumsum(0), (1, 0)).int(),
            paged_kv_indices=segment.block_table[used],
            paged_kv_last_page_len=(segment.seq_lens - 1) % page_size + 1,
            num_qo_heads=query.shape[1],
            num_kv_heads=key_cache.shape[2],
            head_dim_qk=query.shape[2],
            page_size=page_size,
            causal=True,
            sm_scale=scale,
            window_left=segment.tokens_before,
            q_data_type=query.dtype,
            kv_data_type=key_cache.dtype,
        )
        return wrapper


_COMPUTES: dict[str, type[Compute]] = {
    "torch": TorchCompute,
    "triton": TritonCompute,
    "flash_attn": FlashAttentionCompute,
    "flashinfer": FlashInferCompute,
}


@cache
def compute_of(name: str) -> Compute:
    """Return the compute called `name`, see `AttentionBackend.get_compute`.

    Raises:
        ConfigError: its package is missing.
    """
    try:
        return _COMPUTES[name]()
    except ImportError as error:
        raise ConfigError(
            f"attention with {name} needs a package that is missing ({error}); use TORCH"
        ) from None


TORCH = TorchCompute()
TRITON = TritonCompute()


class Rotary(Protocol):
    """A rotary embedding, hashable by its parameters (`models.rope.Rope`)."""

    def rotation(
        self, positions: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


class SlotMapping:
    """Slots of a step's tokens [num_tokens] int64, and their cells for each kernel block size."""

    def __init__(self, slots: torch.Tensor) -> None:
        self.slots = slots
        self._cells: dict[int, SlotCells] = {}

    def cells(self, block_size: int) -> SlotCells:
        """Return `kernels.paged_attention.slot_cells` of the slots, computed once."""
        if block_size not in self._cells:
            self._cells[block_size] = slot_cells(self.slots, block_size)
        return self._cells[block_size]


@dataclass(frozen=True)
class AttentionPart:
    """The decodes or the prefills of a step, with values that several layers share."""

    start: int  # first token
    num_tokens: int
    rows: Ragged
    positions: torch.Tensor  # [num_rows, max_len] int64; padding repeats the row's last
    block_table: torch.Tensor  # [num_rows, used kernel blocks] int32
    num_keys: int  # most tokens that the queries of a row see
    compute: Compute = TORCH
    window: int | None = None  # of a group whose queries see that many tokens each
    # What layers of one geometry share.
    plans: dict[Any, Any] = field(default_factory=dict, compare=False)

    @cached_property
    def last(self) -> torch.Tensor:
        """[num_rows] int64, position of each row's last token."""
        return self.positions[:, -1]

    @cached_property
    def first(self) -> torch.Tensor:
        """[num_rows] int64, position of the first token that the queries of each row see."""
        assert self.window is not None
        return (self.positions[:, 0] - self.window + 1).clamp(min=0)

    @cached_property
    def distances(self) -> torch.Tensor:
        """[num_rows, max_len, num_keys] int64, tokens from a key to a query."""
        first = torch.zeros_like(self.last) if self.window is None else self.first
        return self.positions.unsqueeze(-1) - window_positions(first, self.num_keys).unsqueeze(1)

    @property
    def tokens_before(self) -> int:
        """Return the number of tokens before its own that a query sees; -1: all of them."""
        return -1 if self.window is None else self.window - 1

    @cached_property
    def seq_lens(self) -> torch.Tensor:
        """[num_rows] int32, tokens after this step."""
        return (self.last + 1).int()

    @cached_property
    def query_start_loc(self) -> torch.Tensor:
        """[num_rows + 1] int32, first token of each row, counted from the part's first."""
        return self.rows.starts.int()

    def token_index(self, cache: torch.Tensor, grid: int | None = None) -> torch.Tensor:
        """Return the places of the `num_keys` tokens of each row that its queries see.

        See `kernels.paged_attention.token_index` and `window_index`.
        """
        key = *cache.stride()[:2], cache.shape[1], grid
        if key not in self.plans:
            table = self.block_table
            if self.window is None:
                self.plans[key] = token_index(cache, table, self.last, self.num_keys, grid)
            else:
                assert grid is None, "a draft head with a grid has no window"
                self.plans[key] = window_index(cache, table, self.first, self.last, self.num_keys)
        planned: torch.Tensor = self.plans[key]
        return planned

    def mask(
        self, per_kv_head: int, dtype: torch.dtype, grid: int | None = None
    ) -> torch.Tensor | None:
        """Return `kernels.paged_attention.attention_mask` or `window_mask`.

        It is None for a lone query, which sees every key up to its own.
        """
        if grid is None and self.positions.numel() == 1:
            return None
        key = per_kv_head, dtype, grid
        if key not in self.plans and self.window is not None:
            keys = window_positions(self.first, self.num_keys)
            self.plans[key] = window_mask(self.positions, keys, self.window, per_kv_head, dtype)
        if key not in self.plans:
            self.plans[key] = attention_mask(
                self.positions, self.num_keys, per_kv_head, dtype, grid
            )
        planned: torch.Tensor = self.plans[key]
        return planned


@dataclass(frozen=True)
class PagedAttentionMetadata:
    """Slots and positions of all tokens, [num_tokens_padded] int64, and the parts of the step."""

    slot_mapping: SlotMapping
    parts: tuple[AttentionPart, ...]
    positions: torch.Tensor
    rotations: dict[Any, tuple[torch.Tensor, torch.Tensor]] = field(
        default_factory=dict, compare=False
    )

    def rotation(self, rope: Rotary, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines at the positions, computed once for all layers of the step."""
        if (rope, dtype) not in self.rotations:
            self.rotations[rope, dtype] = rope.rotation(self.positions, dtype)
        return self.rotations[rope, dtype]


def build_paged_attention_metadata(
    common: CommonAttentionMetadata,
    block_table: torch.Tensor,
    slots: torch.Tensor,
    kernel_block_size: int,
    compute: Compute = TORCH,
    window: int | None = None,
) -> PagedAttentionMetadata:
    """Split the step into decodes and prefills.

    Args:
        block_table: [num_reqs_padded, width] int32, kernel blocks.
        slots: [num_tokens_padded] int64.
        compute: of the group's backend.
        window: tokens that a query of the group sees; None: all before it.
    """
    totals = common.num_computed_tokens + common.query_lens
    seen = totals if window is None else np.minimum(totals, common.query_lens + window - 1)
    used = cdiv(int(totals.max()), kernel_block_size)
    parts = []
    split = common.num_decodes
    decodes = 0, split, 0, common.decode_rows
    prefills = split, common.num_reqs_padded, common.num_decode_tokens, common.prefill_rows
    for first, last, start, rows in (decodes, prefills):
        if rows is None:
            continue
        num_tokens = int(common.query_lens[first:last].sum())
        positions = rows.padded(common.positions[start : start + num_tokens])
        table = block_table[first:last, :used]
        num_keys = int(seen[first:last].max())
        parts.append(
            AttentionPart(start, num_tokens, rows, positions, table, num_keys, compute, window)
        )
    return PagedAttentionMetadata(SlotMapping(slots), tuple(parts), common.positions)
