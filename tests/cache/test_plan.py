"""Planned sizes against an independent transcription of vLLM 0.22's rules, literal anchors, and vllm!37467."""

from __future__ import annotations

from dataclasses import replace
from math import ceil, lcm
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybrid_kv.cache.backend import BackendContext, FlashAttentionBackend, Mamba2Backend, _SSMBackend, get_backend
from hybrid_kv.cache.plan import CachePlan, describe, plan_cache, update_block_size_for_backend
from hybrid_kv.cache.spec import FullAttentionSpec, KVCacheSpec, MambaSpec, UndoSpec, window_and_states
from hybrid_kv.config import CacheConfig, ConfigError
from hybrid_kv.models.shapes import model_shape
from tests.model_configs import CONFIGS, NEMOTRON_3_NANO

GRANITE = "ibm-granite/granite-4.0-h-small"
QWEN = "Qwen/Qwen3-Next-80B-A3B"
MAX_MODEL_LEN = 131072


def plan_of(name: str, platform: str = "cuda", k: int = 0, backend: str = "auto", **wishes: Any) -> CachePlan:
    wishes = {"num_blocks": 4096, **wishes}
    cache = CacheConfig(**wishes)
    shape = model_shape(CONFIGS[name], cache=cache, num_speculative_tokens=k)
    context = BackendContext.for_layers(platform, shape.layers)
    attention = get_backend(backend, platform)
    return plan_cache(shape.layers, cache, attention, context, MAX_MODEL_LEN, shape.mamba_chunk_size)


def vllm_022_sizes(config: dict[str, Any], platform: str, mode: str, k: int) -> tuple[int, int, int, int]:
    """(block size, Mamba block size, state bytes, padded page), from the rules of vLLM 0.22.

    `platforms/interface.py` (`update_block_size_for_backend`, `_align_hybrid_block_size`), `platforms/xpu.py` (gated
    delta net), `layers/mamba/mamba_utils.py` (state shapes), with FlashAttention (`backends/flash_attn.py`).
    """
    bf16 = 2
    if config["model_type"] == "qwen3_next":
        keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
        values = config["linear_num_value_heads"] * config["linear_value_head_dim"]
        conv = (config["linear_conv_kernel_dim"] - 1 + k) * (2 * keys + values) * bf16
        ssm = values * config["linear_key_head_dim"] * bf16
    elif config["model_type"] == "nemotron_h":
        inner = config["mamba_num_heads"] * config["mamba_head_dim"]
        conv = (config["conv_kernel"] - 1 + k) * (inner + 2 * config["n_groups"] * config["ssm_state_size"]) * bf16
        ssm = inner * config["ssm_state_size"] * 4
    else:
        inner = config["mamba_expand"] * config["hidden_size"]
        conv_dim = inner + 2 * config["mamba_n_groups"] * config["mamba_d_state"]
        conv = (config["mamba_d_conv"] - 1 + k) * conv_dim * bf16
        ssm = inner * config["mamba_d_state"] * bf16
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    state, token = conv + ssm, 2 * config["num_key_value_heads"] * head_dim * bf16
    preferred = 64 if platform == "xpu" else 16
    if mode == "all":
        chunk = config.get("mamba_chunk_size") or config.get("chunk_size") or 2048
        unit = lcm(chunk, preferred)
        block = unit * ceil(ceil(state / token) / unit)
    else:
        block = preferred * ceil(state / (preferred * token))
    block = max(block, preferred)
    if platform == "xpu" and config["model_type"] == "qwen3_next":
        block = 64 * ceil(block / 64)
    return block, MAX_MODEL_LEN if mode == "none" else block, state, block * token


@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("mode", ["none", "align", "all"])
@pytest.mark.parametrize("platform", ["cuda", "xpu"])
@pytest.mark.parametrize("name", CONFIGS)
def test_sizes_are_those_of_vllm_022(name: str, platform: str, mode: str, k: int) -> None:
    plan = plan_of(name, platform, k, mamba_cache_mode=mode)
    sizes = plan.sizes
    assert (
        sizes.block_size,
        sizes.mamba_block_size,
        sizes.mamba_state_bytes,
        sizes.page_size_bytes,
    ) == vllm_022_sizes(CONFIGS[name], platform, mode, k)
    assert {group.spec.page_size_bytes for group in plan.config.groups} == {sizes.page_size_bytes}
    for group, kernel_block_size in zip(plan.config.groups, plan.kernel_block_sizes, strict=True):
        assert group.spec.block_size % kernel_block_size == 0


