"""Each compute of a step reads its tokens, positions and blocks, and gives the right output.

FlashAttention and FlashInfer are stand-ins here: they check what their packages require of the
arguments. Tolerance: 1e-5 of the largest output, see tests/kernels/paged_attention/test_launch.py.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from types import ModuleType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybrid_kv.attention import paged
from hybrid_kv.attention.paged import AttentionPart, build_paged_attention_metadata, compute_of
from hybrid_kv.cache.backend import get_backend
from hybrid_kv.cache.spec import FullAttentionSpec
from hybrid_kv.config import ConfigError
from hybrid_kv.kernels.common.ragged import Ragged
from hybrid_kv.kernels.paged_attention.reference import FOLDED_QUERIES
from hybrid_kv.models.attention import GridAttention
from hybrid_kv.models.config_file import ConfigFile
from tests.kernels.harness import GAPS, Shape, check, equality, shapes
from tests.kernels.interpreter import interpreted
from tests.support.batches import common
from tests.support.paged_attention import MIXED, Attention, attention

Caches = tuple[torch.Tensor, torch.Tensor]


@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 4)), max_size=4),  # with up to 3 drafts
    st.lists(st.tuples(st.integers(0, 15), st.integers(1, 9)), max_size=4),
    st.integers(1, 6),
)
def test_each_part_has_its_rows(
    decodes: list[tuple[int, int]], prefills: list[tuple[int, int]], kernel_block_size: int
) -> None:
    if not decodes and not prefills:
        return
    computed, lens = zip(*decodes, *prefills, strict=True)
    batch = common(computed, lens, len(decodes))
    table = torch.arange(len(lens) * 40, dtype=torch.int32).view(len(lens), 40)
    slots = torch.arange(sum(lens))
    metadata = build_paged_attention_metadata(batch, table, slots, kernel_block_size)
    assert metadata.slot_mapping.slots is slots
    totals = [a + b for a, b in zip(computed, lens, strict=True)]
    row = token = 0
    for part in metadata.parts:
        assert part.start == token
        lengths = part.rows.lengths.tolist()
        assert lengths == list(lens[row : row + len(lengths)])
        assert part.num_keys == max(totals[row : row + len(lengths)])
        used = -(-max(totals) // kernel_block_size)
        assert torch.equal(part.block_table, table[row : row + len(lengths), :used])
        for i, n in enumerate(lengths):
            assert part.positions[i, :n].tolist() == list(
                range(computed[row + i], computed[row + i] + n)
            )
        assert part.num_tokens == sum(lengths)
        row, token = row + len(lengths), token + part.num_tokens
    assert (row, token) == (len(lens), sum(lens))
    assert [part.rows.num_rows for part in metadata.parts] == [
        n for n in (len(decodes), len(prefills)) if n
    ]


def test_padding_rows_are_decodes_at_position_zero() -> None:
    batch = common([7, 3], [1, 1], 2, padding=2)
    table = torch.zeros(4, 9, dtype=torch.int32)
    (part,) = build_paged_attention_metadata(batch, table, torch.tensor([7, 9, -1, -1]), 4).parts
    assert part.positions.flatten().tolist() == [7, 3, 0, 0]
    assert part.block_table.shape == (4, 2)


# ---- computes ----


def attend(
    compute: paged.Compute,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    max_query_len: int,
    scale: float,
    grid: int = 0,
    window: int = 0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the outputs of the rows that run, by this compute; NaN for tokens of no row."""
    running = query_start_loc.diff().nonzero()[:, 0]
    lengths, totals = query_start_loc.diff()[running].long(), seq_lens[running].tolist()
    positions = torch.cat(
        [torch.arange(end - n, end) for n, end in zip(lengths.tolist(), totals, strict=True)]
    )
    rows = Ragged(lengths, torch.device("cpu"))
    seen = [
        min(end, n + window - 1) if window else end
        for n, end in zip(lengths.tolist(), totals, strict=True)
    ]
    part = AttentionPart(
        0,
        len(positions),
        rows,
        rows.padded(positions),
        block_table[running],
        max(seen),
        window=window or None,
    )
    options = {"grid": grid} if grid else {}
    options |= {} if sinks is None else {"sinks": sinks}
    out = torch.full_like(query, torch.nan, memory_format=torch.contiguous_format)
    for _ in range(2):  # the second layer finds what the first has planned
        found = compute.attend(
            query[: len(positions)], (key_cache, value_cache), part, scale, **options
        )
        out[: len(positions)] = found
    return out


