"""Loading a peer's kernels without the rest of its package, which needs compiled extensions."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import torch

from bench.peers import loaded


def _stand_ins() -> dict[str, Any]:
    """Return what a peer's files import from elsewhere and use on the way to a launch."""
    import triton
    import triton.language as tl

    platform = MagicMock()
    for name in ("is_cpu", "is_rocm", "is_xpu", "is_arch_support_pdl"):
        getattr(platform, name).return_value = False
    platform.fp8_dtype.return_value = torch.float8_e4m3fn
    return {
        "vllm.triton_utils.triton": triton,
        "vllm.triton_utils.tl": tl,
        "vllm.triton_utils.HAS_TRITON": True,
        "vllm.platforms.current_platform": platform,
        "vllm.envs.VLLM_BATCH_INVARIANT": False,
        "vllm.envs.VLLM_TUNED_CONFIG_FOLDER": None,
        "vllm.v1.attention.backends.utils.NULL_BLOCK_ID": 0,
        "vllm.v1.attention.backends.utils.PAD_SLOT_ID": -1,
        "vllm.v1.kv_cache_interface.KVQuantMode": SimpleNamespace(
            NONE=0, INT8_PER_TOKEN_HEAD=2, FP8_PER_TOKEN_HEAD=3, INT4_PER_TOKEN_HEAD=4
        ),
        "vllm.utils.torch_utils.is_quantized_kv_cache": lambda dtype: False,
        "vllm.model_executor.layers.quantization.utils.quant_utils.get_fp8_min_max": lambda: (
            -448.0,
            448.0,
        ),
        "mamba_ssm.utils.determinism.autotune_configs": lambda configs: configs,
        "mamba_ssm.utils.determinism.use_deterministic_mode": lambda: False,
    }


def root_of(package: str) -> Path | None:
    """Return the folder of an installed package, which is not imported; None where it is not."""
    spec = PathFinder.find_spec(package)
    return (
        Path(spec.submodule_search_locations[0])
        if spec and spec.submodule_search_locations
        else None
    )


@contextmanager
def loaded_kernels(name: str, interpreted: bool = False) -> Iterator[ModuleType]:
    """Yield a peer's module, its folder's files real.

    Afterwards its package can be imported as ever.

    Args:
        name: of the module, in a package that is there.
        interpreted: its kernels run in Triton's interpreter, if this process does that; else they
            can be compiled.
    """
    folder = name.rpartition(".")[0]
    root = root_of(name.partition(".")[0])
    assert root is not None
    with (
        loaded(root, lambda one: one.startswith(f"{folder}."), _stand_ins()),
        patch.dict(os.environ),
    ):
        if not interpreted:
            os.environ.pop("TRITON_INTERPRET", None)  # Triton reads it at each kernel.
        yield importlib.import_module(name)