# Nemotron-3-Nano by hand: conv 3 * 6144 * 2 = 36,864 B and SSM 64 * 64 * 128 * 4 = 2,097,152 B, so m = 2,134,016 B;
# one token of K and V is 2 * 2 * 128 * 2 = 1,024 B; 2,084 tokens hold a state: 131 blocks of 16, 33 of 64, 17 of 128.
@pytest.mark.parametrize(
    ("platform", "mode", "k", "block_size", "kernel_block_size", "padding"),
    [
        ("cuda", "none", 0, 2096, 16, 0.58),
        ("xpu", "none", 0, 2112, 64, 1.34),
        ("cuda", "all", 0, 2176, 64, 4.41),
        ("xpu", "all", 0, 2176, 64, 4.41),
        ("cuda", "align", 3, 2128, 16, 0.38),
        ("xpu", "align", 3, 2176, 64, 2.64),
    ],
)
def test_nemotron_3_nano_anchors(
    platform: str, mode: str, k: int, block_size: int, kernel_block_size: int, padding: float
) -> None:
    plan = plan_of(NEMOTRON_3_NANO, platform, k, mamba_cache_mode=mode)
    assert plan.sizes.block_size == block_size
    assert plan.kernel_block_sizes[-1] == kernel_block_size
    assert plan.sizes.page_size_bytes == block_size * 1024
    assert plan.sizes.mamba_state_bytes == 2_134_016 + k * 6144 * 2
    assert describe(plan)["mamba_padding_percent"] == padding


def test_vllm_37467_alignment_follows_the_backends_preference() -> None:
    # Aligned for 16-token blocks the page would be 2,096 tokens, which no 64-token kernel block divides.
    assert 2096 % 64
    plan = plan_of(NEMOTRON_3_NANO, "xpu")
    assert plan.sizes.block_size % 64 == 0
    assert plan.sizes.page_size_bytes % (64 * 1024) == 0


def test_vllm_37467_a_users_mamba_block_size_is_kept_raised_with_a_note_or_refused() -> None:
    assert plan_of(GRANITE, mamba_cache_mode="none", mamba_block_size=512).sizes.mamba_block_size == 512
    kept = plan_of(GRANITE, mamba_cache_mode="all", mamba_block_size=1024)
    assert (kept.sizes.mamba_block_size, kept.notes) == (1024, ())
    raised = plan_of(GRANITE, mamba_cache_mode="all", mamba_block_size=48)
    assert raised.sizes.mamba_block_size == 528  # 525 tokens hold a state: 11 times lcm(48, 16), not 3 chunks of 256
    assert any("--mamba-block-size 48 was raised to its multiple 528" in note for note in raised.notes)
    assert plan_of(GRANITE, mamba_cache_mode="align", mamba_block_size=528).sizes.mamba_block_size == 528
    with pytest.raises(ConfigError, match="--mamba-block-size 512 cannot be kept"):
        plan_of(GRANITE, mamba_cache_mode="align", mamba_block_size=512)


