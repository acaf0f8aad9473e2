"""Measurements that others published, each beside what `hybrid_kv.measure.predict` says.

`POINTS` are kernels. `RATIOS` are whole decode steps of vLLM, stored states over ReplaySSM
(vllm#47572; H100, float32 states, a buffer of 16 tokens, CUDA graphs): its script starts from 14
tokens and decodes 1,000, so the mean context is
514. ReplaySSM reads a whole state in each step and writes it in every 15th.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from hybrid_kv.attention.rollback import RecomputeSpec
from hybrid_kv.cache.spec import KVCacheSpec, MambaSpec, StatePart, with_rollback
from hybrid_kv.config import CacheConfig, planned_dtype
from hybrid_kv.measure.predict.gpu import GPUS, UPDATE, WIDTH_LAST
from hybrid_kv.measure.predict.step import Kernel, cache_kernels, other_kernels, priced, step_time
from hybrid_kv.models.shapes import model_shape

COLD = float("inf")  # between two launches so much passes through the cache that nothing is left


class Point(NamedTuple):
    source: str
    name: str
    gpu: str
    kernel: Kernel
    footprint: float
    measured: float  # µs


def _gdn(batch: int, tokens: int, measured: float) -> Point:
    """Return a point of 64 value and 16 key heads of 128, in bfloat16, L2 flushed."""
    moved = 2 * batch * (64 * 128 * 128 * (1 + tokens) + tokens * 128 * (2 * 64 + 2 * 16))
    kernel = Kernel("update", 1, moved, UPDATE, tokens)
    return Point(
        "flashinfer!3127", f"GDN, batch {batch}, {tokens} tokens", "b200", kernel, COLD, measured
    )


def _conv(batch: int, measured: float) -> Point:
    """Return a point of 10,240 channels, 4 taps, the same buffers again and again."""
    moved = 2 * batch * 10240 * 8
    kernel = Kernel("conv", 1, moved, WIDTH_LAST)
    return Point(
        "tensorrt-llm!13103", f"convolution, batch {batch}", "b300", kernel, moved * 5 / 8, measured
    )


POINTS = [
    *(_gdn(batch, 1, us) for batch, us in ((1, 3.49), (32, 26.74), (256, 172.18))),
    *(_gdn(batch, 4, us) for batch, us in ((1, 6.69), (32, 62.64), (256, 440.62))),
    *(_conv(batch, us) for batch, us in ((1, 2.0), (16, 2.7), (64, 5.2), (256, 14.4))),
    # Its bytes are published as a floor of 11.9 µs at 8 TB/s.
    Point(
        "tensorrt-llm!18838",
        "convolution, batch 512",
        "b200",
        Kernel("conv", 1, 95.2e6, WIDTH_LAST),
        COLD,
        24.4,
    ),
]

# By model: config.json, bytes of weights that a step reads (from the shapes; embeddings are not),
# groups of keys.
MODELS: dict[str, tuple[dict[str, Any], float, int]] = {
    "Nemotron-3-Nano-4B": (
        {
            "model_type": "nemotron_h",
            "dtype": "bfloat16",
            "hidden_size": 3136,
            "vocab_size": 131072,
            "num_hidden_layers": 42,
            "hybrid_override_pattern": "M-M-M-MM-M-M*-M-M*-M-M-M*-M-M-MM*-MMM-M-M-",
            "mamba_num_heads": 96,
            "mamba_head_dim": 80,
            "ssm_state_size": 128,
            "n_groups": 8,
            "conv_kernel": 4,
            "chunk_size": 256,
            "num_attention_heads": 40,
            "num_key_value_heads": 8,
            "head_dim": 128,
        },
        7.12e9,
        8,
    ),
    "Qwen3.5-4B": (
        {
            "model_type": "qwen3_5_text",
            "dtype": "bfloat16",
            "hidden_size": 2560,
            "vocab_size": 248320,
            "num_hidden_layers": 32,
            "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 8,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "head_dim": 256,
        },
        8.4e9,
        16,
    ),
}
BATCHES = (1, 32, 128, 512)
RATIOS = {"Nemotron-3-Nano-4B": (0.99, 1.17, 1.40, 1.55), "Qwen3.5-4B": (0.99, 1.08, 1.21, 1.31)}


def points() -> Iterator[tuple[Point, float]]:
    """Yield each point with the predicted µs."""
    for point in POINTS:
        yield point, priced(point.kernel, GPUS[point.gpu], point.footprint).us


def ratios() -> Iterator[tuple[str, int, float, float]]:
    """Yield model, batch, the published and the predicted ratio."""
    for model, published in RATIOS.items():
        config, weights, groups = MODELS[model]
        cache = CacheConfig(mamba_ssm_cache_dtype="float32")
        shape = model_shape(config, cache=cache, make_dtype=planned_dtype)
        stored = list(shape.layers.values())
        both = stored, [_replayed(spec, groups) for spec in stored]
        for batch, measured in zip(BATCHES, published, strict=True):
            rest = other_kernels(shape.num_hidden_layers, batch, weights)
            before, after = (
                step_time(
                    [*cache_kernels(layers, batch, 514, 1.0), *rest],
                    GPUS["h100"],
                    waits=1,
                    eager=False,
                )[0].us
                for layers in both
            )
            yield model, batch, measured, before / after


def _replayed(spec: KVCacheSpec, groups: int) -> KVCacheSpec:
    """Return a layer with a buffer of 16 inputs.

    They are float16, since with bfloat16 ones half of a state would be read.
    """
    if not isinstance(spec, MambaSpec):
        return spec
    heads, head_dim, size = spec.parts[1].shape
    half, wide = planned_dtype("float16"), planned_dtype("float32")
    inputs = (StatePart("x", (heads, head_dim), half), StatePart("B", (groups, size), half))
    inputs += (StatePart("dt", (heads,), wide),)
    return with_rollback(replace(spec, inputs=inputs), RecomputeSpec(0, ring_len=16))