class Torch(Attention):
    """In plain torch; of bfloat16 and float16 it keeps weights and outputs in as many bits."""

    reference = staticmethod(partial(attend, paged.TORCH))
    share = {  # noqa: RUF012
        torch.float64: 1e-12,
        torch.float32: 5e-6,
        torch.bfloat16: 2.0**-7,
        torch.float16: 2.0**-10,
    }


ONE = MIXED.but(rows=((1, 5, False),), gap=0, stale=0)
STEPS = {
    "decodes": ONE.but(rows=((1, 12, False), (1, 3, False), (1, 7, False))),
    "alone": ONE,
    "drafts": ONE.but(rows=((3, 9, False), (1, 4, False), (2, 2, False)), per_kv=1),
    "prefills": ONE.but(rows=((9, 0, False), (1, 6, False), (4, 3, False)), block_size=16),
    "windows": ONE.but(rows=((1, 12, False), (1, 3, False), (1, 7, False)), window=4, stale=1),
    "a window alone": ONE.but(window=3, block_size=2),
    "drafts in a window": ONE.but(
        rows=((3, 9, False), (1, 4, False), (2, 2, False)), window=5, block_size=2
    ),
    "multi-head": ONE.but(rows=((1, 2, False), (1, 2, False)), kv_heads=3, per_kv=1),
}
# Which the libraries do not know: the longest queries of a row, and a window that is full.
SINKS = {
    "drafts": ONE.but(rows=((3, 9, False), (1, 4, False)), has_sinks=True),
    "a prefill": ONE.but(rows=((FOLDED_QUERIES + 2, 3, False),), has_sinks=True),
    "a full window": ONE.but(rows=((1, 12, False), (2, 9, False)), window=4, has_sinks=True),
}
steps = pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
ROW = st.tuples(
    st.integers(1, FOLDED_QUERIES + 4), st.integers(0, 20), st.sampled_from([False, False, True])
)
DECODES = st.lists(st.tuples(st.just(1), st.integers(0, 20), st.booleans()), min_size=1, max_size=3)
CASES = shapes(
    MIXED,
    rows=(st.lists(ROW, min_size=1, max_size=3) | DECODES).map(tuple),
    kv_heads=[1, 2, 3],
    per_kv=[1, 2, 3, 5],
    head_size=[1, 3, 16, 20],
    block_size=[1, 2, 5, 16],
    gap=GAPS,
    is_swapped=[False, True],
    dtype=[*Torch.share],
    grid=[0, 0, 1, 3, 8],
    window=[0, 0, 1, 2, 6, 19],
    has_sinks=[False, True],
)
_, test_torch_equals_the_definition = equality(Torch, CASES, *STEPS.values(), *SINKS.values())


def problem(step: Shape) -> tuple[AttentionPart, torch.Tensor, Caches]:
    """A part, its queries and its caches."""
    made = []

    class Kept:
        attend = staticmethod(
            lambda query, caches, part, scale: made.append((part, query, caches)) or query
        )

    Attention(step).run(partial(attend, Kept))
    return made[0]


def check_window(step: Shape) -> None:
    check(Attention(step), partial(attend, paged.TRITON))


def check_triton(step: Shape) -> None:
    check(Attention(step), partial(attend, paged.TRITON))
    file = ConfigFile(
        {"hidden_size": 8, "num_attention_heads": step.kv_heads * step.per_kv}, "config.json"
    )
    spec = FullAttentionSpec(4, step.kv_heads, step.head_size, torch.float32)
    layer = GridAttention(file, "head", spec)
    layer.grid = 4
    part, query, caches = problem(step)
    outputs = [
        layer.attend(query, caches, replace(part, compute=compute, plans={}))
        for compute in (paged.TRITON, paged.TORCH)
    ]
    assert (
        0 < float((outputs[0] - outputs[1]).abs().max()) <= 1e-5 * float(outputs[1].abs().max())
    ), "not one kernel's"


@pytest.mark.parametrize("name", ["windows", "drafts in a window"])
def test_triton_in_a_window(name: str) -> None:
    interpreted(check_window, STEPS[name])


@pytest.mark.parametrize("name", SINKS)
def test_triton_with_sinks(name: str) -> None:
    interpreted(check_window, SINKS[name])


@pytest.mark.parametrize("name", ["drafts", "prefills"])
def test_triton_and_beside_a_draft_heads_grid(name: str) -> None:
    interpreted(check_triton, STEPS[name])


