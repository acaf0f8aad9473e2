"""Loading a peer's kernels without the rest of its package, which needs compiled extensions."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import torch


def _stand_ins() -> dict[str, Any]:
    """What a peer's files import from elsewhere in their package and use on the way to a launch."""
    import triton
    import triton.language as tl

    platform = MagicMock()
    for question in ("is_cpu", "is_rocm", "is_xpu", "is_arch_support_pdl"):
        getattr(platform, question).return_value = False
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
        "vllm.model_executor.layers.quantization.utils.quant_utils.get_fp8_min_max": lambda: (-448.0, 448.0),
        "mamba_ssm.utils.determinism.autotune_configs": lambda configs: configs,
        "mamba_ssm.utils.determinism.use_deterministic_mode": lambda: False,
    }


class _Elsewhere(MetaPathFinder, Loader):
    """Finds the kernels' folder of a package; what else its files import from it is a stand-in."""

    def __init__(self, folder: str, root: Path) -> None:
        self._folder, self._root = folder, root
        self._values = _stand_ins()

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        package = self._folder.partition(".")[0]
        if name.partition(".")[0] != package or name.startswith(f"{self._folder}."):
            return None
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return ModuleType(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        module.__path__ = [str(self._root.joinpath(*name.split(".")[1:]))]

        def attribute(item: str) -> Any:
            if item.startswith("__"):
                raise AttributeError(item)
            return self._values.get(f"{name}.{item}", MagicMock())

        module.__dict__["__getattr__"] = attribute


def root_of(package: str) -> Path | None:
    """The folder of an installed package, which is not imported; None where it is not."""
    spec = PathFinder.find_spec(package)
    return Path(spec.submodule_search_locations[0]) if spec and spec.submodule_search_locations else None


@contextmanager
def loaded(name: str, interpreted: bool = False) -> Iterator[ModuleType]:
    """A peer's module, its folder's files real; afterwards its package can be imported as ever.

    Args:
        name: of the module, in a package that is there.
        interpreted: its kernels run in Triton's interpreter, if this process does that; else they can be compiled.
    """
    package, folder = name.partition(".")[0], name.rpartition(".")[0]
    root = root_of(package)
    assert root is not None
    outside = {key: sys.modules.pop(key) for key in list(sys.modules) if key.partition(".")[0] == package}
    finder = _Elsewhere(folder, root)
    sys.meta_path.insert(0, finder)
    try:
        with patch.dict(os.environ):
            if not interpreted:
                os.environ.pop("TRITON_INTERPRET", None)  # Triton asks for it at each kernel.
            yield importlib.import_module(name)
    finally:
        sys.meta_path.remove(finder)
        for key in [key for key in sys.modules if key.partition(".")[0] == package]:
            del sys.modules[key]
        sys.modules.update(outside)
