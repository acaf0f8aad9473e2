"""Page b of every view lies in page b's bytes, whatever the logical order (vllm!37236)."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybrid_kv.attention.rollback import RecomputeSpec
from hybrid_kv.cache.backend import (
    AttentionBackend,
    AttentionGroup,
    BackendContext,
    FlashAttentionBackend,
    FlashInferBackend,
    TorchBackend,
    init_attn_backend,
)
from hybrid_kv.cache.layout import (
    allocate_raw_buffers,
    allocate_row_memory,
    bind_views,
    mamba_views,
)
from hybrid_kv.cache.spec import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    StatePart,
    UniformTypeKVCacheSpecs,
    window_and_states,
)
from hybrid_kv.kernels.recompute import read_states, write_states

CPU = torch.device("cpu")


class AnyFlash(FlashAttentionBackend):
    """FlashAttention's layout at a kernel block size chosen by the test."""

    size = 1

    @classmethod
    def get_supported_kernel_block_sizes(cls, context: BackendContext) -> Sequence[int]:
        return [cls.size]


class AnyTorch(TorchBackend):
    """The `(num_blocks, 2, …)` layout at a kernel block size chosen by the test."""

    size = 1

    @classmethod
    def get_supported_kernel_block_sizes(cls, context: BackendContext) -> Sequence[int]:
        return [cls.size]


def hybrid_config(
    num_blocks: int, block_size: int, num_kv_heads: int = 1, head_size: int = 8, num_layers: int = 1
) -> KVCacheConfig:
    attention = FullAttentionSpec(block_size, num_kv_heads, head_size, torch.float16)
    width = attention.page_size_bytes // 16
    state = MambaSpec(
        64,
        window_and_states(((2, width), torch.float16), ((width,), torch.float32)),
        attention.page_size_bytes,
    )
    names = [tuple(f"{kind}{i}" for i in range(num_layers)) for kind in "ma"]
    return KVCacheConfig(
        num_blocks, (KVCacheGroupSpec(names[0], state), KVCacheGroupSpec(names[1], attention))
    )


def touched(raw: torch.Tensor, view: torch.Tensor) -> set[int]:
    """The bytes of `raw` that filling `view` changes."""
    raw.zero_()
    view.view(torch.int16 if view.itemsize == 2 else torch.int32).fill_(-1)
    return set(torch.nonzero(raw).flatten().tolist())


def page_of(view: torch.Tensor, block: int, num_blocks: int) -> torch.Tensor:
    """Manager block `block` of a view whose first dimension counts manager or kernel blocks."""
    per_block = view.shape[0] // num_blocks
    return view[block * per_block : (block + 1) * per_block]


@given(
    backend=st.sampled_from([AnyFlash, AnyTorch]),
    num_blocks=st.integers(2, 5),
    kernel_block_size=st.sampled_from([1, 2, 3, 4]),
    blocks_per_kv_block=st.integers(1, 3),
    num_kv_heads=st.integers(1, 3),
    head_size=st.sampled_from([8, 16]),
)
def test_every_page_of_every_view_stays_inside_its_bytes(
    backend: type[AttentionBackend],
    num_blocks: int,
    kernel_block_size: int,
    blocks_per_kv_block: int,
    num_kv_heads: int,
    head_size: int,
) -> None:
    backend.size = kernel_block_size  # type: ignore[attr-defined]
    config = hybrid_config(
        num_blocks, kernel_block_size * blocks_per_kv_block, num_kv_heads, head_size
    )
    groups = init_attn_backend(config, backend, BackendContext("cpu", float32_ssm_state=False))
    (raw,) = buffers = allocate_raw_buffers(config, CPU)
    views = bind_views(config, groups, buffers)
    page = config.page_size_bytes
    for block in range(num_blocks):
        own = set(range(block * page, (block + 1) * page))
        key, value = (touched(raw, page_of(view, block, num_blocks)) for view in views["a0"])
        conv, ssm = (touched(raw, page_of(view, block, num_blocks)) for view in views["m0"])
        assert key | value == own
        assert not key & value
        assert conv | ssm <= own
        assert not conv & ssm
        assert len(conv | ssm) == config.groups[0].spec.state_bytes  # type: ignore[attr-defined]


def test_groups_share_buffers_by_position_and_a_short_group_skips_its_last() -> None:
    config = hybrid_config(num_blocks=3, block_size=16, num_layers=2)
    short = KVCacheGroupSpec(("m2",), config.groups[0].spec)
    config = KVCacheConfig(3, (*config.groups, short))
    buffers = allocate_raw_buffers(config, CPU)
    assert [buffer.numel() for buffer in buffers] == [3 * config.page_size_bytes] * 2
    views = bind_views(
        config,
        init_attn_backend(
            config, FlashAttentionBackend, BackendContext("cpu", float32_ssm_state=False)
        ),
        buffers,
    )
    assert views.keys() == {"m0", "m1", "m2", "a0", "a1"}
    for name, parts in views.items():
        buffer = buffers[1 if name.endswith("1") else 0]
        assert {part.untyped_storage().data_ptr() for part in parts} == {
            buffer.untyped_storage().data_ptr()
        }
        assert parts[0].data_ptr() == buffer.data_ptr()


