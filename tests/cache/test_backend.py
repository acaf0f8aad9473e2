"""What backends say of themselves, and which kernel block size follows from it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybrid_kv.cache.backend import (
    AttentionBackend,
    BackendContext,
    CUDAGraphSupport,
    FlashAttentionBackend,
    FlashInferBackend,
    GDNBackend,
    Mamba1Backend,
    Mamba2Backend,
    ShortConvBackend,
    TorchBackend,
    backend_of,
    get_attention_cg_support_info,
    get_backend,
    init_attn_backend,
    select_kernel_block_size,
)
from hybrid_kv.cache.spec import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    StatePart,
    window_and_states,
)
from hybrid_kv.config import ConfigError

CUDA, XPU = (
    BackendContext("cuda", float32_ssm_state=False),
    BackendContext("xpu", float32_ssm_state=False),
)
FP32_STATE = BackendContext("cuda", float32_ssm_state=True)
BYTE = StatePart("state", (1,), torch.int8)
STATE = MambaSpec(64, window_and_states(((3, 8), torch.float32), ((4, 8), torch.float32)))
ATTENTION = FullAttentionSpec(64, num_kv_heads=2, head_size=8, dtype=torch.float32)


@pytest.mark.parametrize(
    ("name", "platform", "default", "preferred"),
    [
        ("FLASH_ATTN", "cuda", 16, 16),
        ("FLASH_ATTN", "xpu", 16, 64),
        ("FLASH_ATTN", "xpu", 128, 128),
        ("CPU_ATTN", "cpu", 16, 128),
        ("CPU_ATTN", "cpu", 256, 256),
        ("FLASHINFER", "cuda", 24, 16),
        ("TORCH", "cpu", 24, 24),
    ],
)
def test_preferred_block_sizes(name: str, platform: str, default: int, preferred: int) -> None:
    assert (
        get_backend(name, platform).get_preferred_block_size(
            default, BackendContext(platform, float32_ssm_state=False)
        )
        == preferred
    )


@pytest.mark.parametrize(
    ("block_size", "backends", "context", "size"),
    [
        (528, [FlashAttentionBackend], CUDA, 528),
        (528, [FlashAttentionBackend], FP32_STATE, 16),
        (544, [FlashInferBackend], CUDA, 32),
        (2112, [FlashAttentionBackend], FP32_STATE, 64),
        (544, [FlashAttentionBackend, FlashInferBackend], CUDA, 32),
        (7, [TorchBackend], CUDA, 7),
    ],
)
def test_kernel_block_sizes(
    block_size: int, backends: list[type[AttentionBackend]], context: BackendContext, size: int
) -> None:
    assert select_kernel_block_size(block_size, backends, context) == size


def test_no_common_kernel_block_size_is_an_error_with_the_flag() -> None:
    with pytest.raises(
        ConfigError,
        match=r"no kernel block size of FLASHINFER divides the block size 24; .*--block-size",
    ):
        select_kernel_block_size(24, [FlashInferBackend], CUDA)


@pytest.mark.parametrize(("backend", "block_dim"), [(TorchBackend, 0), (FlashAttentionBackend, 1)])
@given(st.integers(1, 64), st.integers(1, 9), st.integers(1, 300))
def test_the_block_dimension_is_known_at_any_geometry(
    backend: type[AttentionBackend],
    block_dim: int,
    block_size: int,
    num_kv_heads: int,
    head_size: int,
) -> None:
    assert backend.get_kv_cache_block_dim(block_size, num_kv_heads, head_size) == block_dim
    assert (
        backend.get_kv_cache_shape(9, block_size, num_kv_heads, head_size)[backend.get_kv_dim()]
        == 2
    )


def test_the_context_knows_a_float32_state() -> None:
    half = MambaSpec(64, window_and_states(((3, 8), torch.bfloat16), ((4, 8), torch.bfloat16)))
    mixed = MambaSpec(64, window_and_states(((4, 8), torch.bfloat16), ((4, 8), torch.float32)))
    assert BackendContext.for_layers("cuda", {"h": half, "m": mixed}) == FP32_STATE
    assert BackendContext.for_layers("cuda", {"m": half, "a": ATTENTION}) == CUDA


def test_backends_are_found_by_name_platform_and_layer() -> None:
    assert get_backend("auto", "xpu") is FlashAttentionBackend
    assert get_backend("auto", "cpu") is TorchBackend
    assert get_backend("FLASHINFER", "cuda") is FlashInferBackend
    with pytest.raises(ConfigError, match="platform='tpu' is unknown; use one of cuda, xpu, cpu"):
        get_backend("auto", "tpu")
    for name in ("MAMBA2_ATTN", "auto2", "torch"):
        with pytest.raises(ConfigError, match=f"'{name}' is unknown; use one of auto, TORCH"):
            get_backend(name, "cuda")
    assert backend_of(ATTENTION, FlashInferBackend) is FlashInferBackend
    assert backend_of(STATE, FlashInferBackend) is Mamba2Backend
    assert backend_of(MambaSpec(1, (BYTE,), mamba_type="gdn_attention"), TorchBackend) is GDNBackend
    assert backend_of(MambaSpec(1, (BYTE,), mamba_type="mamba1"), TorchBackend) is Mamba1Backend
    assert (
        backend_of(MambaSpec(1, (BYTE,), mamba_type="short_conv"), TorchBackend) is ShortConvBackend
    )
    with pytest.raises(ConfigError, match="'rwkv'"):
        backend_of(MambaSpec(1, (BYTE,), mamba_type="rwkv"), TorchBackend)


class Uncaptured(TorchBackend):
    cudagraph_support = CUDAGraphSupport.NEVER


def test_groups_get_their_backend_and_a_state_is_never_split() -> None:
    config = KVCacheConfig(
        4, (KVCacheGroupSpec(("m",), STATE), KVCacheGroupSpec(("a",), ATTENTION))
    )
    groups = init_attn_backend(config, FlashInferBackend, CUDA)
    assert isinstance(groups, list)
    assert [(g.group_id, g.backend, g.kernel_block_size) for g in groups] == [
        (0, Mamba2Backend, 64),
        (1, FlashInferBackend, 64),
    ]
    assert len(CUDAGraphSupport) == 3
    assert get_attention_cg_support_info(groups) == CUDAGraphSupport.UNIFORM_SINGLE_TOKEN_DECODE
    assert (
        get_attention_cg_support_info([*groups, replace(groups[0], backend=Uncaptured)])
        == CUDAGraphSupport.NEVER
    )