def check_stores() -> None:
    """Both ways store the same."""
    g = torch.Generator().manual_seed(0)
    key, value = (torch.randn(4, 2, 16, generator=g) for _ in range(2))
    found = []
    for name in ("torch", "triton"):
        caches = torch.zeros(2, 3, 4, 2, 16).unbind(0)
        compute_of(name).store(key, value, caches, paged.SlotMapping(torch.tensor([11, -1, 0, 6])))
        found.append(torch.stack(caches))
    assert torch.equal(*found)
    assert int(found[0].any(-1).sum()) == 2 * 3 * 2


def test_stores() -> None:
    interpreted(check_stores)


def test_a_lone_query_has_no_mask() -> None:
    part, *_ = problem(STEPS["alone"])
    assert part.mask(2, torch.float32) is None and part.mask(2, torch.float32, grid=4) is not None
    assert problem(STEPS["decodes"])[0].mask(2, torch.float32) is not None


@steps
def test_layers_of_one_geometry_share_what_is_computed(step: Shape) -> None:
    part, query, (key_cache, value_cache) = problem(step)
    made = part.token_index(key_cache), part.mask(step.per_kv, query.dtype)
    assert (
        part.token_index(value_cache) is made[0] and part.mask(step.per_kv, query.dtype) is made[1]
    )
    if part.window is None:
        assert part.token_index(key_cache, grid=3) is not made[0]
        assert part.mask(step.per_kv, query.dtype, grid=3) is not made[1]
    other = torch.zeros(len(key_cache), 3, *key_cache.shape[1:]).unbind(1)[0]
    assert part.token_index(other) is not made[0]
    slots = paged.SlotMapping(torch.arange(6))
    assert slots.cells(2) is slots.cells(2) and slots.cells(2) is not slots.cells(3)


def test_other_heads_and_dtypes_have_a_mask_of_their_own() -> None:
    part = problem(STEPS["drafts"])[0]
    masks = [
        part.mask(*key) for key in ((1, torch.float32), (2, torch.float32), (1, torch.float64))
    ]
    assert [mask.shape[2] for mask in masks] == [3, 6, 3]
    assert [mask.dtype for mask in masks] == [torch.float32, torch.float32, torch.float64]


def by_definition(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    starts: torch.Tensor,
    lens: torch.Tensor,
    scale: float,
    before: int,
) -> torch.Tensor:
    """Attention of flat rows, each over its own blocks."""
    out = torch.empty_like(query)
    for span, total, blocks in zip(
        starts.unfold(0, 2, 1).tolist(), lens.tolist(), block_table.long(), strict=True
    ):
        place, own = torch.arange(total), slice(*span)
        at = blocks[place // key_cache.shape[1]], place % key_cache.shape[1]
        ends = range(total - (span[1] - span[0]), total)
        out[own] = attention(
            query[own], key_cache[at], value_cache[at], ends, scale, window=before + 1
        )
    return out


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    max_seqlen_q: int,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_k: int,
    cu_seqlens_k: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    q_v: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] | None = None,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
) -> torch.Tensor:
    """vLLM 0.22's signature; what its kernel requires of its arguments."""
    assert causal and cu_seqlens_k is None
    for ints in (cu_seqlens_q, seqused_k, block_table):
        assert ints.dtype == torch.int32 and ints.stride(-1) == 1
    assert q.is_contiguous() and k.stride(-1) == v.stride(-1) == 1 and k.shape == v.shape
    assert (
        q.shape[0] == int(cu_seqlens_q[-1])
        and len(cu_seqlens_q) == len(seqused_k) + 1 == len(block_table) + 1
    )
    assert max_seqlen_q == int(cu_seqlens_q.diff().max()) and max_seqlen_k >= int(seqused_k.max())
    assert window_size[1] == 0
    return by_definition(
        q, k, v, block_table, cu_seqlens_q, seqused_k, softmax_scale, window_size[0]
    )