def test_layers_of_one_group_may_have_pages_of_their_own() -> None:
    specs = tuple(
        (f"a{heads}", FullAttentionSpec(32, heads, 8, torch.float16)) for heads in (3, 1, 2)
    )
    shared = UniformTypeKVCacheSpecs(32, specs)
    names = ("a1", "a2", "a3")
    config = KVCacheConfig(3, (KVCacheGroupSpec(names, shared),))
    buffers = allocate_raw_buffers(config, CPU)
    assert [buffer.numel() for buffer in buffers] == [3 * page for page in (1024, 2048, 3072)]
    views = bind_views(
        config, [AttentionGroup(0, names, shared, FlashAttentionBackend, 16)], buffers
    )
    for name, raw, page in zip(names, buffers, (1024, 2048, 3072), strict=True):
        for block in range(3):
            own = set(range(block * page, (block + 1) * page))
            key, value = (touched(raw, page_of(view, block, 3)) for view in views[name])
            assert key | value == own
            assert not key & value


def test_the_number_of_blocks_is_the_configurations() -> None:
    config = hybrid_config(num_blocks=3, block_size=32)
    larger = [torch.zeros(5 * config.page_size_bytes, dtype=torch.int8)]
    views = bind_views(
        config,
        init_attn_backend(
            config, FlashInferBackend, BackendContext("cpu", float32_ssm_state=False)
        ),
        larger,
    )
    assert [part.shape[0] for part in views["m0"]] == [3, 3]
    assert [part.shape for part in views["a0"]] == [(3, 32, 1, 8)] * 2


@pytest.mark.parametrize(
    "window, state", [("float32", "float32"), ("bfloat16", "float32"), ("float64", "float64")]
)
def test_recompute_keeps_float32_states_as_two_planes_in_the_same_bytes(
    window: str, state: str
) -> None:
    dtypes = getattr(torch, window), getattr(torch, state)
    inputs = (
        StatePart("x", (4, 2), dtypes[0]),
        StatePart("B", (1, 6), dtypes[0]),
        StatePart("dt", (4,), torch.float32),
    )
    parts = window_and_states(((3, 20), dtypes[0]), ((4, 2, 6), dtypes[1]))
    spec = MambaSpec(64, parts, 1024, rollback=RecomputeSpec(1, 7), inputs=inputs)
    raw = torch.zeros(3 * 1024, dtype=torch.int8)
    conv, ssm = mamba_views(raw, 3, spec)
    assert (conv.shape, conv.dtype) == ((3, 3, 20), dtypes[0])
    planes = (2,) if state == "float32" else ()
    assert (ssm.shape, ssm.dtype) == ((3, *planes, 4, 2, 6), torch.int16 if planes else dtypes[1])
    values = torch.randn(1, 4, 2, 6, dtype=dtypes[1])
    write_states(ssm, torch.tensor([1]), values)
    assert torch.equal(read_states(ssm, torch.tensor([1])), values)
    written = raw.nonzero().flatten() - 1024 - 60 * dtypes[0].itemsize
    assert written.min() >= 0 and written.max() < 48 * dtypes[1].itemsize
    rings = allocate_row_memory(KVCacheConfig(3, (KVCacheGroupSpec(("m",), spec),)), 5, CPU)
    assert rings["m"].x.shape == (5, 4, 7, 2)
    if window != "float64":
        assert rings["m"].nbytes == 5 * spec.row_bytes


@pytest.mark.parametrize("backend", [AnyTorch, AnyFlash])
def test_a_latent_cache_is_one_view_whatever_the_backend(
    backend: type[AnyTorch] | type[AnyFlash],
) -> None:
    """One vector per token, in the token's block and slot, over kernel blocks."""
    spec = MLAAttentionSpec(6, 5, torch.float32)
    config = KVCacheConfig(4, (KVCacheGroupSpec(("a",), spec),))
    backend.size = 3
    groups = init_attn_backend(config, backend, BackendContext("cpu", float32_ssm_state=False))
    (raw,) = allocate_raw_buffers(config, CPU)
    assert len(raw) == 4 * 6 * 5 * 4
    (latents,) = bind_views(config, groups, [raw])["a"]
    assert latents.shape == (8, 3, 5)
    latents[5, 1] = torch.arange(5.0)  # token 4 of block 2
    page = raw[2 * spec.page_size_bytes : 3 * spec.page_size_bytes].view(torch.float32).view(6, 5)
    assert page[4].tolist() == [0, 1, 2, 3, 4]
    assert int(latents.count_nonzero()) == 4