def test_vllm_37467_a_state_space_backend_is_never_asked_for_a_block_size(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(cls: type, *_: object) -> int:
        raise AssertionError(f"{cls.__name__} was asked for a block size")

    monkeypatch.setattr(_SSMBackend, "get_preferred_block_size", classmethod(asked))
    monkeypatch.setattr(_SSMBackend, "get_supported_kernel_block_sizes", classmethod(asked))
    for name in (NEMOTRON_3_NANO, QWEN):
        for platform in ("cuda", "xpu", "cpu"):
            plan_of(name, platform)
    assert Mamba2Backend.is_ssm()
    assert not FlashAttentionBackend.is_ssm()


def test_gated_delta_net_on_xpu_keeps_blocks_divisible_by_64() -> None:
    assert plan_of(QWEN, "xpu", block_size=16).sizes.block_size % 64 == 0
    assert plan_of(QWEN, "cuda", block_size=16).sizes.block_size % 64 != 0


@pytest.mark.parametrize("backend", ["FLASH_ATTN", "FLASHINFER", "CPU_ATTN", "TORCH"])
def test_a_block_size_that_no_kernel_block_divides_is_refused(backend: str) -> None:
    if backend == "TORCH":
        assert plan_of(GRANITE, backend=backend, block_size=7).sizes.block_size % 7 == 0
        return
    with pytest.raises(ConfigError, match=f"block size 24 does not fit {backend}"):
        plan_of(GRANITE, backend=backend, block_size=24)


def test_a_users_block_size_is_raised_with_a_note() -> None:
    plan = plan_of(GRANITE, block_size=32)
    assert plan.sizes.block_size == 544  # 2,147,840 B of state / 4,096 B per token = 524.4 tokens = 17 blocks of 32
    assert any("--block-size 32 was raised to 544" in note for note in plan.notes)
    assert plan_of(GRANITE, block_size=1024).sizes.block_size == 1024


def test_groups_and_lost_layer_slots() -> None:
    plan = plan_of(NEMOTRON_3_NANO)  # 23 Mamba layers in groups of 6 leave one slot of the fourth group unused
    assert [len(group.layer_names) for group in plan.config.groups] == [6, 6, 6, 5, 6]
    assert plan.unused_layer_slots == 1
    assert any("1 of 30 layer slots are unused" in note for note in plan.notes)
    assert plan_of(GRANITE).unused_layer_slots == 0


def test_memory_becomes_blocks_and_requests() -> None:
    plan = plan_of(GRANITE, num_blocks=None, memory_bytes=100 * 4 * 528 * 4096 + 1, mamba_cache_mode="none")
    assert plan.config.num_blocks == 100  # four buffers of pages of 528 tokens of 4,096 B
    assert plan.config.total_bytes == 100 * 4 * 528 * 4096
    assert plan.blocks_per_request == 9 + 249  # nine Mamba groups, ceil(131072 / 528) attention blocks
    assert plan.max_concurrency == 99 / 258
    assert plan.longest_request == 90 * 528
    assert plan.token_capacity == 90 * 528
    assert any("no request longer than 47520 tokens fits" in note for note in plan.notes)


def test_impossible_plans_are_refused_with_the_way_out() -> None:
    page = 528 * 4096
    with pytest.raises(ConfigError, match=f"at least {11 * 4 * page} B of memory"):
        plan_of(GRANITE, num_blocks=None, memory_bytes=page)
    plan_of(GRANITE, num_blocks=None, memory_bytes=11 * 4 * page)
    with pytest.raises(ConfigError, match="at least 11 blocks"):
        plan_of(GRANITE, num_blocks=10)
    with pytest.raises(ConfigError, match="--num-blocks or --gpu-memory"):
        plan_of(GRANITE, num_blocks=None)


def attention(**changes: Any) -> FullAttentionSpec:
    return replace(FullAttentionSpec(1, num_kv_heads=2, head_size=8, dtype=torch.float16), **changes)


def mamba(**changes: Any) -> MambaSpec:
    return replace(MambaSpec(1, window_and_states(((3, 16), torch.float16), ((2, 8, 8), torch.float16))), **changes)


def sizes_of(layers: dict[str, KVCacheSpec], chunk_size: int | None = 16, **wishes: Any) -> Any:
    backend, context = get_backend("FLASH_ATTN", "cuda"), BackendContext("cuda", False)
    return update_block_size_for_backend(layers, CacheConfig(**wishes), backend, context, 1000, chunk_size)


def test_models_of_one_kind_of_layer() -> None:
    assert sizes_of({"a": attention()}).block_size == 16
    assert sizes_of({"m": mamba()}).mamba_block_size == 1000
    assert sizes_of({"m": mamba()}, mamba_cache_mode="all").mamba_block_size == 16
    assert sizes_of({"m": mamba()}, mamba_cache_mode="align", mamba_block_size=96).mamba_block_size == 96
    assert sizes_of({"m": mamba()}).page_size_bytes == mamba().state_bytes
    with pytest.raises(ConfigError, match="no layer"):
        sizes_of({})
    with pytest.raises(ConfigError, match="no Mamba layer"):
        sizes_of({"a": attention()}, mamba_block_size=16)
    with pytest.raises(ConfigError, match="no attention layer"):
        sizes_of({"m": mamba()}, block_size=16)
    with pytest.raises(ConfigError, match=r"\[64, 96\] bytes per token cannot share one pool with Mamba layers"):
        sizes_of({"a": attention(num_kv_heads=3), "b": attention(num_kv_heads=2), "m": mamba()})
    for layers in ({"m": mamba()}, {"m": mamba(), "a": attention()}):
        with pytest.raises(ConfigError, match="chunk size"):
            sizes_of(layers, chunk_size=None, mamba_cache_mode="all")


def test_much_padding_without_a_chunk_size_is_told_of_the_modes_that_need_none() -> None:
    layers = {"m": mamba(), "a": attention(num_kv_heads=8, head_size=64)}
    backend, context = get_backend("TORCH", "cpu"), BackendContext("cpu", False)
    for mode, unit in (("align", None), ("all", 32)):
        cache = CacheConfig(mamba_block_size=unit, mamba_cache_mode=mode, num_blocks=100)  # type: ignore[arg-type]
        (note,) = plan_cache(layers, cache, backend, context, 500).notes
        assert note.startswith(f"mode {mode} pads each Mamba state of {mamba().state_bytes} B by")
        assert ("--mamba-cache-mode align" in note) == (mode == "all")


def test_narrower_attention_layers_get_longer_blocks_of_the_same_page() -> None:
    layers = {"wide": attention(num_kv_heads=4), "narrow": attention(num_kv_heads=1), "m": mamba()}
    backend, context = get_backend("FLASH_ATTN", "cuda"), BackendContext("cuda", False)
    cache = CacheConfig(mamba_cache_mode="align", num_blocks=100)
    plan = plan_cache(layers, cache, backend, context, 1000, 16)
    sizes = {name: group.spec.block_size for group in plan.config.groups for name in group.layer_names}
    assert sizes["wide"] == sizes["m"] == plan.sizes.block_size
    assert sizes["narrow"] == 4 * sizes["wide"]
    assert len({group.spec.page_size_bytes for group in plan.config.groups}) == 1


def test_attention_layers_alone_have_one_block_size_and_pages_of_their_own() -> None:
    layers = {name: attention(num_kv_heads=heads) for name, heads in (("a", 2), ("b", 3), ("c", 2))}
    backend, context = get_backend("FLASH_ATTN", "cuda"), BackendContext("cuda", False)
    plan = plan_cache(layers, CacheConfig(memory_bytes=100_000), backend, context, 1000)
    (group,) = describe(plan)["groups"]
    assert (group["layers"], group["block_size"], group["kernel_block_size"]) == (["a", "b", "c"], 16, 16)
    assert group["page_sizes_bytes"] == [16 * 64, 16 * 96, 16 * 64]
    assert (plan.sizes.block_size, plan.sizes.page_size_bytes) == (16, 16 * 96)
    assert plan.config.num_blocks == 100_000 // (16 * (64 + 96 + 64))
    assert plan.config.total_bytes == plan.config.num_blocks * 16 * (64 + 96 + 64)
    assert plan.unused_layer_slots == 0


@given(
    num_kv_heads=st.integers(1, 8),
    rows=st.integers(1, 8),
    width=st.integers(1, 400),
    mode=st.sampled_from(["none", "align", "all"]),
    backend=st.sampled_from(["FLASH_ATTN", "FLASHINFER", "CPU_ATTN", "TORCH"]),
    platform=st.sampled_from(["cuda", "xpu", "cpu"]),
    block_size=st.sampled_from([None, 16, 48, 80, 256]),
    mamba_block_size=st.sampled_from([None, 16, 24, 100]),
    k=st.integers(0, 3),
)
def test_every_plan_fits_its_pages_and_kernel_blocks(
    num_kv_heads: int,
    rows: int,
    width: int,
    mode: str,
    backend: str,
    platform: str,
    block_size: int | None,
    mamba_block_size: int | None,
    k: int,
) -> None:
    layers: dict[str, KVCacheSpec] = {
        "a": attention(num_kv_heads=num_kv_heads),
        "m": mamba(
            parts=window_and_states(((rows + k, width), torch.float16), ((rows, width), torch.float16)),
            undo=UndoSpec(k),
        ),
    }
    cache = CacheConfig(block_size, mamba_block_size if mode == "all" else None, mode, num_blocks=64)  # type: ignore[arg-type]
    attention_backend, context = get_backend(backend, platform), BackendContext.for_layers(platform, layers)
    plan = plan_cache(layers, cache, attention_backend, context, 500, 32)
    sizes = plan.sizes
    assert sizes.page_size_bytes == sizes.block_size * 2 * num_kv_heads * 8 * 2
    assert sizes.page_size_bytes >= sizes.mamba_state_bytes
    assert sizes.block_size % (block_size or 1) == 0
    assert all(
        g.spec.block_size % size == 0 for g, size in zip(plan.config.groups, plan.kernel_block_sizes, strict=True)
    )
    if mode != "none":
        assert sizes.mamba_block_size == sizes.block_size
        assert sizes.block_size % (cache.mamba_block_size or 1) == 0
    assert plan.config.max_blocks_per_request(plan.longest_request) <= plan.usable_blocks
    assert plan.token_capacity >= plan.longest_request
