"""Bytes, block counts and grouping of layers."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybrid_kv.attention.rollback import RecomputeSpec, rollback_spec
from hybrid_kv.cache.spec import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlotsSpec,
    StatePart,
    UniformTypeKVCacheSpecs,
    group_layers,
    window_and_states,
    with_rollback,
)
from hybrid_kv.config import CacheConfig, ConfigError

DTYPES = [torch.int8, torch.bfloat16, torch.float32]
ATTENTION = FullAttentionSpec(16, num_kv_heads=2, head_size=128, dtype=torch.bfloat16)


def mamba(
    mode: str = "none", k: int = 0, block_size: int = 64, padded: int | None = None
) -> MambaSpec:
    parts = window_and_states(((3, 10), torch.bfloat16), ((4, 8), torch.float32))
    return MambaSpec(block_size, parts, padded, mamba_cache_mode=mode, rollback=SlotsSpec(k))


@pytest.mark.parametrize(
    ("mode", "k", "blocks", "width"),
    [
        ("none", 0, 1, 1),
        ("none", 3, 4, 4),
        ("align", 0, 2, 4),
        ("align", 3, 5, 7),
        ("all", 0, 4, 4),
        ("all", 3, 7, 7),
    ],
)
def test_blocks_of_one_request_with_speculative_ones_in_every_mode(
    mode: str, k: int, blocks: int, width: int
) -> None:
    spec = mamba(mode, k, padded=256)
    assert spec.max_blocks_per_request(200) == blocks  # 200 tokens are four blocks of 64
    assert spec.block_table_width(200) == width
    assert spec.max_memory_usage_bytes(200) == blocks * 256


@pytest.mark.parametrize(
    ("mode", "blocks", "width"), [("none", 1, 1), ("align", 2, 4), ("all", 4, 4)]
)
def test_recompute_has_a_ring_in_place_of_speculative_blocks(
    mode: str, blocks: int, width: int
) -> None:
    inputs = (
        StatePart("x", (4, 2), torch.bfloat16),
        StatePart("B", (1, 8), torch.bfloat16),
        StatePart("dt", (4,), torch.float32),
    )
    layer = replace(mamba(mode, padded=2048), inputs=inputs)
    spec = with_rollback(with_rollback(layer, SlotsSpec(5)), RecomputeSpec(3, 36))
    assert isinstance(spec, MambaSpec)
    assert [part.shape for part in spec.parts] == [(3 + 3, 10), (4, 8)]
    assert (spec.num_speculative_blocks, spec.num_speculative_tokens) == (0, 3)
    assert spec.max_blocks_per_request(200) == blocks
    assert spec.block_table_width(200) == width
    assert spec.row_bytes == 36 * (8 * 2 + 8 * 2 + 4 * 4)
    assert spec.max_memory_usage_bytes(200) == blocks * 2048 + spec.row_bytes
    assert with_rollback(spec, SlotsSpec(3)) == with_rollback(layer, SlotsSpec(3))


def test_a_ring_longer_than_a_block_keeps_one_more_state() -> None:
    assert [
        RecomputeSpec(3, ring_len).most_logical_blocks_behind(16) for ring_len in (16, 17, 23, 400)
    ] == [1, 2, 2, 2]
    assert [RecomputeSpec(7, 400).most_logical_blocks_behind(size) for size in (8, 14, 15, 64)] == [
        3,
        3,
        2,
        2,
    ]
    assert [RecomputeSpec(3, 12, late).most_logical_blocks_behind(16) for late in (0, 4, 5)] == [
        1,
        1,
        2,
    ]


def test_the_ring_that_a_user_gets() -> None:
    layers = [mamba()]
    assert rollback_spec(CacheConfig(), 3, is_async=True, specs=layers) == SlotsSpec(3)
    assert rollback_spec(
        CacheConfig(state_scheme="recompute"), 3, is_async=False, specs=layers
    ) == RecomputeSpec(3, 36)
    given = CacheConfig(state_scheme="recompute", recompute_ring_len=11)
    assert rollback_spec(given, 3, is_async=True, specs=layers) == RecomputeSpec(3, 11, 4)
    with pytest.raises(
        ConfigError,
        match="recompute_ring_len=11 is too short for num_speculative_tokens=4, which needs 14",
    ):
        rollback_spec(given, 4, is_async=False, specs=layers)
    with pytest.raises(ConfigError, match="no Mamba layer"):
        rollback_spec(given, 3, is_async=False, specs=[ATTENTION])


def test_a_state_must_fit_its_page() -> None:
    with pytest.raises(
        ConfigError, match=r"padded Mamba page \(187 B\) is smaller than the state \(188 B\)"
    ):
        mamba(padded=187)


@given(
    drawn=st.lists(
        st.tuples(st.integers(1, 5), st.sampled_from([torch.int8, torch.bfloat16, torch.float32])),
        min_size=1,
    ),
    more=st.none() | st.integers(0, 7),
)
def test_a_part_of_a_state_is_aligned_to_its_dtype_in_every_page(
    drawn: list[tuple[int, torch.dtype]], more: int | None
) -> None:
    parts = tuple(StatePart(f"part{i}", (count,), dtype) for i, (count, dtype) in enumerate(drawn))
    *starts, whole = accumulate((part.nbytes for part in parts), initial=0)
    padded = None if more is None else whole + more
    wrong = [
        (
            f"a {dtype} state part at byte {start} of a {padded or whole} B page is not "
            f"aligned to {dtype.itemsize} B"
        )
        for start, (_, dtype) in zip(starts, drawn, strict=True)
        if start % dtype.itemsize or (padded or 0) % dtype.itemsize
    ]
    with pytest.raises(ConfigError, match=wrong[0]) if wrong else nullcontext():
        MambaSpec(1, parts, padded)


def test_the_elements_of_a_state_divide_a_page_without_padding() -> None:
    """Else the views of the second page begin inside the first."""
    state = MambaSpec(1, window_and_states(((1,), torch.float32), ((1,), torch.bfloat16)))
    config = KVCacheConfig(10, (KVCacheGroupSpec(("m",), state),))
    with pytest.raises(
        ConfigError,
        match=r"torch.float32 in pages of 6 B, no multiple of 4; give all state parts one",
    ):
        _ = config.block_bytes
    padded = KVCacheConfig(10, (KVCacheGroupSpec(("m",), replace(state, page_size_padded=8)),))
    assert padded.block_bytes == 8


def test_layers_of_different_pages_may_share_a_table_when_they_are_of_one_type() -> None:
    wide = FullAttentionSpec(16, num_kv_heads=4, head_size=128, dtype=torch.bfloat16)
    shared = UniformTypeKVCacheSpecs(16, (("a", ATTENTION), ("b", wide)))
    assert shared.page_size_bytes == ATTENTION.page_size_bytes + wide.page_size_bytes
    assert shared.max_blocks_per_request(33) == 3
    states = UniformTypeKVCacheSpecs(64, (("m", mamba("align")),))
    assert (states.max_blocks_per_request(200), states.block_table_width(200)) == (2, 4)
    with pytest.raises(ConfigError, match="2 types"):
        UniformTypeKVCacheSpecs(64, (("a", ATTENTION), ("m", mamba())))
    with pytest.raises(ConfigError, match=r"\[16\]"):
        UniformTypeKVCacheSpecs(32, (("a", ATTENTION),))


def test_bytes_of_layers_whose_pages_differ() -> None:
    small, large = FullAttentionSpec(8, 1, 2, torch.int32), FullAttentionSpec(8, 2, 2, torch.int32)
    shared = UniformTypeKVCacheSpecs(8, (("b", large), ("a", small)))
    config = KVCacheConfig(10, (KVCacheGroupSpec(("a", "b"), shared),))
    assert config.groups[0].layer_specs == (small, large)
    assert config.buffer_page_sizes == (128, 256)
    assert config.total_bytes == 10 * config.page_size_bytes == 10 * (128 + 256)
    twice = KVCacheConfig(10, (*config.groups, KVCacheGroupSpec(("c",), small)))
    assert twice.total_bytes == config.total_bytes
    with pytest.raises(
        ConfigError, match="layer 0 of one group has pages of 128 B and of another 256 B"
    ):
        KVCacheConfig(10, (*config.groups, KVCacheGroupSpec(("c",), large))).total_bytes  # noqa: B018
    with pytest.raises(ConfigError, match="layers c have no spec"):
        KVCacheGroupSpec(("a", "c"), shared).layer_specs  # noqa: B018


def test_groups_need_layers_of_one_page_size() -> None:
    with pytest.raises(ConfigError, match="no layer"):
        group_layers({})
    with pytest.raises(ConfigError, match="one page size"):
        group_layers({"a": ATTENTION, "m": mamba()})