class BatchPrefillWithPagedKVCacheWrapper:
    """FlashInfer's signatures, as vLLM 0.22 calls them."""

    plans = 0

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD") -> None:
        assert (
            float_workspace_buffer.dtype == torch.uint8 and len(float_workspace_buffer) == 128 << 20
        )
        assert kv_layout == "NHD"

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
    ) -> None:
        type(self).plans += 1
        assert causal and q_data_type == kv_data_type
        for ints in (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len):
            assert ints.dtype == torch.int32 and ints.is_contiguous()
        assert int(paged_kv_indptr[-1]) == len(paged_kv_indices)
        assert (
            int(paged_kv_last_page_len.min()) >= 1
            and int(paged_kv_last_page_len.max()) <= page_size
        )
        pages = paged_kv_indptr.diff()
        self.heads = num_qo_heads, num_kv_heads, head_dim_qk, page_size
        self.table = torch.zeros(len(pages), int(pages.max()), dtype=torch.int32)
        for row, ids in enumerate(paged_kv_indices.split(pages.tolist())):
            self.table[row, : len(ids)] = ids
        self.starts, self.scale, self.window_left = qo_indptr, sm_scale, window_left
        self.lens = (pages - 1) * page_size + paged_kv_last_page_len

    def run(self, q: torch.Tensor, paged_kv_cache: Caches) -> torch.Tensor:
        k, v = paged_kv_cache
        assert (*q.shape[1:2], *k.shape[2:], k.shape[1]) == self.heads and q.shape[0] == int(
            self.starts[-1]
        )
        return by_definition(
            q, k, v, self.table, self.starts, self.lens, self.scale, self.window_left
        )


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The packages, as far as the adapters call them."""
    flash = ModuleType("vllm.vllm_flash_attn")
    flash.flash_attn_varlen_func = flash_attn_varlen_func
    flashinfer = ModuleType("flashinfer")
    flashinfer.BatchPrefillWithPagedKVCacheWrapper = BatchPrefillWithPagedKVCacheWrapper
    for module in (ModuleType("vllm"), flash, flashinfer):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    compute_of.cache_clear()
    yield
    compute_of.cache_clear()


@steps
def test_flash_attn_is_called_as_it_requires(fakes: None, step: Shape) -> None:
    check(Attention(step), partial(attend, compute_of("flash_attn")))


@steps
def test_flashinfer_is_called_as_it_requires_and_planned_once(
    fakes: None, step: Shape, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BatchPrefillWithPagedKVCacheWrapper, "plans", 0)
    check(Attention(step), partial(attend, compute_of("flashinfer")))
    assert BatchPrefillWithPagedKVCacheWrapper.plans == 1


@pytest.mark.usefixtures("fakes")
def test_flashinfer_plans_again_for_layers_of_other_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BatchPrefillWithPagedKVCacheWrapper, "plans", 0)
    part, query, (key_cache, value_cache) = problem(STEPS["drafts"])
    part = replace(part, compute=compute_of("flashinfer"), plans={})
    heads = key_cache.shape[2]
    for kv_heads, copies in ((heads, 1), (2 * heads, 2), (heads, 1), (heads, 2)):
        caches = tuple(
            cache[:, :, :1].repeat(1, 1, kv_heads, 1) for cache in (key_cache, value_cache)
        )
        queries = query.repeat(1, copies, 1)
        by_torch = replace(part, compute=paged.TORCH, plans={})
        torch.testing.assert_close(
            part.compute.attend(queries, caches, part, 0.5),
            paged.TORCH.attend(queries, caches, by_torch, 0.5),
        )
    assert BatchPrefillWithPagedKVCacheWrapper.plans == 3


@pytest.mark.parametrize(
    ("name", "package"), [("flash_attn", "vllm"), ("flashinfer", "flashinfer")]
)
def test_a_missing_package_is_one_line(
    name: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    compute_of.cache_clear()
    with pytest.raises(
        ConfigError, match=f"attention with {name} needs a package that is missing .*{package}"
    ):
        compute_of(name)
    compute_of.cache_clear()


def test_a_part_belongs_to_the_compute_that_it_was_built_for() -> None:
    batch, table = common([3, 0], [1, 4], 1), torch.zeros(2, 9, dtype=torch.int32)
    triton = compute_of("triton")
    built = build_paged_attention_metadata(batch, table, torch.arange(5), 4, triton)
    assert all(part.compute is triton for part in built.parts)
    assert (
        build_paged_attention_metadata(batch, table, torch.arange(5), 4).parts[0].compute
        is paged.TORCH
    )


@pytest.mark.parametrize(
    ("backend", "device", "found", "name"),
    [
        ("TORCH", "cpu", True, "triton"),
        ("FLASH_ATTN", "cpu", True, "triton"),
        ("FLASHINFER", "cpu", True, "triton"),
        ("TORCH", "cuda", True, "triton"),
        ("FLASH_ATTN", "cuda", True, "flash_attn"),
        ("FLASH_ATTN", "cuda", False, "triton"),
        ("FLASHINFER", "cuda", True, "flashinfer"),
        ("FLASHINFER", "cuda", False, "triton"),
    ],
)
def test_what_a_backend_computes_with(
    backend: str, device: str, found: bool, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: object() if found else None)
    attention = get_backend(backend, "cuda")
    assert attention.get_compute(device, "triton", [torch.float32, torch.bfloat16]) == name
    assert attention.get_compute(device, "triton", [torch.float32, torch.float64]) == "torch"
    assert attention.get_compute(device, "torch", [torch.float32]) == "torch"
