"""Every option just inside and just outside of its limit, and the defaults of the rest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hybrid_kv.cache.modes import MODES
from hybrid_kv.config import (
    DTYPES,
    ConfigError,
    engine_config,
    parse_dtype,
    parse_model_dtype,
    planned_dtype,
)

CACHED: dict[str, Any] = {"enable_prefix_caching": True}
DRAFTS: dict[str, Any] = {"speculative_method": "ngram", "num_speculative_tokens": 2}
COUNTS = (
    "block_size",
    "mamba_block_size",
    "num_blocks",
    "memory_bytes",
    "recompute_ring_len",
    "max_num_seqs",
    "max_model_len",
    "max_num_batched_tokens",
    "prompt_lookup_min",
    "prompt_lookup_max",
)
# Options that are allowed, options one step beyond, and the error's message.
LIMITS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    *(
        ({n: 1}, {n: wrong}, f"{n}={wrong!r} must be an integer >= 1")
        for n in COUNTS
        for wrong in (0, True, "8")
    ),
    *(
        ({name: True}, {name: "false"}, f"{name}='false' must be True or False")
        for name in (*CACHED, "sanitize")
    ),
    (
        {"async_scheduling": True},
        {"async_scheduling": 1},
        "async_scheduling=1 must be True or False",
    ),
    (
        {"mamba_cache_mode": "all"},
        {"mamba_cache_mode": "sparse"},
        "'sparse'; use one of none, align, all",
    ),
    (
        {"mamba_cache_mode": "align"},
        {"mamba_cache_mode": "align", "enable_prefix_caching": False},
        "use mode none",
    ),
    (
        {**CACHED, "kv_offload_bytes": 9},
        {"kv_offload_bytes": 9},
        "kv_offload_bytes=9 keeps blocks of the prefix cache",
    ),
    (
        {**CACHED, "kv_offload_folder": "f"},
        {"kv_offload_folder": "f"},
        "kv_offload_folder='f' keeps blocks of",
    ),
    (
        {"kv_offload_bytes": 0},
        {"kv_offload_bytes": -1},
        "kv_offload_bytes=-1 must be an integer >= 0",
    ),
    (
        {**CACHED, "kv_offload_folder": Path("f")},
        {**CACHED, "kv_offload_folder": b"f"},
        "must be the path of a folder",
    ),
    (
        {**CACHED, "kv_offload_folder": "f"},
        {**CACHED, "kv_offload_folder": ""},
        "must be the path of a folder",
    ),
    (
        {**CACHED, "kv_offload_folder": "f"},
        {**CACHED, "kv_offload_folder": "f\0"},
        "must be the path of a folder",
    ),
    (
        {**CACHED, "kv_offload_folder": "f", "kv_offload_folder_bytes": 1},
        {**CACHED, "kv_offload_folder_bytes": 1},
        "kv_offload_folder_bytes=1 limits a folder that is not set",
    ),
    ({"state_scheme": "slots"}, {"state_scheme": 1}, "state_scheme=1 must be a name"),
    ({"kv_cache_dtype": "fp8"}, {"kv_cache_dtype": "int4"}, "kv_cache_dtype='int4' is not a dtype"),
    (
        {"mamba_ssm_cache_dtype": "float32"},
        {"mamba_ssm_cache_dtype": "f"},
        "mamba_ssm_cache_dtype='f' is not a dtype",
    ),
    (
        {"max_num_seqs": 9, "max_num_batched_tokens": 9},
        {"max_num_seqs": 9, "max_num_batched_tokens": 8},
        "is below",
    ),
    (DRAFTS, {**DRAFTS, "speculative_method": "eagle"}, "'eagle'; use ngram or mtp"),
    (
        {**DRAFTS, "num_speculative_tokens": 1},
        {"speculative_method": "mtp"},
        "needs num_speculative_tokens >= 1",
    ),
    (
        {**DRAFTS, "speculative_method": "dflash", "speculative_model": "folder"},
        {**DRAFTS, "speculative_model": "folder"},
        "speculative_model='folder' drafts with speculative_method='dflash', not 'ngram'",
    ),
    (
        {**DRAFTS, "speculative_method": "dflash"},
        {**DRAFTS, "speculative_method": "dflash", "speculative_model": ""},
        "speculative_model='' must be the path of a folder",
    ),
    (
        {"num_speculative_tokens": 16},
        {"num_speculative_tokens": 17},
        r"num_speculative_tokens=17 must be in [0, 16]",
    ),
    (
        {"num_speculative_tokens": 0},
        {"num_speculative_tokens": -1},
        r"num_speculative_tokens=-1 must be in [0, 16]",
    ),
    (
        {**DRAFTS, "num_speculative_tokens_per_batch_size": ((1, 4, 2), (9, 9, 0))},
        {**DRAFTS, "num_speculative_tokens_per_batch_size": [[1, 4, 2], [4, 9, 0]]},
        "num_speculative_tokens_per_batch_size=[[1, 4, 2], [4, 9, 0]]; give [first, last, K]",
    ),
    (
        {**DRAFTS, "num_speculative_tokens_per_batch_size": ((1, 1, 0),)},
        {**DRAFTS, "num_speculative_tokens_per_batch_size": "[[2, 4, 1]]"},
        "num_speculative_tokens_per_batch_size='[[2, 4, 1]]'; give [first, last, K]",
    ),
    (
        {"num_speculative_tokens_per_batch_size": ()},
        {"num_speculative_tokens_per_batch_size": "[[1, 1, 0]]"},
        "needs num_speculative_tokens, the largest K",
    ),
    (
        {"prompt_lookup_min": 3, "prompt_lookup_max": 3},
        {"prompt_lookup_min": 4, "prompt_lookup_max": 3},
        "prompt_lookup_min=4 is above prompt_lookup_max=3",
    ),
    ({"seed": 2**42 - 1}, {"seed": 2**42}, "at most 42 bits"),
    ({"seed": -(2**42)}, {"seed": -(2**42) - 1}, "at most 42 bits"),
    ({"seed": 1}, {"seed": 1.5}, "seed=1.5 must be an integer"),
    ({"seed": np.int64(1)}, {"seed": True}, "seed=True must be an integer"),
    ({"dtype": "bfloat16"}, {"dtype": "fp8"}, "dtype='fp8' can't be computed with"),
    ({"dtype": "float64"}, {"dtype": ["float32"]}, "dtype=['float32'] is not a dtype"),
    ({"kernels": "torch"}, {"kernels": "cuda"}, "kernels='cuda'; use one of"),
    ({"captured_batch_sizes": (2, 4)}, {"captured_batch_sizes": (4, 2)}, "must rise strictly"),
    ({"captured_batch_sizes": ()}, {"captured_batch_sizes": (2, 2)}, "must rise strictly"),
    ({"captured_batch_sizes": (1,)}, {"captured_batch_sizes": (0, 1)}, "must be >= 1"),
    (
        {"num_blocks": 9},
        {"num_blokcs": 9},
        "EngineConfig does not know num_blokcs; it takes async_scheduling, ",
    ),
    ({}, {"cache": {}}, "give the options of cache by their own names"),
]


@pytest.mark.parametrize(
    ("inside", "outside", "message"), LIMITS, ids=[f"{limit[1]}" for limit in LIMITS]
)
def test_what_is_allowed_is_kept_and_what_is_not_is_rejected(
    inside: dict[str, Any], outside: dict[str, Any], message: str
) -> None:
    # Their own limits leave room for each other.
    room = {"max_num_seqs": 1, "prompt_lookup_min": 1}
    config = engine_config(room | inside)
    parts = {
        **vars(config),
        **vars(config.cache),
        **vars(config.scheduler),
        **vars(config.speculative),
    }
    assert {name: parts[name] for name in inside} == inside
    with pytest.raises(ConfigError) as caught:
        engine_config(room | outside)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "ranges",
    ["x", "1", "{}x", "[1]", [[1, 2]], [[1, 2, -1]], [[1, 2, 0.5]], [[1, True, 0]], {"1-2": 0}],
)
def test_what_is_no_range_of_requests_is_rejected(ranges: object) -> None:
    with pytest.raises(ConfigError, match=r"give .first, last, K"):
        engine_config({**DRAFTS, "num_speculative_tokens_per_batch_size": ranges})


@pytest.mark.parametrize(
    ("most", "expected"),
    [(3, {1: 3, 16: 3, 17: 3, 63: 3, 64: 2, 200: 2, 256: 0, 9999: 0}), (2, {1: 2, 64: 2, 256: 0})],
)
def test_drafts_follow_from_the_number_of_requests(most: int, expected: dict[int, int]) -> None:
    """A gap has the K before it, and no K is above the largest (vllm#32374)."""
    ranges = [[1, 16, 3], [64, 128, 2], [256, 4096, 0]]
    for given in (ranges, json.dumps(ranges)):
        options = {"num_speculative_tokens_per_batch_size": given}
        config = engine_config({**DRAFTS, "num_speculative_tokens": most, **options}).speculative
        assert {number: config.drafts_after(number) for number in expected} == expected
    assert engine_config({"num_speculative_tokens": most}).speculative.drafts_after(99) == most


@pytest.mark.parametrize("mode", [None, *MODES])
@pytest.mark.parametrize("caching", [None, False, True])
def test_mode_and_prefix_caching_follow_from_each_other(
    mode: str | None, caching: bool | None
) -> None:
    options = {"mamba_cache_mode": mode, "enable_prefix_caching": caching}
    given = {name: value for name, value in options.items() if value is not None}
    if mode in ("align", "all") and caching is False:
        return
    cache = engine_config(given).cache
    assert cache.mamba_cache_mode == (mode or ("all" if caching else "none"))
    assert cache.enable_prefix_caching == (mode in ("align", "all") if caching is None else caching)


@pytest.mark.parametrize(("text", "due"), [(None, False), ("", False), ("0", False), ("1", True)])
def test_the_environment_turns_the_sanitizer_on(
    text: str | None, due: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HYBRID_KV_SANITIZE", raising=False)
    if text is not None:
        monkeypatch.setenv("HYBRID_KV_SANITIZE", text)
    assert engine_config({}).sanitize is due
    assert engine_config({"sanitize": not due}).sanitize is not due


def test_dtypes_by_name() -> None:
    assert {parse_dtype(name, "dtype") for name in DTYPES} == {
        getattr(torch, name) for name in DTYPES.values()
    }
    assert [
        name for name in DTYPES if name != "fp8" and parse_model_dtype(name) != getattr(torch, name)
    ] == []
    assert parse_dtype("fp8", "kv_cache_dtype") is torch.float8_e4m3fn
    both = [(parse_dtype(name, "", planned_dtype), parse_dtype(name, "")) for name in DTYPES]
    assert [(str(light), light.itemsize) for light, _ in both] == [
        (str(dtype), dtype.itemsize) for _, dtype in both
    ]
