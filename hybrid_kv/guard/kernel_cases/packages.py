"""Stand-ins for packages that compute attention on a GPU: what they say of their arguments, row by row.

They know no more of the engine than those packages do: pages, indices and lengths, in the dtypes that kernels ask for.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from itertools import pairwise
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch

from hybrid_kv.guard import definitions
from hybrid_kv.guard.kernel_cases.draw import wide

ATTENTION, INFER = "vllm.vllm_flash_attn", "flashinfer"


@contextmanager
def installed(is_there: bool) -> Iterator[None]:
    """As if vllm and FlashInfer were installed, or not."""
    modules = {name: _module(name) if is_there else None for name in ("vllm", ATTENTION, INFER)}
    with patch.dict(sys.modules, modules):
        yield


def _module(name: str) -> ModuleType:
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    vars(module).update(
        flash_attn_varlen_func=flash_attn_varlen_func, BatchPrefillWithPagedKVCacheWrapper=PrefillWrapper
    )
    return module


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    max_seqlen_q: int,
    cu_seqlens_q: torch.Tensor,
    seqused_k: torch.Tensor,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    block_table: torch.Tensor,
) -> torch.Tensor:
    """vLLM's FlashAttention over pages; the mask is aligned to the last key."""
    _are_ints(cu_seqlens_q, seqused_k, block_table)
    bounds, lengths = cu_seqlens_q.tolist(), seqused_k.tolist()
    longest = max(end - begin for begin, end in pairwise(bounds))
    if not causal or (max_seqlen_q, max_seqlen_k) != (longest, max(lengths)):
        raise ValueError(f"causal={causal}, at most {max_seqlen_q} queries and {max_seqlen_k} keys in a row")
    pages = [row[: -(-length // k.shape[1])] for row, length in zip(block_table.tolist(), lengths, strict=True)]
    return _attend(q, k, v, bounds, pages, lengths, softmax_scale)


class PrefillWrapper:
    """FlashInfer's `BatchPrefillWithPagedKVCacheWrapper`.

    Attributes:
        made: all of them since somebody emptied the list.
    """

    made: list[PrefillWrapper] = []  # noqa: RUF012

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str) -> None:
        if kv_layout != "NHD":
            raise ValueError(f"layout {kv_layout}; pages are [page_size, num_kv_heads, head_dim]")
        self.workspace = float_workspace_buffer
        self.made.append(self)

    def plan(
        self,
        *,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        _are_ints(qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        if not causal or paged_kv_indptr[-1] != len(paged_kv_indices):
            raise ValueError(f"causal={causal}, {len(paged_kv_indices)} pages for rows {paged_kv_indptr.tolist()}")
        self._geometry = num_qo_heads, num_kv_heads, head_dim_qk, page_size, q_data_type, kv_data_type
        self._bounds, self._scale, indptr = qo_indptr.tolist(), sm_scale, paged_kv_indptr.tolist()
        ids = paged_kv_indices.tolist()
        self._pages = [ids[begin:end] for begin, end in pairwise(indptr)]
        full = [(len(pages) - 1) * page_size for pages in self._pages]
        self._lengths = [most + last for most, last in zip(full, paged_kv_last_page_len.tolist(), strict=True)]

    def run(self, q: torch.Tensor, paged_kv_cache: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        k, v = paged_kv_cache
        if self._geometry != (q.shape[1], k.shape[2], q.shape[2], k.shape[1], q.dtype, k.dtype):
            raise ValueError(f"planned for {self._geometry}, not for q {list(q.shape)}, k {list(k.shape)}")
        return _attend(q, k, v, self._bounds, self._pages, self._lengths, self._scale)


def _are_ints(*parts: torch.Tensor) -> None:
    for part in parts:
        if part.dtype != torch.int32 or not part.numel() or part.stride(-1) != 1:
            raise ValueError(f"an index {list(part.shape)} of {part.dtype} with strides {part.stride()}")


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bounds: Sequence[int],
    pages: Sequence[Sequence[int]],
    lengths: Sequence[int],
    scale: float,
) -> torch.Tensor:
    """Each row's queries are its last tokens."""
    if len(bounds) != len(lengths) + 1:
        raise ValueError(f"{len(lengths)} rows begin and end at {bounds}")
    out = torch.full_like(q, torch.nan)
    for row, (ids, length) in enumerate(zip(pages, lengths, strict=True)):
        own = slice(bounds[row], bounds[row + 1])
        keys, values = (wide(cache[list(ids)].flatten(0, 1)[:length]) for cache in (k, v))
        ends: Any = range(length - (own.stop - own.start), length)
        out[own] = torch.from_numpy(definitions.attention(wide(q[own]), keys, values, ends, scale)).to(q.dtype)
    return out
