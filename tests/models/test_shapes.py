"""Layer counts, state shapes and dtypes from config.json, and errors of unusable files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid_kv.cache.ranks import Ranks
from hybrid_kv.cache.spec import FullAttentionSpec, MambaSpec
from hybrid_kv.config import CacheConfig, ConfigError
from hybrid_kv.models import registry
from hybrid_kv.models.shapes import ModelShape, model_shape
from tests.model_configs import CONFIGS, NEMOTRON_3_NANO

BF16, FP32 = torch.bfloat16, torch.float32


def shapes_of(spec: MambaSpec) -> tuple[tuple[int, ...], ...]:
    return tuple(part.shape for part in spec.parts)


def dtypes_of(spec: MambaSpec) -> tuple[torch.dtype, ...]:
    return tuple(part.dtype for part in spec.parts)


def mamba_of(shape: ModelShape) -> MambaSpec:
    return next(spec for spec in shape.layers.values() if isinstance(spec, MambaSpec))


def attention_of(shape: ModelShape) -> FullAttentionSpec:
    return next(spec for spec in shape.layers.values() if isinstance(spec, FullAttentionSpec))


def changed(name: str = NEMOTRON_3_NANO, **changes: Any) -> dict[str, Any]:
    """The named config with some keys replaced; `None` removes a key."""
    return {key: value for key, value in {**CONFIGS[name], **changes}.items() if value is not None}


# Computed by hand: conv rows 3, conv dim = inner + 2 * groups * state (or 2 * key dim + value dim),
# state shape.
HAND = {
    NEMOTRON_3_NANO: ((3, 6144), (64, 64, 128), FP32, {"mamba2": 23, "attention": 6}),
    "nvidia/Nemotron-H-8B-Base-8K": (
        (3, 10240),
        (128, 64, 128),
        FP32,
        {"mamba2": 24, "attention": 4},
    ),
    "ibm-granite/granite-4.0-h-small": (
        (3, 8448),
        (128, 64, 128),
        BF16,
        {"mamba2": 36, "attention": 4},
    ),
    "ibm-granite/granite-4.0-h-tiny": (
        (3, 3328),
        (48, 64, 128),
        BF16,
        {"mamba2": 36, "attention": 4},
    ),
    "ibm-ai-platform/Bamba-9B": ((3, 8448), (128, 64, 128), BF16, {"mamba2": 29, "attention": 3}),
    "Qwen/Qwen3-Next-80B-A3B": (
        (3, 8192),
        (32, 128, 128),
        BF16,
        {"gdn_attention": 36, "attention": 12},
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_public_checkpoints_have_the_shapes_computed_by_hand(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]))
    shape = model_shape(tmp_path)
    conv, ssm, ssm_dtype, counts = HAND[name]
    assert shapes_of(mamba_of(shape)) == (conv, ssm)
    assert dtypes_of(mamba_of(shape)) == (BF16, ssm_dtype)
    assert shape.counts == counts
    assert list(shape.layers) == sorted(shape.layers, key=lambda layer: int(layer.split(".")[1]))


@pytest.mark.parametrize("name", CONFIGS)
def test_speculative_tokens_widen_only_the_convolution_window(name: str) -> None:
    plain, drafted = (
        mamba_of(model_shape(CONFIGS[name], num_speculative_tokens=k)) for k in (0, 3)
    )
    assert shapes_of(drafted)[0] == (shapes_of(plain)[0][0] + 3, shapes_of(plain)[0][1])
    assert shapes_of(drafted)[1] == shapes_of(plain)[1]
    assert drafted.state_bytes - plain.state_bytes == 3 * shapes_of(plain)[0][1] * 2


def test_dtypes_come_from_the_flags_then_the_config_then_the_family() -> None:
    def ssm_dtype(config: dict[str, Any], wish: str = "auto") -> torch.dtype:
        return dtypes_of(
            mamba_of(model_shape(config, cache=CacheConfig(mamba_ssm_cache_dtype=wish)))
        )[1]

    granite = "ibm-granite/granite-4.0-h-tiny"
    assert ssm_dtype(changed()) == FP32
    assert ssm_dtype(changed(mamba_ssm_cache_dtype="float16")) == torch.float16
    assert ssm_dtype(changed(mamba_ssm_cache_dtype="float16"), "bfloat16") == BF16
    assert ssm_dtype(changed(granite)) == BF16
    assert ssm_dtype(changed(granite), "float32") == FP32
    fp8 = model_shape(changed(), cache=CacheConfig(kv_cache_dtype="fp8"))
    assert attention_of(fp8).dtype == torch.float8_e4m3fn
    assert model_shape(changed(torch_dtype=None, dtype="float16")).dtype == torch.float16
    assert model_shape(changed(torch_dtype=None), dtype="float32").dtype == FP32


@pytest.mark.parametrize(
    "changes",
    [
        {
            "hybrid_override_pattern": None,
            "layers_block_type": ["mamba", "moe", "attention", "mlp"],
        },
        {
            "hybrid_override_pattern": None,
            "layer_types": ["linear_attention", "moe", "full_attention", "mlp"],
        },
        {"hybrid_override_pattern": "ME*-"},
    ],
)
def test_layer_types_may_be_named_in_any_of_three_ways(changes: dict[str, Any]) -> None:
    shape = model_shape(changed(num_hidden_layers=4, **changes))
    kinds = {name: type(spec) for name, spec in shape.layers.items()}
    assert kinds == {"layers.0": MambaSpec, "layers.2": FullAttentionSpec}


def small(model_type: str) -> dict[str, Any]:
    return {**registry.sizes_of(model_type)["small"], "model_type": model_type, "dtype": "float32"}


def test_zamba2_derives_its_head_sizes() -> None:
    """Two times 256 channels over 16 Mamba heads, and over 8 of attention."""
    shape = model_shape({**small("zamba2"), "mamba_d_conv": 4})
    assert shapes_of(mamba_of(shape)) == ((3, 512 + 2 * 2 * 32), (16, 32, 32))
    assert (attention_of(shape).num_kv_heads, attention_of(shape).head_size) == (8, 64)


def test_a_model_of_attention_alone_is_planned() -> None:
    llama = {
        **{
            "model_type": "llama",
            "hidden_size": 2048,
            "vocab_size": 128256,
            "num_hidden_layers": 16,
        },
        **{"num_attention_heads": 32, "num_key_value_heads": 8, "torch_dtype": "bfloat16"},
    }
    assert model_shape(llama).counts == {"attention": 16}
    assert model_shape(llama).mamba_chunk_size is None
    assert attention_of(model_shape(llama)).page_size_bytes == 2 * 8 * 64 * 2


@pytest.mark.parametrize(
    ("model_type", "keys", "counts"),
    [
        ("mistral", {}, {"window 4096": 16}),
        ("mistral", {"sliding_window": None}, {"attention": 16}),
        ("qwen2", {"use_sliding_window": False}, {"attention": 16}),
        ("qwen2", {"max_window_layers": 10}, {"attention": 10, "window 4096": 6}),
        ("qwen2", {}, {"attention": 16}),
        (
            "qwen3",
            {"layer_types": ["sliding_attention", "full_attention"] * 8},
            {"window 4096": 8, "attention": 8},
        ),
    ],
)
def test_windows_of_a_model_without_states_are_planned(
    model_type: str, keys: dict[str, Any], counts: dict[str, int]
) -> None:
    """As in transformers those of Mistral are in every layer, those of Qwen2 in the last ones."""
    sizes = {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32}
    values = {**sizes, "num_key_value_heads": 8, "sliding_window": 4096, "dtype": "bfloat16"}
    assert model_shape({"model_type": model_type, **values, **keys}).counts == counts


def test_a_text_config_is_read_where_the_top_level_is_multimodal() -> None:
    text = {
        **CONFIGS["Qwen/Qwen3-Next-80B-A3B"],
        "model_type": "qwen3_5_text",
        "mamba_ssm_dtype": "float32",
    }
    shape = model_shape(
        {"model_type": "qwen3_5", "text_config": text, "vision_config": {"hidden_size": 8}}
    )
    assert attention_of(shape).head_size == 256
    assert dtypes_of(mamba_of(shape)) == (BF16, FP32)


def test_transformers_writes_configs_that_read_the_same(tmp_path: Path) -> None:
    from transformers import AutoConfig

    for name, config in CONFIGS.items():
        values = dict(config)
        AutoConfig.for_model(values.pop("model_type"), **values).save_pretrained(tmp_path)
        assert model_shape(tmp_path).layers == model_shape(config).layers, name


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"model_type": "rwkv"},
            r"model_type 'rwkv' is not supported; supported are .*nemotron_h, ",
        ),
        ({}, "model_type None is not supported"),
        (changed(mamba_num_heads=None), "mamba_num_heads is missing"),
        (changed(mamba_num_heads="many"), "mamba_num_heads='many' must be an integer"),
        (changed(num_key_value_heads=0), "num_key_value_heads=0 must be an integer >= 1"),
        (
            changed(num_key_value_heads=3),
            "num_attention_heads=32 is not a multiple of num_key_value_heads=3",
        ),
        (changed(num_hidden_layers=51), "num_hidden_layers=51, but 52 layers are named"),
        (changed(hybrid_override_pattern="MX*"), "layers of type X"),
        (
            changed("ibm-ai-platform/Bamba-9B", num_hidden_layers=10**9),
            "num_hidden_layers=1000000000 must be at most",
        ),
        (
            changed("ibm-ai-platform/Bamba-9B", attn_layer_indices=[[9]]),
            r"attn_layer_indices=\[\[9\]\]",
        ),
        (changed(model_type=["bamba"]), r"model_type=\['bamba'\] must be a text"),
        (changed(torch_dtype="fp8"), "dtype='fp8' can't be computed with; use bfloat16"),
        (changed(torch_dtype=["bfloat16"]), r"torch_dtype=\['bfloat16'\] must be a text"),
        (changed(hybrid_override_pattern=None), "hybrid_override_pattern is missing"),
        (changed(layers_block_type=["mamba"]), "name different layers"),
        (changed(torch_dtype=None), "dtype is missing; give --dtype"),
        (changed(torch_dtype="int3"), "dtype='int3' is not a dtype"),
        (changed("ibm-granite/granite-4.0-h-tiny", mamba_d_head=32), "is not the inner size 3072"),
        (
            changed("ibm-ai-platform/Bamba-9B", attn_layer_indices=[32]),
            r"attn_layer_indices=\[32\]",
        ),
        (
            changed("Qwen/Qwen3-Next-80B-A3B", linear_num_value_heads=33),
            "linear_num_value_heads=33",
        ),
        (
            changed("Qwen/Qwen3-Next-80B-A3B", head_dim=None, num_attention_heads=15),
            "do not divide 2048 channels",
        ),
    ],
)
def test_a_config_that_cannot_be_planned_says_why_in_one_line(
    config: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        model_shape(config)
    assert "\n" not in str(caught.value)


def test_negative_speculative_tokens_are_refused() -> None:
    with pytest.raises(ConfigError, match="num_speculative_tokens=-1"):
        model_shape(changed(), num_speculative_tokens=-1)


# One of so many tensor parallel ranks, by hand: the convolution's channels, the state, KV heads.
OF_A_RANK = [
    (NEMOTRON_3_NANO, 4, 16 * 64 + 2 * 2 * 128, (16, 64, 128), 1),
    (NEMOTRON_3_NANO, 2, 32 * 64 + 2 * 4 * 128, (32, 64, 128), 1),
    # its one group is on every rank
    ("ibm-granite/granite-4.0-h-small", 8, 16 * 64 + 2 * 128, (16, 64, 128), 1),
    ("ibm-granite/granite-4.0-h-small", 2, 64 * 64 + 2 * 128, (64, 64, 128), 4),
    ("Qwen/Qwen3-Next-80B-A3B", 8, 2 * 2 * 128 + 4 * 128, (4, 128, 128), 1),
    ("Qwen/Qwen3-Next-80B-A3B", 2, 2 * 8 * 128 + 16 * 128, (16, 128, 128), 1),
]


@pytest.mark.parametrize(("name", "count", "channels", "state", "kv_heads"), OF_A_RANK)
def test_tensor_parallel_ranks_divide_heads_and_repeat_what_is_fewer(
    name: str, count: int, channels: int, state: tuple[int, ...], kv_heads: int
) -> None:
    shape = model_shape(CONFIGS[name], ranks=Ranks(count))
    assert shapes_of(mamba_of(shape)) == ((3, channels), state)
    assert attention_of(shape).num_kv_heads == kv_heads


def test_mamba_1_short_convolutions_and_delta_attention_divide_their_channels() -> None:
    def parts(model_type: str, count: int) -> tuple[tuple[int, ...], ...]:
        return shapes_of(mamba_of(model_shape(small(model_type), ranks=Ranks(count))))

    for model_type in ("jamba", "lfm2", "kimi_linear", "falcon_mamba"):
        for whole, half in zip(parts(model_type, 1), parts(model_type, 2), strict=True):
            places = [i for i, (a, b) in enumerate(zip(whole, half, strict=True)) if a != b]
            assert len(places) == 1
            assert whole[places[0]] == 2 * half[places[0]]
    # A latent vector is on every rank.
    one, two = (
        attention_of(model_shape(small("kimi_linear"), ranks=Ranks(count))) for count in (1, 2)
    )
    assert one.page_size_bytes == two.page_size_bytes


@pytest.mark.parametrize(
    ("name", "ranks", "message"),
    [
        (
            NEMOTRON_3_NANO,
            (3, 1, 1),
            "mamba_num_heads=64 can't be divided over --tensor-parallel-size 3; use",
        ),
        (
            NEMOTRON_3_NANO,
            (16, 1, 1),
            "n_groups=8 can't be divided over --tensor-parallel-size 16; use a divisor",
        ),
        (
            NEMOTRON_3_NANO,
            (8, 1, 8),
            "kept 4 times by --tensor-parallel-size 8.* use a --decode-.* that divides 4",
        ),
        (
            "ibm-granite/granite-4.0-h-tiny",
            (8, 1, 1),
            "num_attention_heads=12 can't be divided over",
        ),
        (
            "Qwen/Qwen3-Next-80B-A3B",
            (32, 1, 1),
            "linear_num_key_heads=16 can't be divided over --tensor-.* 32",
        ),
    ],
)
def test_ranks_that_heads_cannot_be_divided_over(
    name: str, ranks: tuple[int, int, int], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        model_shape(CONFIGS[name], ranks=Ranks(*ranks))


def test_kv_heads_are_repeated_equally_often_or_not_at_all() -> None:
    config = changed(num_attention_heads=12, num_key_value_heads=6, mamba_num_heads=12, n_groups=12)
    assert attention_of(model_shape(config, ranks=Ranks(12))).num_kv_heads == 1
    with pytest.raises(
        ConfigError,
        match="num_key_value_heads=6 can't be divided over --tensor-parallel-size 4, nor",
    ):
        model_shape(config, ranks=Ranks(4))
    # Six copies of a head: four ranks that follow each other would divide the tokens of two heads.
    with pytest.raises(
        ConfigError, match="use a --decode-context-parallel-size that divides 6, not 4"
    ):
        model_shape(config | {"num_key_value_heads": 2}, ranks=Ranks(12, 1, 4))


ZAMBA2 = {
    "model_type": "zamba2",
    "hidden_size": 64,
    "vocab_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_mamba_heads": 4,
    "mamba_d_state": 16,
    "mamba_ngroups": 1,
    "mamba_headdim": 32,
    "mamba_d_conv": 4,
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 512,
}


def test_zamba2_names_its_layers_one_by_one_or_by_the_numbers_of_the_hybrid_ones() -> None:
    listed = ZAMBA2 | {"layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"]}
    numbered = ZAMBA2 | {"hybrid_layer_ids": [1, 3]}
    assert model_shape(numbered).layers == model_shape(listed).layers
    with pytest.raises(ConfigError, match=r"hybrid_layer_ids=\[4\] must list layers from 0 to 3"):
        model_shape(ZAMBA2 | {"hybrid_layer_ids": [4]})
